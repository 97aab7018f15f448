"""DeepSpeed under a model of transformers: the traits of its runs, facts from its source code."""

from llama_core.planning.frameworks.traits import Framework

DEEPSPEED = Framework(
    name="deepspeed",
    prints="allocated",
    source="DeepSpeed: runtime/zero/stage_1_and_2.py and bf16_optimizer.py, under a model as transformers write it",
    sharding="optimizer",
    master_bytes=4,
    norm_saved=8,
    repeats_kv=True,
    accumulates=True,
)
