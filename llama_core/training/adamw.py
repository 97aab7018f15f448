"""Builds AdamW."""

from typing import Any

import torch

from llama_core.config.settings import TrainingConfig
from llama_core.training.bf16_moments import Bf16Moments
from llama_core.training.local import KeepsDtypes, on_local_parts


def build(groups: list[dict[str, Any]], training: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW over groups of parameters.

    The fused kernel needs no temporaries and is the fastest on both CUDA and CPU.
    """
    lr = training.learning_rate
    betas = (training.beta1, training.beta2)
    if training.moments == "bf16":
        moments = Bf16Moments(groups, training.seed)
        return AdamWInBf16(groups, {"lr": lr, "betas": betas, "eps": training.epsilon}, moments)
    return on_local_parts(torch.optim.AdamW, groups)(groups, lr=lr, betas=betas, eps=training.epsilon, fused=True)


class AdamWInBf16(KeepsDtypes):
    """AdamW whose moments are bf16.

    Args:
        groups: groups of parameters.
        defaults: settings of groups that have none of their own.
        moments: updates parameters.
    """

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], moments: Bf16Moments) -> None:
        super().__init__(groups, defaults)
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. ``closure`` is torch's, and nobody here passes one."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.moments.update(parameters, self.state, group, self.grad_scale, self.found_inf)
