from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.naming import element_names, values_in_words

VALUES = {
    "model": st.sampled_from(["./small", "./large", "/models/large", "llama3_8b"]),
    "training.learning_rate": st.floats(1e-6, 10) | st.integers(1, 10),
    "parallel.compile": st.booleans(),
    "parallel.microbatch_size": st.none() | st.integers(1, 64),
    "data.source": st.text(),
}


def names(grid, **settings):
    elements = SweepConfig.from_mapping({"name": "sweep", "grid": grid} | settings).elements()
    return list(element_names(elements).shown.values())


def elements(*settings):
    return [SimpleNamespace(name=f"folder-{place}", settings=own) for place, own in enumerate(settings)]


@given(st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=6))
def test_names_are_unique_whatever_the_values(settings):
    named = element_names(elements(*settings))
    assert len(set(named.shown.values())) == len(settings)
    assert "" not in named.shown.values()


def test_elements_are_named_as_a_person_would():
    rates = {"training.learning_rate": [1e-5, 0.01, 10.0]}
    settings = [
        {"model": model, "training.learning_rate": rate, "training.batch_size": 8}
        for model in ("./large", "./small")
        for rate in rates["training.learning_rate"]
    ]
    named = element_names(elements(*settings))
    assert list(named.shown.values())[:4] == [
        "large, learning rate 1e-5",
        "large, learning rate 0.01",
        "large, learning rate 10",
        "small, learning rate 1e-5",
    ]
    assert named.shared == ("batch size 8",)
    assert names({"parallel.compile": [True, False], "parallel.microbatch_size": [None]}) == [
        "compile on",
        "compile off",
    ]


def test_a_name_keeps_what_tells_two_keys_or_two_paths_apart():
    grid = {"training.warmup_steps": [1, 2], "benchmark.warmup_steps": [3]}
    both = element_names(elements({key: values[0] for key, values in grid.items()}))
    assert both["folder-0"] == "training warmup steps 1, benchmark warmup steps 3"
    assert values_in_words(["/a/large", "/b/large", "/b/small/", "tiny"]) == ["a/large", "b/large", "small", "tiny"]


@pytest.mark.parametrize("again", [1, 2])
def test_an_element_that_runs_again_has_a_number(again):
    include = [{"parallel.tp": 2}] * again
    numbered = [f"tp 2, run {number}" for number in range(2, 2 + again)]
    assert names({"parallel.tp": [1, 2]}, include=include) == ["tp 1", "tp 2", *numbered]
    assert names({"parallel.tp": [2]}, include=include) == ["tp 2", *numbered]


def test_names_that_read_the_same_are_those_of_the_folders():
    named = element_names(elements({"data.source": "a, seed 1"}, {"data.source": "b", "training.seed": 1}))
    assert len(set(named.shown.values())) == 2
    equal = elements({"training.learning_rate": 1}, {"training.learning_rate": 1.0})
    assert list(element_names(equal).shown.values()) == ["folder-0", "folder-1"]
