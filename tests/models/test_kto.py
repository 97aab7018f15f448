"""Kahneman-Tversky optimisation: its loss is the paper's, and its divergence that of answers after other prompts."""

from dataclasses import replace

import pytest
import torch
from answers import problem

from llama_core.config.run import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.models.head import HeadInputs
from llama_core.models.kto import mismatched
from llama_core.models.objective import build_objective

BETA = 0.3
DESIRABLE = 1.5
UNDESIRABLE = 0.7


def objective():
    return build_objective(
        TrainingConfig(
            objective="kto", preference_beta=BETA, desirable_weight=DESIRABLE, undesirable_weight=UNDESIRABLE
        )
    )


def gains_of(batch, hidden, weight):
    """The gain over the reference of every answer, by its label, from the answers' numbers by plain loops."""
    logits = (hidden @ weight.T).view(*batch.tokens_BS.shape, -1).log_softmax(-1)
    gains = {"good": [], "bad": []}
    for row in range(len(batch.tokens_BS)):
        numbers = batch.per_token["answer"][row].abs().where(batch.targets_BS[row] != IGNORE_INDEX, 0).tolist()
        for number in set(numbers) - {0}:
            places = [place for place, own in enumerate(numbers) if own == number]
            summed = sum(logits[row, place, batch.targets_BS[row, place]] for place in places)
            reference = float(batch.per_token["reference"][row, places].sum())
            gains["good" if number % 2 else "bad"].append(summed - reference)
    return gains


def formula(gains, divergence):
    good = [DESIRABLE * (1 - torch.sigmoid(BETA * (gain - divergence))) for gain in gains["good"]]
    bad = [UNDESIRABLE * (1 - torch.sigmoid(BETA * (divergence - gain))) for gain in gains["bad"]]
    return sum(good) + sum(bad)


@pytest.mark.parametrize("raised", [0.0, 20.0], ids=["no divergence", "a divergence"])
def test_the_loss_and_its_gradient_are_those_of_the_formula(raised):
    batch, hidden, weight = problem()
    gains = gains_of(batch, hidden, weight)
    kto = objective()
    before = kto.rows_before(batch)
    per_token = {
        **before.per_token,
        "reference": before.per_token["reference"] - raised * (before.per_token["answer"] < 0),
    }
    before = replace(before, per_token=per_token)
    other = gains_of(before, hidden, weight)
    values = torch.stack([*other["good"], *other["bad"]]).detach()
    divergence = values.mean().clamp(min=0)
    assert (divergence > 0) == (raised > 0)
    kto.prepare(kto.of_rows_before(HeadInputs(hidden.detach(), weight.detach()), before).double().sum(0))
    loss = kto.loss(HeadInputs(hidden, weight), batch)
    expected = formula(gains, divergence)
    assert int(kto.count(batch)) == len(gains["good"]) + len(gains["bad"]) > 6
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(one, (hidden, weight)) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    good, bad = (BETA * torch.stack(gains[label]).detach() for label in ("good", "bad"))
    right = [*(good > BETA * divergence), *(bad < BETA * divergence)]
    assert kto.of_step(kto.take_measured().tolist()) == pytest.approx(
        {
            "reward_chosen": float(good.mean()),
            "reward_rejected": float(bad.mean()),
            "reward_margin": float(good.mean() - bad.mean()),
            "reward_accuracy": sum(map(int, right)) / len(right),
            "kl": float(divergence),
        }
    )


def test_a_step_without_bad_answers_has_no_reward_of_them():
    kto = objective()
    fields = kto.of_step([6.0, 0.0, 1.0, 2.0, 0.0, 4.0])
    assert fields == {"reward_chosen": 3.0, "reward_accuracy": 0.5, "kl": 2.0}
    assert kto.of_step([0.0] * 6) == {}


def test_in_mismatched_rows_each_prompt_has_the_answer_after_its_own():
    """Prompts 10 11, 20 and 30 31 32 with answers 1 2, 3 4 5 and 6; the last target of each ends its document."""
    tokens = torch.tensor([[10, 11, 1, 2, 20, 3, 4, 30, 31, 32, 0, 0]])
    targets = torch.tensor([[-100, 1, 2, 8, 3, -100, 8, -100, -100, 6, -100, -100]])
    numbers = torch.tensor([[0, -1, 1, 1, -4, 0, 4, 0, 0, -5, 0, 0.0]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]])
    mismatches = torch.where(numbers < 0, 0.5 * numbers, 0)
    batch = Batch(
        tokens,
        targets,
        positions,
        per_token={"answer": numbers, "reference": 100 * mismatches, "mismatch": mismatches},
    )
    moved = mismatched(batch)
    assert moved.tokens_BS.tolist() == [[10, 11, 3, 4, 20, 30, 31, 32, 1, 2, 0, 0]]
    assert moved.targets_BS.tolist() == [[-100, 3, -100, 8, 6, -100, -100, 1, 2, 8, -100, -100]]
    assert moved.positions_BS.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]]
    assert moved.per_token["answer"].tolist() == [[0, -4, 0, 4, -5, 0, 0, -1, 1, 1, 0, 0]]
    assert moved.per_token["reference"].tolist() == [[0, -2, 0, 0, -2.5, 0, 0, -0.5, 0, 0, 0, 0]]


def test_an_answer_to_an_equal_prompt_is_no_mismatch():
    """Prompts 10, 10 and 20 with an answer each: only those after 20, and the one to 20, are mismatched."""
    numbers = torch.tensor([[-1.0, 1, -4, 4, -5, 5, 0, 0]])
    batch = Batch(
        torch.tensor([[10, 1, 10, 2, 20, 3, 0, 0]]),
        torch.tensor([[1, 8, 2, 8, 3, 8, -100, -100]]),
        torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1]]),
        per_token={"answer": numbers, "reference": numbers, "mismatch": numbers},
    )
    moved = mismatched(batch)
    assert moved.tokens_BS.tolist() == [[10, 2, 10, 3, 20, 1, 0, 0]]
    assert moved.targets_BS.tolist() == [[-100, -100, 3, 8, 1, 8, -100, -100]]


def test_the_only_answer_of_a_row_has_no_mismatch():
    numbers = torch.tensor([[0, -1.0, 1, 0]])
    batch = Batch(
        torch.tensor([[10, 11, 1, 0]]),
        torch.tensor([[-100, 1, 2, -100]]),
        torch.tensor([[0, 1, 2, 0]]),
        per_token={"answer": numbers, "reference": numbers, "mismatch": numbers},
    )
    for rows in (batch, replace(batch, positions_BS=None)):
        assert (mismatched(rows).targets_BS == IGNORE_INDEX).all()
