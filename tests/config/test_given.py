"""A value that somebody gave is kept, also where it equals the default that another kind of run has."""

import json

import pytest

from llama_core.chain.planned import with_keys
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.config.settings import TrainingConfig
from llama_core.config.strict_yaml import parse_yaml, write_yaml
from llama_core.errors import ConfigError
from llama_core.records.files import by_dotted_key
from llama_core.sweep.grid import SweepConfig
from training_infra.config import with_settings

KINDS = {
    "from scratch": {},
    "adapters": {"strategy": "lora"},
    "trained weights": {"training": {"init_from": "weights"}},
    "adapters of trained weights": {"strategy": "lora", "training": {"init_from": "weights"}},
    "preferences": {"training": {"init_from": "weights", "objective": "dpo"}},
    "preferences with adapters": {"strategy": "lora", "training": {"init_from": "weights", "objective": "dpo"}},
}


def keys_of(kind):
    return by_dotted_key(RunConfig.from_mapping(KINDS[kind]).model_dump(mode="json"))


DEFAULTS = {kind: keys_of(kind) for kind in KINDS}


def default_values(key):
    """Return every default that the key has in any kind of run, each once."""
    values = [defaults[key] for defaults in DEFAULTS.values() if defaults.get(key) is not None]
    return [value for number, value in enumerate(values) if value not in values[:number]]


def asked(kind, key, value):
    """Return the nested keys of a run of this kind that gives one key; None if such a run is refused."""
    mapping = json.loads(json.dumps(KINDS[kind]))
    Override(key, value).apply(mapping)
    try:
        RunConfig.from_mapping(mapping)
    except ConfigError:
        return None
    return mapping


LOSS = {"objective": "loss", "tokens": 64}


def value_of(config, key):
    return by_dotted_key(config.model_dump(mode="json"))[key]


def from_file(mapping, folder):
    (folder / "run.yaml").write_text(write_yaml(mapping))
    return RunConfig.load(folder / "run.yaml")


def from_flags(mapping, folder):
    (folder / "run.yaml").write_text("launch: {device: cpu}")
    return RunConfig.load(folder / "run.yaml", [Override(*one) for one in by_dotted_key(mapping).items()])


def from_python(mapping, folder):
    return with_settings(RunConfig.from_mapping(mapping), {"device": "cpu"})


def from_a_plan(mapping, folder):
    return with_keys(RunConfig.from_mapping(mapping), launch={"device": "cpu"})


def from_a_record(mapping, folder):
    return RunConfig.from_mapping(parse_yaml(RunConfig.from_mapping(mapping).to_yaml(), "record"))


def from_a_sweep(mapping, folder):
    sweep = SweepConfig.from_mapping({"name": "s", "base": mapping, "grid": {"tracking.run_name": ["a"]}})
    return sweep.config_of(sweep.elements()[0])


def from_a_recorded_sweep(mapping, folder):
    sweep = SweepConfig.from_mapping({"name": "s", "base": mapping, "grid": {"tracking.run_name": ["a"]}})
    recorded = SweepConfig.from_mapping(json.loads(json.dumps(sweep.given())))
    return recorded.config_of(recorded.elements()[0])


@pytest.mark.parametrize("kind", ["from scratch", "adapters of trained weights", "preferences"])
@pytest.mark.parametrize(
    "through",
    [from_file, from_flags, from_python, from_a_plan, from_a_record, from_a_sweep, from_a_recorded_sweep],
)
def test_any_given_value_survives(through, kind, tmp_path):
    for key in DEFAULTS["from scratch"]:
        if key in {"launch.device", "tracking.run_name"}:  # the way sets them
            continue
        for value in default_values(key):
            mapping = asked(kind, key, value)
            if mapping is not None:
                assert value_of(through(mapping, tmp_path), key) == value, f"{key}={value}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_a_grid_survives(kind):
    for key in ("training.learning_rate", "training.weight_decay", "training.epochs"):
        values = default_values(key)
        sweep = SweepConfig.from_mapping({"name": "s", "base": KINDS[kind], "grid": {key: values}} | LOSS)
        assert [value_of(sweep.config_of(element), key) for element in sweep.elements()] == values


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_given_first_survives_what_makes_it_another_kind_of_run(kind):
    for key in ("training.learning_rate", "training.weight_decay", "training.epochs"):
        for value in default_values(key):
            given = RunConfig.from_mapping({}, [Override(key, value)])
            changed = given.with_overrides(*(Override(*one) for one in by_dotted_key(KINDS[kind]).items()))
            assert value_of(changed, key) == value


def test_elements_of_a_recorded_sweep_have_the_defaults_of_their_own_kind():
    grid = {"strategy": ["standard", "lora"]}
    sweep = SweepConfig.from_mapping({"name": "s", "grid": grid})
    recorded = SweepConfig.from_mapping(json.loads(json.dumps(sweep.given())))
    assert [recorded.config_of(element).training.learning_rate for element in recorded.elements()] == [3e-4, 2e-4]


def test_a_section_made_in_python_leaves_the_other_defaults_to_the_kind_of_run():
    config = RunConfig(strategy="lora", training=TrainingConfig(learning_rate=3e-4))
    assert (config.training.learning_rate, config.training.epochs) == (3e-4, 2)
