"""Which kernels a run computes with, as far as its memory and its time depend on them."""

from llama_core.attention import Dtype, Kernel, chosen_kernel
from llama_core.config.models import ModelSpec
from llama_core.config.run import Precision, RunConfig
from llama_core.planning.plan import ParallelPlan

ACTIVATIONS: dict[Precision, Dtype] = {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "bf16"}
"""The dtype of activations; products in fp8 return bf16, and every GPU in the hardware table supports bf16."""


def runs_on_cuda(config: RunConfig) -> bool:
    """Return whether a resolved ``config`` runs on CUDA, whose kernels make loss and norms without copies in fp32."""
    return config.launch.device == "cuda"


def attention_kernel(config: RunConfig, plan: ParallelPlan, spec: ModelSpec | None = None) -> Kernel:
    """Return what serves attention of all layers when a resolved ``config`` runs under ``plan``.

    Args:
        config: the configuration.
        plan: how its ranks divide the model.
        spec: another model than that of ``config``, on the same rows.

    Raises:
        PlanError: if no kernel does what the model needs.
    """
    return chosen_kernel(
        [needs._replace(documents=config.data.document_mask) for needs in (spec or config.spec).attentions],
        device=config.launch.device,
        dtype=ACTIVATIONS[config.training.precision],
        asked=plan.attention,
        cp=plan.cp,
    )
