"""What computes a block's attention computes it in generation and in scoring too: caches only bring earlier keys."""

import pytest
import torch
from greedy_texts import NUM_TOKENS, PROMPT, generated, greedy_without_cache
from hugging_face_models import BY_LAYER, model_with_large_weights
from test_scoring import continuations, expected

from llama_core import attention
from llama_core.errors import PlanError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.generation import Cache
from llama_core.evaluation.inference.scoring import log_likelihoods
from llama_core.models.attention import Attention, attend, attend_with_all_scores


def sharper(q_BNSH, k_BKSH, v_BKSH, mask):
    return attend(3 * q_BNSH, k_BKSH, v_BKSH, mask)


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, Attention)]


def model_with(attention):
    model = model_with_large_weights(BY_LAYER)
    for block in blocks_of(model):
        block.attend = attention
    return model


@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_blocks_own_attention():
    usual, whole = (model_with(attention)(PROMPT) for attention in (attend, sharper))
    assert (usual - whole).abs().max() > 0.1
    model = model_with(sharper)
    Cache(model)
    logits = torch.cat([model(tokens) for tokens in PROMPT.split([7, 1, 32], dim=1)], dim=1)
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)
    assert all(block.attend is sharper for block in blocks_of(model))


def test_texts_are_those_of_the_blocks_own_attention():
    expected_tokens = greedy_without_cache(model_with(sharper))
    assert expected_tokens != greedy_without_cache(model_with(attend))
    assert generated(model_with(sharper)) == expected_tokens
    model = model_with(sharper)
    prompts = [PROMPT[0].tolist(), PROMPT[0, :9].tolist()]
    for _ in range(2):
        rows = generate_rows(model, prompts, num_tokens=NUM_TOKENS, is_end=lambda *_: False)
        assert rows[0] == expected_tokens
        assert all(block.attend is sharper and block.with_earlier is None for block in blocks_of(model))


def test_scores_are_those_of_the_blocks_own_attention():
    asked = continuations()
    totals = [
        [score.total for score in log_likelihoods(model_with(one), asked, context_length=64)]
        for one in (attend, sharper)
    ]
    exact = [expected(model_with(sharper), one)[0] for one in asked]
    assert totals[1] == pytest.approx(exact, rel=1e-4)
    assert totals[0] != pytest.approx(exact, rel=1e-2)


def test_the_math_kernel_holds_all_scores_of_a_cache_too(monkeypatch):
    keys_seen = []

    def watched(q_BNSH, k_BKSH, v_BKSH, mask):
        keys_seen.append(k_BKSH.shape[2])
        return attend_with_all_scores(q_BNSH, k_BKSH, v_BKSH, mask)

    assert generated(model_with(watched)) == generated(model_with(attend))
    num_layers = BY_LAYER.num_layers
    first = PROMPT.shape[1]
    assert keys_seen[::num_layers] == list(range(first, first + NUM_TOKENS))


def test_caches_refuse_a_model_that_they_do_not_serve(monkeypatch):
    kernels = tuple(kernel for kernel in attention.KERNELS if not kernel.is_cached)
    monkeypatch.setattr(attention, "KERNELS", kernels)
    said = r"\Aattention with window has no kernel among those of a cache \(no kernel\), so no text can be generated\Z"
    with pytest.raises(PlanError, match=said):
        Cache(model_with(attend))
    with pytest.raises(PlanError, match=said):
        generate_rows(model_with(attend), [PROMPT[0].tolist()], num_tokens=1, is_end=lambda *_: False)
