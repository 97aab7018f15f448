import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.sweep.edges import edges, is_geometric

RATE = "training.learning_rate"


def found(key, values, best, *, without_result=()):
    ranked = [{key: best}, *({key: value} for value in values if value != best)]
    every = [*ranked, *({key: value} for value in without_result)]
    return [(edge.end, edge.next) for edge in edges(ranked, every)]


@pytest.mark.parametrize(
    ("values", "smaller", "larger"),
    [
        ([1e-4, 1e-3, 1e-2], 1e-5, 0.1),
        ([1e-4, 3e-4, 1e-3, 3e-3], 3e-5, 0.01),
        ([2e-4, 4e-4, 8e-4], 1e-4, 1.6e-3),
        ([1e-3, 2e-3, 3e-3], 5e-4, 4e-3),
        ([1e-3, 1e-2, 10.0], 1e-4, 10_000.0),
    ],
)
def test_the_next_value_continues_the_grid_in_the_spacing_that_people_write(values, smaller, larger):
    assert found(RATE, values, values[0]) == [("smallest", pytest.approx(smaller))]
    assert found(RATE, values, values[-1]) == [("largest", pytest.approx(larger))]


def test_whole_numbers_stay_whole():
    assert found("training.batch_size", [64, 128, 256], 256) == [("largest", 512)]
    assert found("training.batch_size", [8, 16, 24], 24) == [("largest", 32)]


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6, unique_by=lambda value: f"{value:.3g}").map(sorted))
def test_the_next_value_lies_beyond_the_edge(values):
    for end, following in found(RATE, values, values[0]):
        assert (end, following < values[0]) == ("smallest", True)
    for end, following in found(RATE, values, values[-1]):
        assert (end, following > values[-1]) == ("largest", True)


def test_a_value_inside_the_grid_is_at_no_edge_even_if_those_beyond_it_failed():
    assert found(RATE, [1e-4, 1e-3, 1e-2], 1e-3) == []
    assert found(RATE, [1e-4, 1e-3], 1e-3, without_result=[1e-2]) == []


@pytest.mark.parametrize(
    ("key", "values", "best"),
    [
        ("training.batch_size", [1, 2], 1),  # none is smaller
        ("training.weight_decay", [0.0, 0.1], 0.0),
        ("training.beta1", [0.8, 0.9], 0.9),  # 1 is refused
        ("training.seed", [0, 1, 2], 2),  # no seed is more than another
        ("parallel.compile", [False, True], True),
        ("parallel.recompute", ["none", "full"], "full"),
        (RATE, [1e-3], 1e-3),
        ("training.steps", [10, 20], 20),  # longer training is better
        ("parallel.gpus", [1, 4], 4),
        ("architecture.hidden_size", [64, 128], 128),
    ],
)
def test_there_is_no_advice_where_no_value_lies_beyond(key, values, best):
    assert found(key, values, best) == []


@pytest.mark.parametrize(
    ("values", "geometric"),
    [([1e-4, 1e-3, 1e-2], True), ([4, 8, 16], True), ([1, 2, 3, 4], False), ([0, 1, 10], False), ([1e-3, 0.01], True)],
)
def test_an_axis_is_logarithmic_where_ratios_are_more_even_than_differences(values, geometric):
    assert is_geometric(values) is geometric
