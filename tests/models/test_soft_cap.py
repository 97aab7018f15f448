"""Attention with a soft cap on its scores is that of a dense computation, in training, documents and generation."""

from dataclasses import replace

import pytest
import torch
from greedy_texts import NUM_TOKENS, PROMPT, generated, greedy_without_cache
from hugging_face_models import BY_LAYER, model_with_large_weights

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, PlanError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.row_losses import losses_of_rows
from llama_core.models.attention import Attention, use_kernels
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.models.rotation import rotation
from llama_core.planning.plan import ParallelPlan

CAP = 0.5
LENGTH = 9
SPEC = ModelSpec("small", "llama", 24, 1, 4, 2, 8, 40, 32, 1e4, 1e-5, 64, 64, attention_soft_cap=CAP)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
WHOLE = torch.arange(LENGTH).expand(2, -1)
SEEN = {
    "causal": (WHOLE, 0),
    "documents": (POSITIONS, 0),
    "window": (WHOLE, 3),
    "window in documents": (POSITIONS, 3),
}


def dense(q, k, v, positions, window, cap=CAP):
    """Return attention [B, S, N, H] of rotated queries [B, S, N, H] to keys and values [B, S, K, H], head by head."""
    out = torch.zeros_like(q)
    num_rows, length, num_heads, width = q.shape
    for row in range(num_rows):
        for head in range(num_heads):
            shared = head // (num_heads // k.shape[2])
            for query in range(length):
                first = query - int(positions[row, query])
                first = max(first, query - window + 1) if window else first
                seen = slice(first, query + 1)
                scores = k[row, seen, shared] @ q[row, query, head] / width**0.5
                scores = cap * torch.tanh(scores / cap) if cap else scores
                out[row, query, head] = scores.softmax(0) @ v[row, seen, shared]
    return out


def rotated(x, rotary):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * rotary.cos - second * rotary.sin, second * rotary.cos + first * rotary.sin), dim=-1)


def drawn(window, *, kv_heads=2, cap=CAP):
    spec = replace(SPEC, sliding_window=window, num_kv_heads=kv_heads, attention_soft_cap=cap)
    model = Llama(spec, compute_dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.4, generator=generator)
    x = torch.randn(2, LENGTH, SPEC.hidden_size, generator=generator, dtype=torch.float64)
    return model, x.requires_grad_()


@pytest.mark.parametrize("asked", ["auto", "math"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("positions", "window"), SEEN.values(), ids=SEEN)
def test_attention_and_its_gradients_are_those_of_a_dense_computation(positions, window, kv_heads, asked):
    model, x = drawn(window, kv_heads=kv_heads)
    if asked == "math":
        use_kernels(model, asked="math")
    block = model.layers["0"].attention
    weights = dict(block.named_parameters())
    rotary = rotation(model.spec.rope(0), positions, torch.float64)
    given = None if positions is WHOLE else positions
    mask = model.attention_mask(given, torch.arange(LENGTH), torch.float64, None, window)
    assert (mask is None) == (positions is WHOLE and not window)
    q, k, v = ((x @ weights[f"w{letter}.weight"].T).unflatten(-1, (-1, 8)) for letter in "qkv")
    attended = dense(rotated(q, rotary), rotated(k, rotary), v, positions, window)
    expected = attended.flatten(2) @ weights["wo.weight"].T
    out = block(x, rotary, mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    uncapped = dense(rotated(q, rotary), rotated(k, rotary), v, positions, window, cap=0)
    assert (uncapped.flatten(2) @ weights["wo.weight"].T - expected).abs().max() > 0.05
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x, *weights.values()]
    found = torch.autograd.grad(out, inputs, towards)
    for one, other in zip(found, torch.autograd.grad(expected, inputs, towards), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_wide_cap_leaves_attention_as_it_is():
    (capped, x), (plain, _) = drawn(0, cap=1e6), drawn(0, cap=0.0)
    rotary = rotation(SPEC.rope(0), WHOLE, torch.float64)
    outs = [model.layers["0"].attention(x, rotary, None) for model in (capped, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-9)


def check_losses_of_packed_rows(model, tolerance):
    """Compare them with those of each document alone."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % SPEC.vocab_size
    targets = tokens.roll(-1, 1)
    whole = sum(loss for loss, _ in losses_of_rows(model, [Batch(tokens, targets, POSITIONS)]))
    pieces = [(0, 0, 4), (0, 4, 9), (1, 0, 1), (1, 1, 9)]
    alone = [
        Batch(tokens[row : row + 1, start:end], targets[row : row + 1, start:end], None) for row, start, end in pieces
    ]
    assert whole == pytest.approx(sum(loss for loss, _ in losses_of_rows(model, alone)), rel=tolerance)


def check_texts_with_a_cache(**trait):
    """Compare them with those without one, of a model with a trait that changes them."""
    spec = replace(BY_LAYER, **trait)
    expected = greedy_without_cache(model_with_large_weights(spec))
    assert expected != greedy_without_cache(model_with_large_weights(BY_LAYER))
    assert generated(model_with_large_weights(spec)) == expected
    prompts = [PROMPT[0].tolist(), PROMPT[0, :9].tolist()]
    model = model_with_large_weights(spec)
    assert generate_rows(model, prompts, num_tokens=NUM_TOKENS, is_end=lambda *_: False)[0] == expected


def test_losses_of_packed_rows_are_those_of_their_documents_alone():
    check_losses_of_packed_rows(drawn(3)[0], 1e-12)


def test_texts_with_a_cache_are_those_without():
    check_texts_with_a_cache(attention_soft_cap=2.0)


def test_sequences_are_not_divided():
    said = (
        r"\Aattention with soft cap has no kernel among those of cp=2 and attention=auto "
        r"\(ring, gathered, masked ring\); use cp=1\Z"
    )
    with pytest.raises(PlanError, match=said):
        ParallelPlan(cp=2).check(SPEC, seq_len=64, precision="bf16")
    ParallelPlan(tp=2).check(SPEC, seq_len=64, precision="bf16")


@pytest.mark.parametrize("cap", [-1.0, float("inf"), float("nan")])
def test_a_cap_that_is_no_number_from_0_is_refused(cap):
    with pytest.raises(ConfigError, match=r"architecture\.attention_soft_cap"):
        RunConfig.from_mapping({"architecture": {"attention_soft_cap": cap}})


def test_every_block_of_a_capped_model_is_capped():
    model, _ = drawn(0)
    plain, _ = drawn(0, cap=0.0)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(one, Attention):
            assert one.needs == other.needs._replace(soft_cap=CAP)
