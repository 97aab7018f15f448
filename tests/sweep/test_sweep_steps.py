import fcntl
import os
import re
import shutil
import subprocess
import sys

import pytest
from step_record import record as step_record
from step_record import training_summary

from llama_core.errors import (
    ConfigError,
    EnvironmentMismatchError,
    RunDirectoryError,
    StoppedError,
    TrainingFailedError,
)
from llama_core.records.files import read_json, write_json
from llama_core.records.held_out import HeldOutRows
from llama_core.records.job import Outcome
from llama_core.records.measurements import BenchmarkRecord
from llama_core.records.metrics import write_metrics_part
from llama_core.runs.loading import load_config
from llama_core.sweep import steps as sweeps
from llama_core.sweep.chain import SweepSteps, run_sweep
from llama_core.sweep.directory import SweepDirectory, is_timed, read_record, unfinished
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.lock import unlock

CHANCE = ", within the spread of the held-out rows: their order may be chance"
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 512}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))


def config(grid=None, *, launch=None, objective="throughput", **training):
    base = {
        "architecture": TINY,
        "training": {"seq_len": 16, "batch_size": 4, "steps": 2} | training,
        "launch": {"device": "cpu"} | (launch or {}),
    }
    return SweepConfig.from_mapping(
        {
            "name": "tiny",
            "base": base,
            "grid": grid or {"parallel.microbatch_size": [1, 2, 3]},
            "objective": objective,
        }
    )


def end(run, status="finished"):
    write_json(run.outcome, Outcome(status, "it did", 0, "", "2026-11-21T10:00:00+00:00"))
    if status == "finished":
        write_json(run.benchmark, {})


def test_every_possible_element_is_an_ordinary_run():
    sweep = sweeps.prepare(config())
    runs = list(unfinished(sweep))
    assert [run.name for run in runs] == ["microbatch_size=1", "microbatch_size=2"]
    assert [read_json(run.plan)["microbatch_size"] for run in runs] == [1, 2]
    assert all(run.estimate.exists() for run in runs)


def test_an_impossible_element_is_skipped_with_the_reason_and_leaves_nothing():
    sweep = sweeps.prepare(config())
    skipped = [element for element in read_record(sweep).elements if element.skipped]
    assert [element.name for element in skipped] == ["microbatch_size=3"]
    assert "training.batch_size=4 is not a multiple of 3" in skipped[0].skipped
    assert not sweep.run("microbatch_size=3").path.exists()


def test_an_element_that_does_not_fit_is_skipped_with_the_arithmetic():
    sweep = sweeps.prepare(config({"architecture.hidden_size": [64, 2**20]}))
    reasons = [element.skipped for element in read_record(sweep).elements]
    assert reasons[0] == ""
    assert "per device" in reasons[1]


def test_a_sweep_without_a_possible_element_is_refused_with_every_reason():
    with pytest.raises(ConfigError) as refused:
        sweeps.prepare(config({"parallel.microbatch_size": [3, 5]}))
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["microbatch size 3", "microbatch size 5"]


def test_each_sweep_has_its_own_directory():
    first, second = sweeps.prepare(config()), sweeps.prepare(config())
    assert second.name == f"{first.name}-2"


def test_resume_takes_the_newest_unfinished_sweep():
    first, second = sweeps.prepare(config()), sweeps.prepare(config())
    for run in list(unfinished(second)):
        end(run)
    assert sweeps.prepare(config(), resume=True) == first
    sweeps.prepare(config(seq_len=32))
    assert sweeps.prepare(config(), resume=True) == first


def test_a_directory_is_reused_only_to_resume_its_sweep(tmp_path):
    sweeps.prepare(config(), tmp_path / "sweep")
    with pytest.raises(RunDirectoryError, match="add --resume"):
        sweeps.prepare(config(), tmp_path / "sweep")
    with pytest.raises(RunDirectoryError, match="another base"):
        sweeps.prepare(config(seq_len=32), tmp_path / "sweep", resume=True)
    with pytest.raises(RunDirectoryError, match="other grid keys"):
        sweeps.prepare(config({"training.seq_len": [8]}), tmp_path / "sweep", resume=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("")
    with pytest.raises(RunDirectoryError, match="not a sweep"):
        sweeps.prepare(config(), tmp_path / "notes", resume=True)


def test_two_processes_on_one_sweep_and_the_second_is_refused(tmp_path):
    sweep = sweeps.prepare(config(), tmp_path / "sweep")
    again = (sys.executable, "-m", "training_infra.cli", "sweep", "--resume", "--sweep-dir", str(sweep.path))
    second = subprocess.run(again, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"{sweep.path}: process {os.getpid()} on " in second.stderr
    assert second.stderr.count("\n") == 1
    assert not sweep.report.exists()


def test_a_sweep_belongs_to_nobody_after_it_was_refused_or_has_run(tmp_path):
    def is_free():
        with (tmp_path / "sweep" / "sweep.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    (tmp_path / "sweep").mkdir()
    with pytest.raises(ConfigError):
        sweeps.prepare(config({"parallel.microbatch_size": [3]}), tmp_path / "sweep")
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1]}), tmp_path / "sweep")
    assert not is_free()
    nothing = SweepSteps(*[lambda *_: None] * 5, report=lambda sweep: sweep.report)
    run_sweep(sweep, nothing)
    assert is_free()


def test_a_resumed_sweep_may_have_more_values_and_another_time_limit(tmp_path):
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1]}), tmp_path / "sweep")
    end(sweep.run("microbatch_size=1"))
    patient = config({"parallel.microbatch_size": [1, 2]}, launch={"slurm": {"time_limit_min": 90}})
    sweeps.prepare(patient, sweep.path, resume=True)
    assert [run.name for run in unfinished(sweep)] == ["microbatch_size=2"]


@pytest.mark.parametrize("status", ["oom", "crashed", "cancelled"])
def test_an_element_that_failed_is_not_finished(status):
    run = sweeps.prepare(config()).run("microbatch_size=1")
    end(run)
    assert is_timed(run)
    end(run, status)
    assert not is_timed(run)


def test_an_element_that_was_only_timed_is_not_finished_in_a_sweep_that_ranks_losses():
    sweep = sweeps.prepare(config({"training.seed": [0, 1]}, objective="loss"))
    timed, trained = (sweep.run(f"seed={seed}") for seed in (0, 1))
    end(timed)
    end(trained)
    write_json(trained.training, {})
    assert [run.name for run in unfinished(sweep)] == [timed.name]


def test_a_sweep_is_resumed_with_its_own_objective(tmp_path):
    grid = {"training.batch_size": [4, 8]}
    sweeps.prepare(config(grid), tmp_path / "sweep")
    with pytest.raises(RunDirectoryError, match="another base, objective"):
        sweeps.prepare(config(grid, objective="loss"), tmp_path / "sweep", resume=True)


def rehearsed(sweep, capsys):
    """Rehearse, and return the element and the first word of each printed line."""
    capsys.readouterr()
    sweeps.rehearse(sweep)
    lines = capsys.readouterr().out.splitlines()
    return [re.fullmatch(r"dry-run +([^:]+): (\w+).*", line).groups() for line in lines]


def test_rehearsal_counts_the_bytes_of_every_element_once(capsys):
    sweep = sweeps.prepare(config())
    assert rehearsed(sweep, capsys) == [("microbatch size 1", "peak"), ("microbatch size 2", "peak")]
    assert all(run.dry_run.exists() for run in unfinished(sweep))
    assert rehearsed(sweep, capsys) == []


def test_an_element_rehearsed_not_to_fit_is_skipped_and_rehearsed_again_on_resume(capsys):
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1, 2]}))
    run = sweep.run("microbatch_size=1")
    run.config.write_text(load_config(run).with_overrides("architecture.hidden_size=1073741824").to_yaml())
    assert rehearsed(sweep, capsys)[0] == ("microbatch size 1", "skipped")
    assert [run.name for run in unfinished(sweep)] == ["microbatch_size=2"]
    sweeps.prepare(read_record(sweep).sweep_config, sweep.path, resume=True)
    assert [name for name, _ in rehearsed(sweep, capsys)] == ["microbatch size 1"]


def test_a_machine_without_slurm_is_refused_before_anything_is_submitted(monkeypatch):
    monkeypatch.setenv("PATH", "")
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1, 2]}, launch={"launcher": "slurm"}))
    with pytest.raises(EnvironmentMismatchError, match="slurm"):
        sweeps.validate(sweep)


@pytest.mark.parametrize(
    ("seconds", "waiting", "ahead"),
    [
        ((4.0, 4.0, 4.0), None, "4.2% more than the next (microbatch size 2)"),
        ((4.0, 4.0, 4.0), 0.15, "4.2% more than the next (microbatch size 2)"),
        (
            (4.0, 4.0, 5.1),
            None,
            "not told apart from the next (microbatch size 2): the middle halves of their steps overlap",
        ),
        (
            (4.0, 4.0, 4.0),
            0.5,
            "not told apart from the next (microbatch size 2): threads waited for a core 25% of the time: "
            "the machine was shared",
        ),
    ],
)
def test_the_fastest_element_is_named_at_the_end_with_how_far_ahead_it_is(seconds, waiting, ahead, capsys):
    """In tokens per second: 20 against 19.2 and 10; the threads of a rank are two."""
    grid = {"parallel.microbatch_size": [1, 2, 4]}
    sweep = sweeps.prepare(config(grid, launch={"launcher": "slurm"}))
    for run, times in zip(list(unfinished(sweep)), [(8.0,), (4.0 * 25 / 24,) * 3, seconds], strict=True):
        end(run)
        timed = BenchmarkRecord(
            "cpu", 0, times, times[0], 0.0, 80, 80 / times[0], None, 0, num_threads=2, waiting_threads=waiting
        )
        write_json(run.benchmark, timed)
    capsys.readouterr()
    sweeps.follow(sweep, [])
    assert capsys.readouterr().out == (
        f"best      microbatch size 4: 20 tokens/s, {ahead}; 3 elements timed\n"
        "next      The best microbatch size, 4, is the largest in the grid: try 8.\n"
    )


def trained(rows):
    """Return the summary of a run with these held-out losses of its rows; None of one that was not evaluated."""
    held_out = None if rows is None else HeldOutRows.of(rows, [1] * len(rows))
    loss = held_out.mean if held_out else None
    return training_summary(eval_loss=loss, eval_rows=held_out)


@pytest.mark.parametrize(
    ("rows", "lead"),
    [
        ([2.5, 3.5, 4.5], "0.2500 ± 0.0000 below the next (batch size 4)"),
        ([2.75, 3.25, 4.5], "0.2500 ± 0.2887 below the next (batch size 4)" + CHANCE),
        ([3.5], "0.2500 below the next (batch size 4), of unknown spread"),
    ],
)
def test_the_element_of_the_lowest_loss_is_named_at_the_end_with_how_far_ahead_it_is(rows, lead, capsys):
    sweep = sweeps.prepare(config({"training.batch_size": [4, 8, 16]}, objective="loss", launch={"launcher": "slurm"}))
    best = [2.25, 3.25, 4.25] if len(rows) > 1 else [3.25]
    for run, of_run in zip(list(unfinished(sweep)), [rows, best, None], strict=True):
        end(run)
        write_json(run.training, trained(of_run))
    capsys.readouterr()
    sweeps.follow(sweep, [])
    mean = sum(best) / len(best)
    assert capsys.readouterr().out == f"best      batch size 8: held-out loss {mean:.4f}, {lead}; 3 elements trained\n"


def test_a_run_that_diverged_is_not_the_best_however_low_its_held_out_loss(capsys):
    sweep = sweeps.prepare(config({"training.learning_rate": [1e-3, 0.1]}, objective="loss"))
    for run, rows, last in zip(list(unfinished(sweep)), [[3.0, 4.0], [2.0, 3.0]], [4.0, 90.0], strict=True):
        end(run)
        write_json(run.training, trained(rows))
        write_metrics_part(run, [step_record(step, loss=loss) for step, loss in ((1, 5.0), (2, last))])
    capsys.readouterr()
    sweeps.follow(sweep, [])
    assert capsys.readouterr().out == (
        "best      learning rate 0.001: held-out loss 3.5000, the only one to compare; 2 elements trained, "
        "1 of them diverged\n"
    )


def test_an_interrupted_sweep_names_the_best_of_what_has_a_result(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    sweep = sweeps.prepare(config({"training.batch_size": [4, 8]}, objective="loss"))
    for run, rows in zip(list(unfinished(sweep)), [[3.0, 4.0], [2.0, 3.0]], strict=True):
        end(run)
        write_json(run.training, trained(rows))
    monkeypatch.setattr(sweeps, "_run_in_turn", interrupt)
    with pytest.raises(StoppedError, match="stopped after all 2 elements were trained"):
        sweeps.follow(sweep, [])
    assert "best      batch size 8: held-out loss 2.5000" in capsys.readouterr().out


@pytest.mark.parametrize("existed", [False, True])
def test_a_sweep_that_cannot_start_leaves_nothing_behind_and_the_corrected_one_starts(existed, tmp_path, monkeypatch):
    place = tmp_path / "results" / "sweep"
    if existed:
        place.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "file").write_text("")
    steps = SweepSteps(sweeps.validate, *[lambda *_: None] * 4, report=lambda sweep: sweep.report)
    grid = {"parallel.microbatch_size": [1]}
    wrong = config(grid).model_copy(
        update={"base": config(grid).base.with_overrides(f"benchmark.history={tmp_path / 'file' / 'history'}")}
    )
    with pytest.raises(EnvironmentMismatchError, match="choose another --history"):
        run_sweep(sweeps.prepare(wrong, place), steps)
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    run_sweep(sweeps.prepare(config(grid), place), steps)
    assert place.is_dir()


def test_a_resumed_sweep_that_cannot_start_keeps_its_results(tmp_path):
    grid = {"parallel.microbatch_size": [1]}
    sweep = sweeps.prepare(config(grid), tmp_path / "sweep")
    end(sweep.run("microbatch_size=1"))
    unlock(sweep)
    with pytest.raises(ConfigError):
        sweeps.prepare(config({"parallel.microbatch_size": [3]}), sweep.path, resume=True)
    assert sweep.run("microbatch_size=1").benchmark.exists()


@pytest.mark.parametrize("objective", ["throughput", "loss"])
def test_a_sweep_needs_room_for_a_checkpoint_if_it_trains(objective, tmp_path, monkeypatch):
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1]}, objective=objective))
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    if objective == "throughput":
        sweeps.validate(sweep)
    else:
        with pytest.raises(EnvironmentMismatchError, match=r"a checkpoint of .* 1 B free"):
            sweeps.validate(sweep)


def test_a_sweep_whose_elements_all_failed_fails_with_every_reason():
    sweep = sweeps.prepare(config({"parallel.microbatch_size": [1, 2]}, launch={"launcher": "slurm"}))
    for run in list(unfinished(sweep)):
        end(run, "oom")
    with pytest.raises(TrainingFailedError, match="microbatch size 1: oom, it did; microbatch size 2: oom"):
        sweeps.follow(sweep, [])


def test_reading_a_directory_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"sweep\.json does not exist"):
        read_record(SweepDirectory(tmp_path))
