"""A run on labelled answers measures its divergence before every step, and goes on with that of its own reference."""

import math

import numpy as np
import pytest
import torch
from test_labelled_answers import labelled
from test_pairs import write
from test_references import column, trainer_of, weights

from llama_core.data.datasets import validation_batches
from llama_core.errors import StoppedError
from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.head import logits
from llama_core.models.kto import mismatched
from llama_core.models.llama import measuring


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.jsonl", map(labelled, range(40)))


def kto_run(tmp_path, source, name="run", **training):
    return trainer_of(tmp_path, source, name, **{"objective": "kto", "eval_every": 2} | training)


def log_probabilities(model, batch):
    """Those of every answer by row and number, from all logits, by plain loops."""
    with torch.no_grad(), measuring(model, lambda head, batch: logits(head)):
        of_tokens = model(batch.tokens_BS, batch).log_softmax(-1).view(*batch.tokens_BS.shape, -1)
    found = {}
    counts = batch.targets_BS != IGNORE_INDEX
    for row, place in counts.nonzero().tolist():
        number = int(batch.per_token["answer"][row, place].abs())
        value = float(of_tokens[row, place, batch.targets_BS[row, place]])
        found[row, number] = found.get((row, number), 0.0) + value
    return found


def gains_of(model, batch):
    """The number of every answer that counts, and its gain over the reference."""
    of_answers = log_probabilities(model, batch)
    firsts = (batch.per_token["answer"] < 0) & (batch.targets_BS != IGNORE_INDEX)
    numbered = [(row, place, -int(batch.per_token["answer"][row, place])) for row, place in firsts.nonzero().tolist()]
    return [
        (number, of_answers[row, number] - float(batch.per_token["reference"][row, place]))
        for row, place, number in numbered
    ]


def test_the_reference_holds_every_answer_after_its_prompt_and_after_another_one(tmp_path, source):
    trainer = kto_run(tmp_path, source)
    model = trainer.engine.model
    rows = trainer.reference.references.rows["train/"]
    trainer.reference.begin()
    (batch,) = validation_batches(rows, len(rows), len(rows))
    own = log_probabilities(model, batch)
    after_another = log_probabilities(model, mismatched(batch))
    firsts = (batch.per_token["answer"] < 0).nonzero().tolist()
    assert len(firsts) == rows.num_pairs > 20
    for row, place in firsts:
        number = -int(batch.per_token["answer"][row, place])
        other = after_another.get((row, number), 0.0)  # 0: the only answer of its row
        assert float(batch.per_token["reference"][row, place]) == pytest.approx(own[row, number], rel=1e-5)
        assert float(batch.per_token["mismatch"][row, place]) == pytest.approx(other, rel=1e-5)


def test_steps_begin_without_rewards_and_learn_which_answers_are_good(tmp_path, source):
    trainer = kto_run(tmp_path, source)
    summary = trainer.fit()
    assert summary.loss_unit == "utility/answer"
    assert column(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-4)
    assert column(trainer, "reward_margin")[0] == pytest.approx(0, abs=1e-3)
    assert column(trainer, "kl")[0] == pytest.approx(0, abs=1e-3)
    assert column(trainer, "reward_margin")[-1] > 0.05
    assert column(trainer, "reward_accuracy")[-1] > 0.9


def test_the_divergence_of_a_step_is_the_mean_gain_of_its_mismatched_answers(tmp_path, source):
    trainer = kto_run(tmp_path, source, desirable_weight=20.0)  # so that all answers gain
    trainer.reference.begin()
    model = trainer.engine.model
    trainer._optimize(trainer.batches.next_step())
    microbatches = trainer.batches.next_step()
    assert len(microbatches) == 2
    gains = [gain for batch in microbatches for _, gain in gains_of(model, batch.before)]
    trainer._optimize(microbatches)
    assert len(gains) > 4
    assert float(model.objective._divergence) == pytest.approx(max(0.0, np.mean(gains)), rel=1e-4)
    assert np.mean(gains) > 0.01


def test_the_held_out_loss_is_relative_to_the_divergence_of_the_held_out_answers(tmp_path, source):
    trainer = kto_run(tmp_path, source, desirable_weight=20.0)
    trainer.reference.begin()
    model = trainer.engine.model
    trainer._optimize(trainer.batches.next_step())
    batches = [piece for batch in trainer.held_out.batches[""]() for piece in trainer.inputs.microbatches(batch)]
    divergence = np.mean([gain for batch in batches for _, gain in gains_of(model, batch.before)])
    assert divergence > 0.01
    losses = [
        20 * sigmoid(-0.1 * (gain - divergence)) if number % 2 else sigmoid(0.1 * (gain - divergence))
        for batch in batches
        for number, gain in gains_of(model, batch)
    ]
    (held_out,) = trainer.held_out.rows().values()
    assert held_out.count == len(losses) > 1
    assert held_out.mean == pytest.approx(np.mean(losses), rel=1e-5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, source):
    undisturbed = kto_run(tmp_path, source, "whole")
    undisturbed.fit()
    first = kto_run(tmp_path, source)
    first.stop.should_stop = lambda: first.step == 2
    with pytest.raises(StoppedError, match="stopped after step 2 of 4"):
        first.fit()
    second = kto_run(tmp_path, source)
    second.fit()
    for name in ("loss", "reward_chosen", "reward_accuracy", "kl", "eval_loss"):
        assert column(second, name) == column(undisturbed, name)
    torch.testing.assert_close(weights(second), weights(undisturbed), rtol=0, atol=0)
