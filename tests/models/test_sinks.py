"""Attention with a sink for each head is that of GPT-OSS in transformers, in training, documents and generation."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from greedy_texts import NUM_TOKENS, PROMPT, generated, greedy_without_cache
from hugging_face_models import BY_LAYER, model_with_large_weights
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from llama_core.config.models import ModelSpec
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.row_losses import losses_of_rows
from llama_core.models.batch import Batch
from llama_core.models.layers import Attention, document_mask, softmax_with_sinks, use_kernels
from llama_core.models.llama import Llama

LENGTH = 9
HEADS = 4
SPEC = ModelSpec("small", "llama", 24, 1, HEADS, 2, 8, 40, 32, 1e4, 1e-5, 64, 64, attention_sinks=True)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
WHOLE = torch.arange(LENGTH).expand(2, -1)
SEEN = {
    "causal": (WHOLE, 0),
    "documents": (POSITIONS, 0),
    "window": (WHOLE, 3),
    "window in documents": (POSITIONS, 3),
}
SINKS = torch.tensor([-1.0, 0.0, 2.0, 30.0], dtype=torch.float64)
"""Logits of sinks: from a small share of attention to all of it."""


def drawn(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def theirs(q_BNSH, k_BKSH, v_BKSH, mask, sinks_N):
    """Return attention of transformers, [B, N, S, H]."""
    module = SimpleNamespace(sinks=sinks_N, num_key_value_groups=HEADS // k_BKSH.shape[1], training=False)
    out_BSNH, _ = eager_attention_forward(module, q_BNSH, k_BKSH, v_BKSH, mask, scaling=8**-0.5)
    return out_BSNH.transpose(1, 2)


@pytest.mark.parametrize("asked", ["auto", "math"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize(("positions", "window"), SEEN.values(), ids=SEEN)
def test_attention_and_its_gradients_are_those_of_transformers(positions, window, kv_heads, asked):
    model = Llama(replace(SPEC, sliding_window=window, num_kv_heads=kv_heads))
    use_kernels(model, "none" if positions is WHOLE and not window else "mask", asked=asked)
    q, k, v = (drawn(2, heads, LENGTH, 8, scale=1.5) for heads in (HEADS, kv_heads, kv_heads))
    sinks = SINKS.clone().requires_grad_()
    given = None if positions is WHOLE else positions
    mask = model.attention_mask(given, torch.arange(LENGTH), torch.float64, None, window)
    out = model.layers["0"].attention.attend(q, k, v, mask, sinks)
    expected = theirs(q, k, v, document_mask(positions, torch.float64, window), sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, right = (torch.autograd.grad(each, [q, k, v, sinks], towards) for each in (out, expected))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


def test_a_softmax_with_sinks_has_the_gradients_of_finite_differences():
    assert torch.autograd.gradcheck(softmax_with_sinks, (drawn(2, HEADS, 3, 5), SINKS[:HEADS].clone().requires_grad_()))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_a_sink_without_share_leaves_attention_as_it_is(soft_cap):
    plain = replace(SPEC, attention_sinks=False, attention_soft_cap=soft_cap)
    q, k, v = (drawn(2, heads, LENGTH, 8) for heads in (HEADS, 2, 2))
    without = Llama(plain).layers["0"].attention.attend(q, k, v, None)
    none = torch.full((HEADS,), -1e4, dtype=torch.float64)
    with_sinks = Llama(replace(plain, attention_sinks=True)).layers["0"].attention
    torch.testing.assert_close(with_sinks.attend(q, k, v, None, none), without, rtol=0, atol=1e-12)
    assert (with_sinks.attend(q, k, v, None, SINKS) - without).abs().max() > 0.1


def test_losses_of_packed_rows_are_those_of_their_documents_alone():
    model = model_with_large_weights(replace(SPEC, sliding_window=3)).double()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % SPEC.vocab_size
    targets = tokens.roll(-1, 1)
    whole = sum(loss for loss, _ in losses_of_rows(model, [Batch(tokens, targets, POSITIONS)]))
    pieces = [(0, 0, 4), (0, 4, 9), (1, 0, 1), (1, 1, 9)]
    alone = [
        Batch(tokens[row : row + 1, start:end], targets[row : row + 1, start:end], None) for row, start, end in pieces
    ]
    assert whole == pytest.approx(sum(loss for loss, _ in losses_of_rows(model, alone)), rel=1e-6)


def test_texts_with_a_cache_are_those_without():
    spec = replace(BY_LAYER, attention_sinks=True)
    expected = greedy_without_cache(model_with_large_weights(spec))
    assert expected != greedy_without_cache(model_with_large_weights(BY_LAYER))
    assert generated(model_with_large_weights(spec)) == expected
    prompts = [PROMPT[0].tolist(), PROMPT[0, :9].tolist()]
    model = model_with_large_weights(spec)
    assert generate_rows(model, prompts, num_tokens=NUM_TOKENS, is_end=lambda *_: False)[0] == expected


def test_every_block_has_a_sink_for_each_head():
    model = Llama(replace(SPEC, num_layers=3))
    blocks = [module for module in model.modules() if isinstance(module, Attention)]
    assert [block.sinks.shape for block in blocks] == [(HEADS,)] * 3
    assert all(block.needs.sinks for block in blocks)
