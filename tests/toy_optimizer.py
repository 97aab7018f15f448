"""Adagrad as somebody would add it: its row, and what builds it. Norms learn four times as fast as the rest."""

import torch

from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.optimizers.traits import OptimizerType, State
from llama_core.training.local import on_local_parts

ADAGRAD = OptimizerType(
    "adagrad",
    built_in="toy_optimizer",
    states=(State("sum"),),
    read_bytes=12,
    written_bytes=8,
    keys=("weight_decay", "epsilon"),
    rates=(("*norm.weight", 4.0),),
    runs_in_deepspeed=True,
)


def build(groups, training):
    return on_local_parts(torch.optim.Adagrad, groups)(
        groups, lr=training.learning_rate, eps=training.epsilon, fused=True
    )


def register(optimizer=ADAGRAD):
    """Add an optimizer to the registry of this process, as every rank of a test has to."""
    OPTIMIZERS[optimizer.name] = optimizer
