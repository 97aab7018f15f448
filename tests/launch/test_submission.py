import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import pytest
from launch_harness import FAKE_WORKER, is_alive
from waiting import eventually

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, EnvironmentMismatchError, RunDirectoryError, StoppedError
from llama_core.evaluation.plan import evaluating_request, evaluation_plan
from llama_core.launch.attempts import log_path, read_rank_exits, request_cancellation
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.local import LocalJobHandle
from llama_core.launch.jobs.slurm_request import in_one_task, job_name
from llama_core.launch.jobs.slurm_request import slurm_parameters as parameters
from llama_core.launch.jobs.submission import attach
from llama_core.launch.outcome import read_outcome, record_outcome, record_refusal
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.slurm import (
    cores_per_gpu,
    default_memory_bytes,
    job_status,
    largest_node_bytes,
)
from llama_core.records.files import read_json, write_json
from llama_core.records.job import JobRecord, Outcome
from llama_core.runs.stopping import stopping_on_interrupt
from llama_core.units import GIB, MIB
from training_reports.page import write_report

pytestmark = pytest.mark.xdist_group("submission")

SUBMIT_AND_DIE = """
import os, signal, sys
from pathlib import Path
from llama_core.records.directory import RunDirectory
from llama_core.config.run import RunConfig
from llama_core.launch.jobs.submission import submit

config = RunConfig.from_mapping({"launch": {"device": "cpu", "launcher": sys.argv[3]}})
submit(RunDirectory(Path(sys.argv[1])), config, 1, worker=(sys.executable, sys.argv[2], "serve"))
os.kill(os.getpid(), signal.SIGKILL)
"""


class Finished(NamedTuple):
    outcome: Outcome
    steps: list[int]
    ranks: list[dict[str, Any]]
    """What every rank's worker told about itself."""


@pytest.fixture(scope="module")
def finished(submit_for_all):
    """A job of two ranks that was asked for a part of the work and has done it."""
    steps = []
    job = submit_for_all("finish", num_ranks=2, only="benchmark")
    outcome = job.handle.wait(lambda record: steps.append(record.step))
    return Finished(outcome, steps, [job.worker(rank) for rank in range(2)])


def test_a_job_runs_its_worker_to_the_end_and_reports_its_steps(finished):
    assert (finished.outcome.status, finished.outcome.step) == ("finished", 3)
    assert finished.steps == sorted(set(finished.steps))
    assert finished.steps[-1] == 3


def test_every_rank_learns_its_place_among_the_others(finished):
    environments = [rank["environment"] for rank in finished.ranks]
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in environments] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1


def test_the_requested_part_is_passed_to_every_worker(finished):
    assert [rank["options"] for rank in finished.ranks] == 2 * [["--only", "benchmark"]]


def test_a_job_is_recorded_when_submit_returns_so_that_its_run_takes_no_second_one(submit, run):
    first = submit("serve").handle
    assert JobRecord(**read_json(run.job)) == first.record
    assert submit("finish").handle.record == first.record


@pytest.fixture(scope="module")
def again(submit_for_all):
    """The run of a job that failed and of one that finished."""
    failed = submit_for_all("fail").handle
    failed.wait()
    submit_for_all("finish", run=failed.run).handle.wait()
    return failed.run


def test_a_run_whose_job_has_ended_takes_another_and_remembers_both(again):
    assert [attempt["status"] for attempt in read_json(again.outcome)["attempts"]] == ["crashed", "finished"]


def test_output_of_all_attempts_stays_in_the_ranks_log(again):
    log = log_path(again, 0).read_text()
    assert log.index("about to fail") < log.index("three steps to take")


def test_exit_records_of_an_earlier_attempt_are_not_read_for_the_next(again):
    record = JobRecord(**read_json(again.job))
    assert [rank_exit.exit_code for rank_exit in read_rank_exits(again, record, 0)] == [0]


def test_cancelling_lets_the_worker_stop_cleanly(submit, run):
    job = submit("serve")
    job.worker()
    assert job.handle.cancel().reason == "stopped by a signal"
    assert read_json(run.path / "received.json")["signals"] == [signal.SIGTERM]


@pytest.mark.wide
def test_cancelling_kills_a_worker_that_does_not_stop_and_its_descendants(submit):
    job = submit("hang", num_ranks=2)
    processes = job.processes()
    assert job.handle.cancel(grace_seconds=0.5).status == "cancelled"
    eventually(lambda: not any(is_alive(pid) for pid in processes))


def test_an_interrupt_while_nobody_waits_for_the_job_stops_it_too(submit, run, config):
    run.config.write_text(config.to_yaml())
    job = submit("serve")
    job.worker()
    with pytest.raises(StoppedError, match="no checkpoint yet; start over with"), stopping_on_interrupt(run):
        raise KeyboardInterrupt
    assert not job.handle.is_running()


def test_a_job_cancelled_before_its_worker_starts_never_starts_it(submit, run):
    job = submit("serve")
    request_cancellation(run, job.handle.record)
    eventually(lambda: not job.handle.is_running())
    assert job.handle.wait().status == "cancelled"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("controller", "vanished without an exit code"),
        ("supervisor", "vanished without an exit code"),
        ("worker", "killed by signal 9 (possibly out of memory)"),
    ],
)
def test_kill_9_of_any_process_of_a_job_ends_all_of_it_and_is_reported(submit, victim, reason):
    job = submit("hang")
    processes = job.processes()
    worker = job.worker()
    pids = {"controller": int(job.handle.record.job_id), "supervisor": worker["supervisor"], "worker": worker["pid"]}
    os.kill(pids[victim], signal.SIGKILL)
    outcome = job.handle.wait()
    assert outcome.status == "crashed"
    assert reason in outcome.reason
    eventually(lambda: not any(is_alive(pid) for pid in processes))


@pytest.mark.wide
def test_a_rank_that_fails_takes_down_ranks_that_wait_for_it(submit):
    job = submit("fail_on_rank_1_while_others_hang", num_ranks=2)
    hanging = job.worker(0)["pid"]
    outcome = job.handle.wait()
    assert "rank 1 ended with exit code 1: ValueError: the third weight is made of cheese" in outcome.reason
    assert not is_alive(hanging)


@pytest.mark.nightly
def test_a_rank_whose_supervisor_is_killed_takes_down_the_others(submit):
    job = submit("hang", num_ranks=2)
    os.kill(job.worker(1)["supervisor"], signal.SIGKILL)
    assert job.handle.wait().reason.startswith("rank 1 vanished")
    assert not is_alive(job.worker(0)["pid"])


def test_a_job_outlives_the_process_that_submitted_it_and_is_found_again(run, config):
    arguments = [str(run.path), str(FAKE_WORKER), config.launch.launcher]
    submitter = subprocess.run([sys.executable, "-c", SUBMIT_AND_DIE, *arguments], check=False)
    assert submitter.returncode == -signal.SIGKILL
    handle = attach(run)
    eventually((run.path / "worker-0.json").exists)
    assert handle.cancel().reason == "stopped by a signal"
    assert attach(run) is None


def test_an_interrupt_in_the_terminal_does_not_reach_the_job(at_work):
    foreground = os.getpgrp()
    assert all(os.getpgid(pid) != foreground for pid in at_work.processes())
    assert os.getsid(int(at_work.handle.record.job_id)) != os.getsid(0)


def test_output_can_be_followed_while_the_worker_runs(at_work):
    eventually(lambda: "at work" in log_path(at_work.handle.run, 0).read_text())
    assert at_work.handle.is_running()


def test_a_run_without_a_job_has_nothing_to_attach_to(run):
    assert attach(run) is None


def test_another_process_with_the_recorded_id_is_not_mistaken_for_the_job(run, job):
    stranger = replace(job, job_id=str(os.getpid()), folder=str(run.logs / "submitit" / "submission-00000"))
    assert psutil.pid_exists(os.getpid())
    assert not LocalJobHandle(run, stranger).is_running()


def test_a_job_that_ended_unwatched_is_concluded_on_attach(submit, run):
    job = submit("fail")
    eventually(lambda: not job.handle.is_running())
    assert not run.outcome.exists()
    assert attach(run) is None
    assert read_json(run.outcome)["status"] == "crashed"


def test_a_job_of_another_machine_is_left_alone(run, job):
    write_json(run.job, replace(job, host="elsewhere"))
    with pytest.raises(RunDirectoryError, match=r"submitted on elsewhere .* delete .*job\.json if the job has ended"):
        attach(run)


ATTACH = """
import sys
from pathlib import Path
from llama_core.launch.jobs.submission import attach
from llama_core.records.directory import RunDirectory

attach(RunDirectory(Path(sys.argv[1])))
"""
UNSEEN = r"was submitted in another container of .* delete .*job\.json if the job has ended"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to make a process namespace")
def test_a_job_that_lives_in_another_process_namespace_gets_no_second_one_beside_it(at_work):
    run = at_work.handle.run
    isolated = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ATTACH, str(run.path)]
    attached = subprocess.run(isolated, capture_output=True, text=True, check=False)
    assert re.search(UNSEEN, attached.stderr), attached.stderr
    assert not run.outcome.exists()
    assert at_work.handle.is_running()


ELSEWHERE = {"process_namespace": "of another container"}
OTHER_KERNEL = {"lock_domain": "of another kernel"}


@contextmanager
def recorded(handle, home):
    """Record a job as one of another place, and yield its run."""
    write_json(handle.run.job, replace(handle.record, **home))
    yield handle.run
    write_json(handle.run.job, handle.record)


@pytest.mark.parametrize("home", [ELSEWHERE, ELSEWHERE | OTHER_KERNEL])
def test_a_job_that_lives_where_its_processes_cannot_be_seen_is_left_alone(at_work, home):
    with recorded(at_work.handle, home) as run:
        with pytest.raises(RunDirectoryError, match=UNSEEN):
            attach(run)
        assert not run.outcome.exists()


@pytest.fixture(scope="module")
def killed(submit_for_all):
    """The handle of a job whose controller was killed."""
    handle = submit_for_all("serve").handle
    os.kill(int(handle.record.job_id), signal.SIGKILL)
    eventually(lambda: not handle.is_running())
    return handle


@pytest.mark.parametrize("home", [ELSEWHERE, OTHER_KERNEL, {"lock_domain": "", "process_namespace": ""}])
def test_a_job_has_ended_if_its_kernel_says_so_or_has_started_again(killed, home):
    with recorded(killed, home) as run:
        assert attach(run) is None
        assert read_outcome(run).status == "crashed"
        run.outcome.unlink()


def test_nobody_here_can_tell_whether_a_container_under_another_kernel_lives(killed):
    with recorded(killed, ELSEWHERE | OTHER_KERNEL) as run, pytest.raises(RunDirectoryError, match=UNSEEN):
        attach(run)


def test_without_slurm_a_slurm_job_is_refused_with_the_remedy(run, config, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentMismatchError, match=r"no Slurm commands .* use --launcher local"):
        submission.submit(run, config.with_overrides("launch.launcher=slurm"), 1)
    assert not run.job.exists()


def slurm_config(*overrides):
    config = RunConfig.from_mapping({"launch": {"launcher": "slurm", "device": "cuda"}, "training": {"batch_size": 16}})
    return config.with_overrides(*overrides)


def slurm_parameters(config, name, *, num_ranks):
    return parameters(config, name, "a comment", num_ranks)


def test_slurm_is_asked_for_one_task_and_one_gpu_per_rank():
    asked = slurm_parameters(slurm_config("launch.nodes=2", "parallel.gpus=16"), "run", num_ranks=16)
    assert (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"]) == (2, 8, 8)


@pytest.mark.parametrize(
    ("gres", "asked_for"),
    [
        ("gpu:h100:8", "gpu:h100:8"),
        ("gpu:h100", "gpu:h100:8"),
        ("gpu:1g.10gb", "gpu:1g.10gb:8"),
        ("nvme:1,gpu:rtx_6000:8", "gpu:rtx_6000:8,nvme:1"),
        ("gpu", "gpu:8"),
    ],
)
def test_gpus_named_by_their_type_are_those_of_a_nodes_ranks_and_asked_for_once(gres, asked_for):
    config = slurm_config("launch.nodes=2", "parallel.gpus=16", f"launch.slurm.options={{gres: '{gres}'}}")
    asked = slurm_parameters(config, "run", num_ranks=16)
    assert "gpus_per_node" not in asked
    assert asked["additional_parameters"]["gres"] == asked_for


def test_other_resources_stay_beside_the_gpus():
    asked = slurm_parameters(slurm_config("launch.slurm.options={gres: 'nvme:2'}"), "run", num_ranks=1)
    assert (asked["gpus_per_node"], asked["additional_parameters"]["gres"]) == (1, "nvme:2")


@pytest.mark.parametrize(
    ("gres", "told"),
    [
        ("gpu:h100:4", "asks for 4 GPUs on each node, which gets 8 ranks; use gpu:h100:8"),
        ("gpu:1", "asks for 1 GPUs on each node, which gets 8 ranks; use gpu:8"),
        ("gpu:a100:4,gpu:h100:4", "names GPUs twice; use one kind"),
    ],
)
def test_other_gpus_than_those_of_the_ranks_are_refused(gres, told):
    with pytest.raises(ConfigError, match=re.escape(f"launch.slurm.options.gres={gres} {told}")):
        slurm_config(
            "parallel.gpus=24", "launch.nodes=3", f"launch.slurm.options={{gres: '{gres}'}}", "training.batch_size=24"
        )


@pytest.mark.parametrize(("device", "gres"), [("cuda", "gpu:h100:4,nvme:1"), ("cpu", "nvme:1")])
def test_an_evaluation_asks_for_its_own_number_of_gpus_of_the_type(device, gres):
    evaluation = f"evaluation={{tasks: [hellaswag], device: {device}, gpus: 4}}"
    config = slurm_config("parallel.gpus=16", "launch.slurm.options={gres: 'gpu:h100:8,nvme:1'}", evaluation)
    asked = slurm_parameters(evaluating_request(config, evaluation_plan(config, device)), "evaluation", num_ranks=4)
    assert "gpus_per_node" not in asked
    assert asked["additional_parameters"]["gres"] == gres


def test_an_evaluation_on_several_gpus_is_one_task_with_all_of_them_and_their_cores():
    evaluation = "evaluation={tp: 2, gpus: 4, partition: small}"
    config = slurm_config("launch.nodes=2", "parallel.gpus=16", "launch.slurm.cpus_per_rank=6", evaluation)
    job = evaluating_request(config, evaluation_plan(config, "cuda"))
    asked = in_one_task(slurm_parameters(job, "evaluation", num_ranks=4))
    assert (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"], asked["cpus_per_task"]) == (1, 1, 4, 24)
    assert asked["srun_args"][-3:] == ["--nodes=1", "--ntasks=1", "--cpus-per-task=24"]
    assert asked["partition"] == "small"


def test_an_evaluation_on_several_nodes_is_one_task_on_the_first_of_them():
    config = slurm_config("parallel.gpus=16", "evaluation={tp: 2, pp: 8}", "launch.slurm.cpus_per_rank=6")
    shared = evaluation_plan(config, "cuda")
    asked = in_one_task(slurm_parameters(evaluating_request(config, shared), "evaluation", num_ranks=16))
    assert (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"], asked["cpus_per_task"]) == (2, 1, 8, 48)


def test_ranks_on_gpus_sit_beside_each_other_and_the_request_may_place_them_otherwise():
    asked = slurm_parameters(slurm_config(), "run", num_ranks=1)
    assert "--distribution=block:block" in asked["srun_args"]
    asked = slurm_parameters(slurm_config("launch.slurm.srun_options={distribution: cyclic}"), "run", num_ranks=1)
    assert [option for option in asked["srun_args"] if "distribution" in option] == ["--distribution=cyclic"]
    asked = slurm_parameters(slurm_config("launch.device=cpu"), "run", num_ranks=1)
    assert not any("distribution" in option for option in asked["srun_args"])


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Put a Slurm on the path whose default partition has GPUs; two cores of node2 are kept for the system."""
    rows = (
        "cpu*|node0|64|(null)",
        "gpu|node1|112|gpu:h100:8(S:0-1)",
        "gpu|node2|96|gpu:8,shard:4",
        "dev*|node3|12|gpu:2",
    )
    (tmp_path / "sinfo").write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\ncase "$*" in *node2) echo "NodeName=node2 CPUTot=96 CPUEfctv=94";; *) echo "NodeName=x";; esac\n'
    )
    for command in tmp_path.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cores_per_gpu.cache_clear()
    yield
    cores_per_gpu.cache_clear()


def test_a_rank_gets_its_gpus_share_of_the_cores_that_jobs_may_use(nodes):
    def cores(*overrides):
        asked = slurm_parameters(slurm_config(*overrides), "run", num_ranks=1)
        assert f"--cpus-per-task={asked['cpus_per_task']}" in asked["srun_args"]
        return asked["cpus_per_task"]

    assert cores("launch.slurm.partition=gpu") == 94 // 8  # the smaller of two kinds of nodes
    assert cores() == 12 // 2  # of the default partition
    assert cores("launch.slurm.partition=none") == 8
    assert cores("launch.slurm.partition=gpu", "launch.slurm.cpus_per_rank=3") == 3
    assert cores("launch.device=cpu") == 4


@pytest.fixture
def partitions(tmp_path, monkeypatch):
    """A cluster that gives a job 4000 MB for each core, in one partition 2 GiB for each GPU, in one whole nodes."""
    scontrol = """#!/bin/sh
        case "$*" in
            *config) echo "DefMemPerCPU            = 4000";;
            *) echo "PartitionName=cpu AllowNodes=ALL Default=YES DefMemPerNode=UNLIMITED"
               echo "PartitionName=gpu Default=NO DefMemPerCPU=1 JobDefaults=DefCpuPerGPU=2,DefMemPerGPU=2048";;
        esac
    """
    (tmp_path / "scontrol").write_text(scontrol)
    (tmp_path / "sinfo").write_text('#!/bin/sh\ncase "$*" in *%m) echo "cpu*|64000"; echo "gpu|512000+";; esac\n')
    for command in ("scontrol", "sinfo"):
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    caches = (cores_per_gpu, default_memory_bytes, largest_node_bytes)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("settings", "host_gib", "asked"),
    [
        (["device=cpu"], 24, None),  # 8 cores of 4000 MB are more than 30 GiB
        (["device=cpu"], 28, f"{28 * 1280}M"),
        (["device=cpu"], 60, "64000M"),  # no more than the largest node has, as long as the estimate fits
        (["device=cpu"], 0, None),
        (["slurm.partition=gpu"], 3, None),
        (["slurm.partition=gpu"], 4, f"{4 * 1280}M"),
        (["slurm.partition=gpu", "slurm.memory_gb_per_node=1"], 100, "1G"),
        (["slurm.partition=gpu", "slurm.options={exclusive: true}"], 1, "0"),
        (["slurm.partition=gpu", "slurm.options={mem-per-gpu: 8G}"], 100, None),
        (["slurm.partition=unheard-of"], 100, None),
    ],
)
def test_a_job_asks_for_the_estimated_memory_where_the_default_is_less(partitions, settings, host_gib, asked):
    config = slurm_config(*(f"launch.{setting}" for setting in settings))
    request = parameters(config, "run", "a comment", 2, host_bytes=host_gib * GIB)
    assert request.get("mem") == asked


def test_a_job_is_asked_to_fit_the_largest_node_of_its_partition(partitions):
    assert largest_node_bytes(None) == 64000 * MIB
    assert largest_node_bytes("gpu,none") == 512000 * MIB
    assert largest_node_bytes("none") is None


def test_slurm_is_asked_for_no_gpu_when_ranks_compute_on_the_cpu():
    assert "gpus_per_node" not in slurm_parameters(slurm_config("launch.device=cpu"), "run", num_ranks=1)


def test_slurm_gets_every_setting_of_the_configuration():
    config = slurm_config(
        "launch.slurm.partition=train",
        "launch.slurm.account=lab",
        "launch.slurm.time_limit_min=90",
        "launch.slurm.cpus_per_rank=6",
        "launch.slurm.memory_gb_per_node=200",
        "launch.slurm.setup=[module load cuda]",
    )
    asked = slurm_parameters(config, "llama3", num_ranks=1)
    expected = {
        "partition": "train",
        "account": "lab",
        "time": 90,
        "cpus_per_task": 6,
        "mem": "200G",
        "setup": ["module load cuda"],
        "job_name": "llama3",
        "comment": "a comment",
    }
    assert asked | expected == asked


def test_slurm_gets_no_setting_that_the_configuration_leaves_open():
    assert not {"partition", "account", "mem", "setup"} & set(slurm_parameters(slurm_config(), "run", num_ranks=1))


@pytest.mark.parametrize("minutes", [1, 10, 1440])
def test_slurm_warns_a_job_after_most_of_its_time_has_passed(minutes):
    asked = slurm_parameters(slurm_config(f"launch.slurm.time_limit_min={minutes}"), "run", num_ranks=1)
    assert 0 < asked["signal_delay_s"] <= minutes * 60 / 4


def test_submitit_takes_every_parameter(tmp_path):
    from submitit.slurm.slurm import _make_sbatch_string

    script = _make_sbatch_string("true", tmp_path, **slurm_parameters(slurm_config(), "run", num_ranks=1))
    assert "#SBATCH --requeue" in script
    assert "#SBATCH --wckey" not in script


def test_a_slurm_job_name_has_no_character_that_slurm_splits_at():
    assert job_name("my run,2") == "my-run-2"


def test_a_job_that_slurm_refuses_leaves_slurms_words_as_the_outcome(tmp_path, run, monkeypatch):
    said = "Batch job submission failed: Requested node configuration is not available"
    for command in ("sbatch", "srun"):
        (tmp_path / command).write_text(f"#!/bin/sh\necho 'sbatch: error: {said}' >&2; exit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EnvironmentMismatchError, match=said):
        submission.submit(run, slurm_config(), 1)
    outcome = read_outcome(run)
    assert outcome.status == "bad-config"
    assert said in outcome.reason
    page = write_report(run).read_text()
    assert "refused" in page
    assert said in page
    assert "no outcome yet" not in page


@pytest.mark.parametrize("status", ["finished", "cancelled"])
def test_a_refusal_replaces_every_outcome_but_a_finished_one(run, status):
    record_outcome(run, status, reason="it did", next_action="")
    record_refusal(run, "no such partition", "")
    assert read_outcome(run).reason == {"finished": "it did", "cancelled": "no such partition"}[status]


def test_a_job_that_may_still_run_is_not_called_refused(run):
    write_json(run.job, JobRecord("slurm", "7", "login1", "2026-11-21T09:50:00+00:00"))
    record_refusal(run, "no such partition", "")
    assert not run.outcome.exists()


def test_a_job_is_queried_by_the_name_it_was_given(tmp_path, monkeypatch):
    """The accounting database is queried once the controller has forgotten the job."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    (tmp_path / "sacct").write_text('#!/bin/sh\ncase "$*" in *--name=my-run-2*) echo TIMEOUT;; esac\n')
    for command in tmp_path.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert job_status("7", job_name("my run,2")) == JobStatus("TIMEOUT")
