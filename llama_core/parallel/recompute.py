"""Activation checkpointing: keep less for the backward pass and recompute it instead."""

import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llama_core.config.run import RecomputeMode
from llama_core.errors import EnvironmentMismatchError
from llama_core.models.layers import KEPT
from llama_core.models.llama import Llama
from llama_core.parallel.gathered_attention import GATHERED_ATTENTION
from llama_core.parallel.ring import RING_ATTENTION
from llama_core.planning.plan import KEPT_PRODUCTS, ParallelPlan

_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.llama_core.cpu_attention.default,
        RING_ATTENTION,
        GATHERED_ATTENTION,
    }
)

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


def recompute_and_compile(model: Llama, plan: ParallelPlan, device: torch.device) -> None:
    """Make the blocks of ``model`` recompute and compile as ``plan`` says, each block as one graph.

    Raises:
        EnvironmentMismatchError: if this machine lacks what it takes to compile for its GPU.
    """
    if plan.compile and device.type == "cuda":
        _check_compilers()
    blocks = model.layers.values()
    # It is best to compile the recomputation into the same graph. But if a tensor-parallel block recomputes attention
    # on the CPU, torch 2.13 saves its random state after the device mesh, and then refuses the mesh.
    inside = plan.compile and plan.tp > 1 and plan.recompute == "full" and device.type == "cpu"
    if inside:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    apply_recompute(model, [mode for stage in plan.recompute_modes(model.spec) for mode in stage])
    if plan.compile and not inside:
        for block in blocks:
            block.compile()


def _check_compilers() -> None:
    lacking = [] if find_spec("triton") else ["Triton (pip install triton)"]
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):  # Triton builds its launchers with it
        lacking.append("a C compiler (gcc)")
    if lacking:
        raise EnvironmentMismatchError(
            f"parallel.compile needs {' and '.join(lacking)} on {socket.gethostname()}; install it, or set "
            "parallel.compile=false"
        )


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
