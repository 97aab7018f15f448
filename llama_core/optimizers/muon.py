"""Muon: momentum, orthogonalised, for the matrices inside layers; AdamW for all other weights.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the rule and its coefficients); Liu et al. 2025,
arXiv:2502.16982, section 2.2 (the scale by which it takes AdamW's learning rate and weight decay).
"""

from dataclasses import replace

from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.traits import WEIGHT_BYTES, OptimizerType, State

NUM_ITERATIONS = 5
"""Newton-Schulz iterations of an update."""


def flops(rows: int, columns: int) -> float:
    """Return the FLOPs to orthogonalise a matrix: in each iteration two products with it, and one of its square."""
    short, long = sorted((rows, columns))
    return NUM_ITERATIONS * (4 * short * short * long + 2 * short**3)


_FP32 = OptimizerType(
    "muon",
    module="llama_core.training.muon",
    states=(State("momentum_buffer"),),
    # the momentum and then the gradient take up a part of each other; the weight decays, and then takes the update
    read_bytes=7 * WEIGHT_BYTES,
    written_bytes=4 * WEIGHT_BYTES,
    keys=("weight_decay", "beta1", "beta2", "epsilon", "moments", "muon_lr", "muon_momentum"),
    flops=flops,
    others=ADAMW,
)
MUON = replace(_FP32, with_bf16_moments=replace(_FP32, others=ADAMW.with_bf16_moments))
