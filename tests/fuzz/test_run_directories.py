"""Files of a run directory that were cut short, edited or replaced."""

import json
import shutil
from functools import partial

import pytest
from malformed import cases, damaged, damaged_json, keep_the_law, naming, write
from synthetic_run import step_record, write_run

from llama_core.chain import steps
from llama_core.chain.announcements import say_data
from llama_core.config.run import RunConfig
from llama_core.launch.attempts import attempt_path, current_attempt, is_cancellation_requested, read_rank_exits
from llama_core.launch.jobs.submission import attach
from llama_core.launch.logs import LogFollower
from llama_core.launch.outcome import conclude, concluded, read_outcome
from llama_core.records.activity import Activity, append_activities, read_activities, read_activity
from llama_core.records.checkpoints import STATE, newest_step, write_manifest
from llama_core.records.files import read_json, write_json
from llama_core.records.goodput import read_goodput
from llama_core.records.job import JobRecord
from llama_core.records.metrics import append_metrics, drop_metrics_after, read_heartbeat, read_metrics
from llama_core.records.profiles import ProfileRecord, read_profiles, write_profile
from llama_core.records.rollbacks import Rollback, read_rollbacks, write_rollbacks
from llama_core.records.timelines import LaneRecord, read_lanes, write_lane
from llama_core.runs.checkpoints import find_checkpoint
from llama_core.runs.continuing import existing_run, is_finished, resume_point
from llama_core.runs.loading import load_config, load_plan
from llama_core.sweep.directory import SweepDirectory, unfinished
from llama_core.sweep.judgement import Judgement
from training_reports.page import write_report
from training_reports.run_comparison import compare_runs

JOB = JobRecord("local", "999999999", "login1", "2026-11-21T09:50:00+00:00")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a file of every kind."""
    run = write_run(tmp_path_factory.mktemp("whole") / "mine")
    attempt = {"job_id": JOB.job_id, "submitted_at": JOB.submitted_at, "restart": 0}
    write_json(attempt_path(run), attempt | {"nodes": "", "started_at": JOB.submitted_at})
    write_json(run.logs / "cancel.json", {"job_id": "1", "submitted_at": "x", "requested_at": "y"})
    exits = {"exit_code": 1, "signal": None, "oom_killed": False, "stopped": False, "num_ranks": 1, "ended_at": 1.0}
    write_json(run.logs / "exits" / f"{JOB.job_id}-0" / "rank-00000.json", {"rank": 0} | exits)
    write_json(run.activity, {"doing": "building the model", "since": 1.0})
    run.trace.mkdir()
    write_profile(run, ProfileRecord(0, {"matmul": 1.0}))
    checkpoint = run.checkpoints / "step-00000020"
    (checkpoint / "weights").write_bytes(b"x")
    write_json(checkpoint / STATE, {"step": 20, "loss": 2.5, "tokens": 20 * 16_384})
    write_manifest(checkpoint, {})
    outcome = read_json(run.outcome)
    ended = {"status": "finished", "reason": "", "requeued": False, "excluded": [], "first_step": 1}
    ended |= {"last_step": 40}
    outcome["attempts"] = [attempt | ended | {"started_at": None, "ended_at": JOB.submitted_at}]
    write_json(run.outcome, outcome)
    write_json(run.job, JOB)
    write_json(run.choice, {"reasons": {"tp": "one rank"}, "step": {"step_seconds": 1.0, "tp_seconds": 0.1}})
    write_rollbacks(run, [Rollback(10, 12, "loss 9", {"position": 4}, 1.0)])
    for step in (41, 42):
        append_metrics(run, step_record(step))
    drop_metrics_after(run, 41)
    append_activities(run, Activity("", 1.0, "queue"), Activity("", 2.0), Activity("", 3.0, "steps"))
    write_lane(run, 0, LaneRecord(("0F0", "0B0"), (0.0, 1.0), (1.0, 3.0)))
    append_metrics(run, step_record(42))
    return run


def readers(run):
    """Everything that commands do with a run, except starting its job."""
    config = RunConfig()
    return [
        partial(load_config, run), partial(load_plan, run), partial(read_heartbeat, run), partial(read_activity, run),
        partial(read_metrics, run), partial(read_outcome, run), partial(is_finished, run), partial(resume_point, run),
        partial(newest_step, run), partial(find_checkpoint, run, None), partial(read_profiles, run),
        partial(steps.records, run), partial(steps.reasons, run), partial(steps.read_estimate, run),
        partial(steps.read_benchmark, run), partial(steps.training_summary, run), partial(say_data, run),
        partial(current_attempt, run, JOB), partial(is_cancellation_requested, run, JOB),
        partial(read_rank_exits, run, JOB, 0), partial(concluded, run, JOB), partial(conclude, run, JOB),
        partial(attach, run), partial(existing_run, config, run.path, resume=True),
        lambda: list(LogFollower(run, last_lines=None).new_lines()),
        partial(read_goodput, run), partial(read_activities, run), partial(read_lanes, run, 1),
        partial(drop_metrics_after, run, 30), partial(read_rollbacks, run),
    ]  # fmt: skip


def one_damaged(rng, whole, run):
    """Copy ``whole`` to ``run``, with a file damaged."""
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.copytree(whole.path, run.path)
    files = sorted(path for path in run.path.rglob("*") if path.is_file())
    path = rng.choice(files)
    content = path.read_bytes()
    path.unlink()
    if rng.random() < 0.05:
        write(path, None)
    elif path.suffix == ".json":
        write(path, damaged_json(rng, json.loads(content)))
    elif path.suffix == ".jsonl" and rng.random() < 0.6:
        *others, last = content.splitlines(keepends=True)
        write(path, b"".join(others) + damaged_json(rng, json.loads(last)) + b"\n")
    else:
        write(path, damaged(rng, content))
    return path


def test_damaged_files_are_named_by_every_reader(whole, tmp_path):
    run = type(whole)(tmp_path / "mine")
    for number, rng in cases("run directory", share=0.6):
        path = one_damaged(rng, whole, run)
        with naming(number):
            keep_the_law(readers(run), run.path, names=[path.name, run.path.name])


def test_damaged_files_leave_a_page(whole, tmp_path):
    run = type(whole)(tmp_path / "mine")
    for number, rng in cases("page", share=0.1):
        one_damaged(rng, whole, run)
        with naming(number):
            run.report.unlink(missing_ok=True)
            keep_the_law([partial(write_report, run), partial(compare_runs, [run.path, whole.path])], run.path)
            assert run.report.exists()


def test_damaged_sweeps_are_named(tmp_path):
    sweep = SweepDirectory(tmp_path / "sweep")
    record = {
        "schema_version": 1,
        "config": {"name": "x", "grid": {"parallel.tp": [1, 2]}},
        "elements": [{"name": "tp=1", "settings": {"parallel.tp": 1}, "skipped": ""}],
    }
    compared = {"element": "tp=1", "verdict": "first", "tokens_per_second": 1.0, "memory_peak_bytes": 1, "earlier": []}
    compared |= dict.fromkeys(("expected", "noise", "p_value", "earlier_memory_bytes")) | {"notes": []}
    judgement = {"schema_version": 1, "folder": "x", "part": "part-1.parquet", "since": "", "changes": []}
    for number, rng in cases("sweep"):
        write(sweep.record, damaged_json(rng, record))
        write(sweep.history, damaged_json(rng, judgement | {"elements": [compared]}))
        with naming(number):
            keep_the_law([lambda: list(unfinished(sweep)), partial(Judgement.read, sweep.history)], sweep.path)
