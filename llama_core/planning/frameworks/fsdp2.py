"""What every framework on torch's ``fully_shard`` shares."""

from llama_core.planning.frameworks.traits import Framework

FSDP2 = Framework(
    name="fsdp2",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    own_pools=True,  # all_gather_stream, reduce_scatter_stream
    repeats_kv=True,
)
