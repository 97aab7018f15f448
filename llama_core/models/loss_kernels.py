"""Triton kernels for the loss: one program for each row of logits, which it reads twice and overwrites once.

Import it only where the kernels run: it needs Triton, which torch brings along on CUDA. The arithmetic is fp32 whatever
the dtype of the logits is, with one pass for the largest logit and the sum of exponentials, and one for the gradients.

A row whose target is ``ignore_index`` gets the loss 0 and the gradients 0.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the maximum and the sum in one pass.
"""

# Shape suffixes: C tokens of one chunk, V columns held here (a part of the vocabulary)

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns that a program loads at once."""
NUM_WARPS = 8


@triton.jit
def _peak_and_total(row, width, BLOCK: tl.constexpr):
    """Return a row's largest logit, and the sum of the exponentials of all logits relative to it."""
    peak = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(logits, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # a block of nothing but -inf adds nothing
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(logits - shift), 0)
        peak = higher
    return peak, total


@triton.jit
def _answer_logit(row, width, column):
    """Return the logit in a column, or -inf if the column is not in this row."""
    held = (column >= 0) & (column < width)
    return tl.load(row + column, mask=held, other=-float("inf")).to(tl.float32)


@triton.jit
def _overwrite(row, width, column, peak, total, z_loss, scale, BLOCK: tl.constexpr):
    """Replace a row's logits by their gradients times ``scale``: of the loss, and of ``z_loss`` times log Z squared."""
    factor = (1.0 + 2.0 * z_loss * (peak + tl.log(total))) * scale / total
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        gradients = tl.exp(logits - peak) * factor - tl.where(columns == column, scale, 0.0)
        tl.store(row + columns, gradients.to(row.dtype.element_ty), mask=columns < width)


@triton.jit
def _clear(row, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(row + columns, tl.zeros((BLOCK,), row.dtype.element_ty), mask=columns < width)


@triton.jit
def whole_rows(logits, stride, width, targets, ignore_index, losses, z_loss, scale, BLOCK: tl.constexpr):
    """Compute a row's loss and gradients from all its logits."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    target = tl.load(targets + place)
    if target == ignore_index:
        tl.store(losses + place, 0.0)
        _clear(row, width, BLOCK)
    else:
        answer_logit = _answer_logit(row, width, target)  # before the row is overwritten
        peak, total = _peak_and_total(row, width, BLOCK)
        tl.store(losses + place, tl.log(total) - (answer_logit - peak))
        _overwrite(row, width, target, peak, total, z_loss, scale, BLOCK)


@triton.jit
def parts_of_rows(
    logits, stride, width, targets, ignore_index, first, peaks, totals, answer_logits, BLOCK: tl.constexpr
):
    """Compute what the loss needs of a part of a row, whose first column is ``first`` in the vocabulary."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    target = tl.load(targets + place)
    if target != ignore_index:
        tl.store(answer_logits + place, _answer_logit(row, width, target - first))
        peak, total = _peak_and_total(row, width, BLOCK)
        tl.store(peaks + place, peak)
        tl.store(totals + place, total)


@triton.jit
def divided_rows(
    logits,
    stride,
    width,
    targets,
    ignore_index,
    first,
    peaks,
    totals,
    answer_logits,
    losses,
    z_loss,
    scale,
    BLOCK: tl.constexpr,
):
    """Compute a row's loss, and the gradients of the part of it held here, from what was combined over all parts."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    target = tl.load(targets + place)
    if target == ignore_index:
        tl.store(losses + place, 0.0)
        _clear(row, width, BLOCK)
    else:
        peak = tl.load(peaks + place)
        total = tl.load(totals + place)
        tl.store(losses + place, tl.log(total) - (tl.load(answer_logits + place) - peak))
        _overwrite(row, width, target - first, peak, total, z_loss, scale, BLOCK)


def whole(
    logits_CV: Tensor, targets_C: Tensor, losses_C: Tensor, ignore_index: int, z_loss: float, scale: float
) -> None:
    """Fill ``losses_C`` and turn the logits into their gradients, times ``scale``, in place."""
    whole_rows[logits_CV.shape[:1]](
        *_rows(logits_CV), targets_C, ignore_index, losses_C, z_loss, scale, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


def parts(logits_CV: Tensor, targets_C: Tensor, ignore_index: int, first: int, part_3C: Tensor) -> None:
    """Fill ``part_3C`` with the peaks, totals and answers' logits of a part of the vocabulary, unless ignored."""
    parts_of_rows[logits_CV.shape[:1]](
        *_rows(logits_CV), targets_C, ignore_index, first, *part_3C.unbind(), BLOCK=BLOCK, num_warps=NUM_WARPS
    )


def divided(
    logits_CV: Tensor,
    targets_C: Tensor,
    ignore_index: int,
    first: int,
    combined_3C: Tensor,
    losses_C: Tensor,
    z_loss: float,
    scale: float,
) -> None:
    """Do the same as ``whole`` to a part of the vocabulary, given peaks, totals and answers' logits of all parts."""
    divided_rows[logits_CV.shape[:1]](
        *_rows(logits_CV),
        targets_C,
        ignore_index,
        first,
        *combined_3C.unbind(),
        losses_C,
        z_loss,
        scale,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _rows(logits_CV: Tensor) -> tuple[Tensor, int, int]:
    return logits_CV, logits_CV.stride(0), logits_CV.shape[1]
