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
from llama_core.models.block_attention import BIAS_ALIGNMENT, BlockKernel, BlockMask, kernel_for


def attend_with_sinks(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | Documents | None, sinks_N: Tensor
) -> Tensor:
    """Return softmax attention with a sink in each head, [B, N, S, H], as ``attend`` does without; no scores are held.

    Args:
        q_BNSH: queries.
        k_BKSH: keys; K divides N.
        v_BKSH: values.
        mask: what is seen: an additive mask, documents, or all earlier tokens.
        sinks_N: the logit of each head's sink.
    """
    out_BNSH: Tensor = _AttentionWithSinks.apply(q_BNSH, k_BKSH, v_BKSH, sinks_N, mask)  # type: ignore[no-untyped-call]
    return out_BNSH


class _AttentionWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sinks_N: Tensor, mask: Tensor | Documents | None
    ) -> Tensor:
        kernel, arguments = _kernel(q_BNSH, mask)
        qkv = (q_BNSH, k_BKSH, v_BKSH)
        if isinstance(mask, Documents):
            out_TNH, lse_NT = kernel.forward(*map(_tokens_first, qkv), *arguments)
            out_BNSH = _in_rows(out_TNH, len(q_BNSH))
            lse_BNS = lse_NT.unflatten(1, (len(q_BNSH), -1)).transpose(0, 1)
        else:
            out_BNSH, lse_BNS = kernel.forward(*qkv, *arguments)
        total_BNS = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype)[:, None])
        out_BNSH = (out_BNSH * torch.exp(lse_BNS - total_BNS)[..., None]).to(q_BNSH.dtype)
        ctx.save_for_backward(*qkv, sinks_N, out_BNSH, total_BNS)
        ctx.mask = mask
        return out_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, k_BKSH, v_BKSH, sinks_N, out_BNSH, total_BNS = ctx.saved_tensors
        kernel, arguments = _kernel(q_BNSH, ctx.mask)
        whole = (grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH)
        if isinstance(ctx.mask, Documents):
            total_NT = total_BNS.transpose(0, 1).flatten(1).contiguous()
            grads = [
                _in_rows(grad, len(q_BNSH))
                for grad in kernel.backward(*map(_tokens_first, whole), total_NT, *arguments)
            ]
        else:
            grads = list(kernel.backward(*whole, total_BNS.contiguous(), *arguments))
        # the sink's probability, times how much less than the mean its value of zero is worth
        worth_BNS = (grad_BNSH.to(total_BNS.dtype) * out_BNSH).sum(-1)
        share_BNS = torch.exp(sinks_N.to(total_BNS.dtype)[:, None] - total_BNS)
        grad_N = -(share_BNS * worth_BNS).sum((0, 2))
        return *grads, grad_N.to(sinks_N.dtype), None


def _kernel(q_BNSH: Tensor, mask: Tensor | Documents | None) -> tuple[BlockKernel, tuple[Any, ...]]:
    """Return the kernel for what is seen, and what it takes behind queries, keys and values."""
    if isinstance(mask, Documents):
        starts, row_length, window = mask
        return block_attention.VARLEN, (starts, starts, row_length, row_length, window)
    whole = slice(None)
    block = BlockMask(whole, whole, causal=mask is None, bias_B1QJ=None if mask is None else _aligned(mask))
    return kernel_for(q_BNSH, block), (block,)


def _aligned(mask_B1SS: Tensor) -> Tensor:
    """Return an additive mask whose rows begin where CUDA's kernel can load them; it is itself if they do."""
    spare = -mask_B1SS.shape[-1] % BIAS_ALIGNMENT
    if not mask_B1SS.is_cuda or not spare:
        return mask_B1SS
    return F.pad(mask_B1SS, (0, spare))[..., : mask_B1SS.shape[-1]]


def _tokens_first(x_BNSH: Tensor) -> Tensor:
    return x_BNSH.transpose(1, 2).flatten(0, 1)


def _in_rows(x_TNH: Tensor, num_rows: int) -> Tensor:
    return x_TNH.unflatten(0, (num_rows, -1)).transpose(1, 2)
