"""Log-likelihoods and texts of several rows at once are those of one row at a time, from all logits."""

import pytest
import torch
from hugging_face_models import model_with_large_weights, random_tokens, shrunk
from test_generation import every_spec

from llama_core.errors import WeightsError
from llama_core.evaluation.inference import scoring
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.generation import Sampling, generate_tokens
from llama_core.evaluation.inference.scoring import Continuation, log_likelihoods

ROWS = [(5, 3), (30, 1), (1, 9), (12, 12)]
"""Tokens of the context and of the continuation."""


def continuations(sizes=ROWS):
    tokens = [tuple(random_tokens(place + 1, sum(size))[place].tolist()) for place, size in enumerate(sizes)]
    return [Continuation(row[:context], row[context:]) for row, (context, _) in zip(tokens, sizes, strict=True)]


@torch.no_grad()
def expected(model, one, context_length=64):
    row = torch.tensor([(one.context + one.tokens)[-(context_length + 1) :]])
    scores = model(row[:, :-1]).double().log_softmax(-1)[0, -len(one.tokens) :]
    total = scores.gather(1, row[0, -len(one.tokens) :, None]).sum()
    return float(total), scores.argmax(1).tolist() == list(one.tokens)


@every_spec
def test_log_likelihoods_are_those_of_all_logits(spec, monkeypatch):
    model = model_with_large_weights(spec)
    asked = continuations()
    asked += [one._replace(tokens=(*one.tokens[:-1], last)) for one in asked[:2] for last in (3, 4)]
    prompt = list(asked[0].context)
    greedy = list(generate_tokens(model, prompt, num_tokens=3, sampling=Sampling()))
    model = model_with_large_weights(spec)  # without its cache
    asked.append(Continuation(tuple(prompt), tuple(greedy)))
    monkeypatch.setattr(scoring, "TOKENS_OF_A_FORWARD", 40)
    done = []
    found = log_likelihoods(model, asked, context_length=64, on_progress=done.append)
    for one, score in zip(asked, found, strict=True):
        total, is_greedy = expected(model, one)
        assert score.total == pytest.approx(total, rel=1e-4)
        assert score.is_greedy == is_greedy
    assert found[-1].is_greedy
    assert sum(done) == len(asked)


def test_long_contexts_lose_their_first_tokens_and_long_texts_are_refused():
    model = model_with_large_weights(shrunk("llama1_7b"))
    (one,) = continuations([(30, 4)])
    (found,) = log_likelihoods(model, [one], context_length=10)
    assert found.total == pytest.approx(expected(model, one, 10)[0], rel=1e-4)
    assert found.total != pytest.approx(expected(model, one)[0], rel=1e-3)
    with pytest.raises(ValueError, match="12 tokens to score are more than the 10 of the context"):
        log_likelihoods(model, continuations([(3, 12)]), context_length=10)


def test_one_row_serves_texts_that_differ_in_their_last_token(monkeypatch):
    model = model_with_large_weights(shrunk("llama1_7b"))
    shapes = []
    model.register_forward_pre_hook(lambda _, arguments: shapes.append(tuple(arguments[0].shape)))
    (one,) = continuations([(6, 1)])
    log_likelihoods(model, [one._replace(tokens=(last,)) for last in range(5)], context_length=64)
    assert shapes == [(1, 6)]


@every_spec
def test_rows_of_any_length_are_continued_as_each_alone(spec):
    prompts = [list(one.context + one.tokens) for one in continuations()]
    model = model_with_large_weights(spec)
    alone = [list(generate_tokens(model, prompt, num_tokens=12, sampling=Sampling())) for prompt in prompts]
    model = model_with_large_weights(spec)
    before = log_likelihoods(model, continuations(), context_length=64)
    stops = [texts[3 + place] for place, texts in enumerate(alone)]

    def is_end(row, tokens):
        return tokens[-1] == stops[row] if row < 3 else False

    rows = generate_rows(model, prompts, num_tokens=12, is_end=is_end)
    for row, texts, stop in zip(rows[:3], alone[:3], stops[:3], strict=True):
        assert row == texts[: texts.index(stop) + 1]
    assert rows[3] == alone[3]
    assert generate_rows(model, prompts, num_tokens=12, is_end=is_end) == rows
    assert log_likelihoods(model, continuations(), context_length=64) == before, "no cache is left in the model"


def test_logits_that_are_not_finite_are_refused():
    model = model_with_large_weights(shrunk("llama1_7b"))
    with torch.no_grad():
        model.norm.weight.fill_(torch.inf)
    with pytest.raises(WeightsError, match="logits are not finite"):
        log_likelihoods(model, continuations(), context_length=64)
    with pytest.raises(WeightsError, match="logits are not finite"):
        generate_rows(model, [[1, 2]], num_tokens=2, is_end=lambda *_: False)
