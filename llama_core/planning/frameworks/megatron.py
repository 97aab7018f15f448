"""Megatron-LM and what is built on its core: the traits of its runs, facts from its source code."""

from llama_core.planning.frameworks.traits import Efficiencies, Framework, Loss

MEGATRON = Framework(
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
    fused_kernels=True,
    attention="cudnn",  # that of TransformerEngine on Hopper and Blackwell
    efficiencies=Efficiencies(
        products=1.03,
        tensor_parallel=0.21,
        step_seconds=0.002,
        num_rows=23,
        left_out_error=0.066,
    ),
)
