"""Which kernels a run computes with, as far as its memory and its time depend on them."""

from llama_core.attention import Kernel, chosen_kernel
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan


def runs_on_cuda(config: RunConfig) -> bool:
    """Return whether a resolved ``config`` runs on CUDA, whose kernels make loss and norms without copies in fp32."""
    return config.launch.device == "cuda"


def attention_kernel(config: RunConfig, plan: ParallelPlan) -> Kernel:
    """Return what computes attention when a resolved ``config`` runs under ``plan``.

    Raises:
        PlanError: if no kernel does what the model needs.
    """
    return chosen_kernel(
        [needs._replace(documents=config.data.document_mask) for needs in config.spec.attentions],
        device=config.launch.device,
        is_narrow=config.training.precision != "fp32",
        asked=plan.attention,
        cp=plan.cp,
    )
