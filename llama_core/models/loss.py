"""Cross-entropy of a linear head, computed without ever holding the logits of all tokens.

On CUDA, a Triton kernel makes each row's loss and gradients, and cuBLAS adds the products of half precision to the
head's fp32 gradient. Elsewhere, both are computed in blocks that fit a CPU's cache.
"""

# Shape suffixes: T tokens, D model dim, V vocabulary (the rows of the head held here), C tokens of one chunk,
# R rows of one block, A rank of an adapter, G ranks that the vocabulary is divided over

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from llama_core.machine.toolchain import can_build_kernels
from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.layers import LowRank
from llama_core.units import GIB, MIB

MIN_CHUNK_BYTES = 128 * MIB
MAX_CHUNK_BYTES = GIB
NUM_BLOCKS = 16
"""Blocks in which intermediates wider than a chunk's logits are computed; one fits a CPU's last-level cache."""

FP16_GRADIENT_SCALE = 2.0**10
"""Multiplies the gradients of fp16 logits until the backward, where the upstream gradient is known.

Softmax values down to 6e-11 then survive in fp16, which otherwise underflows below 6e-8. A gradient of the hidden
states is at most twice this scale times the head's largest weight, so it overflows only if that weight exceeds 31.
"""


def default_chunk_tokens(vocab_size: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Return how many tokens' logits a rank with ``vocab_size`` rows of the head holds at once, at most.

    Every chunk reads and writes the weight's gradient once, so its logits may take as many bytes as the weight, but
    at least ``MIN_CHUNK_BYTES`` and at most ``MAX_CHUNK_BYTES``.
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
    vocab_group: dist.ProcessGroup | None = None,
    adapter: LowRank | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of ``hidden_TD @ weight_VD.T``, summed over tokens: an fp32 scalar.

    The logits are computed in the dtype of ``hidden_TD``, widened to fp32 for the softmax, and dropped chunk by chunk;
    the gradients are computed in the same pass, so the backward only scales them. The weight is cast to the
    dtype of ``hidden_TD`` once; its gradient is accumulated in fp32 and returned in the weight's dtype. fp64 inputs
    stay fp64 throughout. Not differentiable twice.

    With ``vocab_group``, every rank of the group holds an equal part of the head's rows, in rank order, and computes
    only the logits of that part. All ranks pass the same hidden states and targets and get the same loss, bit for bit,
    for one small collective per chunk. The weight's gradient is that of the rank's own rows. The gradient of the
    hidden states is a partial sum: the caller must sum it over the group, with a reduce-scatter under sequence
    parallelism, else with an all-reduce.

    Args:
        hidden_TD: the final hidden states.
        weight_VD: the head, or this rank's rows of it, of any floating dtype.
        targets_T: the index of each token's target in the whole vocabulary, or ``ignore_index``. An index outside the
            vocabulary raises an indexing error, or with ``vocab_group`` or on CUDA gives an infinite loss.
        ignore_index: the target that adds neither loss nor gradient.
        chunk_tokens: most tokens whose logits are held at once; default: ``default_chunk_tokens``.
        vocab_group: the ranks that divide the vocabulary; None if this rank holds all of it.
        adapter: a product to add to the logits, in the dtype of ``hidden_TD``, with this rank's rows. The gradients of
            its factors behave like those of the hidden states and the weight.
        z_loss: how much of the square of each token's log Z, the logarithm of the sum of its exponentials, is trained
            for besides: the gradients are those of both, and the result is the cross-entropy alone.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, for the head and its loss in parallel; Chowdhery et al.
    2022, arXiv:2204.02311, section 5, for the loss of log Z.
    """
    chunk_tokens = even_chunk(hidden_TD, weight_VD, chunk_tokens)
    softmax = _softmax(
        hidden_TD, weight_VD.shape[0], targets_T, ignore_index, dividing(vocab_group), z_loss, chunk_tokens
    )
    return linear_loss(hidden_TD, weight_VD, softmax, chunk_tokens, adapter=adapter)


class LogitLoss(Protocol):
    """The losses of all tokens, each a function of its logits alone, made chunk by chunk."""

    losses_T: Tensor
    """Those of the chunks that were made, in a wide dtype; 0 for an ignored token."""

    @property
    def ignored_T1(self) -> Tensor | None:  # noqa: N802 - its shape
        """Return tokens that do not count, whose logits get any finite gradient; None if they get zeros."""

    def differentiate_(self, logits_CV: Tensor, chunk: slice) -> None:
        """Set the losses of a chunk, and replace its logits by their gradients, times ``gradient_scale``."""


def linear_loss(
    hidden_TD: Tensor, weight_VD: Tensor, loss: LogitLoss, chunk_tokens: int, *, adapter: LowRank | None = None
) -> Tensor:
    """Return the sum of any losses of the logits ``hidden_TD @ weight_VD.T``, a scalar; see ``linear_cross_entropy``.

    Args:
        hidden_TD: the final hidden states.
        weight_VD: the head, or this rank's rows of it.
        loss: makes losses and gradients of each chunk of logits.
        chunk_tokens: tokens whose logits are held at once: ``even_chunk``.
        adapter: a product to add to the logits.
    """
    total: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        weight_VD,
        *(adapter or (None, None)),
        loss,
        chunk_tokens,
        torch.is_grad_enabled(),  # inside the function it is always off
    )
    return total


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        inner_TA: Tensor | None,
        rows_VA: Tensor | None,
        loss: LogitLoss,
        chunk_tokens: int,
        differentiate: bool,
    ) -> Tensor:
        factors = (hidden_TD, weight_VD, inner_TA, rows_VA)
        needed = [differentiate and needs for needs in ctx.needs_input_grad[:4]]
        products = _products(factors, loss.ignored_T1, needed)
        for chunk, logits in _chunks_of_logits(products, chunk_tokens):
            loss.differentiate_(logits, chunk)
            for product in products:
                product.differentiate(logits, chunk)
        ctx.save_for_backward(*(gradient for product in products for gradient in product.gradients()))
        ctx.dtypes = [tensor.dtype for tensor in factors if tensor is not None]
        ctx.scale = gradient_scale(hidden_TD.dtype)
        return loss.losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # a matrix, because its dtype counts in the product; a scalar would first be rounded to the gradients' dtype
        factor_11 = (upstream / ctx.scale).reshape(1, 1)
        scaled = [
            None if grad is None else torch.mul(grad, factor_11, out=torch.empty_like(grad, dtype=dtype))
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled)))


def linear_cross_entropies(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_tokens: int | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    adapter: LowRank | None = None,
) -> Tensor:
    """Return the cross-entropy of each token of ``hidden_TD @ weight_VD.T``, [T] in fp32, 0 for an ignored target.

    For losses that are no sum over tokens: what the gradient of a token is multiplied with is known only in the
    backward. That computes the logits a second time, chunk by chunk, and keeps nothing of them until then. Everything
    else, and the arguments, are as for ``linear_cross_entropy``.
    """
    losses_T: Tensor = _LinearCrossEntropies.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        weight_VD,
        *(adapter or (None, None)),
        targets_T,
        ignore_index,
        even_chunk(hidden_TD, weight_VD, chunk_tokens),
        dividing(vocab_group),
    )
    return losses_T


def even_chunk(hidden_TD: Tensor, weight_VD: Tensor, chunk_tokens: int | None = None) -> int:
    """Return the tokens of a chunk: as many as may be held at most, or fewer if that makes all chunks equal."""
    num_tokens = hidden_TD.shape[0]
    vocab_size, hidden_size = weight_VD.shape
    most = chunk_tokens or default_chunk_tokens(vocab_size, hidden_size, hidden_TD.dtype)
    num_chunks = max(1, math.ceil(num_tokens / most))
    return max(1, math.ceil(num_tokens / num_chunks))


def dividing(vocab_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks that divide the vocabulary; None if there is only one."""
    return None if vocab_group is None or dist.get_world_size(vocab_group) == 1 else vocab_group


class _LinearCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        inner_TA: Tensor | None,
        rows_VA: Tensor | None,
        targets_T: Tensor,
        ignore_index: int,
        chunk_tokens: int,
        vocab_group: dist.ProcessGroup | None,
    ) -> Tensor:
        factors = (hidden_TD, weight_VD, inner_TA, rows_VA)
        ctx.save_for_backward(*factors, targets_T)
        ctx.options = (ignore_index, vocab_group, 0.0, chunk_tokens)
        softmax = _softmax(hidden_TD, weight_VD.shape[0], targets_T, *ctx.options)
        for chunk, logits in _chunks_of_logits(_products(factors, softmax.ignored_T1, [False] * 4), chunk_tokens):
            softmax.differentiate_(logits, chunk)
        return softmax.losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_T: Tensor) -> tuple[Tensor | None, ...]:
        *factors, targets_T = ctx.saved_tensors
        hidden_TD, weight_VD, *_ = factors
        softmax = _softmax(hidden_TD, weight_VD.shape[0], targets_T, *ctx.options)
        products = _products(factors, softmax.ignored_T1, ctx.needs_input_grad[:4])
        factors_T1 = (upstream_T / gradient_scale(hidden_TD.dtype))[:, None]
        for chunk, logits in _chunks_of_logits(products, ctx.options[-1]):
            softmax.differentiate_(logits, chunk)
            logits.mul_(factors_T1[chunk])
            for product in products:
                product.differentiate(logits, chunk)
        made = [gradient for product in products for gradient in product.gradients()]
        made += [None] * (len(factors) - len(made))
        cast = [
            None if gradient is None else gradient.to(factor.dtype)
            for gradient, factor in zip(made, factors, strict=True)
        ]
        return (*cast, *[None] * (len(ctx.needs_input_grad) - len(cast)))


def _softmax(  # noqa: PLR0917 - as autograd's functions keep them
    hidden_TD: Tensor,
    vocab_size: int,
    targets_T: Tensor,
    ignore_index: int,
    vocab_group: dist.ProcessGroup | None,
    z_loss: float,
    chunk_tokens: int,
) -> "_SoftmaxInKernels | _SoftmaxInBlocks":
    """Return what makes losses and the gradients of logits, for the device of the hidden states."""
    if uses_kernels(hidden_TD):
        return _SoftmaxInKernels(targets_T, ignore_index, vocab_group, z_loss)
    return _SoftmaxInBlocks(
        targets_T, ignore_index, vocab_group, block_rows(hidden_TD, vocab_size, chunk_tokens), z_loss
    )


def block_rows(hidden_TD: Tensor, vocab_size: int, chunk_tokens: int) -> Tensor:
    """Return memory for some rows of a chunk's logits in a wide dtype, which ``blocks`` cuts the chunk into, [R, V]."""
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    return hidden_TD.new_empty((math.ceil(chunk_tokens / NUM_BLOCKS), vocab_size), dtype=wide)


def _products(factors: Sequence[Tensor | None], ignored_T1: Tensor | None, needed: Sequence[bool]) -> "list[_Product]":
    """Return the products that add up to the logits: of hidden states and head, and of an adapter's factors."""
    pairs = zip(factors[::2], factors[1::2], needed[::2], needed[1::2], strict=True)
    return [
        _Product(left, right, ignored_T1, need_left, need_right)
        for left, right, need_left, need_right in pairs
        if left is not None and right is not None
    ]


def logits_in_chunks(
    hidden_TD: Tensor, weight_VD: Tensor, chunk_tokens: int, *, adapter: LowRank | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk of tokens with its logits, without gradients; they may be overwritten, and are gone with it."""
    products = _products((hidden_TD, weight_VD, *(adapter or (None, None))), None, [False] * 4)
    yield from _chunks_of_logits(products, chunk_tokens)


def _chunks_of_logits(products: "Sequence[_Product]", chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk of tokens with its logits, which may be overwritten and are gone with the next chunk."""
    product, *added = products
    num_tokens = len(product.left_TD)
    # allocate the loop's buffer once: on a CPU, fresh memory costs more than the arithmetic on it
    logits_CV = product.left_TD.new_empty((chunk_tokens, len(product.right_VD)))
    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, num_tokens))
        logits = torch.mm(product.left_TD[chunk], product.right_VD.t(), out=logits_CV[: chunk.stop - start])
        for one in added:
            logits.addmm_(one.left_TD[chunk], one.right_VD.t())
        yield chunk, logits


class _Product:
    """``left_TD @ right_VD.T``, the logits or a summand of them, and its gradients, computed chunk by chunk.

    Args:
        left_TD: one row per token.
        right_VD: one row per logit; cast to the dtype of ``left_TD`` once.
        ignored_T1: tokens that do not count; None if their logits have no gradients.
        need_left, need_right: which gradients to compute.
    """

    def __init__(
        self, left_TD: Tensor, right_VD: Tensor, ignored_T1: Tensor | None, need_left: bool, need_right: bool
    ) -> None:
        self.left_TD = left_TD
        self.right_VD = right_VD.to(left_TD.dtype)
        self._ignored_T1 = ignored_T1
        wide = torch.promote_types(left_TD.dtype, torch.float32)
        self._grad_left_TD = torch.empty_like(left_TD) if need_left else None
        self._grad_right_VD = torch.zeros_like(right_VD, dtype=wide) if need_right else None
        if need_right and ignored_T1 is not None:
            self._counted_TD = left_TD.masked_fill(ignored_T1, 0)
            # a sum over tokens may overflow fp16, and the loss scale comes too late to prevent that
            dtype = wide if left_TD.dtype == torch.float16 else left_TD.dtype
            vocab_size, width = right_VD.shape
            self._block_RD = left_TD.new_empty((math.ceil(vocab_size / NUM_BLOCKS), width), dtype=dtype)

    def differentiate(self, logit_gradients_CV: Tensor, chunk: slice) -> None:
        """Set the gradients of a chunk of ``left_TD``, and add to those of ``right_VD``."""
        if self._grad_left_TD is not None:
            torch.mm(logit_gradients_CV, self.right_VD, out=self._grad_left_TD[chunk])
        if self._grad_right_VD is None:
            return
        if self._ignored_T1 is None:
            _add_wide_product_(self._grad_right_VD, logit_gradients_CV, self.left_TD[chunk])
        else:
            _add_product_(self._grad_right_VD, logit_gradients_CV, self._counted_TD[chunk], self._block_RD)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients, that of ``right_VD`` in the wide dtype; None for one that is not needed."""
        if self._grad_left_TD is not None and self._ignored_T1 is not None:
            self._grad_left_TD.masked_fill_(self._ignored_T1, 0)
        return self._grad_left_TD, self._grad_right_VD


def gradient_scale(dtype: torch.dtype) -> float:
    """Return the factor on the gradients of logits in ``dtype``, by which the backward divides."""
    return FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0


# --- in kernels, on CUDA


def uses_kernels(hidden_TD: Tensor) -> bool:
    """Return whether the loss of these hidden states runs in kernels. The dry run of a CUDA run replaces this."""
    return hidden_TD.is_cuda and hidden_TD.dtype != torch.float64 and can_build_kernels()


class _SoftmaxInKernels:
    """The losses of all tokens, made chunk by chunk; no kernel gives an ignored token's logits a gradient."""

    ignored_T1 = None

    def __init__(self, targets_T: Tensor, ignore_index: int, group: dist.ProcessGroup | None, z_loss: float) -> None:
        self._targets_T = targets_T
        self._ignore_index = ignore_index
        self._group = group
        self._z_loss = z_loss
        self.losses_T = torch.empty_like(targets_T, dtype=torch.float32)

    def differentiate_(self, logits_CV: Tensor, chunk: slice) -> None:
        """Set the losses of a chunk, and replace its logits by their scaled gradients."""
        targets_C = self._targets_T[chunk]
        losses_C = self.losses_T[chunk]
        scale = gradient_scale(logits_CV.dtype)
        if self._group is None:
            softmax_of_rows(logits_CV, targets_C, losses_C, self._ignore_index, self._z_loss, scale)
            return
        first = dist.get_rank(self._group) * logits_CV.shape[1]
        part_3C = logits_CV.new_empty((3, len(logits_CV)), dtype=torch.float32)
        parts_of_rows(logits_CV, targets_C, part_3C, self._ignore_index, first)
        combined_3C = torch.stack(_over_the_vocabulary(part_3C, self._group))
        softmax_of_parts(logits_CV, targets_C, combined_3C, losses_C, self._ignore_index, first, self._z_loss, scale)


# Custom operators, so that a dry run can trace them on fake tensors and without Triton. Each calls one function of
# models.loss_kernels.


@torch.library.custom_op("llama_core::softmax_of_rows", mutates_args=("logits", "losses"))
def softmax_of_rows(  # noqa: PLR0917 - an operator's arguments
    logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, z_loss: float, scale: float
) -> None:
    """Fill ``losses`` and turn the logits into their gradients, times ``scale``, in place."""
    from llama_core.models import loss_kernels

    loss_kernels.whole(logits, targets, losses, ignore_index, z_loss, scale)


@torch.library.custom_op("llama_core::parts_of_rows", mutates_args=("part",))
def parts_of_rows(logits: Tensor, targets: Tensor, part: Tensor, ignore_index: int, first: int) -> None:
    """Fill ``part``, [3, C], with what the loss needs of a part of the vocabulary that begins with token ``first``."""
    from llama_core.models import loss_kernels

    loss_kernels.parts(logits, targets, ignore_index, first, part)


@torch.library.custom_op("llama_core::softmax_of_parts", mutates_args=("logits", "losses"))
def softmax_of_parts(  # noqa: PLR0917 - an operator's arguments
    logits: Tensor,
    targets: Tensor,
    combined: Tensor,
    losses: Tensor,
    ignore_index: int,
    first: int,
    z_loss: float,
    scale: float,
) -> None:
    """Do the same as ``softmax_of_rows`` to a part of the vocabulary, given what was combined over all parts."""
    from llama_core.models import loss_kernels

    loss_kernels.divided(logits, targets, ignore_index, first, combined, losses, z_loss, scale)


@torch.library.custom_op("llama_core::add_wide_product", mutates_args=("total",))
def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, in half precision, to ``total``, which is fp32; only CUDA has this product.

    An operator of our own, because torch 2.11 takes the dtype for a factor where tensors are fake.
    """
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


for _operator in (softmax_of_rows, parts_of_rows, softmax_of_parts, add_wide_product):
    _operator.register_fake(lambda *_: None)


@register_flop_formula(torch.ops.llama_core.add_wide_product)
def _flops_of_wide_product(_: Any, left_shape: Any, right_shape: Any, **__: Any) -> int:
    flops: int = 2 * left_shape[0] * left_shape[1] * right_shape[1]
    return flops


def _add_wide_product_(sum_VD: Tensor, left_CV: Tensor, right_CD: Tensor) -> None:
    """Add ``left_CV.T @ right_CD`` to ``sum_VD``, which may be fp32 where the others are in half precision."""
    if sum_VD.dtype == right_CD.dtype:
        sum_VD.addmm_(left_CV.t(), right_CD)
    else:
        add_wide_product(sum_VD, left_CV.t(), right_CD)


# --- in blocks


class _SoftmaxInBlocks:
    """The losses of all tokens, made chunk by chunk; an ignored token's logits get meaningless gradients."""

    def __init__(
        self,
        targets_T: Tensor,
        ignore_index: int,
        group: dist.ProcessGroup | None,
        block_RV: Tensor,
        z_loss: float,
    ) -> None:
        self._group = group
        self._z_loss = z_loss
        self._block_RV = block_RV
        self.ignored_T1 = (targets_T == ignore_index)[:, None]
        self._answers_T1 = targets_T[:, None].masked_fill(self.ignored_T1, 0)
        self.losses_T = torch.empty_like(targets_T, dtype=block_RV.dtype)

    def differentiate_(self, logits_CV: Tensor, chunk: slice) -> None:
        """Set the losses of a chunk, and replace its logits by their scaled gradients."""
        answers_C1 = self._answers_T1[chunk]
        losses_C1 = self.losses_T[chunk, None]
        if self._group is None:
            _losses_and_logit_gradients_(logits_CV, answers_C1, losses_C1, self._block_RV, self._z_loss)
        else:
            _divided_losses_and_logit_gradients_(
                logits_CV, answers_C1, losses_C1, self._block_RV, z_loss=self._z_loss, group=self._group
            )
        losses_C1.masked_fill_(self.ignored_T1[chunk], 0)


def blocks(rows: Tensor, block: Tensor) -> Iterator[slice]:
    """Yield slices that cut ``rows`` into pieces no longer than ``block``."""
    for start in range(0, rows.shape[0], block.shape[0]):
        yield slice(start, min(start + block.shape[0], rows.shape[0]))


def _losses_and_logit_gradients_(
    logits_CV: Tensor, answers_C1: Tensor, losses_C1: Tensor, block_RV: Tensor, z_loss: float
) -> None:
    """Fill ``losses_C1`` and turn the logits into their scaled gradients in place, a wide block of rows at a time."""
    scale = gradient_scale(logits_CV.dtype)
    for rows in blocks(logits_CV, block_RV):
        answers_R1 = answers_C1[rows]
        wide_RV = block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
        peaks_R1 = wide_RV.amax(-1, keepdim=True)
        answer_logits_R1 = wide_RV.gather(-1, answers_R1)
        torch.softmax(wide_RV, -1, out=wide_RV)  # overwrites its input row by row
        # the log-sum-exp comes from the largest probability, because the answer's may be zero
        log_z_R1 = peaks_R1 - wide_RV.amax(-1, keepdim=True).log_()
        losses_C1[rows] = log_z_R1 - answer_logits_R1
        if z_loss:
            wide_RV.mul_(log_z_R1.mul_(2 * z_loss).add_(1).mul_(scale))
        elif scale != 1:
            wide_RV.mul_(scale)
        logits_CV[rows] = wide_RV.scatter_add_(-1, answers_R1, torch.full_like(peaks_R1, -scale))


def _divided_losses_and_logit_gradients_(
    logits_CV: Tensor,
    answers_C1: Tensor,
    losses_C1: Tensor,
    block_RV: Tensor,
    *,
    z_loss: float,
    group: dist.ProcessGroup,
) -> None:
    """Do the same as ``_losses_and_logit_gradients_`` with the logits of one rank's part of the vocabulary."""
    scale = gradient_scale(logits_CV.dtype)
    columns_C1 = answers_C1 % logits_CV.shape[1]
    held_C1 = answers_C1 // logits_CV.shape[1] == dist.get_rank(group)
    part_3C1 = torch.empty((3, *answers_C1.shape), dtype=block_RV.dtype, device=block_RV.device)
    peaks_C1, totals_C1, answer_logits_C1 = part_3C1.unbind()
    for rows in blocks(logits_CV, block_RV):
        wide_RV = block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
        answer_logits_C1[rows] = wide_RV.gather(-1, columns_C1[rows])
        peaks_C1[rows] = wide_RV.amax(-1, keepdim=True)
        totals_C1[rows] = wide_RV.sub_(peaks_C1[rows]).exp_().sum(-1, keepdim=True)
    answer_logits_C1.masked_fill_(~held_C1, -math.inf)

    peaks_C1, totals_C1, answer_logits_C1 = _over_the_vocabulary(part_3C1, group)
    logs_C1 = totals_C1.log()
    losses_C1.copy_(logs_C1 - (answer_logits_C1 - peaks_C1))
    factors_C1 = ((peaks_C1 + logs_C1) * (2 * z_loss) + 1) * scale / totals_C1
    answer_gradients_C1 = held_C1.to(block_RV.dtype).mul_(-scale)
    for rows in blocks(logits_CV, block_RV):
        wide_RV = block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
        wide_RV.sub_(peaks_C1[rows]).exp_().mul_(factors_C1[rows])
        logits_CV[rows] = wide_RV.scatter_add_(-1, columns_C1[rows], answer_gradients_C1[rows])


def _over_the_vocabulary(part_3C1: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's largest logit, sum of exponentials relative to it, and answer's logit, over all parts.

    All ranks gather the same numbers and combine them in the same order, so they agree bit for bit.
    """
    parts_G3C1 = part_3C1.new_empty((dist.get_world_size(group), *part_3C1.shape))
    dist.all_gather(list(parts_G3C1.unbind()), part_3C1, group=group)
    return combined(parts_G3C1)


def combined(parts_G3C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the peaks, totals and answers' logits of all parts of the vocabulary together."""
    peaks_GC1, totals_GC1, answer_logits_GC1 = parts_G3C1.unbind(1)
    peaks_C1 = peaks_GC1.amax(0)
    totals_C1 = (totals_GC1 * (peaks_GC1 - peaks_C1).exp()).sum(0)
    return peaks_C1, totals_C1, answer_logits_GC1.amax(0)


def _add_product_(sum_VD: Tensor, left_CV: Tensor, right_CD: Tensor, block_RD: Tensor) -> None:
    """Add ``left_CV.T @ right_CD`` to the wide ``sum_VD``, a block of rows in the block's dtype at a time."""
    right_CD = right_CD.to(block_RD.dtype)
    for rows in blocks(sum_VD, block_RD):
        product_RD = block_RD[: rows.stop - rows.start]
        sum_VD[rows].add_(torch.mm(left_CV.t()[rows].to(block_RD.dtype), right_CD, out=product_RD))
