"""Signum as somebody would add it: its row, its update, and what builds it. Norms learn four times as fast as the rest.

Source: Bernstein et al. 2018, arXiv:1802.04434, algorithm 2.
"""

import torch

from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.optimizers.traits import OptimizerType, State
from llama_core.training.local import LocalOptimizer

SIGNUM = OptimizerType(
    "signum",
    module="toy_optimizer",
    states=(State("momentum"),),
    read_bytes=12,
    written_bytes=8,
    keys=("weight_decay", "beta1"),
    rates=(("*norm.weight", 4.0),),
    runs_in_deepspeed=True,
)


class Signum(LocalOptimizer):
    def update(self, weight, gradient, states, group, happens):
        (momentum,) = states
        momentum.lerp_(gradient, happens * (1 - group["beta"]))
        weight.mul_(1 - happens * group["lr"] * group["weight_decay"])
        weight.addcmul_(torch.sign(momentum, out=gradient), happens, value=-group["lr"])


def build(groups, training):
    return Signum(SIGNUM, groups, lr=training.learning_rate, beta=training.beta1)


def register(optimizer=SIGNUM):
    """Add an optimizer to the registry of this process, as every rank of a test has to."""
    OPTIMIZERS[optimizer.name] = optimizer
