"""A job starts again once without nodes that fell behind, if those are few."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.launch import slurm as commands
from llama_core.launch.attempts import Attempt, attempt_path
from llama_core.launch.outcome import is_requeued, read_outcome
from llama_core.launch.rank import slurm
from llama_core.launch.rank.machines import _with_exclusion
from llama_core.launch.rank.requeue import start_again, start_elsewhere
from llama_core.launch.scheduler import JobStatus
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now, write_json
from llama_core.records.job import JobRecord
from llama_core.records.preflight import NamedRank, PreflightRecord, RankMeasurements, append_preflight
from llama_core.records.stragglers import Straggler, append_stragglers

JOB = JobRecord("slurm", "812", "login", "2026-11-29T20:00:00+00:00", name="a-run")
CONFIG = RunConfig.from_mapping(
    {
        "launch": {"launcher": "slurm", "device": "cpu", "preflight": "exclude", "slurm": {"max_attempts": 3}},
        "parallel": {"gpus": 16},
    }
)


AT_ITS_LIMIT = {"announced": True, "max_attempts": 3}


def behind(rank, host):
    return Straggler(rank, host, "a device", "product", "slow", since_step=20, step=50)


def checked(*slow, num_nodes=16, slows_training=True):
    """Return the check of two ranks on each node, of which the first rank of some nodes is slow."""
    ranks = tuple(RankMeasurements(rank, f"n{rank // 2}", "a device", {}) for rank in range(2 * num_nodes))
    named = (NamedRank(2 * node, f"n{node}", "a device", ("slow",), slows_training=slows_training) for node in slow)
    return PreflightRecord(now(), 0.1, ranks, tuple(named))


def decided(record, *, job=JOB, restart=0, before=()):
    return _with_exclusion(record, CONFIG, job, restart, before)


def test_a_node_that_slows_training_is_excluded_and_the_record_names_the_job():
    record = decided(checked(5))
    assert (record.excluded, record.job_id, record.kept) == (("n5",), "812", "")


def test_an_eighth_of_the_nodes_may_be_excluded_and_no_more():
    assert decided(checked(5, 9)).excluded == ("n5", "n9")
    record = decided(checked(5, 9, 11))
    assert (record.excluded, record.kept) == ((), "3 nodes fell behind, and of 16 it may exclude 2")
    assert decided(checked(1, num_nodes=2)).excluded == ("n1",)


def test_a_job_excludes_nodes_once():
    earlier = decided(checked(5))
    again = decided(checked(6), restart=1, before=[checked(), earlier])
    assert (again.excluded, again.kept) == ((), "it has started again for this before")
    other = replace(JOB, submitted_at="2026-11-30T20:00:00+00:00")
    assert decided(checked(6), job=other, before=[earlier]).excluded == ("n6",)


def test_the_last_attempt_of_a_job_keeps_its_nodes():
    assert decided(checked(5), restart=1).excluded == ("n5",)
    record = decided(checked(5), restart=2)
    assert (record.excluded, record.kept) == ((), "this is the last of 3 attempts (launch.slurm.max_attempts)")


def test_ranks_of_no_job_and_nodes_that_only_write_slowly_stay():
    assert decided(checked(5), job=None).kept == "no job of this run started these ranks"
    slow_disk = checked(5, slows_training=False)
    assert decided(slow_disk) == slow_disk


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ({"launcher": "local"}, ": this machine cannot keep a job off some nodes; use warn"),
        (
            {"launcher": "slurm", "slurm": {"requeue": False}},
            " needs a job that starts again, which launch.slurm.requeue or launch.slurm.max_attempts forbids; use warn",
        ),
    ],
)
@pytest.mark.parametrize("key", ["preflight", "stragglers"])
def test_exclusion_is_refused_where_a_job_cannot_start_again_elsewhere(key, launch, why):
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping({"launch": {"device": "cpu", key: "exclude"} | launch})
    assert f"launch.{key}=exclude{why}" in str(refused.value)


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    write_json(directory.job, JOB)
    write_json(attempt_path(directory), Attempt(JOB.job_id, JOB.submitted_at, 0, "n[0-15]", now()))
    return directory


@pytest.fixture
def asked(monkeypatch):
    """The questions to Slurm, which agrees to each that is in its answers."""
    asked = []
    answers = {"requeue": True, "exclude": True}

    def note(name, job_id, *arguments):
        asked.append((name, job_id, *arguments))
        return answers[name]

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm, "job_status", lambda *job: JobStatus("RUNNING"))
    for name in answers:
        monkeypatch.setattr(slurm, name, lambda *arguments, name=name: note(name, *arguments))
    return type("Slurm", (), {"asked": asked, "answers": answers})


def test_the_job_is_queued_again_first_and_then_kept_off_the_nodes(run, asked):
    append_preflight(run, decided(checked(5)))
    assert start_elsewhere(run, JOB, 0, num_nodes=0, surroundings=slurm.SlurmSurroundings())
    assert asked.asked == [("requeue", "812"), ("exclude", "812", ["n5"])]
    outcome = read_outcome(run)
    assert (outcome.status, outcome.attempts[-1]["requeued"]) == ("node-failure", True)
    assert outcome.reason == "before the first step, rank 10 on n5 (a device): slow"


def test_a_job_at_its_time_limit_leaves_out_the_nodes_that_were_behind_then(run, asked):
    append_stragglers(run, [behind(10, "n5"), behind(14, "n7"), replace(behind(14, "n7"), step=60, is_over=True)])
    assert start_again(run, JOB, 0, **AT_ITS_LIMIT, max_excluded=1, surroundings=slurm.SlurmSurroundings())
    assert asked.asked == [("requeue", "812"), ("exclude", "812", ["n5"])]
    outcome = read_outcome(run)
    assert (outcome.status, outcome.attempts[-1]["excluded"]) == ("timeout", ["n5"])
    assert outcome.reason.endswith("; rank 10 on n5 (a device), behind since step 20: slow")


def test_of_many_ranks_that_were_behind_the_reason_names_a_few(run, asked):
    append_stragglers(run, [behind(rank, "n5") for rank in range(10, 18)])
    assert start_again(run, JOB, 0, **AT_ITS_LIMIT, max_excluded=1, surroundings=slurm.SlurmSurroundings())
    reason = read_outcome(run).reason
    assert reason.endswith("; rank 13 on n5 (a device), behind since step 20: slow; 4 more")


def test_nodes_beyond_the_share_of_all_starts_stay(run, asked):
    append_stragglers(run, [behind(10, "n5")])
    assert start_again(run, JOB, 0, **AT_ITS_LIMIT, max_excluded=1, surroundings=slurm.SlurmSurroundings())
    write_json(attempt_path(run), Attempt(JOB.job_id, JOB.submitted_at, 1, "n[0-4,6-15]", now()))
    append_stragglers(run, [replace(behind(10, "n5"), is_over=True), behind(3, "n1")])
    assert start_again(run, JOB, 1, **AT_ITS_LIMIT, max_excluded=1, surroundings=slurm.SlurmSurroundings())
    assert asked.asked[2:] == [("requeue", "812"), ("exclude", "812", ["n5"])]
    outcome = read_outcome(run)
    assert outcome.attempts[-1]["excluded"] == ["n5"]
    assert outcome.reason.endswith("slow, which the job keeps, as it may leave out 1 node in all")


def test_a_job_that_only_names_slow_ranks_keeps_their_nodes(run, asked):
    append_stragglers(run, [behind(10, "n5")])
    assert start_again(run, JOB, 0, **AT_ITS_LIMIT, max_excluded=0, surroundings=slurm.SlurmSurroundings())
    assert asked.asked == [("requeue", "812")]


def test_an_exclusion_that_slurm_does_not_accept_is_told(run, asked):
    append_preflight(run, decided(checked(5)))
    asked.answers["exclude"] = False
    assert start_elsewhere(run, JOB, 0, num_nodes=0, surroundings=slurm.SlurmSurroundings())
    outcome = read_outcome(run)
    assert outcome.reason.endswith("; Slurm queued the job again, but did not exclude n5")
    assert outcome.attempts[-1]["requeued"]
    assert len(outcome.attempts) == 1


def test_a_job_that_slurm_does_not_queue_again_ends_with_the_node_named(run, asked):
    append_preflight(run, decided(checked(5)))
    asked.answers["requeue"] = False
    assert not start_elsewhere(run, JOB, 0, num_nodes=0, surroundings=slurm.SlurmSurroundings())
    assert asked.asked == [("requeue", "812")]
    outcome = read_outcome(run)
    assert outcome.status == "node-failure"
    assert outcome.reason.endswith("n5 (a device): slow; Slurm did not queue the job again")
    assert not is_requeued(run, Attempt(JOB.job_id, JOB.submitted_at, 0, "", now()))


@pytest.mark.parametrize(
    ("before", "excluded"), [("(null)", "n5"), ("n[1-2]", "n[1-2],n5")], ids=["none before", "some before"]
)
def test_nodes_that_a_job_has_excluded_stay_excluded(monkeypatch, before, excluded):
    said = []

    def answer(*command):
        said.append(command)
        return type("Answer", (), {"stdout": f"JobId=812 ExcNodeList={before} NodeList=n5", "returncode": 0})

    monkeypatch.setattr(commands, "_slurm", answer)
    assert commands.exclude("812", ("n5",))
    assert said[-1] == ("scontrol", "update", "JobId=812", f"ExcNodeList={excluded}")


def test_a_node_that_a_job_has_excluded_is_not_named_twice(monkeypatch):
    said = []

    def answer(*command):
        said.append(command[1:3])
        shown = "n4 n5" if command[2] == "hostnames" else "JobId=812 ExcNodeList=n[4-5]"
        return subprocess.CompletedProcess(command, 0, shown, "")

    monkeypatch.setattr(commands, "_slurm", answer)
    assert commands.exclude("812", ("n5",))
    assert said == [("--oneliner", "show"), ("show", "hostnames")]


def test_an_exclusion_that_would_replace_others_is_left_out(monkeypatch):
    said = []

    def no_answer(*command):
        said.append(command[1])
        return subprocess.CompletedProcess(command, -signal.SIGTERM, "", "")

    monkeypatch.setattr(commands, "_slurm", no_answer)
    assert not commands.exclude("812", ("n5",))
    assert said == ["--oneliner"]


def test_questions_about_a_job_that_loses_nodes_outlive_the_signal_that_ends_its_processes(monkeypatch):
    def answer(*command):
        ended_by = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], check=False)
        return subprocess.CompletedProcess(command, ended_by.returncode, "", "")

    monkeypatch.setattr(commands, "_slurm", answer)
    assert commands.requeue("812")
    assert commands.exclude("812", ("n5",))
    monkeypatch.setattr(commands, "nodes_of", lambda job_id: ["n4", "n5"])
    assert commands.give_back("812", ["n5"])
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
