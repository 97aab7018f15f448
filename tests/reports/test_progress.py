"""How far a run at work has come, and the table of what has happened to it."""

from dataclasses import replace

import pandas as pd
import pytest
from synthetic_run import step_record, write_run
from test_page import Page

from llama_core.launch.attempts import Attempt, attempt_path
from llama_core.records.activity import Activity, append_activities, record_activity
from llama_core.records.files import read_typed, write_json
from llama_core.records.job import JobRecord
from llama_core.records.preflight import NamedRank, PreflightRecord, append_preflight
from llama_core.records.rollbacks import Rollback, write_rollbacks
from llama_core.records.stragglers import Straggler, append_stragglers
from training_reports.contents import RunContents
from training_reports.events import MAX_EVENTS, events_table
from training_reports.layout import moment
from training_reports.page import write_report
from training_reports.progress import PACE_STEPS, progress_of, seconds_per_step

BEGIN = 1_795_000_000.0


def steps(*times):
    return pd.DataFrame({"step": range(1, len(times) + 1), "time": times})


@pytest.mark.parametrize(
    ("times", "since", "pace"),
    [
        ((), 0.0, None),
        ((10.0,), 0.0, None),
        ((10.0, 12.0, 14.0), 0.0, 2.0),
        ((10.0, 12.0, 20.0), 0.0, 5.0),  # an evaluation between them counts
        ((10.0, 12.0, 500.0, 503.0), 400.0, 3.0),  # the time between attempts does not
        ((10.0, 9.0), 0.0, None),  # a clock was set back
        ((*range(1000), *(1000.0 + 4 * step for step in range(PACE_STEPS))), 0.0, 4.0),
    ],
)
def test_the_pace_is_the_wall_time_of_the_newest_steps_of_this_attempt(times, since, pace):
    assert seconds_per_step(steps(*times), since) == (None if pace is None else pytest.approx(pace, rel=0.05))


@pytest.fixture
def at_work(tmp_path):
    """A run at step 12 of 40, with 10 s per step, in an attempt that began after step 8."""
    records = [step_record(step, time=BEGIN + 10 * step + 5000 * (step > 8)) for step in range(1, 13)]
    records[9] = replace(records[9], eval_loss=2.5)
    run = write_run(tmp_path / "mine", records=records)
    run.outcome.unlink()
    write_json(run.heartbeat, records[-1])
    job = read_typed(run.job, JobRecord)
    write_json(attempt_path(run), Attempt(job.job_id, job.submitted_at, 1, "", moment(BEGIN + 5000)))
    return run


def test_progress_tells_the_time_left_at_the_pace_of_its_attempt(at_work):
    record_activity(at_work, "saving a checkpoint", "checkpoints")
    shown = progress_of(at_work, RunContents.read(at_work))
    assert shown.share == 12 / 40
    end = moment(BEGIN + 5000 + 400)
    assert shown.lines[1].startswith(f"About 4 min 40 s left, until {end}, at 10 s per step")
    assert any(line.startswith("Saving a checkpoint, since 20") for line in shown.lines)


def test_the_page_of_a_run_at_work_shows_its_progress_and_asks_for_nothing(at_work):
    text = Page(write_report(at_work, job="running")).text
    assert "Progress Step 12 of 40 at" in text
    assert "If no job is running any more" not in text
    assert "Progress" not in Page(write_report(at_work)).text


def test_events_are_told_newest_first_with_their_steps(at_work):
    append_activities(at_work, Activity("starting", BEGIN), Activity("starting", BEGIN + 5000))
    write_rollbacks(at_work, [Rollback(6, 9, "loss 9.1 after 2.4", {}, BEGIN + 5095)])
    slow = NamedRank(3, "node7", "H100", ("takes 2.0 s where its peers take 1.0 s",), slows_training=True)
    append_preflight(at_work, PreflightRecord(moment(BEGIN + 1), 2.0, (), (slow,)))
    behind = Straggler(2, "node7", "H100", "product", "a product of matrices takes 3 ms, and 1 ms on its peers", 7, 9)
    append_stragglers(at_work, [behind])
    rows, left_out = events_table(at_work, RunContents.read(at_work))
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    told = {row[2]: row[1] for row in rows}
    assert told["went back to the checkpoint of step 6: loss 9.1 after 2.4"] == 9
    assert told["before the first step: rank 3 on node7 (H100): takes 2.0 s where its peers take 1.0 s"] is None
    assert told["attempt 2 started"] is None
    assert told[str(behind)] == 9
    assert any(step == 10 and what.startswith("held-out loss ") for what, step in told.items())
    assert left_out == ""


def test_events_too_many_for_the_table_are_counted(tmp_path):
    records = [replace(step_record(step), spike=True, eval_loss=None) for step in range(1, MAX_EVENTS + 4)]
    run = write_run(tmp_path / "mine", records=records)
    (run.checkpoints / "step-00000020").rmdir()
    rows, left_out = events_table(run, RunContents.read(run))
    assert len(rows) == MAX_EVENTS
    assert rows[0][1] == MAX_EVENTS + 3
    assert left_out == "3 earlier ones are left out."
