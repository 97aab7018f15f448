"""Times between two measured sizes: exact for a power law, and never invented."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.measured_rates import Measured, MeasuredRates

AXES = ((64, 512, 4096), (128, 2048))


def power_law(rows, columns):
    return 1e-9 * rows * columns**0.5


GRID = Measured(axes=AXES, grid=tuple(power_law(*point) for point in itertools.product(*AXES)), growth=(1, 0.5))


@given(rows=st.integers(64, 10**6), columns=st.integers(128, 10**6))
def test_a_power_law_is_exact_between_the_points_of_a_grid_and_above_it(rows, columns):
    assert GRID.seconds((rows, columns)) == pytest.approx(power_law(rows, columns))


def test_below_a_grid_an_operation_takes_as_long_as_the_smallest():
    assert GRID.seconds((1, 1)) == pytest.approx(power_law(64, 128))


def test_a_size_with_one_value_scales_both_ways():
    one = Measured(axes=((8,),), grid=(4.0,), growth=(2,))
    assert one.seconds((4,)) == pytest.approx(1.0)
    assert one.seconds((16,)) == pytest.approx(16.0)


def test_what_was_measured_by_itself_counts_first_and_what_was_not_is_unknown():
    assert GRID.with_points({(512, 128): 7.0}).seconds((512, 128)) == 7.0
    assert Measured({(5,): 1.0}).seconds((6,)) is None
    assert MeasuredRates({}).seconds("linear bf16 forward", (1, 1, 1)) is None


def test_measurements_are_read_as_they_were_written():
    measured = GRID.with_points({(3, 5): 0.25})
    assert Measured.from_dict(measured.as_dict()) == measured


@pytest.mark.parametrize(
    "broken",
    [{"grid": [1.0]}, {"grid": [-1.0] * 6}, {"axes": [[512, 64, 4096], [128, 2048]]}, {"points": {"3xa": 1.0}}],
)
def test_a_record_that_is_none_is_refused(broken):
    with pytest.raises(ValueError, match=r"."):
        Measured.from_dict(GRID.as_dict() | broken)
