"""nanotron: the traits of its runs, facts from its source code."""

from llama_core.planning.frameworks.traits import Efficiencies, Framework, Loss

NANOTRON = Framework(
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
    fused_kernels=True,
    efficiencies=Efficiencies(
        products=1.27,
        tensor_parallel=0.71,
        step_seconds=0.142,
        num_rows=9,
        left_out_error=0.282,
    ),
)
