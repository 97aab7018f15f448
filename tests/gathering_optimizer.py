"""Descent along momentum as long as a matrix's norm, for which ranks gather the whole momentum of each weight."""

import torch
from torch.distributed.tensor import DTensor

from llama_core.models.layers import local_part
from llama_core.optimizers.traits import OptimizerType, State

NORMALISED = OptimizerType(
    "normalised",
    module="gathering_optimizer",
    states=(State("momentum"),),
    read_bytes=12,
    written_bytes=8,
    gathered_bytes=4,
    keys=("beta1",),
)


class Normalised(torch.optim.Optimizer):
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = local_part(state["momentum"])
                momentum.lerp_(local_part(parameter.grad), 1 - group["beta"])
                whole = state["momentum"].full_tensor() if isinstance(parameter, DTensor) else momentum
                local_part(parameter).sub_(momentum * (group["lr"] / (1e-8 + whole.norm())))


def build(groups, training):
    return Normalised(groups, {"lr": training.learning_rate, "beta": training.beta1})
