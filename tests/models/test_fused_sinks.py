"""Attention with sinks, by kernels without them, equals a softmax over all scores and the sink, with its gradients."""

import math

import pytest
import torch
from document_kernel import DENSE

from llama_core.models import block_attention
from llama_core.models.attention import document_mask
from llama_core.models.batch import Documents
from llama_core.models.sinks import attend_with_sinks

POSITIONS = torch.cat((torch.arange(23), torch.arange(14))).expand(2, -1)
LENGTH = POSITIONS.shape[1]


def operands(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8), (4,)]
    return [torch.randn(shape, dtype=dtype, generator=generator).mul_(2).requires_grad_() for shape in shapes]


def dense(q, k, v, mask, sinks):
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + mask
    with_sinks = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return with_sinks.softmax(-1)[..., :-1] @ v


def masks(dtype, window):
    """Return the additive mask of the reference by how the product is told of the same."""
    causal = document_mask(torch.arange(LENGTH)[None], dtype, window)
    documents = document_mask(POSITIONS, dtype, window)
    starts = torch.tensor([0, 23, LENGTH, LENGTH + 23, 2 * LENGTH], dtype=torch.int32)
    by_telling = {"mask": (documents, documents), "varlen": (Documents(starts, LENGTH, window), documents)}
    return by_telling if window else by_telling | {"none": (None, causal)}


@pytest.mark.parametrize(("told", "window"), [("none", 0), ("mask", 0), ("mask", 5), ("varlen", 0), ("varlen", 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_results_and_gradients_are_those_of_all_scores(told, window, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(block_attention, "VARLEN", DENSE)  # which a CPU lacks
    given, mask = masks(dtype, window)[told]
    q, k, v, sinks = ours = operands(dtype)
    out = attend_with_sinks(q, k, v, given, sinks)
    theirs = operands(dtype)
    expected = dense(*theirs[:3], mask, theirs[3])
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    weights = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=tolerance * largest)


def test_half_precision_is_as_near_as_its_rounding():
    q, k, v, sinks = operands(torch.float64)
    exact = attend_with_sinks(q, k, v, None, sinks)
    exact = exact.detach()
    half = attend_with_sinks(*(x.detach().bfloat16() for x in (q, k, v)), None, sinks.detach().float())
    assert half.dtype == torch.bfloat16
    assert float((half - exact).abs().max()) < 2**-6 * float(exact.abs().max())
