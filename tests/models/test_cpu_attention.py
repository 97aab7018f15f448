"""Attention for training on the CPU, against torch's own and against fp64."""

import math
from dataclasses import replace

import pytest
import torch
from tiers import nightly

from llama_core.config.models import model_spec
from llama_core.models import attention
from llama_core.models.attention import attend, attend_with_all_scores, document_mask
from llama_core.models.batch import Batch
from llama_core.models.cpu_attention import BLOCK_QUERIES, cpu_attention, cpu_attention_backward
from llama_core.models.llama import build_llama
from llama_core.parallel.recompute import apply_recompute
from llama_core.rehearsal.byte_counter import ByteCounter

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=2, head_dim=16, ffn_size=96, vocab_size=128)
NUM_TOKENS = 2 * BLOCK_QUERIES + 50
DOCUMENTS = torch.stack((torch.arange(NUM_TOKENS) % 90, torch.arange(NUM_TOKENS)))
OTHER_RULE = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS).masked_fill_(
    torch.rand(NUM_TOKENS, NUM_TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5, -math.inf
)
"""A mask that is not causal, of one row for the whole batch."""
MASKS = {
    "causal": lambda dtype: None,
    "documents": lambda dtype: document_mask(DOCUMENTS, dtype),
    "other": OTHER_RULE.to,
}


def heads(dtype, *, scale=1.0, head_dim=64, num_heads=4):
    """Queries, keys and values, and a gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    sizes = [num_heads, 2, 2, num_heads]
    tensors = [torch.randn(2, NUM_TOKENS, size, head_dim, generator=generator).transpose(1, 2) for size in sizes]
    tensors[0] *= scale
    return [tensor.to(dtype) for tensor in tensors]


def with_gradients(attention, tensors, mask):
    *leaves, upstream = (tensor.detach().requires_grad_() for tensor in tensors)
    out = attention(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def errors(results, exact):
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("scale", "head_dim"),
    [(1.0, 64), nightly(0.1, 64), nightly(3.0, 64), nightly(8.0, 64), nightly(1.0, 128), nightly(3.0, 96)],
)
def test_its_errors_are_those_of_torchs_kernel(dtype, kind, scale, head_dim):
    """It rounds more on the way to the queries' gradients, and less on the way to those of keys and values."""
    tensors = heads(dtype, scale=scale, head_dim=head_dim)
    exact = with_gradients(attention._attend_with_torch, [x.double() for x in tensors], MASKS[kind](torch.float64))
    theirs = errors(with_gradients(attention._attend_with_torch, tensors, MASKS[kind](dtype)), exact)
    ours = errors(with_gradients(attend, tensors, MASKS[kind](dtype)), exact)
    assert ours[0] <= 1.05 * theirs[0]
    assert math.hypot(*ours[1:]) <= 1.25 * math.hypot(*theirs[1:])
    assert all(our <= 1.8 * their for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, nightly(torch.float32)])
def test_torch_finds_nothing_wrong_with_the_operator(dtype, kind):
    leaves = [tensor.requires_grad_() for tensor in heads(dtype, head_dim=8)[:3]]
    mask = MASKS[kind](dtype)
    torch.library.opcheck(
        cpu_attention,
        (*leaves, mask, mask is None),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    with torch.no_grad():
        out, lse = cpu_attention(*leaves, mask, mask is None)
        arguments = (out, *leaves, out, lse, mask, mask is None)
        torch.library.opcheck(cpu_attention_backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", MASKS)
def test_it_keeps_the_bytes_that_torchs_kernel_keeps(kind):
    def kept(attention):
        saved = {}
        tensors = heads(torch.bfloat16)

        def note(tensor):
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            attention(*(x.requires_grad_() for x in tensors[:3]), MASKS[kind](torch.bfloat16))
        return sorted(saved.values())

    assert kept(attend) == kept(attention._attend_with_torch)


def test_its_backward_holds_the_scores_of_one_block():
    """For one row, however many there are: twice the block's scores, and keys and values thrice, once in fp32."""
    *qkv, upstream = heads(torch.bfloat16)
    mask = document_mask(torch.arange(NUM_TOKENS).expand(2, -1), torch.bfloat16)  # every key is seen
    out, lse = cpu_attention(*qkv, mask, False)
    with ByteCounter(block_bytes=1) as counter:
        cpu_attention_backward._init_fn(upstream, *qkv, out, lse, mask, False)
    scores = 2 * qkv[0].shape[1] * BLOCK_QUERIES * NUM_TOKENS * 2
    rows_of_a_block = 4 * BLOCK_QUERIES * (64 + 8) * 4
    keys = 2 * 2 * NUM_TOKENS * (64 + 8) * (2 + 2 + 4 + 2)
    results = sum(x.nbytes for x in qkv)
    inputs = sum(x.nbytes for x in (upstream, *qkv, out, lse, mask))
    peak = counter.peaks["forward"].num_bytes - inputs
    assert scores < peak < results + scores + keys + 4 * rows_of_a_block


def gradients(spec, recompute, positions):
    model = build_llama(spec, device="cpu", compute_dtype=torch.bfloat16, seed=0)
    apply_recompute(model, recompute)
    tokens = torch.randint(0, spec.vocab_size, (2, 300), generator=torch.Generator().manual_seed(1))
    with ByteCounter() as counter:
        model(tokens, Batch(tokens, tokens.roll(-1, 1), positions)).backward()
    return [parameter.grad for parameter in model.parameters()], counter.flops


@pytest.mark.parametrize("positions", [None, torch.arange(300).expand(2, -1) % 100], ids=["causal", "documents"])
def test_selective_recomputation_keeps_its_result(positions):
    """The recomputation of attention's two products, and of nothing else, is missing from the FLOPs."""
    (plain, once), (selective, twice), (full, all_twice) = (
        gradients(SPEC, mode, positions) for mode in ("none", "selective", "full")
    )
    for one, other, another in zip(plain, selective, full, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, another)
    scored = SPEC.num_layers * 4 * 2 * 300 * SPEC.q_size * 300
    assert all_twice - twice >= scored
    assert once < twice


def test_generation_exact_numbers_and_the_math_kernel_stay_with_torch(monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(attention, "cpu_attention", refuse)
    with torch.no_grad():
        attend(*heads(torch.bfloat16)[:3], None)
    for dtype, kind in ((torch.float64, "documents"), (torch.float32, "causal")):
        with_gradients(attend, heads(dtype), MASKS[kind](dtype))
    with_gradients(attend_with_all_scores, heads(torch.bfloat16, head_dim=8), None)
    with pytest.raises(AssertionError):
        with_gradients(attend, heads(torch.bfloat16), None)
