import json
import re
from math import prod
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.sweep.grid import LONGEST_NAME, SweepConfig

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))

VALUES = {
    "training.seq_len": st.integers(2, 4096),
    "data.validation_fraction": st.floats(0, 1, exclude_max=True),
    "parallel.microbatch_size": st.none() | st.integers(1, 64),
    "parallel.recompute": st.sampled_from(["none", "selective", "full"]),
    "data.source": st.text(min_size=1),
    "data.tokenizer": st.text(),
}
TEN_KEYS = [f"parallel.{key}" for key in ("tp", "pp", "cp", "ep", "gpus", "microbatch_size")] + [
    f"architecture.{key}" for key in ("hidden_size", "ffn_size", "vocab_size", "num_layers")
]
grids = st.fixed_dictionaries(
    {}, optional={key: st.lists(values, min_size=1, max_size=4, unique=True) for key, values in VALUES.items()}
).filter(bool)


def sweep(grid, **settings):
    return SweepConfig.from_mapping({"name": "sweep", "grid": grid} | settings)


def names(grid):
    return {element.name for element in sweep(grid).elements()}


def refusal(**mapping):
    with pytest.raises(ConfigError) as refused:
        SweepConfig.from_mapping({"name": "sweep", "grid": {"parallel.tp": [1, 2]}} | mapping)
    return str(refused.value)


@given(grids)
def test_every_combination_of_the_grid_is_an_element_exactly_once(grid):
    combinations = [json.dumps(element.settings, sort_keys=True) for element in sweep(grid).elements()]
    assert len(set(combinations)) == len(combinations) == prod(map(len, grid.values()))
    assert all(value in grid[key] for element in sweep(grid).elements() for key, value in element.settings.items())


@given(grids)
def test_names_are_distinct_and_safe_as_file_names(grid):
    assert len(names(grid)) == prod(map(len, grid.values()))
    assert all(re.fullmatch(r"\w[\w.,=+-]*", name, re.ASCII) and len(name) <= LONGEST_NAME for name in names(grid))


@given(grids, st.data())
def test_an_element_keeps_its_name_when_the_grid_gets_fewer_values(grid, data):
    smaller = {key: data.draw(st.lists(st.sampled_from(grid[key]), min_size=1, unique=True)) for key in grid}
    assert names(smaller) <= names(grid)


@given(grids, st.data())
def test_only_excluded_elements_are_missing(grid, data):
    every = sweep(grid).elements()
    unwanted = data.draw(st.lists(st.sampled_from(every), max_size=len(every) - 1, unique_by=lambda one: one.name))
    kept = sweep(grid, exclude=[dict(element.settings) for element in unwanted]).elements()
    assert kept == [element for element in every if element not in unwanted]


def test_a_grid_spells_counts_with_suffixes_and_compares_them_as_numbers():
    grid = {"training.seq_len": ["1Ki", 2048], "parallel.tp": [1, 2]}
    spelled = sweep(
        grid, exclude=[{"training.seq_len": "2Ki"}], include=[{"training.seq_len": "4Ki", "parallel.tp": 1}]
    )
    assert [element.settings["training.seq_len"] for element in spelled.elements()] == [1024, 1024, 4096]


def test_excluding_part_of_a_combination_excludes_every_element_that_shares_it():
    grid = {"parallel.tp": [1, 2], "parallel.microbatch_size": [1, 2]}
    kept = sweep(grid, exclude=[{"parallel.tp": 2}]).elements()
    assert [element.name for element in kept] == ["tp=1,microbatch_size=1", "tp=1,microbatch_size=2"]


@given(grids, st.data())
def test_each_included_element_is_added_with_the_base_for_what_it_leaves_out(grid, data):
    some = [{key: data.draw(st.sampled_from(grid[key])) for key in list(grid)[1:]} for _ in range(3)]
    every, longer = sweep(grid).elements(), sweep(grid, include=some).elements()
    assert longer[: len(every)] == every
    first = next(iter(grid))
    at_base = getattr(getattr(RunConfig(), first.partition(".")[0]), first.partition(".")[2])
    assert [element.settings for element in longer[len(every) :]] == [{first: at_base} | one for one in some]
    assert len({element.name for element in longer}) == len(longer)
    assert all(len(element.name) <= LONGEST_NAME for element in longer)


def test_an_element_that_is_included_again_is_run_again():
    again = sweep({"parallel.tp": [1, 2]}, include=[{"parallel.tp": 2}, {"parallel.tp": 2}, {"parallel.tp": 4}])
    assert [element.name for element in again.elements()] == ["tp=1", "tp=2", "tp=2,run=2", "tp=2,run=3", "tp=4"]
    assert [element.name for element in again.without({"tp=1", "tp=2,run=3"}).elements()] == [
        "tp=2",
        "tp=2,run=2",
        "tp=4",
    ]


def test_names_are_short_unless_two_keys_end_alike():
    grid = {"training.warmup_steps": [1], "benchmark.warmup_steps": [2], "parallel.tp": [None]}
    (element,) = sweep(grid).elements()
    assert element.name == "training.warmup_steps=1,benchmark.warmup_steps=2,tp=null"


def test_an_element_is_the_base_with_its_values():
    base = {"training": {"seq_len": 64, "steps": 5}, "launch": {"device": "cpu"}}
    (element,) = sweep({"training.seq_len": [32], "data.source": ["a: b #'"]}, base=base).elements()
    expected = base | {"training": {"seq_len": 32, "steps": 5}, "data": {"source": "a: b #'"}}
    assert element.config(RunConfig.from_mapping(base)) == RunConfig.from_mapping(expected)


def test_overrides_change_the_base_before_it_is_judged():
    mapping = {"name": "x", "objective": "loss", "grid": {"training.learning_rate": [1e-3, 1e-4]}}
    with pytest.raises(ConfigError, match="needs the length of training"):
        SweepConfig.from_mapping(mapping)
    longer = SweepConfig.from_mapping(mapping, ["training.steps=5", Override("data.source", "2024")])
    assert (longer.base.training.steps, longer.base.data.source) == (5, "2024")
    again = SweepConfig.from_mapping(longer.model_dump(), ["training.steps=7"])
    assert (again.base.training.steps, again.base.data.source) == (7, "2024")


def test_a_base_of_a_file_of_its_own_takes_overrides(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {seq_len: 64}\n")
    (tmp_path / "sweep.yaml").write_text("name: x\nbase: base.yaml\ngrid: {parallel.microbatch_size: [1, 2]}\n")
    training = SweepConfig.load(tmp_path / "sweep.yaml", ["training.steps=5"]).base.training
    assert (training.seq_len, training.steps) == (64, 5)


def test_an_override_of_a_key_of_the_grid_is_refused():
    with pytest.raises(ConfigError) as caught:
        SweepConfig.from_mapping({"name": "x", "grid": {"training.seq_len": [32]}}, ["training.seq_len=64", "x"])
    assert caught.value.problems == (
        "override 'x' is not of the form section.key=value",
        "training.seq_len is a key of the grid, which sets it in each element; change it there",
    )


def test_contradictory_values_make_only_their_element_impossible():
    good, bad = sweep({"training.batch_size": [4, 5]}, base={"parallel": {"microbatch_size": 2}}).elements()
    base = RunConfig.from_mapping({"parallel": {"microbatch_size": 2}})
    assert good.config(base).batch_size == 4
    with pytest.raises(ConfigError, match="batch_size=5 is not a multiple of 2"):
        bad.config(base)


@pytest.mark.parametrize(
    ("mapping", "complaint"),
    [
        ({"gird": {}}, "unknown key 'gird'; did you mean 'grid'?"),
        ({"grid": {}}, "grid"),
        ({"grid": {"parallel.tp": []}}, "grid.parallel.tp"),
        ({"grid": {"parallel.tpp": [1]}}, "grid: unknown key 'parallel.tpp'; did you mean 'parallel.tp'"),
        ({"grid": {"parallel.tp": ["two"]}}, "grid.parallel.tp: 'two': input should be 'auto' or an integer"),
        ({"grid": {"model": ["llama9"]}}, "llama9"),
        ({"grid": {"parallel.tp": [1, 1]}}, "grid.parallel.tp: 1 is given twice"),
        (
            {"grid": {key: list(range(16, 26)) for key in TEN_KEYS}},
            "grid has 10,000,000,000 elements, more than 4,096; give fewer values",
        ),
        ({"exclude": [{"parallel.tp": 4}]}, "exclude: parallel.tp=4 is not in the grid"),
        ({"include": [{"parallel.pp": 2}]}, "include: 'parallel.pp' is not a key of the grid; add it there"),
        ({"include": [{"parallel.tp": 0.5}]}, "include: parallel.tp"),
        (
            {"include": [{"training.seed": 2}], "grid": {"training.seed": [1]}},
            "training.seed cannot change the throughput",
        ),
        ({"exclude": [{}]}, "would leave out every element"),
        ({"exclude": [{"parallel.tp": 1}, {"parallel.tp": 2}]}, "leaves no element"),
        ({"name": "../elsewhere"}, "name='../elsewhere'"),
        ({"base": {"training": {"batchsize": 1}}}, "unknown key 'training.batchsize'"),
    ],
)
def test_a_wrong_sweep_is_refused_with_the_reason(mapping, complaint):
    assert complaint in refusal(**mapping)


DOMAINS = {name: {"path": f"{name}.jsonl", "weight": 1} for name in ("wiki", "code")}
SCORED = {
    "objective": "evaluation/law/loss",
    "base": {"training": {"steps": 5, "batch_size": 4}, "evaluation": {"data": {"law": "law.jsonl"}}},
}
LENGTH = {"objective": "loss", "base": {"training": {"steps": 5, "batch_size": 4}}}


@pytest.mark.parametrize(
    ("mapping", "complaint"),
    [
        (
            {"grid": {"training.learning_rate": [1e-4, 1e-3], "training.seed": [0, 1], "parallel.tp": [1, 2]}},
            "training.learning_rate, training.seed cannot change the throughput, which ranks the elements; train each "
            "element and rank the held-out losses with --objective loss",
        ),
        ({"tokens": 1000}, "tokens needs objective=loss"),
        (LENGTH, "parallel.tp cannot change the held-out loss"),
        (LENGTH | {"grid": {"training.eval_every": [1, 2]}}, "training.eval_every cannot change the held-out loss"),
        (LENGTH | {"grid": {"data.validation_fraction": [0.1, 0.2]}}, "held-out losses cannot be compared"),
        (LENGTH | {"grid": {"data.source": ["a", "b"]}}, "set data.validation of the base"),
        ({"objective": "loss", "grid": {"training.seed": [0, 1]}}, "set either training.steps of the base, or tokens"),
        (LENGTH | {"tokens": 1000, "grid": {"training.seed": [0, 1]}}, "set either training.steps"),
        (
            {"objective": "loss", "tokens": 9, "base": {"data": {"validation_fraction": 0.0}}},
            "objective=loss needs held-out documents",
        ),
        ({"objective": "speed"}, "objective='speed': choose one of throughput, loss, eval_loss/NAME"),
        (LENGTH | {"objective": "eval_loss/code"}, "the held-out documents have no names"),
        (
            {"objective": "eval_loss/cod", "base": {**LENGTH["base"], "data": {"sources": DOMAINS}}},
            "objective=eval_loss/cod: choose one of eval_loss/code, eval_loss/wiki; did you mean 'code'?",
        ),
        (
            {
                "objective": "eval_loss/math",
                "base": {**LENGTH["base"], "data": {"validation": {"wiki": "a", "code": "b"}}},
            },
            "objective=eval_loss/math: choose one of eval_loss/code, eval_loss/wiki",
        ),
        (SCORED | {"objective": "evaluation/acc"}, "choose one of throughput, loss, eval_loss/NAME, evaluation/TASK/M"),
        (LENGTH | {"objective": "evaluation/arc/acc"}, "set evaluation.tasks or evaluation.data of the base"),
        (
            SCORED | {"objective": "evaluation/laws/loss"},
            "objective=evaluation/laws/loss: choose one of evaluation/law/loss; did you mean 'law'?",
        ),
        (
            SCORED | {"objective": "evaluation/law/acc"},
            "objective=evaluation/law/acc: choose one of evaluation/law/loss",
        ),
        (SCORED, "parallel.tp cannot change the law/loss, which ranks the elements"),
        (SCORED | {"grid": {"evaluation.limit": [1, 2]}}, "evaluation.limit cannot change the law/loss"),
        (SCORED | {"grid": {"data.tokenizer": ["a", "b"]}}, "losses on data cannot be compared"),
        (
            {"objective": "evaluation/law/loss", "base": {"evaluation": SCORED["base"]["evaluation"]}},
            "objective=evaluation/law/loss needs the length of training",
        ),
    ],
)
def test_a_grid_that_cannot_change_what_ranks_it_is_refused(mapping, complaint):
    (refused,) = [line for line in refusal(**mapping).split("; grid") if complaint in line]
    assert "\n" not in refused


@pytest.mark.parametrize(
    "grid",
    [
        {"training.learning_rate": [1e-4, 1e-3], "parallel.tp": [2]},
        {"parallel.gradient_compression": ["none", "powersgd"]},
        {"model": ["tiny_llama3_50m", "tiny_llama3_150m"]},
    ],
)
def test_a_grid_that_changes_the_loss_can_be_ranked_by_it(grid):
    assert len(sweep(grid, **LENGTH).elements()) == 2


def test_elements_that_train_on_the_same_tokens_differ_in_steps():
    config = sweep({"training.batch_size": [2, 8]}, objective="loss", tokens=1600, base={"training": {"seq_len": 100}})
    assert [config.config_of(element).training.steps for element in config.elements()] == [8, 2]


def test_an_unknown_key_of_a_grid_is_refused_only_as_unknown():
    told = refusal(**LENGTH | {"grid": {"parallel.tpp": [1, 2]}})
    assert told == "grid: unknown key 'parallel.tpp'; did you mean 'parallel.tp'?"


def test_all_problems_of_a_grid_are_reported_at_once():
    assert refusal(grid={"parallel.tpp": [1], "parallel.pp": ["x"]}).count("grid") == 2


def test_the_base_of_a_file_may_be_another_file_beside_it(tmp_path):
    (tmp_path / "run.yaml").write_text("training: {steps: 7}")
    (tmp_path / "sweep.yaml").write_text("{name: s, base: run.yaml, grid: {parallel.tp: [1]}}")
    assert SweepConfig.load(tmp_path / "sweep.yaml").base.training.steps == 7


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_sweep_loads_and_has_the_name_of_its_file(path):
    config = SweepConfig.load(path)
    assert config.name == path.stem
    assert len([element.config(config.base) for element in config.elements()]) > 1


def test_every_shipped_sweep_has_a_deployment_with_the_same_grid_and_a_schedule():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    deployed = [one for one in deployments if "sweep" in one["parameters"]]
    assert {one["name"]: SweepConfig.from_mapping(one["parameters"]["sweep"]) for one in deployed} == {
        path.stem: SweepConfig.load(path) for path in SWEEPS
    }
    assert all(one["schedules"][0]["cron"] for one in deployed)
