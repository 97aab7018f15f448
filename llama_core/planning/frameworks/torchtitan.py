"""torchtitan: the traits of its runs from 2024 on, facts from its source code."""

from dataclasses import replace

from llama_core.planning.frameworks.fsdp2 import FSDP2
from llama_core.planning.frameworks.traits import CROSS_ENTROPY, Efficiencies, Framework, Loss

_TITAN = replace(
    FSDP2,
    name="torchtitan",
    source="torchtitan: train.py, parallelisms/parallelize_llama.py, models/llama/model.py as of March 2024",
    tables_in_root=2,  # one fully_shard(model) around embedding, last norm and head
    loss=Loss(eager=16, sharded=20, compiled=16),  # a reference keeps the fp32 logits; the loss is not compiled
    foreach_bytes=4,
    efficiencies=Efficiencies(
        products=1.00,
        tensor_parallel=2.34,
        step_seconds=0.147,
        num_rows=22,
        left_out_error=0.064,
    ),
)
_TITAN_DROPS_LOGITS = replace(
    _TITAN,
    since="2024-06",
    source="torchtitan: train.py, `del pred` before the backward",
    loss=replace(CROSS_ENTROPY, compiled=CROSS_ENTROPY.eager),
)
_TITAN_COMPILES_LOSS = replace(
    _TITAN_DROPS_LOGITS,
    since="2025-03",
    source="torchtitan: components/loss.py (compiling the loss was off before), fused AdamW by default",
    loss=CROSS_ENTROPY,
    foreach_bytes=0,
)
_TITAN_SPLITS_ROOT = replace(
    _TITAN_COMPILES_LOSS,
    since="2025-08",
    source="torchtitan: models/llama3/infra/parallelize.py, fully_shard(embedding), fully_shard([norm, head])",
    tables_in_root=1,
)
_TITAN_FUSED_NORM = replace(
    _TITAN_SPLITS_ROOT,
    since="2025-10",
    source="torch 2.9: aten::_fused_rms_norm, which saves the input and a scale per row",
    norm_saved=2,
    norm_frozen=2,
)
_TITAN_GQA = replace(
    _TITAN_FUSED_NORM,
    since="2026-02",
    source="torchtitan: models/attention.py, enable_gqa in place of repeat_kv",
    repeats_kv=False,
)

# torchtitan's experiments that trace one graph: its functional collectives allocate like any operator
_SIMPLE_FSDP = replace(
    _TITAN_FUSED_NORM, name="torchtitan simple_fsdp", source="torchtitan: experiments/simple_fsdp", own_pools=False
)
_COMPILER_TOOLKIT = replace(
    _SIMPLE_FSDP, name="torchtitan compiler_toolkit", source="torchtitan: experiments/compiler_toolkit"
)
_GRAPH_TRAINER = replace(
    _SIMPLE_FSDP,
    name="torchtitan graph_trainer",
    source="torchtitan: experiments/graph_trainer/memory_policy.py, whose default saves every product of matrices",
    selective="products",
    fused_kernels=True,
)

TORCHTITAN: tuple[Framework, ...] = (
    _TITAN,
    _TITAN_DROPS_LOGITS,
    _TITAN_COMPILES_LOSS,
    _TITAN_SPLITS_ROOT,
    _TITAN_FUSED_NORM,
    _TITAN_GQA,
    _SIMPLE_FSDP,
    _COMPILER_TOOLKIT,
    _GRAPH_TRAINER,
)
"""All entries; those of one name in chronological order."""
