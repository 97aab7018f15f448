"""litgpt: the traits of its runs, facts from its source code."""

from llama_core.planning.frameworks.traits import Adapters, Framework, Loss

LITGPT = Framework(
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
