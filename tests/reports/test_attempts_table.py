"""The table of attempts accounts for all of a run's time."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import ATTEMPT, FAILED, step_record, table, write_run

from training_reports.attempts import attempts_table, time_spent
from training_reports.contents import RunContents

START = 1_795_000_000.0


def at(seconds):
    return datetime.fromtimestamp(START + seconds, UTC).isoformat()


def attempt(asked, start, end, first, last, status="preempted"):
    times = {"submitted_at": at(asked), "started_at": at(start), "ended_at": at(end)}
    return ATTEMPT | times | {"job_id": "7", "status": status, "first_step": first, "last_step": last}


def steps_at(*ends):
    """Return steps of one second that end at these times."""
    return [step_record(step, time=START + end, step_seconds=1.0) for step, end in enumerate(ends, 1)]


INTERRUPTED = (
    attempt(0, 10, 30, 1, 5),  # its steps 4 and 5 came after the checkpoint
    attempt(0, 40, 45, None, None),
    attempt(0, 60, 80, 4, 6, "finished"),
)
STEPS = steps_at(16, 18, 20, 66, 68, 70)


def test_each_part_of_every_attempt_is_timed():
    parts = [
        (own.waited, own.starting, own.in_steps, own.after, own.repeated)
        for own in time_spent(INTERRUPTED, table(STEPS))
    ]
    assert parts == [(10, 5, 5, 10, 2), (10, 5, 0, 0, 0), (15, 5, 5, 10, 0)]


def test_the_lost_time_is_that_between_the_steps_that_count(tmp_path):
    run = write_run(tmp_path / "run", outcome=replace(FAILED, attempts=INTERRUPTED), records=STEPS)
    rows, lost = attempts_table(RunContents.read(run))
    assert [row[5] for row in rows] == ["1 to 5 (2 repeated later)", None, "4 to 6"]
    assert lost == (
        "Lost to interruptions: 45.0 s (25.0 s waiting to start again, 10.0 s starting again, 10.0 s after the last "
        "step that counts in each earlier attempt); steps taken twice: 2."
    )
    begun_again = 66 - 1 - 20  # between the end of step 3 and the begin of step 4
    assert begun_again == 45


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=6))
def test_the_parts_of_all_attempts_add_up_to_the_time_from_submission_to_end(drawn):
    now, attempts, records = 0, [], []
    for wait, starting, num_steps in drawn:
        start = now + wait
        ends = [start + starting + 1 + n for n in range(num_steps)]
        first = len(records) + 1 if num_steps else None
        records += [step_record(len(records) + n, time=START + end, step_seconds=1.0) for n, end in enumerate(ends, 1)]
        now = (ends[-1] if ends else start + starting) + wait
        attempts.append(attempt(0, start, now, first, len(records) if num_steps else None))
    spent = list(time_spent(attempts, table(records or [step_record(1)]).iloc[: len(records)]))
    parts = sum(own.waited + own.starting + own.in_steps + own.after for own in spent)
    assert parts == pytest.approx(now)
    assert sum(own.in_steps for own in spent) == pytest.approx(len(records))


def test_unknown_times_are_left_out_and_the_loss_is_a_lower_bound(tmp_path):
    old = tuple({**one, "started_at": None} for one in INTERRUPTED)
    run = write_run(tmp_path / "run", outcome=replace(FAILED, attempts=old), records=STEPS)
    rows, lost = attempts_table(RunContents.read(run))
    assert [row[6:8] for row in rows] == [(None, None)] * 3
    assert lost.startswith("Lost to interruptions: at least 10.0 s")
