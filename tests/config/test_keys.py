from typing import Annotated, ClassVar, get_args

import pytest

from llama_core.config.run import RunConfig, config_keys
from llama_core.config.section import Changes, Key, OnResume, Section
from llama_core.records.files import by_dotted_key
from llama_core.sweep.grid import complaints

KEYS = {known.name: known.key for known in RunConfig.known_keys()}


class Inner(Section):
    plain: int = 1
    other: Annotated[int, Key(on_resume="refuse", changes="batch")] = 2


class Work(Section):
    every_key: ClassVar[Key] = Key(on_resume="allow", changes="speed")

    inner: Inner = Inner()
    own: Annotated[str | None, Key(on_resume="extend", changes="learning")] = None
    plain: int = 3


class Whole(Section):
    plain: int = 4
    work: Work = Work()


def test_a_key_is_what_it_says_or_what_the_sections_around_it_say():
    known = {one.name: one.key for one in Whole.known_keys()}
    assert known == {
        "plain": Key("refuse", "everything"),
        "work.inner.plain": Key("allow", "speed"),
        "work.inner.other": Key("refuse", "batch"),
        "work.own": Key("extend", "learning"),
        "work.plain": Key("allow", "speed"),
    }


def test_what_a_resumed_run_may_change_is_left_out_of_a_dump():
    dump = Whole().model_dump(exclude=Whole.free_keys())
    assert dump == {"plain": 4, "work": {"inner": {"other": 2}, "own": None}}


def test_every_key_says_what_a_resume_and_a_sweep_make_of_it():
    assert KEYS.keys() == config_keys().keys()
    assert {key.on_resume for key in KEYS.values()} == set(get_args(OnResume))
    assert {key.changes for key in KEYS.values()} == set(get_args(Changes))


def test_a_run_is_identified_by_the_keys_that_a_resume_may_not_simply_change():
    config = RunConfig.from_mapping({"strategy": "hybrid", "trainable": ["*norm*"]})
    identity = {name for name in by_dotted_key(config.identity()) if not name.startswith("architecture")}
    identity |= {"data.fields", "data.sources"}  # mappings without any key of their own
    fixed = {name for name, key in KEYS.items() if key.on_resume != "allow" and not name.startswith("architecture")}
    assert identity == fixed


def test_a_key_that_changes_nothing_learnt_may_change_on_resume():
    stubborn = [name for name, key in KEYS.items() if key.changes in {"speed", "batch", "nothing"}]
    assert [name for name in stubborn if KEYS[name].on_resume != "allow"] == []


COUNTS = [known.name for known in RunConfig.known_keys() if known.is_count]


def test_sizes_steps_tokens_and_devices_are_counts_and_times_rates_and_choices_are_not():
    some = {"training.seq_len", "training.steps", "training.checkpoint_every", "training.keep_every_tokens"}
    some |= {"architecture.hidden_size", "parallel.gpus", "parallel.tp", "lora.lora_rank", "evaluation.every_tokens"}
    assert some <= set(COUNTS)
    others = {"launch.slurm.time_limit_min", "training.learning_rate", "parallel.zero_stage", "data.source", "model"}
    assert not others.intersection(COUNTS)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize(("spelled", "count"), [("2k", 2000), ("4Ki", 4096), (8e3, 8000), ("0.5M", 500_000)])
def test_every_count_may_have_a_suffix_or_an_exponent(key, spelled, count):
    assert list(complaints(key, spelled)) == list(complaints(key, count))


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("wrong", ["2q", "1.5", "k", "1.0001k", 2.5])
def test_a_count_that_is_no_whole_number_is_refused(key, wrong):
    assert list(complaints(key, wrong))


def test_a_file_and_an_override_spell_counts_as_a_flag_does(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: llama3_1_8b\ntraining: {seq_len: 16Ki, steps: 20k, checkpoint_every: 1e3}\n")
    training = RunConfig.load(file, ["training.eval_every=0.5k"]).training
    assert (training.seq_len, training.steps, training.checkpoint_every, training.eval_every) == (
        16_384,
        20_000,
        1000,
        500,
    )
