"""Real runs of several ranks through the launcher, and how they end when a rank fails."""

import re
import shutil
from contextlib import contextmanager

import psutil
import pytest
from launch_harness import ending_jobs, is_alive
from waiting import eventually

from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.jobs import submission
from llama_core.records.files import read_json
from llama_core.records.metrics import read_metrics
from llama_core.records.profiles import read_profiles
from llama_core.records.timelines import read_lanes
from llama_core.runs.loading import load_config, load_plan

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("ranks")]

STEPS = 12
FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}
TRAINING = {
    "batch_size": 8,
    "seq_len": 64,
    "steps": STEPS,
    "precision": "fp32",
    "checkpoint_every": 2,
    "eval_sequences": 3,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@contextmanager
def submitting(cache, folder):
    """Yield a function that starts a run under a plan; what is left of the runs is killed at the end."""
    with ending_jobs() as handles:

        def start(name, *, resume=False, launch=None, training=None, benchmark=None, **parallel):
            config = RunConfig.from_mapping(
                {
                    "architecture": FEW_PARAMETERS,
                    "training": TRAINING | (training or {}),
                    "parallel": parallel,
                    "data": {"cache_dir": str(cache)},
                    "launch": {"device": "cpu"} | (launch or {}),
                    "tracking": {"tensorboard": False},
                    "benchmark": {"warmup_steps": 0, "steps": 1} | (benchmark or {}),
                }
            )
            run = prepare_run(config, folder / name, resume=resume)
            handles.append(submission.submit(run, load_config(run), load_plan(run).world_size))
            return handles[-1]

        yield start


@pytest.fixture
def submit(cache, tmp_path):
    with submitting(cache, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def submit_for_all(cache, tmp_path_factory):
    with submitting(cache, tmp_path_factory.mktemp("runs")) as start:
        yield start


def finished(handle):
    outcome = handle.wait()
    assert (outcome.status, outcome.step) == ("finished", STEPS), outcome
    return handle.run


@pytest.fixture(scope="module")
def alone(submit_for_all):
    """The run of one process."""
    return finished(submit_for_all("alone", gpus=1))


@pytest.fixture(scope="module")
def offloaded(submit_for_all):
    """The run of one process under DeepSpeed, with its optimizer in host memory."""
    return finished(submit_for_all("offloaded", gpus=1, zero_stage=2, zero_backend="deepspeed", offload="optimizer"))


def worker_of(handle, rank):
    """Return the process of a rank's worker."""
    folder = str(handle.run.path)
    for process in psutil.process_iter():
        try:
            is_worker = "llama_core.launch.rank.worker" in process.cmdline() and folder in process.cmdline()
            if is_worker and process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    return None


def steps_of(run):
    return read_json(run.heartbeat)["step"] if run.heartbeat.exists() else 0


def losses(run):
    return read_metrics(run).column("loss").to_pylist()


@pytest.mark.parametrize(
    ("parallel", "profiled"), [({"gpus": 2, "zero_stage": 3}, [0]), ({"gpus": 2, "pp": 2}, [0, 1])]
)
def test_the_first_rank_of_every_stage_is_profiled(submit, parallel, profiled):
    handle = submit("run", benchmark={"profile": True}, **parallel)
    assert handle.wait().status == "finished"
    records = read_profiles(handle.run)
    assert [record.rank for record in records] == profiled
    assert all(record.communication_seconds > 0 for record in records)
    assert all("head and loss" in record.seconds for record in records[-1:])
    assert len(list(handle.run.trace.glob("*.json.gz"))) == len(profiled)
    assert len(read_json(handle.run.training)["memory_by_rank_bytes"]) == 2
    assert len(read_lanes(handle.run, len(profiled))) == (2 if "pp" in parallel else 0)


ENDLESS = {"steps": 10_000, "checkpoint_every": 10_000}


def test_four_ranks_end_with_the_losses_of_one(submit, alone):
    """In fp32, where another order of summation changes a step by some 1e-7."""
    four = finished(submit("four", gpus=4, tp=2, pp=2, training={"checkpoint_every": STEPS}))
    assert read_metrics(four).column("step").to_pylist() == list(range(1, STEPS + 1))
    assert losses(four) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = read_json(four.training), read_json(alone.training)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert (ours["tokens"], ours["eval_tokens"]) == (theirs["tokens"], theirs["eval_tokens"])
    assert read_json(four.benchmark)["tokens_per_step"] == 8 * 64


def test_a_killed_rank_ends_the_others_and_is_named(submit):
    handle = submit("killed", gpus=2, pp=2, training=ENDLESS)
    eventually(lambda: steps_of(handle.run) >= 2)
    workers = [worker_of(handle, rank) for rank in range(2)]
    workers[1].kill()
    outcome = handle.wait()
    assert outcome.status == "crashed"
    assert outcome.reason.startswith("rank 1 was killed by signal 9")
    assert not any(is_alive(worker.pid) for worker in workers)


@pytest.mark.nightly
def test_a_silent_rank_ends_the_run_and_is_named(submit):
    handle = submit("silent", gpus=2, pp=2, training=ENDLESS, launch={"collective_timeout_s": 5})
    eventually(lambda: steps_of(handle.run) >= 2)
    worker = worker_of(handle, 1)
    worker.suspend()
    outcome = handle.wait()
    assert outcome.status == "hang"
    assert re.fullmatch(r"rank \d timed out waiting for the other ranks \(silent ranks: 1\)", outcome.reason)
    assert not is_alive(worker.pid)


@pytest.mark.parametrize(
    ("plan", "next_plan"),
    [
        ({"zero_stage": 3}, {"gpus": 1, "zero_stage": 0}),
        ({"zero_stage": 2, "zero_backend": "deepspeed", "offload": "optimizer"}, {}),
    ],
    ids=["another plan", "the same plan with DeepSpeed"],
)
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(submit, alone, plan, next_plan):
    handle = submit("resumed", gpus=2, **plan)
    eventually((handle.run.checkpoints / "step-00000002").exists)
    worker_of(handle, 0).kill()
    assert handle.wait().status == "crashed"
    again = finished(submit("resumed", resume=True, **({"gpus": 2} | plan | next_plan)))
    assert losses(again) == pytest.approx(losses(alone), rel=1e-5)


def test_one_process_can_offload_its_optimizer_to_host_memory(offloaded, alone):
    assert losses(offloaded) == pytest.approx(losses(alone), rel=1e-5)


def test_a_deepspeed_run_resumed_under_another_backend_is_refused_and_unchanged(submit, offloaded, tmp_path):
    shutil.copytree(offloaded.path, tmp_path / "run")
    outcome = submit("run", resume=True, gpus=1).wait()
    assert outcome.status == "bad-config"
    assert "was written by DeepSpeed" in outcome.reason
    assert (tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "deepspeed.json").exists()


def test_all_ranks_stop_after_the_same_step_with_a_checkpoint(submit):
    handle = submit("stopped", gpus=2, tp=2, training=ENDLESS)
    eventually(lambda: steps_of(handle.run) >= 2)
    outcome = handle.cancel()
    assert outcome.status == "cancelled"
    assert [path.name for path in handle.run.checkpoints.glob("step-*")] == [f"step-{outcome.step:08d}"]
