"""Builds the optimizer that a run asks for, over groups of parameters; and the loss scale."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from llama_core.config.model_weights import is_decayed
from llama_core.config.parametrization import ParametrizationFactors, factors_of
from llama_core.config.settings import TrainingConfig
from llama_core.models.llama import Llama
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.optimizers.traits import NAMES, RATE, UPDATED_BY


def build_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """Return the optimizer that ``training`` names, over ``model``'s trainable parameters.

    Raises:
        TypeError: if its step does not heed ``grad_scale`` and ``found_inf``, by which the engine clips and skips
            without waiting for the device. torch's fused optimizers do.
    """
    build = import_module(OPTIMIZERS.named(training.optimizer).module).build
    optimizer: Optimizer = build(parameter_groups(model, training), training)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise TypeError(f"the step of {training.optimizer} has to heed grad_scale and found_inf, as fused ones do")
    return optimizer


def parameter_groups(model: nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
    """Return ``model``'s trainable parameters in torch's groups, by what updates them and with which settings.

    The groups do not depend on the settings' values, which a resumed run may change: DeepSpeed restores its states by
    group.
    """
    kind = OPTIMIZERS.named(training.optimizer)
    has_bf16_moments = kind.with_moments(training.moments) is kind.with_bf16_moments
    has_decay = "weight_decay" in kind.keys
    scaled = model.spec if isinstance(model, Llama) and model.spec.base else None
    groups: dict[tuple[float, float, float, str], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factors = factors_of(name, scaled) if scaled else ParametrizationFactors()
            decay = factors.decay if has_decay and is_decayed(name) else 0.0
            rate = factors.rate * kind.rate(name)
            updated_by = kind.updates(name, parameter.ndim).name
            groups[decay, rate, factors.epsilon, updated_by][name] = parameter
    return [
        # checkpoints hold all values of a group: an optimizer without rates of its own, or without others, has none
        {"params": list(parameters.values()), "weight_decay": decay * training.weight_decay}
        | ({RATE: rate} if kind.rates or scaled else {})
        | ({"eps": epsilon * training.epsilon} if scaled else {})
        | ({UPDATED_BY: updated_by} if kind.others else {})
        | ({NAMES: list(parameters)} if has_bf16_moments else {})
        for (decay, rate, epsilon, updated_by), parameters in groups.items()
    ]


@dataclass
class LossScale:
    """The loss scale against vanishing fp16 gradients: halved on overflow, doubled after many steps without one.

    Every rank sees the same overflows, so all ranks have the same scale.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """

    value: float = 1.0
    """Multiplies the loss."""
    growth_interval: int = 0
    """Steps without an overflow after which the scale doubles; 0 keeps it fixed."""
    steps_since_change: int = 0

    @classmethod
    def for_dtype(cls, compute_dtype: torch.dtype) -> Self:
        """Return the initial scale: 2**16 in fp16, and a fixed 1 in dtypes with the range of fp32."""
        return cls(2.0**16, 2000) if compute_dtype == torch.float16 else cls()

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale of a step depends on how the steps before it went."""
        return self.growth_interval > 0

    def update(self, *, finite: bool) -> None:
        """Adjust the scale after a step; ``finite`` says whether its gradients were."""
        if not self.is_dynamic:
            return
        self.steps_since_change += 1
        if not finite:
            self.value = max(1.0, self.value / 2)
            self.steps_since_change = 0
        elif self.steps_since_change >= self.growth_interval:
            self.value = self.value * 2
            self.steps_since_change = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON."""
        return {"value": self.value, "steps_since_change": self.steps_since_change}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, unless the scale is fixed."""
        if self.is_dynamic:
            self.value = state["value"]
            self.steps_since_change = state["steps_since_change"]
