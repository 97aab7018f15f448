"""Attention with sinks, by kernels that know none: a sink is one more logit of each head's softmax, without a value.

A softmax with a sink is the one without, times what the sink leaves of it: ``exp(lse - total)``, where ``total`` is the
log-sum-exp with the sink. A kernel's backward makes probabilities of scores with the log-sum-exp that it is given, and
takes from their gradients the mean that the output tells; both hold with the output and the log-sum-exp that know the
sink, whose own value is zero.

Source: OpenAI 2025, arXiv:2508.10925, section 2.3 (a learned bias in the denominator); Dao 2023, arXiv:2307.08691,
section 3.1 (the backward).
"""

# Shape suffixes: B batch, S sequence, T tokens of all rows (B * S), N query heads, K key/value heads, H head dim

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_core.models import block_attention
from llama_core.models.batch import Documents
from llama_core.models.block_attention import (
    BIAS_ALIGNMENT,
    BlockKernel,
    BlockMask,
    divided,
    divided_lse,
    joined,
    joined_lse,
    kernel_for,
)
from llama_core.models.cpu_attention import cpu_attention, is_faster


def kept_by_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of attention that a sink leaves: ``exp(lse - logaddexp(lse, sink))``.

    Args:
        lse: the log-sum-exp of a query's scores.
        sinks: the logits of its head's sink.
    """
    return torch.sigmoid(lse - sinks)


def attend_with_sinks(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Any,
    sinks_N: Tensor,
    *,
    kernel: BlockKernel | None = None,
) -> Tensor:
    """Return softmax attention with a sink in each head, [B, N, S, H]; no scores are held.

    Args:
        q_BNSH: queries.
        k_BKSH: keys; K divides N.
        v_BKSH: values.
        mask: what is seen, as the kernel is told of it; for one of whole rows an additive mask, [S, S] or
            [B, 1, S, S]; documents; or None for all earlier tokens.
        sinks_N: the logit of each head's sink.
        kernel: attends without sinks. Its forward returns the output and its log-sum-exp, [B, N, S], and its backward
            takes them from behind queries, keys and values. None for that of whole rows.
    """
    if isinstance(mask, Tensor):
        mask = mask.expand(len(q_BNSH), 1, *mask.shape[-2:])
    if kernel is None:
        is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BNSH, k_BKSH, v_BKSH))
        has_blocks = is_trained and not isinstance(mask, Documents) and is_faster(q_BNSH, mask)
        kernel = _IN_BLOCKS if has_blocks else _WHOLE_ROWS
    out_BNSH: Tensor = _AttentionWithSinks.apply(q_BNSH, k_BKSH, v_BKSH, sinks_N, mask, kernel)  # type: ignore[no-untyped-call]
    return out_BNSH


class _AttentionWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        q_BNSH: Tensor,
        k_BKSH: Tensor,
        v_BKSH: Tensor,
        sinks_N: Tensor,
        mask: Any,
        kernel: BlockKernel,
    ) -> Tensor:
        out_BNSH, lse_BNS = kernel.forward(q_BNSH, k_BKSH, v_BKSH, mask)
        sinks_N1 = sinks_N.to(lse_BNS.dtype)[:, None]
        out_BNSH = (out_BNSH * kept_by_keys(lse_BNS, sinks_N1)[..., None]).to(q_BNSH.dtype)
        total_BNS = torch.logaddexp(lse_BNS, sinks_N1)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, sinks_N, out_BNSH, total_BNS)
        ctx.mask = mask
        ctx.kernel = kernel
        return out_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, k_BKSH, v_BKSH, sinks_N, out_BNSH, total_BNS = ctx.saved_tensors
        # the sink's probability, times how much less than the mean its value of zero is worth
        worth_BNS = (grad_BNSH.to(total_BNS.dtype) * out_BNSH).sum(-1)
        share_BNS = torch.exp(sinks_N.to(total_BNS.dtype)[:, None] - total_BNS)
        grad_N = -(share_BNS * worth_BNS).sum((0, 2))
        grads = ctx.kernel.backward(grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH, total_BNS, ctx.mask)
        return *grads, grad_N.to(sinks_N.dtype), None, None


def _forward(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | Documents | None) -> tuple[Tensor, Tensor]:
    """Return attention without sinks, and its log-sum-exp, [B, N, S]."""
    if isinstance(mask, Documents):
        out_TNH, lse_NT = block_attention.VARLEN.forward(*map(joined, (q_BNSH, k_BKSH, v_BKSH)), *_bounds(mask))
        return divided(out_TNH, len(q_BNSH)), divided_lse(lse_NT, len(q_BNSH))
    kernel, block = _kernel(q_BNSH, mask)
    return kernel.forward(q_BNSH, k_BKSH, v_BKSH, block)


def _forward_in_blocks(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the same on a CPU that trains."""
    out_BNSH, lse_BNS = cpu_attention(q_BNSH, k_BKSH, v_BKSH, mask, mask is None)
    return out_BNSH, lse_BNS


def _backward(  # noqa: PLR0917 - as they are saved
    grad_BNSH: Tensor,
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNSH: Tensor,
    total_BNS: Tensor,
    mask: Tensor | Documents | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, by the output and the log-sum-exp that know the sinks."""
    whole = (grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH)
    if isinstance(mask, Documents):
        grads = block_attention.VARLEN.backward(*map(joined, whole), joined_lse(total_BNS), *_bounds(mask))
        return tuple(divided(grad, len(q_BNSH)) for grad in grads)
    kernel, block = _kernel(q_BNSH, mask)
    return kernel.backward(*whole, total_BNS.contiguous(), block)


_WHOLE_ROWS = BlockKernel(_forward, _backward)
_IN_BLOCKS = BlockKernel(_forward_in_blocks, _backward)


def _bounds(documents: Documents) -> tuple[Any, ...]:
    """Return what the kernel of documents takes behind queries, keys and values."""
    starts, row_length, window = documents
    return starts, starts, row_length, row_length, window


def _kernel(q_BNSH: Tensor, mask: Tensor | None) -> tuple[BlockKernel, BlockMask]:
    """Return the kernel for whole rows, and what is seen of them."""
    whole = slice(None)
    block = BlockMask(whole, whole, causal=mask is None, bias_B1QJ=None if mask is None else _aligned(mask))
    return kernel_for(q_BNSH, block), block


def _aligned(mask_B1SS: Tensor) -> Tensor:
    """Return an additive mask whose rows begin where CUDA's kernel can load them; it is itself if they do."""
    spare = -mask_B1SS.shape[-1] % BIAS_ALIGNMENT
    if not mask_B1SS.is_cuda or not spare:
        return mask_B1SS
    return F.pad(mask_B1SS, (0, spare))[..., : mask_B1SS.shape[-1]]
