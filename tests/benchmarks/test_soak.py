"""The figures of a soak: slopes against numpy's, and each thing that can be wrong is found."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.soak import KEPT, Cycle, Sizes, Soak, as_markdown, main, problems, slope
from llama_core.units import MIB

SIZES = Sizes(10, 300 * MIB, 200 * MIB, 40, 60 * MIB, 8)
CYCLE = Cycle(0, 10, "SIGTERM", SIZES, KEPT, 1000, 2000, temporary_files=(), processes=0)
KILLED = replace(CYCLE, ended_by="kill -9 of rank 0", checkpoints=KEPT + 1, temporary_files=("a", "b"))
LONG = tuple(replace(SIZES, step=step) for step in range(0, 3000, 100))
CLEAN = Soak("a machine", "2026-11-23T12:00:00+00:00", 60.0, (CYCLE, CYCLE, KILLED) * 4, LONG, 100, 0)


def test_slopes_and_their_errors_are_those_of_numpy():
    x = np.arange(20.0) * 3
    y = 5 + 2 * x + np.random.default_rng(0).normal(size=20)
    (found, _), cov = np.polyfit(x, y, 1, cov=True)
    assert slope(list(x), list(y)) == pytest.approx((found, cov[0, 0] ** 0.5))


def leaking(**growth):
    """Return sizes that grow by so much from each to the next."""
    return [
        replace(SIZES, step=100 * n, **{name: getattr(SIZES, name) + n * by for name, by in growth.items()})
        for n in range(30)
    ]


@pytest.mark.parametrize(
    ("soak", "problem"),
    [
        (CLEAN, None),
        (replace(CLEAN, long=tuple(leaking(rank_bytes=1))), None),  # a byte is no leak
        (replace(CLEAN, long=tuple(leaking(rank_bytes=MIB))), "within an attempt, the resident set of a rank grows"),
        (
            replace(CLEAN, cycles=tuple(replace(CYCLE, sizes=one) for one in leaking(supervisor_handles=1))),
            "from attempt to attempt, the file handles of its supervisor grows",
        ),
        (replace(CLEAN, cycles=(replace(CYCLE, checkpoints=KEPT + 1),)), "3 checkpoints are left after cycle 1"),
        (
            replace(CLEAN, cycles=(CYCLE, replace(CYCLE, temporary_files=("a",)))),
            "1 temporary files are left after cycle 2",
        ),
        (replace(CLEAN, cycles=(replace(KILLED, processes=1),)), "1 processes"),
        (replace(CLEAN, different_steps=1), "1 of 100 steps differ"),
    ],
)
def test_each_leak_is_found(soak, problem):
    found = problems(soak)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_the_table_has_a_row_for_each_figure():
    table = as_markdown(replace(CLEAN, long=tuple(leaking(rank_bytes=MIB))))
    assert "| resident set of a rank, MiB | 300 | 0 ± 0 KiB | 317.5 | 10,240 ± 0 KiB |" in table
    assert "| checkpoints, with keep_checkpoints=2 | 2 | 3 |" in table
    assert "all 100 steps: the same" in table


@pytest.mark.nightly
def test_a_run_that_is_stopped_and_killed_again_and_again_leaks_nothing_and_loses_no_bit(tmp_path):
    assert main(["--out", str(tmp_path), "--cycles", "15", "--long-steps", "1000"]) == 0
