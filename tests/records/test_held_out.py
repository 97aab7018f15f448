import math
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_record import training_summary

from llama_core.records.held_out import MAX_ROWS, HeldOutRows

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
    many = HeldOutRows.of([2.0] * (3 * MAX_ROWS), [1] * (3 * MAX_ROWS))
    assert many == HeldOutRows((6.0,) * MAX_ROWS, (3,) * MAX_ROWS)
    assert math.isnan(HeldOutRows.of([], []).mean)


def test_rows_and_what_holds_them_are_printed_without_their_losses():
    rows = HeldOutRows.of([8.0 + 0.125 * number for number in range(64)], [4] * 64)
    assert repr(rows) == f"<64 held-out rows: {rows.mean:.4f} ± {rows.spread:.4f} over 256>"
    assert repr(HeldOutRows.of([6.0], [4])) == "<1 held-out rows: 1.5000 over 4>"
    summary = training_summary(eval_rows=rows, named_eval_rows={"code": rows}, memory_by_rank_bytes=(7_654_321,) * 128)
    assert len(repr(summary)) < 1000
    assert repr(summary).count("64 held-out rows") == 2
    assert "7654321" not in repr(summary)


@pytest.mark.parametrize(
    ("parts", "weights", "told"),
    [
        (
            {"code": (3.0, 30), "wiki": (2.0, 10)},
            {"code": 0.75, "wiki": 0.25},
            "(code 3.0000 x 75%, wiki 2.0000 x 25%)",
        ),
        ({"one": (2.5, 7)}, {"one": 1.0}, "(one 2.5000 x 100%)"),
        ({"a": (1.0, 50), "b": (2.0, 50), "c": (6.0, 100)}, {"a": 0.25, "b": 0.25, "c": 0.5}, "c 6.0000 x 50%)"),
    ],
)
def test_named_parts_weigh_in_the_whole_loss_as_the_summary_says(parts, weights, told):
    named = {name: HeldOutRows.of([mean * count / 2] * 2, [count / 2] * 2) for name, (mean, count) in parts.items()}
    whole = HeldOutRows.joined(named.values())
    summary = training_summary(eval_loss=whole.mean, eval_tokens=whole.count, eval_rows=whole, named_eval_rows=named)
    assert summary.held_out_weights == weights
    assert summary.eval_loss == pytest.approx(sum(weights[name] * mean for name, (mean, _) in parts.items()))
    assert told in summary.summary()
