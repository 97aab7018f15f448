"""AdamW: Adam, with weight decay apart from the gradient.

Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

from llama_core.optimizers.traits import WEIGHT_BYTES, OptimizerType, State

ADAMW = OptimizerType(
    "adamw",
    built_in="llama_core.training.adamw",
    states=(State("exp_avg"), State("exp_avg_sq")),
    read_bytes=4 * WEIGHT_BYTES,  # the gradient, the weight and both moments
    written_bytes=3 * WEIGHT_BYTES,  # the weight and both moments
    keys=("weight_decay", "beta1", "beta2", "epsilon"),
    runs_in_deepspeed=True,
)
