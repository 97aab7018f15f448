"""Optimizers on this rank's part of each parameter: torch's own, and the base of others."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from llama_core.models.layers import local_part
from llama_core.optimizers.traits import OptimizerType

Kind = TypeVar("Kind", bound=Optimizer)


class OnLocalParts(Optimizer):
    """Makes one of torch's optimizers update this rank's part of each parameter; states are sharded like parameters.

    Gradients are placed like their parameters, so no communication is needed. ``DTensor`` would nevertheless look at
    the placements of every tensor in every step, and would need a kernel for each mesh.

    The optimizer has to make its states in ``__init__`` or ``_init_group``. torch's SGD makes them after its step, for
    the tensors that it updated, which are no parameters here.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        is_unusual: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return is_unusual


def on_local_parts(kind: type[Kind], groups: list[dict[str, Any]]) -> type[Kind]:
    """Return the class that updates these groups of parameters: torch's own, unless ranks divide some of them.

    DeepSpeed, which divides them itself, knows torch's own class.
    """
    if not any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        return kind
    return cast("type[Kind]", type(f"Local{kind.__name__}", (OnLocalParts, kind), {}))


class KeepsDtypes(Optimizer):
    """An optimizer that loads states in the dtype that they have. torch's casts them to that of the weights."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])


class LocalOptimizer(Optimizer):
    """Base of an optimizer that torch does not have: ``update`` says how one weight changes, and this does the rest.

    The rest is what the engine asks of a step: to change this rank's part of each weight, to divide the gradients by
    ``grad_scale``, and to change nothing if ``found_inf`` is 1, without waiting for the device to know.

    Args:
        kind: its row; its states begin at zero.
        groups: groups of parameters, each with its settings.
        defaults: settings of groups that have none of their own, such as ``lr``.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    """None in DeepSpeed, which scales and skips by itself."""
    found_inf: Tensor | None = None

    def __init__(self, kind: OptimizerType, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self.kind = kind

    def update(
        self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], group: dict[str, Any], happens: Tensor
    ) -> None:
        """Change ``weight`` and ``states`` in place.

        Args:
            weight: this rank's part of a parameter.
            gradient: its gradient, which may be overwritten.
            states: its states, in the order of the row.
            group: the settings of its group.
            happens: 1, or 0 if the step is skipped: a factor of every change.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. ``closure`` is torch's, and nobody here passes one."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        kept = self.state[parameter]
        for state in self.kind.states:
            if state.name not in kept:
                kept[state.name] = torch.zeros_like(parameter)
        (gradient,) = prepared_gradients([parameter], self.grad_scale, self.found_inf)
        happens = whether_it_happens(gradient, self.found_inf)
        states = [local_part(kept[state.name]) for state in self.kind.states]
        self.update(local_part(parameter), gradient, states, group, happens)


def prepared_gradients(
    parameters: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
) -> list[Tensor]:
    """Return this rank's parts of the gradients of parameters, scaled in place, or set to 0 if they are not finite.

    Args:
        parameters: the parameters, with gradients.
        grad_scale: what the gradients are divided by; None for 1.
        found_inf: 1 if the gradients are not finite, else 0; None if they are known to be.
    """
    gradients = [local_part(cast("Tensor", parameter.grad)) for parameter in parameters]
    if grad_scale is not None:
        torch._foreach_div_(gradients, grad_scale)
    if found_inf is not None:
        is_skipped = found_inf.bool()
        for gradient in gradients:
            gradient.masked_fill_(is_skipped, 0)  # zero times what is not finite would not be zero
    return gradients


def whether_it_happens(like: Tensor, found_inf: Tensor | None) -> Tensor:
    """Return 1, or 0 if the step is to change nothing, as a number of the dtype and on the device of ``like``."""
    happens = torch.ones((), dtype=like.dtype, device=like.device)
    return happens if found_inf is None else happens.sub_(found_inf)


def adamw_kernel(
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: tuple[list[Tensor], list[Tensor]],
    steps: list[Tensor],
    group: Mapping[str, Any],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update weights, moments and counts of steps in place with torch's fused kernel of AdamW.

    Args:
        weights: this rank's parts of parameters, or pieces of them.
        gradients: theirs.
        moments: their first and second moments.
        steps: how often each was updated.
        group: the settings of their group.
        grad_scale: what gradients are divided by; None for 1.
        found_inf: 1 if nothing is to change, else 0; None if the gradients are known to be finite.
    """
    beta1, beta2 = group["betas"]
    first, second = moments
    adamw(
        weights,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
