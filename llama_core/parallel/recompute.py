"""Activation checkpointing: keep less for the backward pass and recompute it instead."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.fx import traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llama_core.config.settings import RecomputeMode
from llama_core.errors import PlanError
from llama_core.machine.toolchain import check_can_compile
from llama_core.models.attention import FUSED_ATTENTION, Attention
from llama_core.models.batch import Documents
from llama_core.models.layers import KEPT
from llama_core.models.llama import Llama
from llama_core.parallel.gathered_attention import GATHERED_ATTENTION, HeldDocuments
from llama_core.parallel.ring import RING_ATTENTION
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.matrices import KEPT_PRODUCTS

MAX_GRAPHS = 64
"""Graphs that the blocks of a run may be compiled to.

There is one for each kind of layer, length of rows, and kind of batch: with documents or without, in training or in
evaluation, with a gradient of the input or without. torch's own limit is 8, beyond which it no longer compiles.
"""

_ATTENTION = FUSED_ATTENTION | {RING_ATTENTION, GATHERED_ATTENTION}

_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.llama_core.grouped_product.default,
)


def apply_recompute(model: Llama, modes: RecomputeMode | Sequence[RecomputeMode]) -> None:
    """Make some blocks of ``model`` keep less for the backward pass; the gradients are the same bit for bit.

    ``full`` keeps the input of a block and runs its whole forward again: about a third more arithmetic. ``selective``
    also keeps the results of attention and of ``KEPT_PRODUCTS``, and recomputes the rest. ``none`` changes nothing.

    Args:
        model: the model, or a part of it.
        modes: one mode for every layer, or a mode for each layer of the whole model.

    Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198 (selective).
    """
    for name, block in model.layers.items():
        mode: RecomputeMode = modes if isinstance(modes, str) else modes[int(name)]
        if mode != "none":
            # Not torch's checkpoint_wrapper: it inserts its own name into those of model.named_parameters().
            block.forward = _recomputed(block.forward, mode)
        for path, module in block.named_modules():
            if mode == "selective" and path.rpartition(".")[2] in KEPT_PRODUCTS:
                module.kept = True


def mixes_up_random_state(plan: ParallelPlan) -> bool:
    """Return whether torch cannot compile the recomputation of its own attention under a plan.

    torch 2.13 saves the random state of ``scaled_dot_product_attention`` after a tensor-parallel block's device mesh,
    and then refuses the mesh. The kernel for documents has no random state.
    """
    return plan.compile and plan.tp > 1 and plan.recompute == "full"


def recompute_and_compile(model: Llama, plan: ParallelPlan, device: torch.device) -> None:
    """Make the blocks of ``model`` recompute and compile as ``plan`` says, each block as one graph.

    Args:
        model: the model, or a part of it, whose blocks have their kernels.
        plan: the plan.
        device: where the blocks run.

    Raises:
        EnvironmentMismatchError: if this machine lacks what it takes to compile for its GPU.
        PlanError: from the model, if its blocks need more than ``MAX_GRAPHS``.
    """
    if plan.compile and device.type == "cuda":
        check_can_compile()
    blocks = model.layers.values()
    # It is best to compile the recomputation into the same graph: the compiler then leaves out what nobody reads.
    compiles_inside = mixes_up_random_state(plan) and any(
        module.kernel.has_random_state for module in model.layers.modules() if isinstance(module, Attention)
    )
    if compiles_inside:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    apply_recompute(model, [mode for stage in plan.recompute_modes(model.spec) for mode in stage])
    if plan.compile:
        # DDP would have every block cut into graphs of 25 MB of parameters, so that it can send a bucket between two of
        # them. A block is a small part of a model: the buckets overlap with the blocks before it.
        torch._dynamo.config.optimize_ddp = False
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model.forward = _naming_the_limit(model.forward)  # type: ignore[method-assign]
        model.attention_mask = _of_any_number_of_documents(model.attention_mask)
    if plan.compile and not compiles_inside:
        for block in blocks:
            block.compile()


def _naming_the_limit(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``forward`` with torch's error of too many graphs put into the words of the user."""

    def run(*args: Any, **named: Any) -> Tensor:
        try:
            return forward(*args, **named)
        except FailOnRecompileLimitHit as error:
            raise PlanError(
                f"parallel.compile: the blocks of this run need more than {MAX_GRAPHS} graphs, one for each kind of "
                "layer and batch and each length of rows; set parallel.compile=false, or give stages fewer lengths"
            ) from error

    return run


def _of_any_number_of_documents(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make_mask`` with documents marked as dynamic, so that blocks are compiled for any number of them."""

    def run(*args: Any) -> Any:
        mask = make_mask(*args)
        if isinstance(mask, Documents | HeldDocuments):
            for starts in mask:
                if isinstance(starts, Tensor) and starts.dim() == 1:
                    torch._dynamo.maybe_mark_dynamic(starts, 0)
        return mask

    return run


def _recomputed(forward: Callable[..., Tensor], mode: RecomputeMode) -> Callable[..., Tensor]:
    # A function, because torch.compile does not look into a functools.partial of checkpoint and would compile nothing.
    if mode == "full":

        def run(*args: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False)

    else:
        # It warns about in-place operators, but a block has none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

        def run(*args: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_selective_contexts)

    return run


def _keep_costly(_: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether to keep the result of one operator of a block."""
    is_kept = func in _PRODUCTS and traceback.current_meta.get("custom", {}).get(KEPT)
    return CheckpointPolicy.MUST_SAVE if is_kept or func in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = partial(create_selective_checkpoint_contexts, _keep_costly)
