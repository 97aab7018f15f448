import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cluster
import pytest
from launch_harness import is_alive
from waiting import eventually

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.evaluation.jobs import refusal_of_jobs
from llama_core.launch.jobs.submission import attach
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json

ROOT = Path(__file__).parents[2]
ODD_NODES = {f"node{number}" for number in range(1, cluster.NUM_NODES + 1, 2)}
EVEN_NODES = {f"node{number}" for number in range(2, cluster.NUM_NODES + 1, 2)}


def test_a_job_of_two_nodes_runs_to_the_end_and_reports_its_steps(submit):
    steps = []
    outcome = submit("finish").handle.wait(lambda record: steps.append(record.step))
    assert (outcome.status, outcome.step) == ("finished", 3)
    assert steps[-1] == 3


def test_every_rank_learns_its_place_among_the_others_from_slurm(submit):
    job = submit("finish")
    environments = [job.worker(rank)["environment"] for rank in range(4)]
    job.handle.wait()
    places = [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in environments]
    assert places == [("0", "0", "4"), ("1", "1", "4"), ("2", "0", "4"), ("3", "1", "4")]
    nodes = [env["SLURMD_NODENAME"] for env in environments]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {env["MASTER_ADDR"] for env in environments} == {nodes[0]}
    assert len({env["MASTER_PORT"] for env in environments}) == 1


def test_a_job_submitted_from_inside_another_is_independent_of_it(submit, monkeypatch):
    inherited = {
        "SLURM_ARRAY_JOB_ID": "999",
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_RESTART_COUNT": "7",
        "MASTER_PORT": "1",
    }
    for name, value in (inherited | {"SBATCH_PARTITION": "short", "SBATCH_NO_REQUEUE": "1"}).items():
        monkeypatch.setenv(name, value)
    handle = submit("finish", partition="train").handle
    fields = cluster.job_fields(handle.record.job_id)
    assert (fields["Partition"], fields["Requeue"]) == ("train", "1")
    outcome = handle.wait()
    assert (outcome.status, outcome.attempts[0]["restart"]) == ("finished", 0)


def test_a_job_whose_submitter_died_before_recording_it_is_found_in_the_queue(submit, run):
    first = submit("serve").handle.record
    run.job.unlink()
    assert submit("serve").handle.record.job_id == first.job_id


def test_cancelling_a_waiting_job_removes_it_from_the_queue(submit, run):
    with cluster.held_node():
        handle = submit("serve", nodes=cluster.NUM_NODES, ranks_per_node=1).handle
        assert cluster.job_fields(handle.record.job_id)["JobState"] == "PENDING"
        assert attach(run).state.startswith("queued, for ")
        assert handle.cancel().status == "cancelled"
        assert handle.record.job_id not in cluster.states()
    assert not list(run.path.glob("worker-*.json"))


def test_cancelling_a_running_job_lets_its_ranks_stop_cleanly(submit, run):
    job = submit("serve")
    for rank in range(4):
        job.worker(rank)
    outcome = job.handle.cancel()
    assert (outcome.status, outcome.reason) == ("cancelled", "stopped by a signal")
    assert read_json(run.path / "received.json")["signals"][-1] == signal.SIGTERM
    assert job.handle.record.job_id not in cluster.states()


@pytest.mark.nightly
def test_cancelling_kills_ranks_that_do_not_stop(submit):
    job = submit("hang")
    pids = [job.worker(rank)["pid"] for rank in range(4)]
    assert job.handle.cancel(grace_seconds=1).status == "cancelled"
    eventually(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.nightly
def test_a_job_that_ends_while_slurms_controller_is_away_has_its_outcome_and_who_waits_is_told_once(run, submit, alone):
    """For half a minute: Slurm's commands try for twenty seconds before they give up."""
    handle, heard = submit("finish_slowly", ranks_per_node=1).handle, []
    eventually(lambda: len(list(run.logs.glob("rank-*.log"))) == 2)
    with ThreadPoolExecutor() as pool:
        with cluster.without_controller():
            outcome = pool.submit(handle.wait, on_waiting=heard.append)
            eventually(lambda: not handle.is_answered)
            assert handle.state == "queued or running (its scheduler does not answer)"
            eventually(run.outcome.exists)
            assert not outcome.done()
        assert outcome.result().status == "finished"
    assert heard == [
        "for Slurm's controller, which does not answer; a job that runs goes on without it",
        "Slurm's controller answers again",
    ]


@pytest.mark.nightly
def test_a_job_cancelled_in_slurm_is_recorded_as_cancelled(submit):
    job = submit("hang")
    job.worker()
    cluster.cancel(job.handle.record.job_id)
    assert job.handle.wait().status == "cancelled"


def test_a_rank_that_fails_takes_down_ranks_on_other_nodes_and_is_blamed(submit):
    job = submit("fail_on_rank_1_while_others_hang")
    outcome = job.handle.wait()
    assert outcome.status == "crashed"
    assert outcome.reason.startswith("rank 1 ended with exit code 1")
    assert "the third weight is made of cheese" in outcome.reason


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"partition": "restricted", "account": "nobodys"}, "Invalid account"),
        ({"partition": "short", "time_limit_min": 6}, "time limit"),
        ({"constraint": "quantum"}, "feature"),
        ({"options": {"reservation": "none"}}, "reservation"),
        ({"nodes": cluster.NUM_NODES + 1}, "Node count"),
        ({"memory_gb_per_node": 10**6}, "node configuration"),
        ({"device": "cuda", "options": {"gres": "gpu:b200"}}, "node configuration"),
    ],
)
def test_a_job_refused_by_slurm_is_one_line_with_the_reason_and_is_not_recorded(submit, run, request_, complaint):
    with pytest.raises(EnvironmentMismatchError) as refusal:
        submit("finish", **request_)
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not run.job.exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"evaluation": {"gpus": 8}}, "^$"),
        ({"evaluation": {"partition": "nowhere"}}, "refuse the evaluations: invalid partition specified: nowhere; "),
    ],
)
def test_what_slurm_would_refuse_is_told_before_it_is_asked(settings, complaint):
    launch = {"launcher": "slurm", "device": "cuda", "gpu_type": "h100", "slurm": {"cpus_per_rank": 1}}
    evaluation = {"data": {"law": "law.jsonl"}} | settings.get("evaluation", {})
    config = {"model": "llama3_8b", "launch": launch} | settings | {"evaluation": evaluation}
    assert re.search(complaint, refusal_of_jobs(RunConfig.from_mapping(config)) or "")


@pytest.mark.parametrize(
    ("gres", "nodes"), [("gpu:a100:2", EVEN_NODES), ("gpu:h100", ODD_NODES), ("gpu", EVEN_NODES | ODD_NODES)]
)
def test_gpus_of_a_type_are_asked_for_instead_of_any(submit, gres, nodes):
    job = submit("finish", device="cuda", options={"exclusive": True, "gres": gres})
    environments = [job.worker(rank)["environment"] for rank in range(4)]
    assert job.handle.wait().status == "finished"
    assert {env["CUDA_VISIBLE_DEVICES"] for env in environments} == {"0,1"}
    assert {env["SLURMD_NODENAME"] for env in environments} <= nodes


def test_a_shell_never_executes_the_name_of_a_run(submit, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run = RunDirectory(here / 'it\'s "a" run; touch a & `touch b` $(touch c) > d # $HOME')
    run.create()
    assert submit("finish", run=run).handle.wait().status == "finished"
    assert [path.name for path in here.iterdir()] == [run.name]
    assert not {"a", "b", "c", "d"} & {path.name for path in run.path.iterdir()}


@pytest.mark.parametrize("name", ["run-%j", "run\\", "run\nrun"])
def test_a_run_directory_that_slurm_would_mistake_for_another_is_refused(submit, tmp_path, name):
    run = RunDirectory(tmp_path / name)
    run.create()
    with pytest.raises(EnvironmentMismatchError, match="run directory"):
        submit("finish", run=run)
    assert not run.job.exists()


def test_a_script_with_its_own_dataloader_trains_on_the_ranks_that_srun_starts(tmp_path):
    ranks = ("--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--mem=3G", "--time=10")
    sizes = ("--model=tiny_llama3_50m", "--gpus=2", "--device=cpu", "--steps=1", "--seq-len=16", "--batch-size=2")
    ended = subprocess.run(
        ["srun", *ranks, sys.executable, ROOT / "examples" / "custom_data_loading.py", *sizes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (trained,) = tmp_path.glob("runs/*/training.json")
    assert len({rank["host"] for rank in read_json(trained.with_name("environment.json"))["ranks"]}) == 2
