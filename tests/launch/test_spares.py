"""Whether a job with spare nodes starts its ranks again when those of an attempt have ended."""

import subprocess

import pytest

from llama_core.launch import outcome, slurm
from llama_core.launch.attempts import Attempt, RankExit, attempt_path, exit_path, request_cancellation
from llama_core.launch.outcome import read_outcome, record_requeue, tell_final_ending
from llama_core.launch.rank import requeue
from llama_core.launch.rank.requeue import goes_on, start_elsewhere
from llama_core.launch.rank.surroundings import BelowSubmitit
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.verdict import LOST_PEERS_EXIT, Verdict
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now, write_json
from llama_core.records.job import JobRecord
from llama_core.records.preflight import NamedRank, PreflightRecord, append_preflight

JOB = JobRecord("slurm", "812", "login", "2026-11-29T20:00:00+00:00", name="a-run")
ATTEMPT = Attempt(JOB.job_id, JOB.submitted_at, 0, "n1,n2", now())


class Cluster(BelowSubmitit):
    """A scheduler that has given a job some nodes, of which it may lose some."""

    def __init__(self, *nodes, state="RUNNING", gives_back=True, loses=(), is_late=False):
        self.is_late = is_late
        self.nodes = list(nodes)
        self.loses = dict(loses)
        self.state = state
        self.gives_back = gives_back
        self.asked = []

    def status(self, job):
        return JobStatus(self.state)

    def is_running(self, status):
        return status.state == "RUNNING"

    def nodes_now(self, job_id):
        for node in self.loses:  # after it was asked so often
            self.loses[node] -= 1
        return [node for node in self.nodes if self.loses.get(node, 1) > 0]

    def nears_limit(self, job):
        return self.is_late

    def hosts(self, nodes):
        return nodes.split(",")

    def give_back(self, job, nodes):
        self.asked.append(("give back", *nodes))
        return self.gives_back

    def queue_again(self, job):
        self.asked.append("queue again")
        return True

    def exclude(self, job, nodes):
        self.asked.append(("exclude", *nodes))
        return True


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    write_json(directory.job, JOB)
    write_json(attempt_path(directory), ATTEMPT)
    return directory


@pytest.fixture(autouse=True)
def ended(run, monkeypatch):
    """Return a function that records the ends of ranks, of which there are two; both have ended before each test."""
    monkeypatch.setattr(requeue, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(requeue, "LOSS_PATIENCE_SECONDS", 0.1)

    def record(*ranks):
        for path in (run.logs / "exits").glob("*/*.json"):
            path.unlink()
        for rank in ranks:
            write_json(exit_path(run, JOB, 0, rank), RankExit(rank, LOST_PEERS_EXIT, None, False, False, 2, 0.0))

    record(0, 1)
    return record


def again(run, cluster, restart=0, max_attempts=20):
    return goes_on(run, JOB, restart, num_nodes=2, max_attempts=max_attempts, surroundings=cluster)


def test_a_job_that_has_lost_a_node_starts_its_ranks_again_on_those_left(run):
    cluster = Cluster("n1", "n3")
    assert again(run, cluster)
    found = read_outcome(run)
    assert (found.status, found.reason, found.attempts[0]["requeued"]) == ("node-failure", "Slurm lost n2", True)
    assert found.next_action == "nothing to do: the job has started again on its other nodes"
    assert cluster.asked == []


def test_a_job_with_too_few_nodes_left_is_queued_again(run):
    cluster = Cluster("n1")
    assert not again(run, cluster)
    assert cluster.asked == ["queue again"]
    assert read_outcome(run).next_action == "nothing to do: Slurm has queued the job again"


def test_a_scheduler_gets_time_to_notice_a_dead_node_whose_ranks_left_no_record(run, ended):
    cluster = Cluster("n1", "n2", "n3", loses={"n2": 3})
    assert not again(run, cluster)
    cluster = Cluster("n1", "n2", "n3", loses={"n2": 3})
    ended(0)
    assert again(run, cluster)
    assert read_outcome(run).reason == "Slurm lost n2"


def test_a_scheduler_that_notices_no_dead_node_ends_the_job(run, ended):
    ended(0)
    assert not again(run, Cluster("n1", "n2", "n3"))


def test_ranks_that_never_began_are_not_started_for_ever(run):
    """The attempt that is recorded then is the one before."""
    assert again(run, Cluster("n1", "n3"))
    assert not again(run, Cluster("n1", "n3"), restart=1)


def test_a_job_whose_time_is_nearly_over_is_queued_again(run):
    """Slurm tells the ranks of a time limit only once."""
    cluster = Cluster("n1", "n3", is_late=True)
    assert not again(run, cluster)
    assert cluster.asked == ["queue again"]


@pytest.mark.parametrize(
    ("run_time", "limit", "nears"),
    [
        ("00:10:00", "1-00:00:00", False),
        ("23:52:00", "1-00:00:00", False),
        ("23:53:01", "1-00:00:00", True),
        ("00:05:00", "00:10:00", False),  # a quarter of the limit is less than save_timeout_s
        ("00:06:00", "00:10:00", True),
        ("365-00:00:00", "UNLIMITED", False),
    ],
)
def test_a_job_nears_its_limit_from_a_little_before_slurm_says_so(monkeypatch, run_time, limit, nears):
    shown = f"JobId=812 RunTime={run_time} TimeLimit={limit} TimeMin=N/A"
    monkeypatch.setattr(slurm, "_slurm", lambda *command: subprocess.CompletedProcess(command, 0, shown, ""))
    assert slurm.nears_limit("812", 300) == nears


def test_ranks_that_failed_on_nodes_that_are_all_there_do_not_start_again(run):
    assert not again(run, Cluster("n1", "n2", "n3"))
    assert not again(run, Cluster())  # Slurm does not answer
    assert not run.outcome.exists()


def test_a_job_that_is_over_cancelled_or_in_the_queue_does_not_start_its_ranks_again(run):
    assert not again(run, Cluster("n1", "n3", state="COMPLETING"))
    request_cancellation(run, JOB)
    assert not again(run, Cluster("n1", "n3"))
    assert not run.outcome.exists()


def test_the_last_attempt_ends_the_job(run):
    assert not again(run, Cluster("n1", "n3"), max_attempts=1)
    assert read_outcome(run).reason == "Slurm lost n2; this was the last of 1 attempts (launch.slurm.max_attempts)"


def test_ranks_start_again_after_the_first_one_has_given_nodes_back(run):
    record_requeue(run, JOB, ATTEMPT, Verdict("node-failure", "n2 is slow", ""), ["n2"], in_place=True)
    assert again(run, Cluster("n1", "n3"))
    assert len(read_outcome(run).attempts) == 1


def test_a_node_that_was_given_back_stays_away_when_the_job_is_queued_again(run):
    record_requeue(run, JOB, ATTEMPT, Verdict("node-failure", "n2 is slow", ""), ["n2"], in_place=True)
    write_json(attempt_path(run), Attempt(JOB.job_id, JOB.submitted_at, 1, "n1,n3", now()))
    cluster = Cluster("n1")
    assert not again(run, cluster, restart=1)
    assert cluster.asked == ["queue again", ("exclude", "n2")]


@pytest.fixture
def told(monkeypatch):
    """The endings that people were told of: their status, and whether the job starts again."""
    heard = []

    def tell(run, attempt, status, cause, *, requeued=False):
        heard.append((status, requeued))

    monkeypatch.setattr(outcome, "ALL_ENDED_SECONDS", 0.1)
    monkeypatch.setattr(outcome, "whom_to_tell", lambda run: "somebody")
    monkeypatch.setattr(outcome, "tell_ending", tell)
    return heard


def test_of_a_lost_node_people_hear_that_the_job_goes_on_and_not_first_that_it_failed(run, ended, told):
    ended(0)
    tell_final_ending(run, JOB, 0, 2, has_spares=True)
    assert again(run, Cluster("n1", "n3"))
    assert told == [("node-failure", True)]


def test_of_ranks_that_died_while_all_nodes_are_there_people_hear_from_the_script(run, ended, told):
    ended(0)
    tell_final_ending(run, JOB, 0, 2, has_spares=True)
    assert not again(run, Cluster("n1", "n2"))
    assert told == [("crashed", False)]


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        (Cluster("n1", "n2", "n3"), [("give back", "n2")]),
        (Cluster("n1", "n2"), ["queue again", ("exclude", "n2")]),
        # Slurm keeps a job's first node, which runs its script
        (Cluster("n1", "n2", "n3", gives_back=False), [("give back", "n2"), "queue again", ("exclude", "n2")]),
    ],
)
def test_a_slow_node_is_given_back_if_a_spare_can_take_its_place(run, cluster, asked):
    slow = NamedRank(1, "n2", "a device", ("slow",), slows_training=True)
    checked = PreflightRecord(now(), 0.1, (), (slow,), excluded=("n2",), job_id="812")
    append_preflight(run, checked)
    assert start_elsewhere(run, JOB, 0, num_nodes=2, surroundings=cluster)
    assert cluster.asked == asked
    (attempt,) = read_outcome(run).attempts
    assert (attempt["requeued"], attempt["excluded"]) == (True, ["n2"])
