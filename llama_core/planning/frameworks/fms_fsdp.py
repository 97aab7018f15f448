"""fms-fsdp: the traits of its runs, facts from its source code."""

from llama_core.planning.frameworks.traits import Efficiencies, Framework

FMS_FSDP = Framework(
    name="fms-fsdp",
    source="foundation-model-stack/fms-fsdp: main_training_llama.py (FullyShardedDataParallel), "
    "policies/mixed_precision.py (gradients reduced in bf16)",
    own_pools=True,
    reduce_bytes=2,
    repeats_kv=True,
    efficiencies=Efficiencies(
        products=1.09,
        tensor_parallel=1.00,
        step_seconds=0.096,
        num_rows=12,
        left_out_error=0.059,
    ),
)
