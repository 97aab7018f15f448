"""A rank is named when it is far above the others, and noise names nobody."""

import random
from statistics import NormalDist, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.preflight.outliers import FALSE_ALARM, SIGMA_OF_MAD, deviations, outliers

SHARE = 0.2
times = st.lists(st.floats(1e-4, 1e3), min_size=0, max_size=12)


def above_all_others(values, share, least):
    """The definition, value by value."""
    found = {}
    for place, value in enumerate(values):
        others = values[:place] + values[place + 1 :]
        if not others:
            continue
        usual = median(others)
        sigma = SIGMA_OF_MAD * median(abs(other - usual) for other in others)
        if value > usual + max(deviations(len(values)) * sigma, share * usual, least):
            found[place] = usual
    return found


@given(values=times, share=st.floats(0, 3), least=st.floats(0, 10))
def test_outliers_are_those_of_the_definition(values, share, least):
    assert outliers(values, share=share, least=least) == above_all_others(values, share, least)


class Counted(float):
    """A value that counts what is done with it."""

    operations = 0

    def __lt__(self, other):
        Counted.operations += 1
        return float(self) < float(other)

    def __sub__(self, other):
        Counted.operations += 1
        return float(self) - float(other)


def operations_where_half_are_slow(num_ranks):
    drawn = random.Random(0)
    values = [Counted(1 + rank % 2 + 0.01 * drawn.random()) for rank in range(num_ranks)]
    Counted.operations = 0
    outliers(values, share=SHARE)
    return Counted.operations


def test_many_slow_ranks_cost_little_more_for_each():
    """A job whose second half has slower GPUs would otherwise wait for seconds at every look."""
    assert operations_where_half_are_slow(2048) < 8 * 1.5 * operations_where_half_are_slow(256)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_one_slow_rank_among_others_is_named_with_their_median(num_ranks):
    values = [1.0 + 0.001 * place for place in range(num_ranks)]
    values[1] = 2.0
    assert outliers(values, share=SHARE) == {1: pytest.approx(median(values[:1] + values[2:]))}


def test_all_ranks_of_a_slow_node_of_two_are_named_and_none_of_the_other():
    assert list(outliers([1.0] * 8 + [2.0] * 8, share=SHARE)) == list(range(8, 16))


@pytest.mark.parametrize("num_values", [2, 8, 64, 1024, 8192])
def test_normal_noise_makes_an_outlier_of_any_value_as_rarely_among_many_as_among_few(num_values):
    none_exceeds = NormalDist().cdf(deviations(num_values)) ** num_values
    assert 1 - none_exceeds == pytest.approx(FALSE_ALARM, rel=1e-3)


def test_noise_of_thousands_of_ranks_names_none():
    draw = random.Random(0)
    for _ in range(20):
        assert not outliers([draw.gauss(1.0, 0.05) for _ in range(2000)], share=SHARE)


def test_a_difference_below_the_floors_names_none():
    assert not outliers([1.0, 1.0, 1.0, 1.15], share=SHARE)
    assert not outliers([0.01, 0.01, 0.01, 0.9], share=SHARE, least=1.0)
    assert list(outliers([0.01, 0.01, 0.01, 1.1], share=SHARE, least=1.0)) == [3]


def test_a_single_value_has_no_others():
    assert outliers([1.0], share=SHARE) == outliers([], share=SHARE) == {}
