"""AdamW with weight-decay groups, and the loss scale."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.layers import local_part


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's part of each parameter; its moments are sharded like the parameters.

    Gradients are placed like their parameters, so no communication is needed. ``DTensor`` would nevertheless look at
    the placements of every tensor in every step, and would need a kernel for each mesh.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW over ``model``'s trainable parameters; matrices are decayed, norm vectors are not.

    Norms are recognised by their module, because at DeepSpeed's stage 3 a parameter has no shape. The fused kernel
    needs no temporaries and is the fastest on both CUDA and CPU.
    """
    norms = {id(module.weight) for module in model.modules() if isinstance(module, nn.RMSNorm)}
    groups: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[0.0 if id(parameter) in norms else training.weight_decay].append(parameter)
    is_divided = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = LocalAdamW if is_divided else torch.optim.AdamW  # DeepSpeed accepts torch's own class alone
    return optimizer(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        fused=True,
    )


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
