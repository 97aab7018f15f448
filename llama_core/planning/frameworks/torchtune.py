"""torchtune: the traits of its runs, facts from its source code."""

from dataclasses import replace

from llama_core.planning.frameworks.fsdp2 import FSDP2
from llama_core.planning.frameworks.traits import CROSS_ENTROPY, Adapters, Framework, Loss

_TORCHTUNE = replace(
    FSDP2,
    name="torchtune",
    prints="active",
    source="torchtune: modules/loss (logits of all chunks in bf16, softmax chunk by chunk), training/_distributed.py, "
    "recipes/configs/llama3_1 (adapters; PagedAdamW8bit and optimizer_in_bwd on one GPU)",
    moment_bytes=4,
    gradient_bytes=2,
    reduce_bytes=2,
    tables_in_root=2,
    loss=Loss(eager=8, sharded=8, compiled=4),
    adapters=Adapters(on_output=True, on_ffn=True),
    pages_on_one_gpu=True,
    quantised_bytes=0.52,  # the scales are quantised too
)
_TORCHTUNE_LINEAR_LOSS = replace(
    _TORCHTUNE,
    since="2025-05",
    source="torchtune: modules/loss/cross_entropy_loss.py, LinearCrossEntropyLoss",
    loss=replace(CROSS_ENTROPY, num_pieces=8),
)

TORCHTUNE: tuple[Framework, ...] = (_TORCHTUNE, _TORCHTUNE_LINEAR_LOSS)
"""Its entries in chronological order."""
