"""Interrupted runs continue as if nothing had happened."""

import cluster
import pytest
from launch_harness import is_alive
from waiting import eventually

from llama_core.chain import steps
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.attempts import RESTART_VARIABLE, current_attempt
from llama_core.launch.recoveries import read_recoveries
from llama_core.launch.verdict import STOPPED_EXIT
from llama_core.records.files import read_json
from llama_core.records.metrics import read_metrics
from llama_core.runs.loading import load_config, load_plan

STEPS = 60


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Submit a run of ZeRO 3 on two nodes, and cancel it at the end."""
    cache, handles = tmp_path_factory.mktemp("cache"), []
    config = RunConfig.from_mapping(
        {
            "architecture": {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512},
            "training": {"batch_size": 8, "seq_len": 64, "steps": STEPS, "precision": "fp32", "checkpoint_every": 10},
            "parallel": {"gpus": 2, "zero_stage": 3},
            "data": {"cache_dir": str(cache)},
            "launch": {"launcher": "slurm", "device": "cpu", "nodes": 2, "collective_timeout_s": 120}
            | {
                "slurm": {
                    "cpus_per_rank": 1,
                    "memory_gb_per_node": 3,
                    "time_limit_min": 10,
                    "options": {"exclusive": True},
                }
            },
            "tracking": {"tensorboard": False},
            "benchmark": {"warmup_steps": 0, "steps": 1},
        }
    )

    def start(name, *overrides):
        run = prepare_run(config.with_overrides(*overrides), tmp_path_factory.mktemp("runs") / name)
        handles.append(steps.submit(run))
        return handles[-1]

    yield start
    for handle in handles:
        handle.cancel(grace_seconds=0)


def history(run):
    """Return the loss and gradient norm of every step, which tell two trainings apart bit for bit."""
    table = read_metrics(run)
    return list(zip(table["step"].to_pylist(), table["loss"].to_pylist(), table["grad_norm"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def undisturbed(train):
    handle = train("undisturbed")
    assert handle.wait().status == "finished"
    return history(handle.run)


@pytest.fixture
def interrupted(train, undisturbed):
    """Train a run, interrupt it after some steps, and return the attempts it took to the undisturbed result."""

    def run_to_end(interrupt):
        handle = train("interrupted")
        eventually(lambda: handle.run.heartbeat.exists() and read_json(handle.run.heartbeat)["step"] >= 3)
        interrupt(handle.record.job_id)
        outcome = handle.wait()
        assert (outcome.status, outcome.step) == ("finished", STEPS), outcome
        assert history(handle.run) == undisturbed
        assert [attempt["requeued"] for attempt in outcome.attempts] == [True, False]
        assert {attempt["job_id"] for attempt in outcome.attempts} == {handle.record.job_id}
        return outcome.attempts

    return run_to_end


def nodes_of(job_id):
    return cluster.job_fields(job_id)["NodeList"]


@pytest.mark.nightly
def test_a_requeued_run_continues(interrupted):
    first, second = interrupted(cluster.requeue)
    assert first["status"] == "preempted"
    assert first["first_step"] == 1
    assert second["first_step"] <= first["last_step"] + 1


def test_a_run_out_of_time_saves_a_checkpoint_and_restarts(interrupted):
    first, second = interrupted(lambda job_id: cluster.send_signal(job_id, "USR2"))
    assert first["status"] == "timeout"
    assert second["first_step"] == first["last_step"] + 1


def test_a_preempted_run_saves_a_checkpoint_and_restarts(interrupted):
    first, second = interrupted(lambda job_id: cluster.preempt(nodes_of(job_id)))
    assert first["status"] == "preempted"
    assert second["first_step"] == first["last_step"] + 1


@pytest.mark.nightly
def test_a_run_preempted_while_it_times_steps_times_them_again(train, undisturbed):
    handle = train("timed", "benchmark.steps=300")
    eventually(handle.run.training.exists)
    cluster.preempt(nodes_of(handle.record.job_id))
    outcome = handle.wait()
    assert (outcome.status, outcome.step) == ("finished", STEPS), outcome
    assert [(a["status"], a["requeued"]) for a in outcome.attempts] == [("preempted", True), ("finished", False)]
    assert history(handle.run) == undisturbed
    assert len(read_json(handle.run.benchmark)["step_seconds"]) == 300


@pytest.fixture
def last_node():
    """Return a function that gives the number of a job's last node; the node works again after the test."""
    numbers = []

    def number_of(job_id):
        numbers.append(int(nodes_of(job_id).rstrip("]")[-1]))
        return numbers[0]

    yield number_of
    for number in numbers:
        cluster.start_node(number)


def test_a_run_that_loses_a_node_restarts_on_others(interrupted, last_node):
    """Slurm itself finds that the node is dead, in half a minute; the tests below tell it."""
    first, _ = interrupted(lambda job_id: cluster.kill_node(last_node(job_id)))
    assert first["status"] == "node-failure"


@pytest.fixture
def down():
    """Take nodes from the cluster, as if they had lost power; they are started again at the end."""
    taken = []

    def take(number):
        taken.append(number)
        cluster.kill_node(number)
        cluster.declare_down(number)

    yield take
    for number in taken:
        cluster.start_node(number)


def at_step(handle, step):
    eventually(lambda: handle.run.heartbeat.exists() and read_json(handle.run.heartbeat)["step"] >= step)


def only(*nodes):
    """Return the setting that leaves a job no other nodes, and so no spare."""
    cluster.wait_until_idle(*nodes)
    return f"launch.slurm.options={{exclusive: true, exclude: '{cluster.all_but(*nodes)}'}}"


def test_a_run_that_loses_a_node_without_a_spare_goes_on_with_fewer(train, undisturbed, last_node):
    handle = train("elastic", "launch.min_nodes=1", only(5, 6))
    eventually(lambda: handle.run.heartbeat.exists() and read_json(handle.run.heartbeat)["step"] >= 3)
    lost = last_node(handle.record.job_id)
    cluster.kill_node(lost)
    cluster.declare_down(lost)
    outcome = handle.wait()
    assert (outcome.status, outcome.step) == ("finished", STEPS), outcome
    assert [attempt["status"] for attempt in outcome.attempts] == ["node-failure", "finished"]
    assert len(read_json(handle.run.environment)["ranks"]) == load_plan(handle.run).world_size == 1
    assert load_config(handle.run).launch.nodes == 2
    assert [step for step, *_ in history(handle.run)] == [step for step, *_ in undisturbed]
    assert losses(history(handle.run)) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_a_run_with_a_spare_goes_on_with_it_without_the_queue_and_is_queued_again_once_there_is_none(
    train, undisturbed, down
):
    handle = train("spare", "launch.spare_nodes=1", only(5, 6, 7))
    at_step(handle, 3)
    assert cluster.hosts(nodes_of(handle.record.job_id)) == ["node5", "node6", "node7"]
    down(6)
    eventually(lambda: current_attempt(handle.run, handle.record).restart == 1)
    assert cluster.hosts(nodes_of(handle.record.job_id)) == ["node5", "node7"]
    assert cluster.job_fields(handle.record.job_id)["Restarts"] == "0"
    first = read_json(handle.run.heartbeat)["step"]
    at_step(handle, first + 2)
    down(7)
    eventually(lambda: cluster.job_fields(handle.record.job_id)["Restarts"] == "1")
    cluster.start_node(6)
    outcome = handle.wait()
    assert (outcome.status, outcome.step) == ("finished", STEPS), outcome
    assert [(a["status"], a["requeued"], a["reason"]) for a in outcome.attempts[:2]] == [
        ("node-failure", True, "Slurm lost node6"),
        ("node-failure", True, "Slurm lost node7"),
    ]
    in_place, queued = read_recoveries(handle.run, read_metrics(handle.run))
    assert ("in the queue" in in_place.parts, "in the queue" in queued.parts) == (False, True)
    assert history(handle.run) == undisturbed


def losses(steps):
    return [loss for _, loss, _ in steps]


@pytest.mark.nightly
def test_ranks_lost_by_slurm_end_once_the_next_attempt_starts(submit, last_node):
    """They live on if only the node's daemon or its network has died."""
    job = submit("serve", nodes=1, ranks_per_node=1)
    lost = job.worker()
    number = last_node(job.handle.record.job_id)
    cluster.kill_slurmd(number)
    cluster.declare_down(number)
    found = eventually(lambda: job.worker()["pid"] != lost["pid"] and job.worker())
    assert found["environment"]["SLURMD_NODENAME"] != lost["environment"]["SLURMD_NODENAME"]
    eventually(lambda: not is_alive(lost["pid"]))
    assert is_alive(found["pid"])
    outcome = job.handle.cancel()
    assert [attempt["status"] for attempt in outcome.attempts] == ["node-failure", "cancelled"]


@pytest.mark.nightly
def test_a_job_at_its_time_limit_restarts_up_to_max_attempts(submit, run):
    """Slurm announces the limit of the first attempt; the test announces that of the second, and so need not wait."""
    job = submit("serve", nodes=1, time_limit_min=1, max_attempts=2)
    for rank in range(2):
        eventually(lambda rank=rank: job.worker(rank)["environment"][RESTART_VARIABLE] == "1")
    cluster.send_signal(job.handle.record.job_id, "USR2")
    outcome = job.handle.wait()
    assert [(attempt["status"], attempt["requeued"]) for attempt in outcome.attempts] == [
        ("timeout", True),
        ("timeout", False),
    ]
    assert outcome.reason.endswith("the last of 2 attempts (launch.slurm.max_attempts)")
    assert [read_json(path)["exit_code"] for path in run.logs.glob("exits/*/rank-*.json")] == [STOPPED_EXIT] * 4


@pytest.mark.nightly
def test_a_job_told_to_stop_before_its_ranks_handle_signals_restarts(submit, run):
    job = submit("start_slowly", nodes=1)
    eventually(lambda: len(list(run.path.glob("starting-*.json"))) == 2)
    cluster.send_signal(job.handle.record.job_id, "USR2")
    outcome = job.handle.wait()
    assert [(attempt["status"], attempt["requeued"]) for attempt in outcome.attempts] == [
        ("timeout", True),
        ("finished", False),
    ]


def test_a_job_that_may_not_be_requeued_ends_at_its_time_limit(submit):
    job = submit("serve", nodes=1, requeue=False)
    job.worker()
    cluster.send_signal(job.handle.record.job_id, "USR2")
    outcome = job.handle.wait()
    assert [(attempt["status"], attempt["requeued"]) for attempt in outcome.attempts] == [("timeout", False)]


@pytest.mark.nightly
def test_a_job_that_runs_out_of_memory_ends_and_does_not_restart(submit):
    outcome = submit("run_out_of_host_memory", nodes=1, ranks_per_node=1, memory_gb_per_node=1).handle.wait()
    assert outcome.status == "oom"
    assert [attempt["requeued"] for attempt in outcome.attempts] == [False]
