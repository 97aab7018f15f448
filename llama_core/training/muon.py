"""Builds Muon: orthogonalised momentum for the matrices inside layers, and AdamW for all other weights."""

import math
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.layers import local_part
from llama_core.optimizers.muon import MUON, NUM_ITERATIONS, flops
from llama_core.optimizers.traits import RATE, UPDATED_BY
from llama_core.parallel.whole_matrices import at_owners, matrices_of
from llama_core.training.bf16_moments import Bf16Moments
from llama_core.training.local import KeepsDtypes, adamw_kernel, prepared_gradients, whether_it_happens

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that an iteration applies to every singular value; steep at zero, and between 0.7 and 1.2 later."""
MIN_NORM = 1e-7


def build(groups: list[dict[str, Any]], training: TrainingConfig) -> "Muon":
    """Return Muon over groups of parameters."""
    if training.muon_lr is not None:
        for group in groups:
            if group[UPDATED_BY] == MUON.name:
                group[RATE] = training.muon_lr / training.learning_rate
    return Muon(
        groups,
        {
            "lr": training.learning_rate,
            "momentum": training.muon_momentum,
            "betas": (training.beta1, training.beta2),
            "eps": training.epsilon,
        },
        in_bf16=training.precision != "fp32",
        moments=Bf16Moments(groups, training.seed) if training.moments == "bf16" else None,
    )


class Muon(KeepsDtypes):
    """Muon on this rank's part of each parameter: a matrix that ranks divide is orthogonalised whole, by its owner.

    The momentum follows every gradient on the rank that has it. Only the update travels.

    Args:
        groups: groups of parameters, each with the name of what updates it.
        defaults: settings of groups that have none of their own.
        in_bf16: orthogonalise in bf16, and send updates in it; otherwise in the gradients' own dtype.
        moments: updates what AdamW does if its moments are bf16; None if they are fp32.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, in_bf16: bool, moments: Bf16Moments | None
    ) -> None:
        super().__init__(groups, defaults)
        self.in_bf16 = in_bf16
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. ``closure`` is torch's, and nobody here passes one."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            if group[UPDATED_BY] == MUON.name:
                self._orthogonalise(parameters, group)
            elif self.moments is not None:
                self.moments.update(parameters, self.state, group, self.grad_scale, self.found_inf)
            else:
                self._adapt(parameters, group)

    def _orthogonalise(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        matrices = []
        weights: list[Tensor] = []
        happens = whether_it_happens(local_part(parameters[0]), self.found_inf)
        # a launch of a factor takes as long as that of a matrix: each is computed once
        of_gradient = happens * (1 - group["momentum"])
        gradients = prepared_gradients(parameters, self.grad_scale, self.found_inf)
        parts = [local_part(parameter) for parameter in parameters]
        torch._foreach_mul_(parts, 1 - happens * group["lr"] * group["weight_decay"])
        for parameter, gradient, weight in zip(parameters, gradients, parts, strict=True):
            kept = self.state[parameter]
            if not kept:
                kept["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = local_part(kept["momentum_buffer"])
            momentum.lerp_(gradient, of_gradient)
            update = gradient.lerp_(momentum, group["momentum"])  # Nesterov's look ahead
            matrices += matrices_of(parameter, update)
            weights += [weight] if parameter.ndim == 2 else weight.unbind()
        dtype = torch.bfloat16 if self.in_bf16 else happens.dtype
        for place, direction in at_owners(matrices, orthogonalised, work=lambda shape: flops(*shape), dtype=dtype):
            weight = weights[place]
            length = group["lr"] * scale(matrices[place].shape)
            weight.addcmul_(direction, happens, value=-length)  # it widens what came in bf16

    def _adapt(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            kept = self.state[parameter]
            if not kept:
                kept["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
                kept["exp_avg"] = torch.zeros_like(parameter)
                kept["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw_kernel(
            [local_part(parameter) for parameter in parameters],
            [local_part(cast("Tensor", parameter.grad)) for parameter in parameters],
            (
                [local_part(kept["exp_avg"]) for kept in states],
                [local_part(kept["exp_avg_sq"]) for kept in states],
            ),
            [kept["step"] for kept in states],
            group,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


def orthogonalised(matrices: list[Tensor]) -> list[Tensor]:
    """Return for each matrix, [rows, columns], one of the same singular vectors, with singular values around 1.

    Matrices of one shape are computed together.
    """
    alike: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        alike[matrix.shape].append(place)
    results: dict[int, Tensor] = {}
    for places in alike.values():
        results |= zip(places, _newton_schulz([matrices[place] for place in places]), strict=True)
    return [results[place] for place in range(len(matrices))]


def _newton_schulz(matrices: list[Tensor]) -> Tensor:
    """Apply the quintic to the singular values of matrices of one shape ``NUM_ITERATIONS`` times, and stack them."""
    is_tall = matrices[0].shape[0] > matrices[0].shape[1]
    x = torch.stack([matrix.mT if is_tall else matrix for matrix in matrices])
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, factor, x, beta=linear)
    return x.mT if is_tall else x


def scale(shape: tuple[int, int]) -> float:
    """Return the factor that gives the update of a matrix the root mean square of AdamW's, which is about 0.2."""
    return 0.2 * math.sqrt(max(shape))
