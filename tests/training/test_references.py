"""The reference is the model that the run begins with; a run that goes on still has it."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import chat_of
from test_pairs import answered, asked, chosen, rejected, say, write

from llama_core.config.run import RunConfig
from llama_core.data.datasets import BatchStream, load_datasets, validation_batches
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import DataError, StoppedError
from llama_core.models.head import logits
from llama_core.models.llama import measuring
from llama_core.models.preferences import answer_log_probabilities, answers_of_row
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.runs.decay import branch_off
from llama_core.training.reference import References
from llama_core.training.trainer import Trainer

FEW_PARAMETERS = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "ffn_size": 32,
    "vocab_size": 300,
}
PLAN = ParallelPlan(microbatch_size=2, num_microbatches=2)
NUM_STEPS = 4


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "a.jsonl", map(answered, range(40)))


def trainer_of(tmp_path, source, name="run", **training):
    run = RunDirectory(tmp_path / name)
    if not run.path.exists():
        run.create()
    config = RunConfig.from_mapping(
        {
            "architecture": FEW_PARAMETERS,
            "data": {"source": str(source), "cache_dir": str(tmp_path / "cache"), "chat_template": "llama2"},
            "training": {
                "objective": "dpo",
                "seq_len": 256,
                "batch_size": 4,
                "steps": NUM_STEPS,
                "learning_rate": 1e-2,
                "precision": "fp32",
                "eval_every": 2,
            }
            | training,
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
        }
    )
    run.config.write_text(config.to_yaml())
    datasets = load_datasets(config.data, config.spec, seq_len=256, objective=config.objective)
    return Trainer(
        run,
        config,
        PLAN,
        batches=BatchStream(datasets.train, 4, seed=0),
        validation={name: partial(validation_batches, rows, 2, 8) for name, rows in datasets.validation.items()},
        total_steps=NUM_STEPS,
        references=References.of(run, "drawn", config.objective, datasets),
    )


def column(trainer, name):
    return read_metrics(trainer.run).column(name).to_pylist()


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.engine.model.state_dict().items()}


def plain_log_probability(model, document):
    """That of what counts in a rendered conversation which the model reads alone, from all its logits."""
    ((begin, end),) = document.turns.counted
    (encoded,) = ByteTokenizer().encode_rendered([document.text])
    ids = torch.tensor(encoded.ids.astype(np.int64))
    with torch.no_grad():
        log_probabilities = F.log_softmax(model(ids[None, :-1])[0], -1)
    counts = torch.tensor((encoded.ends[1:] > begin) & (encoded.begins[1:] < end))
    return float(log_probabilities.gather(1, ids[1:, None])[counts, 0].sum())


def test_the_reference_of_each_answer_is_what_the_first_model_says_of_it_alone(tmp_path, source):
    trainer = trainer_of(tmp_path, source)
    model = trainer.engine.model
    expected = sorted(
        tuple(
            plain_log_probability(model, chat_of("llama2").document(say(asked(n), answer), "nowhere:1"))
            for answer in (chosen(n), rejected(n))
        )
        for n in range(40)
    )
    trainer.reference.begin()
    kept = np.frombuffer(trainer.run.reference_values.read_bytes(), np.float32).reshape(-1, 2)
    np.testing.assert_allclose(sorted(map(tuple, kept.tolist())), expected, rtol=1e-5)


def test_the_first_step_has_the_loss_of_a_coin_and_later_ones_prefer_the_chosen_answers(tmp_path, source):
    trainer = trainer_of(tmp_path, source)
    summary = trainer.fit()
    assert column(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-4)
    assert column(trainer, "reward_margin")[0] == pytest.approx(0, abs=1e-3)
    assert column(trainer, "kl")[0] == pytest.approx(0, abs=1e-3)
    assert column(trainer, "reward_margin")[-1] > 0.05
    assert column(trainer, "reward_accuracy")[-1] > 0.9
    assert column(trainer, "loss")[-1] < 0.67
    assert summary.eval_loss < math.log(2)
    assert summary.loss_unit == "nats/pair"


def test_held_out_pairs_have_a_margin_and_an_accuracy_of_their_own(tmp_path, source):
    trainer = trainer_of(tmp_path, source)
    summary = trainer.fit()
    assert [value is not None for value in column(trainer, "eval_reward_margin")] == [False, True, False, True]
    rows = trainer.reference.references.rows["held-out/"]
    (batch,) = validation_batches(rows, len(rows), 8)
    trainer.engine.model.eval()
    of_answers = trainer.engine.measure_rows(answer_log_probabilities, answers_of_row(256), [batch])
    margins = []
    for row, place in (batch.per_token["answer"] < 0).nonzero().tolist():
        number = -int(batch.per_token["answer"][row, place])
        gain = 0.1 * (float(of_answers[row, number]) - float(batch.per_token["reference"][row, place]))
        if number % 2:
            margins.append(gain)
        else:
            margins[-1] -= gain
    assert len(margins) == summary.eval_tokens > 1
    assert summary.measured["eval_reward_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    accuracy = summary.measured["eval_reward_accuracy"]
    assert accuracy == sum(margin > 0 for margin in margins) / len(margins)
    assert column(trainer, "eval_reward_margin")[-1] == summary.measured["eval_reward_margin"]
    assert f"accuracy {accuracy:.1%} over {len(margins)} pairs" in summary.summary()


def test_a_stopped_run_goes_on_bit_for_bit_with_the_reference_of_its_beginning(tmp_path, source):
    undisturbed = trainer_of(tmp_path, source, "whole")
    undisturbed.fit()
    first = trainer_of(tmp_path, source)
    first.stop.should_stop = lambda: first.step == 2
    with pytest.raises(StoppedError, match="stopped after step 2 of 4"):
        first.fit()
    second = trainer_of(tmp_path, source)
    second.fit()
    for name in ("loss", "reward_chosen", "reward_accuracy", "kl", "eval_loss"):
        assert column(second, name) == column(undisturbed, name)
    torch.testing.assert_close(weights(second), weights(undisturbed), rtol=0, atol=0)


def test_a_branch_off_a_run_decays_with_the_reference_of_its_beginning(tmp_path, source):
    stable = {"lr_schedule": "wsd", "warmup_steps": 1, "decay_fraction": 0.5, "checkpoint_every": 2}
    whole = trainer_of(tmp_path, source, "whole", **stable)
    whole.fit()
    branch_off(whole.run, tmp_path / "branch", num_steps=2, step=2)
    decayed = trainer_of(tmp_path, source, "branch", **stable)
    decayed.fit()
    assert column(decayed, "kl") == column(whole, "kl")
    torch.testing.assert_close(weights(decayed), weights(whole), rtol=0, atol=0)


def lose(run):
    run.reference.unlink()


def damage(run):
    content = bytearray(run.reference_values.read_bytes())
    content[0] ^= 1
    run.reference_values.write_bytes(content)


def swap(run):
    record = json.loads(run.reference.read_text())
    record["rows"]["train/"] = "0" * 16
    run.reference.write_text(json.dumps(record))


@pytest.mark.parametrize("spoil", [lose, damage, swap])
def test_a_run_that_goes_on_refuses_a_reference_that_is_not_its_own(tmp_path, source, spoil):
    first = trainer_of(tmp_path, source)
    first.stop.should_stop = lambda: first.step == 2
    with pytest.raises(StoppedError):
        first.fit()
    spoil(first.run)
    with pytest.raises(DataError, match=r"reference\.(json|bin).*the reference is the model of step 0"):
        trainer_of(tmp_path, source).fit()
    assert len(column(first, "loss")) == 2


def test_a_run_of_an_objective_without_a_reference_computes_none(tmp_path, source):
    trainer = trainer_of(tmp_path, source, objective="simpo")
    trainer.fit()
    assert not trainer.run.reference.exists()
    assert None not in column(trainer, "reward_accuracy")
    assert "kl" not in read_metrics(trainer.run).column_names


def test_a_model_that_is_measured_returns_its_loss_again_afterwards(tmp_path, source):
    trainer = trainer_of(tmp_path, source)
    batch = trainer.batches.next_step()[0]
    model = trainer.engine.model
    with measuring(model, lambda head, batch: logits(head)):
        assert model(batch.tokens_BS, batch).shape[1] == 300
    assert model(batch.tokens_BS, batch).shape == ()
