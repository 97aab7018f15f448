"""Attention with a sink for each head is that of GPT-OSS in transformers, in training, documents and generation."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hugging_face_models import model_with_large_weights
from test_soft_cap import LENGTH, SEEN, WHOLE, check_losses_of_packed_rows, check_texts_with_a_cache
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from llama_core.config.models import ModelSpec
from llama_core.models.attention import Attention, document_mask, softmax_with_sinks, use_kernels
from llama_core.models.llama import Llama

HEADS = 4
SPEC = ModelSpec("small", "llama", 24, 1, HEADS, 2, 8, 40, 32, 1e4, 1e-5, 64, 64, attention_sinks=True)
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
    check_losses_of_packed_rows(model, 1e-6)


def test_texts_with_a_cache_are_those_without():
    check_texts_with_a_cache(attention_sinks=True)


def test_every_block_has_a_sink_for_each_head():
    model = Llama(replace(SPEC, num_layers=3))
    blocks = [module for module in model.modules() if isinstance(module, Attention)]
    assert [block.sinks.shape for block in blocks] == [(HEADS,)] * 3
    assert all(block.needs.sinks for block in blocks)
