"""Attention of some queries to some of the keys, one block of a larger softmax: forward and backward.

torch's fused kernels return the log-sum-exp that merges blocks, and their backward takes the one over all blocks, but
only under private names. Only this file and ``cpu_attention`` call them by these names.

Source: Dao 2023, arXiv:2307.08691, section 3.1.
"""

# Shape suffixes: B batch, S tokens of the whole block (Q its visible queries, J its visible keys), N query heads,
# K key/value heads, H head dim, 2 keys and values stacked; T queries and U keys of all rows

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from llama_core.models.cpu_attention import cpu_attention_backward

aten = torch.ops.aten

GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Lets ``varlen_attn`` take fewer key heads than query heads; torch 2.11 does so without an argument."""

BIAS_ALIGNMENT = 16
"""The row stride of an additive mask is a multiple of this many elements: CUDA's kernel loads aligned pieces."""
LSE_ALIGNMENT = 32
"""CUDA's kernel for additive masks pads the rows of its log-sum-exp to a multiple of this many queries."""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which queries of a block see which keys."""

    queries: slice
    """The queries that may see any of the keys; the others are not computed."""
    keys: slice
    """The keys that any of those queries may see."""
    causal: bool
    """Whether the i-th of those queries sees only the first i + 1 of those keys."""
    bias_B1QJ: Tensor | None = None
    """0 where a query sees a key and -inf elsewhere, in the queries' dtype; None if ``causal`` says it all."""
    blind_B1Q: Tensor | None = None
    """True for a query that sees none of the keys; None if there cannot be one."""

    @classmethod
    def of_visible(cls, queries: slice, keys: slice, visible_BQJ: Tensor, dtype: torch.dtype) -> "BlockMask":
        """Return the mask in which query i sees key j if ``visible_BQJ`` is true; ``dtype`` is the queries'."""
        batch, num_queries, num_keys = visible_BQJ.shape
        spacing = -(-num_keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
        padded = torch.zeros((batch, 1, num_queries, spacing), dtype=dtype, device=visible_BQJ.device)
        bias_B1QJ = padded[..., :num_keys].masked_fill_(~visible_BQJ[:, None], -math.inf)
        return cls(queries, keys, causal=False, bias_B1QJ=bias_B1QJ, blind_B1Q=~visible_BQJ.any(-1)[:, None])


class BlockKernel(NamedTuple):
    """A fused attention and its gradient, such as one on tensors cut to the visible part of a block."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """Maps q, k, v and a mask to the output and its log-sum-exp."""
    backward: Callable[..., tuple[Tensor, ...]]
    """Maps the output's gradient, q, k, v, output, log-sum-exp and the mask to the gradients of q, k and v."""


def block_forward(q_BNSH: Tensor, kv_2BKSH: Tensor, *, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the visible queries' output, [B, N, Q, H] in their dtype, and its log-sum-exp, [B, N, Q], fp32 or wider.

    A query that sees nothing has output 0 and log-sum-exp -inf.
    """
    q_BNQH, (k_BKJH, v_BKJH) = q_BNSH[:, :, mask.queries], kv_2BKSH[..., mask.keys, :]
    out_BNQH, lse_BNQ = kernel_for(q_BNQH, mask).forward(q_BNQH, k_BKJH, v_BKJH, mask)
    if mask.blind_B1Q is None:
        return out_BNQH, lse_BNQ
    # the kernels differ for such queries: the CPU's returns log-sum-exp 0; ``masked_fill`` would change the order of
    # dims in memory, and the next matrix product keep a copy in the old one
    seen_BNQH = torch.where(mask.blind_B1Q[..., None], out_BNQH.new_zeros(()), out_BNQH)
    return seen_BNQH, lse_BNQ.masked_fill(mask.blind_B1Q, -math.inf)


def block_backward(
    grad_out_BNSH: Tensor, q_BNSH: Tensor, out_BNSH: Tensor, lse_BNS: Tensor, kv_2BKSH: Tensor, *, mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the visible queries, [B, N, Q, H], and keys and values, [2, B, K, J, H].

    ``out_BNSH`` and ``lse_BNS`` cover all blocks; the gradients have the dtype of ``lse_BNS``.
    """
    grad_out_BNQH, q_BNQH, out_BNQH, lse_BNQ = (
        x[:, :, mask.queries] for x in (grad_out_BNSH, q_BNSH, out_BNSH, lse_BNS)
    )
    k_BKJH, v_BKJH = kv_2BKSH[..., mask.keys, :]
    backward = kernel_for(q_BNQH, mask).backward
    grads = backward(grad_out_BNQH, q_BNQH, k_BKJH, v_BKJH, out_BNQH, lse_BNQ, mask)
    grad_q_BNQH, *grads_kv = (grad.to(lse_BNS.dtype) for grad in grads)
    return grad_q_BNQH, torch.stack(grads_kv)


def kernel_for(q_BNQH: Tensor, mask: BlockMask) -> BlockKernel:
    """Return the kernel for these queries under this mask."""
    if not q_BNQH.is_cuda:
        return CPU
    return CUDA_FLASH if q_BNQH.dtype.itemsize == 2 and mask.bias_B1QJ is None else CUDA_BIASED


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=mask.causal, attn_mask=mask.bias_B1QJ
    )
    return out, lse


def _cpu_backward(*tensors_and_mask: Any) -> tuple[Tensor, ...]:
    *tensors, mask = tensors_and_mask
    grads: tuple[Tensor, ...] = cpu_attention_backward(*tensors, mask.bias_B1QJ, mask.causal)
    return grads


CPU = BlockKernel(_cpu_forward, _cpu_backward)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=mask.causal)
    return out, lse


def _flash_backward(*tensors_and_mask: Any) -> tuple[Tensor, ...]:
    grad_out, q, k, v, out, lse, mask = tensors_and_mask
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout state, without dropout
    grads: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, q, k, v, out, lse.contiguous()),
        *(None, None, q.shape[2], k.shape[2], 0.0, mask.causal, unused, unused),
    )
    return grads


CUDA_FLASH = BlockKernel(_flash_forward, _flash_backward)


def _biased_forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *(q, _per_query_head(k, q), _per_query_head(v, q), _per_head(mask.bias_B1QJ, q)),
        compute_log_sumexp=True,
        is_causal=mask.causal,
    )
    return out, lse[:, :, : q.shape[2]]


def _biased_backward(*tensors_and_mask: Any) -> tuple[Tensor, ...]:
    grad_out, q, k, v, out, lse, mask = tensors_and_mask
    dense_out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes dense rows
    padded_lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=math.inf).contiguous()
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout state, without dropout
    grad_q, *grads_kv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad_out, q, _per_query_head(k, q), _per_query_head(v, q), _per_head(mask.bias_B1QJ, q)),
        *(dense_out, padded_lse, unused, unused, 0.0, [True, True, True, False], mask.causal),
    )
    return grad_q, *(grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in grads_kv)


def _per_query_head(k_BKJH: Tensor, q_BNQH: Tensor) -> Tensor:
    return k_BKJH.repeat_interleave(q_BNQH.shape[1] // k_BKJH.shape[1], dim=1)


def _per_head(bias_B1QJ: Tensor | None, q_BNQH: Tensor) -> Tensor | None:
    return None if bias_B1QJ is None else bias_B1QJ.expand(-1, q_BNQH.shape[1], -1, -1)


CUDA_BIASED = BlockKernel(_biased_forward, _biased_backward)
"""The slower kernel, for additive masks and fp32, which ``CUDA_FLASH`` does not support."""


def _varlen_forward(q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, *documents: Any) -> tuple[Tensor, Tensor]:
    *bounds, window = documents
    out_lse: Any = varlen_attn(
        q_TNH, k_UKH, v_UKH, *bounds, window_size=_seen(window), return_aux=AuxRequest(lse=True), **GROUPED_HEADS
    )
    return out_lse[0], out_lse[1]


def _varlen_backward(*tensors_and_documents: Any) -> tuple[Tensor, ...]:
    *tensors_and_bounds, window = tensors_and_documents
    unused = tensors_and_bounds[0].new_empty(2, dtype=torch.uint64)  # dropout state, without dropout
    grads: tuple[Tensor, ...] = torch.ops.torch_attn._varlen_attn_backward(
        *tensors_and_bounds, not window, unused, None, list(_seen(window))
    )
    return grads


def _seen(window: int) -> tuple[int, int]:
    """Return how many keys query i of a document with n queries and m keys sees before i + m - n, and after it."""
    return window - 1, 0  # -1 is all


def joined(x_BNSH: Tensor) -> Tensor:
    """Return queries, keys or values of all rows as the kernel for documents takes them, [T, N, H]."""
    return x_BNSH.transpose(1, 2).flatten(0, 1)


def divided(x_TNH: Tensor, num_rows: int) -> Tensor:
    """Return the inverse, [B, N, S, H]."""
    return x_TNH.view(num_rows, -1, *x_TNH.shape[1:]).transpose(1, 2)


def joined_lse(lse_BNS: Tensor) -> Tensor:
    """Return a log-sum-exp as the kernel for documents has it, [N, T], dense."""
    return lse_BNS.transpose(0, 1).flatten(1).contiguous()


def divided_lse(lse_NT: Tensor, num_rows: int) -> Tensor:
    """Return the inverse, [B, N, S]."""
    return lse_NT.view(len(lse_NT), num_rows, -1).transpose(0, 1)


VARLEN = BlockKernel(_varlen_forward, _varlen_backward)
"""The kernel for documents, on CUDA and in 16 bits, for tensors with tokens first and without rows.

In place of a mask it takes the starts of all documents' queries and the end of the last, the same for their keys, both
int32, the most queries and the most keys of a document, and the tokens that a query sees, 0 for all.
"""
