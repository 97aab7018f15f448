"""Run FlashAttention 3 or 4 in place of torch's own kernels, once they have computed the same here."""

# Shape suffixes: B batch, S sequence, N query heads, K key/value heads, H head dim

import logging

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama_core.config.run import RunConfig
from llama_core.machine.flash import (
    Implementation,
    choose_flash_attention,
    installed_flash_attention,
    wants_flash_attention,
)
from llama_core.models.attention import attend
from llama_core.models.batch import Documents

logger = logging.getLogger(__name__)

TRIED_STARTS = (0, 5, 5, 135, 256)
"""Where the documents of the trial begin, and where the last ends: short, empty, and longer than a tile of 128."""
LARGEST_DEVIATION = 0.05
"""Of a trial's result from torch's own, relative to the largest number of that: six roundings to bf16, 2**-8 each, are
0.023. A wrong mask, head or scale differs by about one."""


def activate_flash_attention(config: RunConfig, device: torch.device) -> Implementation | None:
    """Make torch compute this process's attention on CUDA with the installed implementation that suits the device.

    torch then calls it wherever it would call its own flash kernel: for documents and the blocks of the ring, and for
    causal rows where cuDNN has no kernel. It stays only if a trial of its forward and backward agrees with torch's own
    kernels, because torch calls private functions of these packages, which change from version to version. Call this
    once, before the model is built.

    Args:
        config: the resolved configuration.
        device: where the rank computes.

    Returns:
        The implementation; None if torch's own kernels stay.
    """
    if not wants_flash_attention(config):
        return None
    name = choose_flash_attention(torch.cuda.get_device_capability(), installed_flash_attention())
    if name is None or name not in getattr(attention, "list_flash_attention_impls", tuple)():
        return None
    if problem := _trial(name, _heads(config, device)):
        attention.restore_flash_attention_impl(_raise_warn=False)
        logger.warning("%s is installed but cannot be used, so torch's own kernels run: %s", name, problem)
        return None
    logger.info("attention: %s", name)
    return name


def _trial(name: Implementation, heads: tuple[Tensor, Tensor, Tensor]) -> str:
    """Activate an implementation and compare it with torch's own; return what is wrong with it, or an empty text."""
    try:
        expected = _tried(heads)
        attention.activate_flash_attention_impl(name)
        deviation = _largest_deviation(_tried(heads), expected)
    except Exception as error:  # a package built for another torch may raise anything
        return f"{type(error).__name__}: {error}"
    if deviation <= LARGEST_DEVIATION:
        return ""
    return f"its results are {deviation:.2g} off those of torch's own kernels"  # also if that is NaN


def _heads(config: RunConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one row, with the run's head dim and query heads per key head."""
    spec = config.spec
    num_heads = spec.num_heads // spec.num_kv_heads
    dtype = torch.float16 if config.training.precision == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, TRIED_STARTS[-1], heads, spec.head_dim) for heads in (num_heads, 1, 1)]
    q_BSNH, k_BSKH, v_BSKH = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q_BSNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2)


def _tried(heads: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return attention and its gradients, inside documents and over a causal row."""
    q_BNSH = heads[0]
    starts = torch.tensor(TRIED_STARTS, dtype=torch.int32, device=q_BNSH.device)
    results = []
    for mask in (Documents(starts, q_BNSH.shape[2]), None):
        leaves = [x.detach().requires_grad_() for x in heads]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # torch would prefer cuDNN's kernel for a causal row
            out_BNSH = attend(leaves[0], leaves[1], leaves[2], mask)
        results += [out_BNSH.detach(), *torch.autograd.grad(out_BNSH, leaves, q_BNSH)]
    return results


def _largest_deviation(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference between results, relative to the largest number expected; NaN if one is NaN."""
    differences = [(one - other).abs().max() / other.abs().max() for one, other in zip(results, expected, strict=True)]
    return float(torch.stack(differences).max())
