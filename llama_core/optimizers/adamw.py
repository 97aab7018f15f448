"""AdamW: Adam, with weight decay apart from the gradient.

Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

from dataclasses import replace

from llama_core.optimizers.traits import BF16_BYTES, WEIGHT_BYTES, OptimizerType, State

CHUNK_ELEMENTS = 2**21
"""Elements that are updated together if moments are bf16, unless a row has more."""

_FP32 = OptimizerType(
    "adamw",
    module="llama_core.training.adamw",
    states=(State("exp_avg"), State("exp_avg_sq")),
    read_bytes=4 * WEIGHT_BYTES,  # the gradient, the weight and both moments
    written_bytes=3 * WEIGHT_BYTES,  # the weight and both moments
    keys=("weight_decay", "beta1", "beta2", "epsilon", "moments"),
    scales=True,
    runs_in_deepspeed=True,
)
_BF16 = replace(
    _FP32,
    states=(State("exp_avg", BF16_BYTES), State("exp_avg_sq", BF16_BYTES)),
    # of every pass over a chunk: widening, the fused kernel, the hash and rounding
    read_bytes=4 + 16 + 36 + 36,
    written_bytes=8 + 12 + 32 + 24,
    workspace_itemsize=4 * WEIGHT_BYTES,  # both moments in fp32, random bits, and those of one moment
    workspace_elements=CHUNK_ELEMENTS,
    runs_in_deepspeed=False,  # the random bits of an element depend on its place, which flat partitions do not know
)
_BF16_ON_CUDA = replace(
    _BF16,
    read_bytes=2 * WEIGHT_BYTES + 2 * BF16_BYTES,  # the gradient, the weight and both moments
    written_bytes=WEIGHT_BYTES + 2 * BF16_BYTES,  # the weight and both moments
    workspace_itemsize=0,
)
ADAMW = replace(_FP32, with_bf16_moments=replace(_BF16, fused=_BF16_ON_CUDA))
