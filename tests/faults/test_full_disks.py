"""A disk is full, or has become read-only."""

import re
import subprocess
import sys
from functools import partial

import pytest
from disks import Disks, while_stopped
from faulty_run import PHASES, Fault, FaultyRun, Phase, where

from llama_core.launch.attempts import log_path
from llama_core.records.files import read_json
from llama_core.runs.diagnosis import diagnose
from training_infra import cli

pytestmark = pytest.mark.root

STOP = {"signal": "SIGSTOP"}
BEFORE = {
    "metrics flush, before the part": Phase("llama_core.records.metrics", "write_metrics_part", step=4, ranks=(0,)),
    # of step 2, because no checkpoint is being written yet that would fail first
    "heartbeat, before the file": Phase(
        "llama_core.records.files", "atomic_write", step=2, argument="heartbeat.json", ranks=(0,)
    ),
    "checkpoint: before its manifest": Phase("llama_core.records.checkpoints", "write_manifest", step=5, ranks=(0,)),
    "checkpoint: before the pointer to it": Phase(
        "llama_core.records.files", "atomic_write", step=5, argument="latest", ranks=(0,)
    ),
}
"""Moments just before a file is written."""

OF_METRICS = r"the disk of \S+/metrics is full: .* free"
OF_CHECKPOINTS = (
    r"cannot save the checkpoint of step \d: the disk of \S+/checkpoints is full: over .* needed, 0 B free; "
    r"step-0000000\d is complete"
)
FULL = {
    "metrics, a step": ("metrics", "forward", 5, OF_METRICS),
    "heartbeat": (".", "heartbeat, before the file", None, r"the disk of \S+ is full: .* free"),
    "metrics, a part": ("metrics", "metrics flush, before the part", None, OF_METRICS),
    "shards of a checkpoint": ("checkpoints", "checkpoint: staging", None, OF_CHECKPOINTS),
    "manifest of a checkpoint": ("checkpoints", "checkpoint: before its manifest", None, OF_CHECKPOINTS),
    "pointer to a checkpoint": ("checkpoints", "checkpoint: before the pointer to it", None, OF_CHECKPOINTS),
    "outcome, and all else": (".", "forward", 5, r".*the disk of \S+ is full: .*"),
}  # fmt: skip
"""The file that has no room; the folder that is a disk, the moment from which it is full, and the reason told."""

READ_ONLY = {
    "metrics": ("metrics", "forward", 5, r".*\[Errno 30\] Read-only file system: '\S+/metrics/_tail.jsonl'"),
    "checkpoints": (
        "checkpoints", "checkpoint: staging", None,
        r"cannot save the checkpoint of step \d: .*Read-only file system.*; step-0000000\d is complete",
    ),
}  # fmt: skip


@pytest.fixture
def disks():
    """Mount disks, and take them away after the test."""
    mounts = Disks()
    yield mounts
    mounts.release_all()


@pytest.fixture(autouse=True)
def moments(monkeypatch):
    """Know the moments before a file is written."""
    for name, phase in BEFORE.items():
        monkeypatch.setitem(PHASES, name, phase)


@pytest.fixture
def run(tmp_path, texts, token_cache):
    """A run that is ready to start."""
    return FaultyRun(tmp_path, texts, token_cache=token_cache)


def cells(table, fault):
    return [pytest.param(*row, marks=pytest.mark.fault(fault, phase=name), id=name) for name, row in table.items()]


def ends_in_one_line(outcome, reason):
    assert outcome.status == "crashed"
    assert re.fullmatch("rank 0: " + reason, outcome.reason), outcome.reason
    assert outcome.next_action


@pytest.mark.parametrize(("folder", "moment", "step", "reason"), cells(FULL, "no room"))
def test_a_run_on_a_full_disk_names_it_and_goes_on_once_there_is_room(
    folder, moment, step, reason, run, disks, undisturbed, texts, token_cache, promise
):
    disk = run.run.path / folder
    if folder == ".":
        disk = run.folder / "disk"
        disks.mount(disk, "16m")
        run = FaultyRun(disk, texts, token_cache=token_cache)
    else:
        disks.mount(disk, "16m")
    fault = Fault(moment, STOP, step=step)
    outcome = run.train(fault, while_stopped(run, partial(disks.fill, disk)))
    ends_in_one_line(outcome, reason)
    assert outcome.next_action.startswith("free some space there")
    assert not any(found.problem for found in diagnose(run.run).checkpoints)
    disks.free(disk)
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"crashed, names the disk; {where(diagnosis)}; equal")


@pytest.mark.parametrize(("folder", "moment", "step", "reason"), cells(READ_ONLY, "read-only"))
def test_a_run_on_a_read_only_disk_names_the_file_and_goes_on_once_it_can_be_written(
    folder, moment, step, reason, run, disks, undisturbed, promise
):
    disk = run.run.path / folder
    disk.mkdir(exist_ok=True)
    outcome = run.train(Fault(moment, STOP, step=step), while_stopped(run, partial(disks.freeze, disk)))
    ends_in_one_line(outcome, reason)
    assert not any(found.problem for found in diagnose(run.run).checkpoints)
    disks.release(disk)
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"crashed, names the file; {where(diagnosis)}; equal")


@pytest.mark.fault("read-only", phase="outcome, and all else")
def test_a_run_that_cannot_even_write_its_outcome_says_it_in_its_log_and_records_it_later(
    run, disks, undisturbed, promise
):
    path = run.run.path
    with pytest.raises(OSError, match=r"Read-only file system: '\S+/outcome.json'"):
        run.train(Fault("forward", STOP, step=5), while_stopped(run, partial(disks.freeze, path)))
    disks.release(path)
    diagnosis = run.resume()
    run.equals(undisturbed)
    assert "Read-only file system" in diagnosis.attempts[0]["reason"], diagnosis.attempts
    promise(f"says so in its log, recorded later; {where(diagnosis)}; equal")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=pytest.mark.fault(name, phase="logs")) for name in ("no room", "read-only")],
)
def test_a_run_whose_logs_cannot_be_written_loses_only_lines(fault, run, disks, undisturbed, promise):
    logs = run.run.logs
    disks.mount(logs, "1m")
    act = disks.fill if fault == "no room" else disks.freeze
    outcome = run.train(Fault("forward", STOP, step=3), while_stopped(run, partial(act, logs)))
    assert outcome.status == "finished"
    run.equals(undisturbed)
    promise("finished; equal; the lines since are lost")


@pytest.mark.fault("no room", phase="TensorBoard")
def test_a_run_without_room_for_tensorboard_goes_on_without_it(
    tmp_path, disks, undisturbed, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, "tracking.tensorboard=true", token_cache=token_cache)
    disks.mount(run.run.tracker("tensorboard"), "64k")
    disks.fill(run.run.tracker("tensorboard"))  # at once: the events of so short a run fit into one page
    outcome = run.train()
    assert outcome.status == "finished"
    warnings = [line for line in log_path(run.run, 0).read_text().splitlines() if line.startswith("WARNING ")]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    run.equals(undisturbed)
    promise("a warning; finished; equal")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=pytest.mark.fault(name, phase="config, report")) for name in ("no room", "read-only")],
)
def test_a_run_that_cannot_write_its_configuration_or_report_is_one_line(
    fault, undisturbed, tmp_path, disks, capsys, promise
):
    disk = tmp_path / "disk"
    disks.mount(disk, "8m")
    subprocess.run(["cp", "-r", undisturbed.run.path, disk / "run"], check=True)
    (disks.fill if fault == "no room" else disks.freeze)(disk)
    new = ["train", "--config", str(undisturbed.run.config), "--run-dir", str(disk / "new")]
    for command in (new, ["report", str(disk / "run")]):
        capsys.readouterr()
        assert cli.main(command) in {1, 2}
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert re.search(r"a disk is full|disk of \S+ is full|No space left on device|Read-only file system", line)
        assert str(disk) in line
    promise("one line that names the disk")


@pytest.fixture
def no_temporary_files(tmp_path, disks, monkeypatch):
    """Return a function that makes the folder for temporary files full or read-only."""
    folder = tmp_path / "tmp"

    def spoil(fault):
        disks.mount(folder, "64k")
        (disks.fill if fault == "no room" else disks.freeze)(folder)
        for name in ("TMPDIR", "TEMP", "TMP"):
            monkeypatch.setenv(name, str(folder))
        return folder

    return spoil


def trains(run):
    command = [sys.executable, "-m", "training_infra.cli", "train", "--run-dir", str(run.run.path), "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_json(run.run.outcome)["status"] == "finished"


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=pytest.mark.fault(name, phase="TMPDIR")) for name in ("no room", "read-only")],
)
def test_a_run_needs_no_room_for_temporary_files(fault, run, no_temporary_files, undisturbed, promise):
    no_temporary_files(fault)
    trains(run)
    run.equals(undisturbed)
    promise("finished; equal")


@pytest.mark.fault("no room", phase="TMPDIR, compiling")
def test_a_run_that_compiles_without_room_for_temporary_files_has_them_in_its_directory(
    tmp_path, no_temporary_files, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, "parallel.compile=true", token_cache=token_cache)
    folder = no_temporary_files("no room")
    trains(run)
    warnings = [line for line in log_path(run.run, 0).read_text().splitlines() if line.startswith("WARNING ")]
    assert len(warnings) == 1
    assert str(folder) in warnings[0]
    assert any(run.run.logs.glob("tmp/*/torchinductor_*"))
    promise("a warning that names the folder; finished")
