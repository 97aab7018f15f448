"""The losses of pairs of answers are their papers' formulas, computed here from whole logits, one pair at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from answers import problem
from parity import UNTIED, make_batch

from llama_core.config.run import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.head import HeadInputs
from llama_core.models.llama import build_llama
from llama_core.models.objective import build_objective
from llama_core.objectives.registry import OBJECTIVES

BETA = 0.3


def pairs_of(batch, hidden, weight):
    """Every pair as ((sum of log-probabilities, tokens, reference), the same of the other answer), from the answers'
    numbers by plain loops."""
    logits = (hidden @ weight.T).view(*batch.tokens_BS.shape, -1).log_softmax(-1)
    pairs = []
    for row in range(len(batch.tokens_BS)):
        numbers = batch.per_token["answer"][row].abs().where(batch.targets_BS[row] != IGNORE_INDEX, 0)
        answers = {}
        for number in range(1, int(numbers.max()) + 1):
            places = [place for place, own in enumerate(numbers.tolist()) if own == number]
            if places:
                summed = sum(logits[row, place, batch.targets_BS[row, place]] for place in places)
                answers[number] = summed, len(places), float(batch.per_token["reference"][row, places].sum())
        pairs += [(answers[n], answers[n + 1]) for n in answers if n % 2 and n + 1 in answers]
    return pairs


def dpo(chosen, rejected, smoothing=0.0):
    margin = BETA * ((chosen[0] - chosen[2]) - (rejected[0] - rejected[2]))
    return -(1 - smoothing) * torch.log(torch.sigmoid(margin)) - smoothing * torch.log(torch.sigmoid(-margin))


def ipo(chosen, rejected):
    margin = (chosen[0] - chosen[2]) / chosen[1] - (rejected[0] - rejected[2]) / rejected[1]
    return (margin - 1 / (2 * BETA)) ** 2


def simpo(chosen, rejected):
    return -torch.log(torch.sigmoid(BETA * chosen[0] / chosen[1] - BETA * rejected[0] / rejected[1] - 0.5))


def orpo(chosen, rejected):
    probabilities = [torch.exp(answer[0] / answer[1]) for answer in (chosen, rejected)]
    odds = [p / (1 - p) for p in probabilities]
    return -chosen[0] / chosen[1] - BETA * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


FORMULAS = {
    "dpo": ({}, dpo),
    "dpo smoothed": ({"label_smoothing": 0.2}, lambda *pair: dpo(*pair, smoothing=0.2)),
    "ipo": ({}, ipo),
    "simpo": ({"simpo_gamma": 0.5}, simpo),
    "orpo": ({}, orpo),
}


def objective_of(name, **settings):
    return build_objective(TrainingConfig(objective=name.split()[0], preference_beta=BETA, **settings))


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_gradients_are_those_of_the_formula(name):
    settings, formula = FORMULAS[name]
    batch, hidden, weight = problem()
    pairs = pairs_of(batch, hidden, weight)
    expected = sum(formula(*pair) for pair in pairs)
    objective = objective_of(name, **settings)
    loss = objective.loss(HeadInputs(hidden, weight), batch)
    assert int(objective.count(batch)) == len(pairs) > 3
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(one, (hidden, weight)) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_rewards_are_those_of_the_pairs_also_in_an_evaluation():
    batch, hidden, weight = problem()
    objective = objective_of("dpo")
    for piece, own in zip(batch.split(1), hidden.detach().chunk(3), strict=True):
        objective.loss(HeadInputs(own, weight), piece)
    record = objective.of_step(objective.take_measured().tolist())
    assert objective.take_measured() is None
    with torch.no_grad():
        objective.loss(HeadInputs(hidden, weight), batch)
    assert objective.of_step(objective.take_measured().tolist()) == pytest.approx(record, rel=1e-12)
    rewards = torch.tensor(
        [
            [BETA * (float(summed.detach()) - reference) for summed, _, reference in pair]
            for pair in pairs_of(batch, hidden, weight)
        ]
    )
    chosen, rejected = rewards.T
    expected = {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "reward_margin": (chosen - rejected).mean(),
        "reward_accuracy": (chosen > rejected).float().mean(),
        "kl": rewards.mean() / BETA,
    }
    assert record == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_a_model_that_is_the_reference_has_the_loss_of_a_coin_and_no_rewards():
    batch, hidden, weight = problem()
    reference = torch.zeros(batch.tokens_BS.shape, dtype=torch.float64)
    of_tokens = -F.cross_entropy(hidden @ weight.T, batch.targets_BS.flatten(), reduction="none").view_as(reference)
    same = replace(batch, per_token=batch.per_token | {"reference": of_tokens.detach()})
    objective = objective_of("dpo")
    loss = objective.loss(HeadInputs(hidden, weight), same)
    assert loss.item() / int(objective.count(same)) == pytest.approx(math.log(2), abs=1e-12)
    record = objective.of_step(objective.take_measured().tolist())
    assert record["reward_margin"] == pytest.approx(0, abs=1e-12)
    assert record["kl"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_has_a_divergence_from_the_reference_if_its_objective_reads_one(name):
    settings, _ = FORMULAS[name]
    objective = objective_of(name, **settings)
    batch, hidden, weight = problem()
    objective.loss(HeadInputs(hidden, weight), batch)
    fields = objective.of_step(objective.take_measured().tolist())
    assert ("kl" in fields) == (OBJECTIVES.named(name.split()[0]).reference is not None)


@pytest.mark.parametrize("name", FORMULAS)
def test_pairs_in_one_row_count_as_much_as_in_rows_of_their_own(name):
    """A row of two pairs, and two rows of a pair each: same losses, since attention stays within documents."""
    settings, _ = FORMULAS[name]
    model = build_llama(replace(UNTIED, num_layers=2), device="cpu", compute_dtype=torch.float64, seed=0).double()
    model.objective = objective_of(name, **settings)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (1, 17), generator=generator)
    numbers = torch.tensor([[-1, 1, 1, 1, -2, 2, 2, 2, -3, 3, 3, 3, -4, 4, 4, 4]])
    positions = torch.arange(16)[None] % 4
    whole = make_batch(0, 1, documents=True)
    reference = -3.0 * (numbers < 0)
    whole = replace(whole, tokens_BS=tokens[:, :-1], targets_BS=tokens[:, 1:], positions_BS=positions)
    whole = replace(whole, per_token={"answer": numbers.float(), "reference": reference})
    halves = whole.each_token(lambda tensor: tensor.view(2, 8))
    answers = numbers.view(2, 8) - numbers.view(2, 8).sign() * torch.tensor([[0], [2]])
    halves = replace(halves, per_token=halves.per_token | {"answer": answers.float()})
    losses = [model(batch.tokens_BS, batch) for batch in (whole, halves)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, model.output.weight)[0] for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
