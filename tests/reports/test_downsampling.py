"""A long series is drawn with fewer points, but with every spike."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import step_record, table, write_run

from training_reports import by_step
from training_reports.downsampling import MAX_POINTS, buckets, kept
from training_reports.page import write_report

MOST = 24
COLUMNS = st.integers(1, 3).flatmap(
    lambda number: st.lists(st.tuples(*[st.floats(width=32)] * number), min_size=1, max_size=150)
)


def finite(values):
    return values[np.isfinite(values)]


@given(COLUMNS)
def test_the_kept_points_have_the_extremes_of_every_series_and_of_every_bucket(rows):
    series = [pd.Series(column, dtype=float) for column in zip(*rows, strict=True)]
    drawn = kept(*series, most_points=MOST)
    assert sorted(set(drawn)) == list(drawn)
    assert {0, len(rows) - 1} <= set(drawn)
    if len(rows) <= MOST:
        assert len(drawn) == len(rows)
        return
    assert len(drawn) <= MOST
    per_bucket = sum(2 if np.isfinite(column).all() else 3 for column in series)
    parts = [(0, len(rows)), *buckets(len(rows), MOST, per_bucket)]
    for column in series:
        for begin, end in parts:
            whole, inside = column[begin:end], column.iloc[drawn[(drawn >= begin) & (drawn < end)]]
            assert np.isfinite(whole).all() == np.isfinite(inside).all()  # a gap stays a gap
            if finite(whole).size:
                assert (finite(inside).min(), finite(inside).max()) == (finite(whole).min(), finite(whole).max())


@given(st.integers(1, 10**6), st.integers(3, 1000), st.integers(1, 20))
def test_buckets_divide_a_series(length, most_points, points_per_bucket):
    parts = list(buckets(length, most_points, points_per_bucket))
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == length


SPIKE = 7_777
SPIKES = {"loss": 99.0, "step_seconds": 500.0, "data_seconds": 499.0, "memory_peak_bytes": 2**40, "grad_norm": 1e6}


@pytest.mark.nightly
def test_a_page_of_ten_thousand_steps_is_small_and_shows_every_spike(tmp_path):
    records = [step_record(step, **(SPIKES if step == SPIKE else {})) for step in range(1, 10_001)]
    run = write_run(tmp_path / "long", records=records)
    assert write_report(run).stat().st_size < 5_000_000
    steps = table(records)
    drawn = {
        "training": (by_step.loss(steps), 99.0),
        "gradient norm": (by_step.learning_rate_and_gradient_norm(steps), 1e6),
        "waiting for data": (by_step.step_time(steps), 499.0),
        "peak so far": (by_step.memory_by_step(steps), 1024.0),
    }
    for name, (figure, spike) in drawn.items():
        lines = {line.name: dict(zip(line.x, line.y, strict=True)) for line in figure.data}
        assert lines[name][SPIKE] == spike
        assert all(len(line.x) <= MAX_POINTS for line in figure.data)
