"""The defaults of training frameworks: facts from their source code, none of them fitted.

Frameworks change: an entry holds until the next one of the same name.
"""

from dataclasses import replace

from benchmarks.published.traits import CROSS_ENTROPY, Adapters, Framework, Loss
from llama_core.errors import ConfigError, did_you_mean

_FSDP2 = Framework(
    name="fsdp2",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    own_pools=True,  # all_gather_stream, reduce_scatter_stream
    repeats_kv=True,
)

_TITAN = replace(
    _FSDP2,
    name="torchtitan",
    source="torchtitan: train.py, parallelisms/parallelize_llama.py, models/llama/model.py as of March 2024",
    tables_in_root=2,  # one fully_shard(model) around embedding, last norm and head
    loss=Loss(eager=16, sharded=20, compiled=16),  # a reference keeps the fp32 logits; the loss is not compiled
    foreach_bytes=4,
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
)

_MEGATRON = Framework(
    name="megatron",
    prints="allocated",
    source="Megatron-LM: core/distributed/param_and_grad_buffer.py (fp32 gradient buffers), core/optimizer/"
    "distrib_optimizer.py, core/tensor_parallel/cross_entropy.py (one fp32 copy of the logits, reused in place); "
    "fused norm and SwiGLU of TransformerEngine, which gather a divided sequence again",
    sharding="optimizer",
    master_bytes=4,
    persistent_gradients=True,
    norm_saved=2,
    norm_frozen=2,
    ffn_tensors=3,
    keeps_gathered=False,
    selective="attention",
    loss=Loss(eager=6, sharded=6, compiled=6),
    num_gpus=64,  # eight nodes, as in its release tests
    accumulates=True,
)

_NANOTRON = Framework(
    name="nanotron",
    source="nanotron: optim/gradient_accumulator.py (fp32 weights, all gradients in one fp32 buffer), "
    "trainer.py (DDP, whose buckets are no views), parallel/tensor_parallel/functional.py (fp32 logits and a shifted "
    "copy that becomes the gradient), models/base.py (stages by cost), flash-attn's norm, tp_recompute_allgather",
    sharding="optimizer",
    master_bytes=4,
    persistent_gradients=True,
    bucket_bytes=2,
    norm_saved=2,
    norm_frozen=2,
    keeps_gathered=False,
    loss=Loss(eager=8, sharded=8, compiled=8),
    balances_cost=True,
    accumulates=True,
)

_LITGPT = Framework(
    name="litgpt",
    prints="allocated",
    source="litgpt: model.py (fp32 norm, keys and values expanded), finetune/lora.py and utils.py (logits and "
    "log-softmax in bf16, gradients in chunks of 128 tokens), config_hub/finetune (adapters), no tied tables; "
    "Lightning Fabric: FSDPStrategy summons all parameters to load a checkpoint",
    moment_bytes=4,
    gradient_bytes=2,
    reduce_bytes=2,
    foreach_bytes=2,
    norm_saved=8,
    repeats_kv=True,
    loss=Loss(eager=4, sharded=4, compiled=4),
    unties_head=True,
    loads_whole=True,
    accumulates=True,
    adapters=Adapters(rank=32, drops_out=True),
    quantises_head=True,
)

_TORCHTUNE = replace(
    _FSDP2,
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

_DEEPSPEED = Framework(
    name="deepspeed",
    prints="allocated",
    source="DeepSpeed: runtime/zero/stage_1_and_2.py and bf16_optimizer.py, under a model as transformers write it",
    sharding="optimizer",
    master_bytes=4,
    norm_saved=8,
    repeats_kv=True,
    accumulates=True,
)

FRAMEWORKS = (
    _FSDP2,
    _TITAN,
    _TITAN_DROPS_LOGITS,
    _TITAN_COMPILES_LOSS,
    _TITAN_SPLITS_ROOT,
    _TITAN_FUSED_NORM,
    _TITAN_GQA,
    _SIMPLE_FSDP,
    _COMPILER_TOOLKIT,
    _GRAPH_TRAINER,
    _MEGATRON,
    _NANOTRON,
    _LITGPT,
    _TORCHTUNE,
    _TORCHTUNE_LINEAR_LOSS,
    _DEEPSPEED,
)
"""All entries; those of one framework in chronological order."""

_EXPERIMENTS = {"simplefsdp": "simple_fsdp", "compiler_toolkit": "compiler_toolkit", "graph_trainer": "graph_trainer"}


def framework(name: str, *, month: str, remarks: str) -> Framework:
    """Return a framework's defaults in a given month.

    Args:
        name: its name in a source, such as ``nanotron v0.5``.
        month: such as ``2024-07``; an empty string means the newest.
        remarks: may name one of torchtitan's experiments.

    Raises:
        ConfigError: if the framework is unknown.
    """
    spelled = name.lower()
    names = sorted({entry.name for entry in FRAMEWORKS if " " not in entry.name})
    family = next((known for known in names if spelled.startswith(known)), None)
    if family is None:
        hint = did_you_mean(spelled, names) or f"; known are {', '.join(names)}"
        raise ConfigError(f"nothing is known about framework {name!r}{hint}")
    for sign, experiment in _EXPERIMENTS.items():
        if family == "torchtitan" and sign in remarks.lower():
            family = f"torchtitan {experiment}"
    entries = [entry for entry in FRAMEWORKS if entry.name == family]
    return next((entry for entry in reversed(entries) if not month or entry.since <= month), entries[0])


def compiled(traits: Framework) -> Framework:
    """Return a framework's traits once ``torch.compile`` has fused the operators between matrix products.

    Its partitioner keeps the inputs of fused regions instead of their intermediate results: a norm's input, the gate
    and up of a gated feed-forward, one copy of keys and values.

    Source: torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``.
    """
    loss = replace(traits.loss, eager=traits.loss.compiled, sharded=traits.loss.compiled)
    return replace(traits, norm_saved=2, norm_frozen=2, ffn_tensors=2, repeats_kv=False, loss=loss)
