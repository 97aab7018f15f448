"""Tokens generated with a cache are those of transformers, and of the model without a cache."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from greedy_texts import NUM_TOKENS, PROMPT, generated, greedy_without_cache
from hugging_face_models import (
    BY_LAYER,
    class_of,
    hugging_face_config,
    load,
    model_with_large_weights,
    shrunk,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llama_core.config.rope import LinearScaling
from llama_core.errors import ConfigError, WeightsError
from llama_core.evaluation.inference.generation import Cache, Sampling, up_to

SPECS = {
    "untied, all heads": shrunk("llama1_7b"),
    "untied, grouped heads, scaled": shrunk("llama3_405b"),
    "tied, grouped heads, scaled": shrunk("llama3_2_1b"),
    "windows": shrunk("mistral_7b"),
    "biases, windows in some layers": BY_LAYER,
    "norms of heads": shrunk("qwen3_0_6b"),
    "norms after, of all heads": shrunk("olmo2_7b"),
    "windows that rotate otherwise": shrunk("olmo3_7b"),
    "scaled embedding and queries, GeGLU": replace(shrunk("gemma3_27b"), tied_embeddings=False),
    "experts, sinks, biases": shrunk("gpt_oss_20b"),
    "chunks, layers without rotation, experts": shrunk("llama4_scout"),
    "temperatures, experts in some layers": replace(shrunk("llama4_maverick"), num_layers=3, attention_chunk=0),
    "latents, experts in groups": shrunk("deepseek_v3"),
    "latents of keys and values alone": shrunk("moonlight_16b_a3b"),
    "untied, linear": replace(shrunk("code_llama_34b"), rope_scaling=LinearScaling(4.0)),
}
NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_spec
def test_greedy_tokens_are_those_of_transformers_and_of_the_model_without_a_cache(spec):
    ours = model_with_large_weights(spec)
    theirs = class_of(spec)[1](hugging_face_config(spec, **NO_SPECIAL_TOKENS)).eval()
    load(theirs, ours)
    expected = theirs.generate(PROMPT, max_new_tokens=NUM_TOKENS, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    assert len(set(expected)) > 5
    assert greedy_without_cache(ours) == expected
    assert generated(ours) == expected
    assert generated(ours) == expected, "each text begins with an empty cache"


@every_spec
@given(lengths=st.lists(st.integers(1, 40), min_size=1))
def test_forwards_with_a_cache_give_the_logits_of_one_forward_at_every_place(spec, lengths):
    model = model_with_large_weights(spec)
    cuts = [0, *(end for end in accumulate(lengths) if end < 40), 40]
    with torch.no_grad():
        expected = model(PROMPT)
        Cache(model)
        logits = torch.cat([model(PROMPT[:, begin:end]) for begin, end in pairwise(cuts)], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_seed_repeats_a_draw_and_another_one_does_not():
    model = model_with_large_weights(SPECS["untied, all heads"])
    first, again, other = (generated(model, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert generated(model, temperature=2.0) != generated(model, temperature=2.0)


def test_a_draw_from_one_token_is_the_likeliest():
    model = model_with_large_weights(SPECS["untied, all heads"])
    assert generated(model, temperature=9.0, top_k=1) == generated(model, temperature=9.0, top_p=1e-9)
    assert generated(model, temperature=1e-300) == generated(model) == generated(model, temperature=9.0, top_k=1)


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 5.0),
    top_k=st.none() | st.integers(1, 80),
    top_p=st.none() | st.floats(0.01, 0.99),
)
def test_tokens_have_the_probabilities_of_transformers(seed, temperature, top_k, top_p):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [TopPLogitsWarper(top_p)]
    theirs = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].softmax(-1)
    ours = Sampling(temperature, top_k, top_p).probabilities(logits)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs)


@given(
    tokens=st.lists(st.integers(0, 2), max_size=20),
    ends=st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=3),
)
def test_a_text_ends_before_the_first_of_its_ends(tokens, ends):
    cuts = [
        known - len(end)
        for known in range(len(tokens) + 1)
        for end in sorted(ends, key=len, reverse=True)
        if tuple(tokens[:known][-len(end) :]) == end
    ]
    assert list(up_to(ends, tokens)) == tokens[: [*cuts, len(tokens)][0]]


def test_a_token_that_begins_no_end_comes_at_once():
    seen = []
    tokens = up_to({(7, 8)}, (seen.append(token) or token for token in (1, 7, 2, 3)))
    assert [(next(tokens), len(seen)) for _ in range(4)] == [(1, 1), (7, 3), (2, 3), (3, 4)]


def test_a_model_that_diverged_is_named_as_the_cause():
    model = model_with_large_weights(SPECS["untied, all heads"])
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(WeightsError, match="logits are not finite; its training diverged"):
        generated(model)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"temperature": -1.0}, "temperature=-1: use 0 for the likeliest token, or a number above 0 to draw tokens"),
        ({"temperature": torch.nan}, "temperature=nan: use 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0: use a probability above 0 and up to 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5: use a probability"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0: draw from at least 1 token"),
        ({"temperature": 1.0, "seed": -1}, "seed=-1: use an integer from 0"),
        ({"top_p": 0.9}, "top_p has no effect at temperature 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, complaint):
    with pytest.raises(ConfigError) as refused:
        Sampling(**settings)
    assert str(refused.value).startswith(complaint)
