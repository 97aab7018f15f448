from typing import Annotated, ClassVar, get_args

from llama_core.config.run import RunConfig, config_keys
from llama_core.config.section import Changes, Key, OnResume, Section
from llama_core.records.files import by_dotted_key

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
