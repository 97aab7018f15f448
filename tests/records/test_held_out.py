import math
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.records.held_out import MOST_ROWS, HeldOutRows

losses = st.lists(st.floats(0.0, 100.0), min_size=2, max_size=20)


@given(losses)
def test_rows_of_one_length_have_the_standard_error_of_their_means(of_rows):
    rows = HeldOutRows.of(of_rows, [4] * len(of_rows))
    means = [loss / 4 for loss in of_rows]
    assert rows.mean == pytest.approx(mean(means))
    assert rows.standard_error == pytest.approx(stdev(means) / math.sqrt(len(means)), abs=1e-9)


@given(losses, st.floats(-1.0, 1.0))
def test_what_is_better_by_the_same_on_every_row_is_told_apart_however_much_rows_differ(of_rows, amount):
    rows = HeldOutRows.of(of_rows, [8] * len(of_rows))
    other = HeldOutRows.of([loss + 8 * amount for loss in of_rows], rows.counts)
    difference = other.above(rows)
    assert difference.amount == pytest.approx(amount, abs=1e-9)
    assert difference.standard_error == pytest.approx(0.0, abs=1e-9)


def test_a_small_difference_between_rows_that_vary_is_within_the_spread():
    first = HeldOutRows.of([3.0, 4.0, 3.5, 4.5], [1] * 4)
    swapped = HeldOutRows.of([4.0, 3.1, 4.5, 3.5], [1] * 4)
    assert swapped.above(first).is_told_apart is False
    assert HeldOutRows.of([13.0, 14.0, 13.5, 14.6], [1] * 4).above(first).is_told_apart is True


def test_other_rows_are_compared_by_the_errors_of_both():
    first = HeldOutRows.of([3.0, 4.0, 3.5], [1, 1, 1])
    longer = HeldOutRows.of([7.0, 8.0, 6.0, 7.0], [2, 2, 2, 2])
    assert longer.above(first).standard_error == pytest.approx(math.hypot(first.standard_error, longer.standard_error))


def test_a_single_row_tells_nothing_apart():
    one = HeldOutRows.of([3.0], [4])
    assert one.standard_error is None
    assert HeldOutRows.of([30.0], [4]).above(one).is_told_apart is None


def test_rows_in_which_nothing_counts_are_left_out_and_very_many_are_added_up():
    assert HeldOutRows.of([3.0, 0.0, 5.0], [2, 0, 2]) == HeldOutRows((3.0, 5.0), (2, 2))
    many = HeldOutRows.of([2.0] * (3 * MOST_ROWS), [1] * (3 * MOST_ROWS))
    assert many == HeldOutRows((6.0,) * MOST_ROWS, (3,) * MOST_ROWS)
    assert math.isnan(HeldOutRows.of([], []).mean)
