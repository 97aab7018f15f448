"""torch's optimizers on this rank's part of each parameter."""

from typing import Any, TypeVar, cast

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from llama_core.models.layers import local_part

Kind = TypeVar("Kind", bound=Optimizer)


class OnLocalParts(Optimizer):
    """Makes one of torch's optimizers update this rank's part of each parameter; states are sharded like parameters.

    Gradients are placed like their parameters, so no communication is needed. ``DTensor`` would nevertheless look at
    the placements of every tensor in every step, and would need a kernel for each mesh.

    It needs an optimizer that makes its states in ``__init__`` or ``_init_group``. torch's SGD makes them after its
    step, for the tensors that it updated, which are no parameters here.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        is_unusual: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return is_unusual


def on_local_parts(kind: type[Kind], groups: list[dict[str, Any]]) -> type[Kind]:
    """Return the class that updates these groups of parameters: torch's own, unless ranks divide some of them.

    DeepSpeed, which divides them itself, accepts torch's own class alone.
    """
    if not any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        return kind
    return cast("type[Kind]", type(f"Local{kind.__name__}", (OnLocalParts, kind), {}))
