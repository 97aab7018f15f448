"""Queries to Slurm, answered by a program that prints the output of Slurm 22.05."""

import subprocess

import pytest

from llama_core.launch import slurm
from llama_core.launch.jobs import slurm_check
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.slurm import SharedAnswers, array_statuses, give_back

ARRAY = """\
JobId=3 ArrayJobId=3 ArrayTaskId=4,7-9,10-14:2%2 ArrayTaskThrottle=2 JobName=sweep JobState=PENDING Reason=Priority
JobId=5 ArrayJobId=3 ArrayTaskId=1 ArrayTaskThrottle=2 JobName=sweep JobState=RUNNING Reason=None PreemptTime=None \
Command=/a run/logs/submitit/submission_file_1.sh WorkDir=/a Command=x WorkDir=y
JobId=6 ArrayJobId=3 ArrayTaskId=2 JobName=sweep JobState=RUNNING Reason=None PreemptTime=2026-11-21T10:00:00
JobId=4 ArrayJobId=3 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=sweep JobState=COMPLETED Reason=None
"""


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """Put a ``scontrol`` that knows only array 3 first on the path, and return a function that lists its queries."""
    log = tmp_path / "questions"
    (tmp_path / "answer").write_text(ARRAY)
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$4" >>"{log}"\n'
        f'if [ "$4" = 3 ]; then cat "{tmp_path}/answer"; else echo "Invalid job id specified" >&2; exit 1; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda name: None)  # no accounting
    return lambda: log.read_text().split()


def test_every_element_of_an_array_has_the_status_of_its_line(questions):
    pending = JobStatus("PENDING", "Priority")
    running = JobStatus("RUNNING", script="/a run/logs/submitit/submission_file_1.sh")
    assert array_statuses("3", "sweep") == {
        **{f"3_{index}": pending for index in (4, 7, 8, 9, 10, 12, 14)},
        "3_1": running,
        "3_2": JobStatus("RUNNING", is_preempted=True),
        "3_0": JobStatus("COMPLETED"),
    }


def test_a_job_that_gives_nodes_back_leaves_no_files(tmp_path, monkeypatch):
    """Where a job's id is in the environment, scontrol 22.05 writes scripts with its new size, as this program does."""
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *hostnames*) echo n1 n2;; *show*) echo "JobId=7 NodeList=n[1-2]";;\n'
        '*) [ -z "$SLURM_JOB_ID$SLURM_JOBID" ] || touch resize.sh;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOBID", "7")
    monkeypatch.chdir(tmp_path)
    assert give_back("7", ["n2"])
    assert list(tmp_path.iterdir()) == [program]


def test_a_job_keeps_its_first_node(monkeypatch):
    monkeypatch.setattr(slurm, "nodes_of", lambda job_id: ["n1", "n2"])
    monkeypatch.setattr(slurm, "_slurm", lambda *command: subprocess.CompletedProcess(command, 0, "", ""))
    assert give_back("7", ["n2"])
    assert not give_back("7", ["n1"])


def test_a_controller_that_answers_too_late_is_one_line(monkeypatch):
    def too_late(command, **options):
        raise subprocess.TimeoutExpired(command, 30, stderr=b"sinfo: error: Unable to contact slurm controller\n")

    monkeypatch.setattr(slurm_check.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm_check.subprocess, "run", too_late)
    found, problem = slurm_check._look(None)
    assert found == "the controller does not answer"
    assert "does not answer (sinfo: error: Unable to contact slurm controller); wait until" in problem


def test_an_array_with_another_name_is_not_ours(questions):
    assert set(array_statuses("3", "mine").values()) == {JobStatus("UNKNOWN")}


def test_one_query_covers_all_elements(questions):
    ask = SharedAnswers()
    states = [ask(f"3_{index}", "sweep").state for index in (0, 1, 2, 4, 7, 8, 9)]
    assert states == ["COMPLETED", "RUNNING", "RUNNING", *["PENDING"] * 4]
    assert questions() == ["3"]


def test_an_element_that_the_controller_forgot_is_unknown(questions):
    assert SharedAnswers()("3_99", "sweep") == JobStatus("UNKNOWN")


def test_a_job_outside_an_array_gets_its_own_query(questions):
    SharedAnswers()("17", "train")
    assert questions() == ["17"]
