"""Cross-entropy of a linear head, computed without ever holding the logits of all tokens."""

# Shape suffixes: T tokens, D model dim, V vocabulary, C tokens of one chunk, R rows of one block

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llama_core.units import GIB, MIB

IGNORE_INDEX = -100
"""The target of a token that does not count."""

MIN_CHUNK_BYTES = 128 * MIB
MAX_CHUNK_BYTES = GIB
NUM_BLOCKS = 16
"""Parts in which what is wider than a chunk's logits is computed: small enough for a CPU's last-level cache."""


def default_chunk_tokens(vocab_size: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Return the most tokens whose logits are held at once.

    Every chunk reads and writes the weight's gradient once, so a chunk's logits may take as many bytes as the
    weight, but at least ``MIN_CHUNK_BYTES`` and at most ``MAX_CHUNK_BYTES``.
    """
    row_bytes = vocab_size * dtype.itemsize
    chunk_bytes = min(max(hidden_size * row_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return max(1, chunk_bytes // row_bytes)


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the cross-entropy of ``hidden_TD @ weight_VD.T``, summed over tokens: an fp32 scalar.

    The logits are computed in the dtype of ``hidden_TD``, widened to fp32 for the softmax, and dropped chunk by chunk;
    the gradients are computed in the same pass, so that the backward only scales them. The weight is cast to the
    dtype of ``hidden_TD`` once; its gradient is accumulated in fp32 and returned in the weight's dtype. fp64 inputs
    stay fp64 throughout. Not differentiable twice.

    Args:
        hidden_TD: the final hidden states.
        weight_VD: the head, of any floating dtype.
        targets_T: the index of each token's right answer, or ``ignore_index`` where there is none.
        ignore_index: the target that adds neither loss nor gradient.
        chunk_tokens: most tokens whose logits are held at once; by default ``default_chunk_tokens``.
    """
    num_tokens = hidden_TD.shape[0]
    vocab_size, hidden_size = weight_VD.shape
    most = chunk_tokens or default_chunk_tokens(vocab_size, hidden_size, hidden_TD.dtype)
    num_chunks = max(1, math.ceil(num_tokens / most))
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        weight_VD,
        targets_T,
        ignore_index,
        max(1, math.ceil(num_tokens / num_chunks)),
        torch.is_grad_enabled(),  # inside the function it is always off
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        ignore_index: int,
        chunk_tokens: int,
        differentiate: bool,
    ) -> Tensor:
        need_hidden, need_weight = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        num_tokens, (vocab_size, hidden_size) = hidden_TD.shape[0], weight_VD.shape
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        head_VD = weight_VD.to(hidden_TD.dtype)
        ignored_T1 = (targets_T == ignore_index)[:, None]
        answers_T1 = targets_T[:, None].masked_fill(ignored_T1, 0)
        counted_TD = hidden_TD.masked_fill(ignored_T1, 0)
        losses_T1 = hidden_TD.new_empty((num_tokens, 1), dtype=wide)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if need_weight else None

        # the buffers of the loop are made once: on a CPU fresh memory costs more than the arithmetic on it
        logits_CV = hidden_TD.new_empty((chunk_tokens, vocab_size))
        block_RV = hidden_TD.new_empty((math.ceil(chunk_tokens / NUM_BLOCKS), vocab_size), dtype=wide)
        block_RD = hidden_TD.new_empty((math.ceil(vocab_size / NUM_BLOCKS), hidden_size))

        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, num_tokens))
            logits = torch.mm(hidden_TD[chunk], head_VD.t(), out=logits_CV[: chunk.stop - start])
            _losses_and_logit_gradients_(logits, answers_T1[chunk], losses_T1[chunk], block_RV)
            if grad_hidden_TD is not None:
                torch.mm(logits, head_VD, out=grad_hidden_TD[chunk])
            if grad_weight_VD is not None:
                _add_product_(grad_weight_VD, logits, counted_TD[chunk], block_RD)
        if grad_hidden_TD is not None:
            grad_hidden_TD.masked_fill_(ignored_T1, 0)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return losses_T1.masked_fill_(ignored_T1, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD * upstream
        if grad_weight_VD is not None:
            scaled_VD = torch.empty_like(grad_weight_VD, dtype=ctx.weight_dtype)
            grad_weight_VD = torch.mul(grad_weight_VD, upstream, out=scaled_VD)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None


def _losses_and_logit_gradients_(logits_CV: Tensor, answers_C1: Tensor, losses_C1: Tensor, block_RV: Tensor) -> None:
    """Fill ``losses_C1`` and turn the logits into their gradients in place, a wide block of rows at a time."""
    block_rows = block_RV.shape[0]
    for start in range(0, logits_CV.shape[0], block_rows):
        narrow_RV = logits_CV[start : start + block_rows]
        answers_R1 = answers_C1[start : start + block_rows]
        wide_RV = block_RV[: narrow_RV.shape[0]].copy_(narrow_RV)
        wide_RV.sub_(wide_RV.amax(-1, keepdim=True))
        answer_logits_R1 = wide_RV.gather(-1, answers_R1)
        totals_R1 = wide_RV.exp_().sum(-1, keepdim=True)
        losses_C1[start : start + block_rows] = totals_R1.log() - answer_logits_R1
        wide_RV.div_(totals_R1).scatter_add_(-1, answers_R1, -torch.ones_like(totals_R1))
        narrow_RV.copy_(wide_RV)


def _add_product_(sum_VD: Tensor, left_CV: Tensor, right_CD: Tensor, block_RD: Tensor) -> None:
    """Add ``left_CV.T @ right_CD`` to the wide ``sum_VD``, a block of rows at a time."""
    block_rows = block_RD.shape[0]
    for start in range(0, sum_VD.shape[0], block_rows):
        sum_RD = sum_VD[start : start + block_rows]
        left_RC = left_CV.t()[start : start + block_rows]
        sum_RD.add_(torch.mm(left_RC, right_CD, out=block_RD[: sum_RD.shape[0]]))
