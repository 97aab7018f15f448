"""Whoever looks at somebody else's run writes nothing there and ends nothing, whatever its records say."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llama_core.config.run import RunConfig
from llama_core.launch.attempts import submission_log
from llama_core.launch.jobs import submission
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord, Outcome
from training_infra import cli

pytestmark = pytest.mark.root

NOBODY = 65534
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


def made(path):
    run = RunDirectory(path)
    run.create()
    run.config.write_text(RunConfig.from_mapping({"launch": {"device": "cpu"}}).to_yaml())
    write_json(run.plan, ParallelPlan())
    return run


def record(run, **changes):
    """Record a job that has ended on this machine."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = JobRecord("local", str(ended.pid), socket.gethostname(), timestamp())
    write_json(run.job, replace(dead, **changes))


def give_away(run):
    for path in (run.path, *run.path.rglob("*")):
        os.lchown(path, NOBODY, NOBODY)
        path.is_symlink() or path.chmod(0o777)
    return run


@pytest.fixture
def mine(tmp_path):
    """An own run, and the folder that submitit has for it."""
    run = made(tmp_path / "mine")
    (run.logs / "submitit" / "submission-00000").mkdir(parents=True)
    return run


@contextmanager
def at_work(run, command=SLEEP, user=None):
    """Run a process that looks like one of a run's job."""
    folder = str(run.logs / "submitit" / "submission-00000")
    with subprocess.Popen([*command, folder], env=os.environ | {"SUBMITIT_FOLDER": folder}, user=user) as process:
        try:
            yield process, folder
        finally:
            process.kill()


def files(run):
    return {path: path.lstat().st_mtime_ns for path in (run.path, *run.path.rglob("*"))}


@pytest.mark.parametrize("command", [["doctor"], ["logs", "--follow"], ["logs"]], ids=" ".join)
def test_looking_at_a_run_of_somebody_else_ends_no_process_and_writes_nothing(mine, tmp_path, capsys, command):
    theirs = made(tmp_path / "theirs")
    with at_work(mine) as (process, folder):
        record(theirs, folder=folder)
        before = files(give_away(theirs))
        cli.main([command[0], str(theirs.path), *command[1:]])
        assert (process.poll(), files(theirs)) == (None, before)


@pytest.mark.parametrize("command", ["doctor", "logs --follow"])
def test_a_line_says_that_nothing_is_concluded_about_a_run_of_somebody_else(tmp_path, capsys, command):
    theirs = made(tmp_path / "theirs")
    record(theirs)
    give_away(theirs)
    name, *flags = command.split()
    cli.main([name, str(theirs.path), *flags])
    told = capsys.readouterr()
    assert "belongs to nobody" in told.out + told.err


def test_a_run_from_an_archive_that_names_an_own_folder_ends_no_process(mine, tmp_path):
    """The files are then one's own."""
    theirs = made(tmp_path / "theirs")
    with at_work(mine) as (process, folder):
        record(theirs, folder=folder)
        cli.main(["doctor", str(theirs.path)])
        assert process.poll() is None


@pytest.mark.parametrize("link", ["logs", "logs/submitit"])
def test_a_run_whose_folder_of_submissions_is_a_link_to_an_own_one_ends_no_process(mine, tmp_path, link):
    theirs = made(tmp_path / "theirs")
    shutil.rmtree(theirs.logs)
    (theirs.path / link).parent.mkdir(exist_ok=True)
    (theirs.path / link).symlink_to(mine.path / link)
    with at_work(mine) as (process, folder):
        for written in (folder, str(theirs.logs / "submitit" / "submission-00000")):
            record(theirs, folder=written)
            cli.main(["doctor", str(theirs.path)])
            assert process.poll() is None


def test_cancelling_a_run_that_names_the_controller_of_an_own_one_does_not_stop_that(mine, tmp_path, capsys):
    theirs = made(tmp_path / "theirs")
    with at_work(mine) as (process, folder):
        record(theirs, folder=folder, job_id=str(process.pid))
        assert cli.main(["cancel", str(theirs.path)]) == 2
        assert "names the files of another run" in capsys.readouterr().err
        give_away(theirs)
        assert cli.main(["cancel", str(theirs.path)]) == 2
        assert "belongs to nobody" in capsys.readouterr().err
        assert process.poll() is None


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Slurm's commands, which find every job running; return the file with the names of those that were called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "asked").touch()
    for name in ("scontrol", "scancel"):
        script = tmp_path / "bin" / name
        job = f"JobName=mine JobState=RUNNING Command={tmp_path}/mine/submission_file_1.sh WorkDir=/"
        script.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/asked\necho {job}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "asked"


@pytest.mark.parametrize("command", ["cancel", "train --resume --run-dir"])
def test_a_queued_job_that_a_run_of_somebody_else_names_is_not_touched(tmp_path, capsys, asked, command):
    theirs = made(tmp_path / "theirs")
    record(theirs, launcher="slurm", job_id="7", name="mine")
    give_away(theirs)
    assert cli.main([*command.split(), str(theirs.path)]) == 2
    assert "belongs to nobody" in capsys.readouterr().err
    assert "scancel" not in asked.read_text()


@pytest.mark.parametrize("names", ["nothing", "the own folder"])
def test_a_queued_job_that_a_run_from_an_archive_names_is_not_cancelled(mine, tmp_path, capsys, asked, names):
    theirs = made(tmp_path / "theirs")
    folder = {"nothing": "", "the own folder": str(mine.logs / "submitit" / "submission-00000")}[names]
    record(theirs, launcher="slurm", job_id="7", name="mine", folder=folder)
    assert cli.main(["cancel", str(theirs.path)]) == 2
    assert "names the files of another run" in capsys.readouterr().err
    assert "scontrol" in asked.read_text()
    assert "scancel" not in asked.read_text()


@pytest.mark.parametrize("place", ["theirs", "{0}/theirs", "/proc/self/cwd/theirs"])
def test_a_run_from_an_archive_that_names_its_own_folder_cancels_no_job_of_another_run(
    tmp_path, monkeypatch, capsys, asked, place
):
    """Its writer may know where it will be, and the names in the queue."""
    theirs = made(tmp_path / "theirs")
    (theirs.logs / "submitit" / "submission-00000").mkdir(parents=True)
    folder = f"{place.format(tmp_path)}/logs/submitit/submission-00000"
    record(theirs, launcher="slurm", job_id="7", name="mine", folder=folder, grace_seconds=0.0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cancel", str(theirs.path)]) == 2
    assert f"error: {theirs.job} names " in capsys.readouterr().err
    assert "scancel" not in asked.read_text()


@pytest.mark.parametrize("job_id", ["../7", "/7", "--user=root", "-u", "", "7\n"])
def test_the_id_of_a_job_is_no_path_and_no_option_of_slurm(tmp_path, capsys, asked, job_id):
    theirs = made(tmp_path / "theirs")
    record(theirs, launcher="slurm", job_id=job_id, name="mine")
    assert cli.main(["cancel", str(theirs.path)]) == 2
    assert "job.json is damaged (job_id: " in capsys.readouterr().err
    assert asked.read_text() == ""


def test_an_own_run_whose_job_record_somebody_else_has_placed_is_theirs(mine, capsys):
    record(mine)
    os.chown(mine.job, NOBODY, NOBODY)
    cli.main(["doctor", str(mine.path), "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "unknown"
    assert not mine.outcome.exists()


@pytest.mark.parametrize("kind", ["its own", "of another run"])
def test_a_page_shows_the_output_of_a_submission_only_of_its_own_run(mine, tmp_path, kind):
    run = {"its own": mine, "of another run": made(tmp_path / "theirs")}[kind]
    folder = mine.logs / "submitit" / "submission-00000"
    (folder / "controller.log").write_text("BEGIN\nthe marker\nEND\n")
    record(run, folder=str(folder))
    write_json(run.outcome, Outcome("crashed", "rank 0 vanished", 1, "", "2026-11-01T00:00:00+00:00"))
    assert cli.main(["report", str(run.path)]) == 0
    assert ("the marker" in run.report.read_text()) == (kind == "its own")


@pytest.mark.parametrize("owner", ["own", "of somebody else"])
def test_a_page_shows_no_output_of_a_submission_behind_a_link(mine, tmp_path, owner):
    folder = mine.logs / "submitit" / "submission-00000"
    (folder / "controller.log").write_text("BEGIN\nthe marker\nEND\n")
    theirs = made(tmp_path / "theirs")
    link = theirs.logs / "submitit" / folder.name
    link.parent.mkdir()
    link.symlink_to(folder)
    record(theirs, folder=str(link))
    write_json(theirs.outcome, Outcome("crashed", "rank 0 vanished", 1, "", "2026-11-01T00:00:00+00:00"))
    {"own": lambda run: run, "of somebody else": give_away}[owner](theirs)
    assert cli.main(["report", str(theirs.path)]) == 0
    assert "the marker" not in theirs.report.read_text()


def test_a_run_in_the_root_folder_can_be_looked_at():
    """As in a container."""
    assert (
        submission_log(RunDirectory(Path("/nowhere")), JobRecord("local", "1", "here", timestamp(), folder="/x")) == ""
    )


def test_a_process_of_somebody_else_does_not_pass_for_the_job_of_an_own_run(mine):
    """It may get the id of a controller that has ended, and its command line may say anything."""
    with at_work(mine, ["tail", "-f", "/dev/null"], user=NOBODY) as (process, folder):
        record(mine, folder=folder, job_id=str(process.pid))
        assert submission.attach(mine) is None


def test_processes_that_outlive_an_own_controller_are_ended(mine):
    """What the rules above must not forbid."""
    with at_work(mine) as (process, folder):
        record(mine, folder=folder)
        assert submission.attach(mine) is None
        process.wait()
    assert mine.outcome.exists()
