import math

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_record import record

from llama_core.errors import RunDirectoryError
from llama_core.records.activity import Activity, append_activities, read_activities
from llama_core.records.directory import RunDirectory
from llama_core.records.goodput import LABELS, Goodput, TakenStep, read_goodput, split_time
from llama_core.records.metrics import append_metrics, drop_metrics_after, write_metrics_part

times = st.floats(0, 1e6)
activities = st.lists(st.builds(Activity, st.just(""), times, st.sampled_from([*LABELS])), min_size=1, max_size=30)
taken = st.lists(st.builds(TakenStep, times, st.floats(0, 1e4), st.floats(0, 1e4), st.booleans()), max_size=30)


@given(activities, taken)
def test_the_parts_add_up_to_the_wall_time_whatever_the_clocks_say(history, steps):
    """Also with marks out of order, as the clocks of two machines may put them, and steps longer than their time."""
    attempts = split_time(history, steps)
    assert all(seconds >= 0 for parts in attempts for seconds in parts.values())
    assert all(set(parts) == set(LABELS) for parts in attempts)
    instants = [activity.since for activity in history] + [step.ended for step in steps]
    assert Goodput(tuple(attempts)).seconds <= max(instants) - min(instants) + 1e-3


@given(st.lists(st.floats(0.1, 1e3), min_size=4, max_size=4), st.lists(st.booleans(), min_size=1, max_size=9))
def test_every_second_of_an_orderly_run_has_its_part(spans, counts):
    queue, startup, evaluation, between = spans
    marks = [Activity("", 100.0, "queue"), Activity("", 100 + queue)]
    began = 100 + queue + startup
    marks.append(Activity("", began, "steps"))
    steps = [TakenStep(began + 3.0 * (n + 1), 3.0, 1.0, counted) for n, counted in enumerate(counts)]
    ended = began + 3.0 * len(counts) + between
    marks += [Activity("", ended, "evaluation"), Activity("", ended + evaluation, "stopped")]
    (parts,) = split_time(marks, steps)
    progress = sum(counts)
    expected = {
        "queue": queue,
        "startup": startup,
        "steps": 2.0 * progress,
        "data": 1.0 * progress,
        "recomputed": 3.0 * (len(counts) - progress),
        "evaluation": evaluation,
        "other": between,
    }
    assert parts == pytest.approx(dict.fromkeys(LABELS, 0.0) | expected, abs=1e-6)


def test_time_without_a_job_is_stopped_and_a_restarted_job_queues():
    killed = [Activity("", 10.0, "queue"), Activity("", 12.0), Activity("", 15.0, "steps")]
    resumed = [Activity("", 100.0, "queue"), Activity("", 103.0), Activity("", 104.0, "stopped")]
    requeued = [Activity("", 0.0, "queue"), Activity("", 110.0), Activity("", 111.0, "stopped")]
    step = TakenStep(20.0, 5.0, 0.0, counts=True)  # the last sign of life of the first attempt
    first, second, third = split_time([*killed, *resumed, *requeued], [step])
    assert (first["queue"], first["startup"], first["steps"]) == (2, 3, 5)
    assert (second["stopped"], second["queue"], second["startup"]) == (80, 3, 1)
    assert (third["stopped"], third["queue"], third["startup"]) == (0, 6, 1)
    assert sum(sum(parts.values()) for parts in (first, second, third)) == 111 - 10


def test_dropped_steps_count_as_done_again_once_even_if_they_were_moved_twice(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert read_goodput(run) is None
    append_activities(run, Activity("", 0.5), Activity("", 1.0, "steps"))
    with run.activities.open("a") as history:
        history.write('{"doing": "cut sh')
    for step in (1, 2, 3):
        append_metrics(run, record(step, time=1.0 + step, step_seconds=1.0, data_seconds=0.25))
    drop_metrics_after(run, 1)
    run.repeated_steps.write_text(2 * run.repeated_steps.read_text())
    append_metrics(run, record(2, time=5.0, step_seconds=1.0, data_seconds=0.25))
    goodput = read_goodput(run)
    total = {part: seconds for part, seconds in goodput.total.items() if seconds}
    assert total == {"startup": 0.5, "steps": 1.5, "data": 0.5, "recomputed": 2.0}
    assert goodput.share == 1.5 / 4.5
    assert math.fsum(total.values()) == goodput.seconds == goodput.as_dict()["seconds"]
    assert goodput.summary() == (
        "33.3% of 4.5 s was progress; steps done again 44.4%, waiting for data 11.1%, start-up 11.1%"
    )
    assert len(read_activities(run)) == 2


@pytest.mark.parametrize("line", ["[]", "3", '"x"', "{}", '{"doing": 1, "since": "x", "time": []}', "[" * 100_000])
@pytest.mark.parametrize("file", ["activities", "repeated_steps"])
def test_a_whole_line_that_is_no_record_names_its_file(tmp_path, file, line):
    run = RunDirectory(tmp_path / "run")
    run.create()
    append_activities(run, Activity("", 0.5), Activity("", 1.0, "steps"))
    path = getattr(run, file)
    with path.open("a") as history:
        history.write(f"{line}\n")
    with pytest.raises(RunDirectoryError, match=f"{path} is damaged"):
        read_goodput(run)


def test_steps_of_a_file_without_their_times_are_left_out(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    append_activities(run, Activity("", 0.5), Activity("", 1.0, "steps"))
    part = write_metrics_part(run, [record(1, time=2.0, step_seconds=1.0, data_seconds=0.5)])
    pq.write_table(pq.read_table(part).drop_columns(["data_seconds"]), part)
    assert read_goodput(run) is None
