"""What a step reads is told in the words of the data, and how many steps follow from it."""

import pytest

from llama_core.chain.batch import batch_line
from llama_core.config.run import RunConfig


def config_of(data=None, **training):
    sizes = {"batch_size": 8, "seq_len": 256}
    return RunConfig.from_mapping({"training": sizes | training, "data": data or {}})


def data_of(unit, num_documents, num_sequences):
    return {"unit": unit, "num_documents": num_documents, "num_sequences": num_sequences}


@pytest.mark.parametrize(
    ("unit", "training", "told"),
    [
        (
            "pairs",
            {"epochs": 4},
            "8 sequences, about 24 pairs a step, 2,048 tokens; 150 pairs fill 50 sequences of 256 tokens, several in "
            "one where they fit; 25 steps: 4 epochs",
        ),
        (
            "labelled answers",
            {"steps": 10},
            "8 sequences, about 24 labelled answers a step, 2,048 tokens; 150 labelled answers fill 50 sequences of 256"
            " tokens, several in one where they fit; 10 steps: 1.6 epochs",
        ),
        (
            "conversations",
            {"epochs": 1, "batch_size": 1},
            "1 sequence, about 3 conversations a step, 256 tokens; 150 conversations fill 50 sequences of 256 tokens, "
            "several in one where they fit; 50 steps: 1 epochs",
        ),
        ("documents", {"steps": 1}, "8 sequences a step, 2,048 tokens; 1 step: 0.16 epochs"),
        ("documents", {"minutes": 2, "warmup_steps": 5}, "8 sequences a step, 2,048 tokens"),
    ],
)
def test_steps_are_explained_by_the_sequences_that_the_data_fill(unit, training, told):
    assert batch_line(config_of(**training), data_of(unit, 150, 50)) == told


def test_unknown_data_leave_the_sequences_of_a_step():
    assert batch_line(config_of(steps=30), {}) == "8 sequences a step, 2,048 tokens; 30 steps"
    assert batch_line(config_of(epochs=2), {}) == "8 sequences a step, 2,048 tokens"


def test_a_batch_that_grows_is_told_as_the_first_and_epochs_are_left_out():
    ramp = [{"from_tokens": 4096, "batch_size": 16}]
    line = batch_line(config_of(steps=30, batch_ramp=ramp), data_of("documents", 90, 60))
    assert line == "8 sequences a step at first, 2,048 tokens; 30 steps"


def test_a_mixture_has_no_epoch_of_its_own():
    sources = {name: {"path": name, "weight": 1} for name in ("code", "wiki")}
    line = batch_line(config_of({"sources": sources}, steps=6), data_of("conversations", 30, 60))
    assert line.startswith("8 sequences, about 4 conversations a step, ")
    assert line.endswith("; 6 steps")
