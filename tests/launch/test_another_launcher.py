"""A launcher of a package that is neither this machine nor Slurm: whatever is asked of it is asked of its facts."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import toy_launcher_jobs as depot_jobs
from launch_harness import FAKE_WORKER, Job, ending_jobs

from llama_core import registry
from llama_core.chain.environment import validate_environment
from llama_core.chain.tokenize import tokenize
from llama_core.config.evaluation import EvaluationConfig
from llama_core.config.run import RunConfig
from llama_core.config.settings import request_sections
from llama_core.data.shards import grouping
from llama_core.errors import ConfigError
from llama_core.evaluation.plan import evaluating_device
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.launch.outcome import read_outcome
from llama_core.launch.rank.start import HELD_SIGNALS
from llama_core.launch.rank.surroundings import Surroundings
from llama_core.launchers.registry import LAUNCHERS
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import read_attempt
from llama_core.records.evaluations import read_scores
from llama_core.records.files import read_json, read_typed
from llama_core.records.job import JobRecord
from training_infra import cli, quick_start

TESTS = Path(__file__).parents[1]
SUBMIT = """
import sys
from pathlib import Path
from llama_core.config.run import RunConfig
from llama_core.launch.jobs.submission import submit
from llama_core.records.directory import RunDirectory

config = RunConfig.from_mapping({"launch": {"device": "cpu", "launcher": "depot"}})
submit(RunDirectory(Path(sys.argv[1])), config, 1, worker=(sys.executable, sys.argv[2], "serve"))
"""
IN_DEPOT = {"launcher": "depot", "device": "cpu"}
FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}


@pytest.fixture
def depot(tmp_path, monkeypatch):
    """The depot of a launcher that a package brings to this test and to the processes that it starts."""
    site = tmp_path / "site"
    described = site / "toy_launcher-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_launcher\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[llama_training_infra.launchers]\ndepot = toy_launcher:DEPOT\n")
    monkeypatch.syspath_prepend(site)
    paths = [str(site), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    folder = tmp_path / "depot"
    folder.mkdir()
    monkeypatch.setenv(depot_jobs.FOLDER, str(folder))
    registry._entry_points.cache_clear()
    yield folder
    LAUNCHERS.pop("depot", None)
    registry._entry_points.cache_clear()


@pytest.fixture
def submit(depot, run):
    """Submit a job of fake workers to the depot, and kill it at the end of the test."""
    config = RunConfig.from_mapping({"launch": IN_DEPOT})
    with ending_jobs() as handles:

        def start(behaviour, num_ranks=1):
            worker = (sys.executable, str(FAKE_WORKER), behaviour)
            handles.append(submission.submit(run, config, num_ranks, worker=worker))
            return Job(handles[-1], num_ranks)

        yield start


@pytest.fixture
def law(tmp_path):
    file = tmp_path / "law.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{number}: the court held the law. " * 5}) for number in range(50)))
    return file


@pytest.mark.wide
def test_a_run_trains_to_its_end_and_its_checkpoints_are_evaluated_in_jobs_of_their_own(depot, tmp_path, law, capsys):
    config = {
        "architecture": FEW_PARAMETERS,
        "training": {"batch_size": 8, "seq_len": 64, "steps": 4, "precision": "fp32", "checkpoint_every": 2},
        "parallel": {"gpus": 2, "dp_replicate": 2},
        "data": {"source": str(law), "validation": None, "cache_dir": str(tmp_path / "cache")},
        "launch": IN_DEPOT,
        "tracking": {"tensorboard": False},
        "benchmark": {"steps": 0},
        "evaluation": {"data": {"law": str(law)}, "sequences": 4},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert cli.main(["train", "--config", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "launch.launcher=depot is of toy_launcher 1.0" in told
    run = RunDirectory(tmp_path / "run")
    outcome = read_outcome(run)
    assert (outcome.status, outcome.step) == ("finished", 4)
    assert read_typed(run.job, JobRecord).launcher == "depot"
    assert [score.step for score in read_scores(run)] == [2, 4]
    evaluated = read_attempt(run, list_checkpoints(run)[-1])
    assert depot_jobs.about(evaluated.job_id)["name"] == "run-evaluation"


def test_a_job_of_two_ranks_runs_to_its_end(submit, run):
    job = submit("finish", num_ranks=2)
    assert job.handle.wait().status == "finished"
    environments = [job.worker(rank)["environment"] for rank in range(2)]
    assert [(env["RANK"], env["WORLD_SIZE"], env["TRAINING_INFRA_NODE"]) for env in environments] == [
        ("0", "2", "a node of the depot"),
        ("1", "2", "a node of the depot"),
    ]


@pytest.mark.parametrize("dies", [(), (depot_jobs.DIES,)], ids=["afterwards", "before-it-has-recorded-the-job"])
def test_a_job_is_found_again_after_its_submitter_has_died(submit, run, depot, dies):
    environment = os.environ | dict.fromkeys(dies, "1")
    ended = subprocess.run([sys.executable, "-c", SUBMIT, run.path, FAKE_WORKER], env=environment, check=False)
    assert ended.returncode == (-signal.SIGKILL if dies else 0)
    assert run.job.exists() != bool(dies)
    job = submit("finish")
    assert [job.handle.record.job_id] == [folder.name for folder in depot.iterdir()]
    job.worker()
    assert job.handle.cancel().status == "cancelled"


def test_a_cancelled_job_stops_cleanly(submit, run):
    job = submit("serve", num_ranks=2)
    job.worker(0)
    job.worker(1)
    assert job.handle.cancel().reason == "stopped by a signal"
    assert read_json(run.path / "received.json")["signals"] == [signal.SIGTERM]


def test_a_job_whose_time_is_over_is_told_not_to_start_again(submit, run):
    job = submit("serve")
    job.worker()
    depot_jobs.send(job.handle.record.job_id, signal.SIGUSR2)
    outcome = job.handle.wait()
    assert outcome.status == "timeout"
    assert outcome.reason == (
        "the job neared its time limit and saved a checkpoint; the depot does not start a job again"
    )
    assert outcome.next_action == "start it again with --resume"
    assert [attempt["requeued"] for attempt in outcome.attempts] == [False]


@pytest.mark.parametrize("key", ["min_nodes", "spare_nodes"])
def test_a_job_that_could_start_with_fewer_nodes_is_refused(depot, key):
    launch = IN_DEPOT | {"nodes": 2, key: 1}
    with pytest.raises(ConfigError, match=rf"^launch\.{key}=1: the depot starts a job with all of its"):
        RunConfig.from_mapping({"launch": launch, "parallel": {"gpus": 2}})


def test_several_runs_are_submitted_at_once(depot, tmp_path):
    config = RunConfig.from_mapping({"launch": IN_DEPOT})
    runs = [RunDirectory(tmp_path / "sweep" / "elements" / name) for name in ("a", "b")]
    for run in runs:
        run.create()
    worker = (sys.executable, str(FAKE_WORKER), "serve")
    with ending_jobs() as handles:
        asked = [(run, config) for run in runs]
        handles.extend(submission.submit_several(tmp_path / "sweep", asked, 1, worker=worker))
        for handle in handles:
            Job(handle, 1).worker()
        assert len({handle.record.job_id for handle in handles}) == len(list(depot.iterdir())) == 2
        assert all(handle.is_running() for handle in handles)


def test_jobs_build_the_shards_of_tokens(depot, tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "ALONE_BYTES", 1)
    for number in range(3):
        folder = tmp_path / "corpus"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number}, of its own words " * 20}))
    data = {"source": str(tmp_path / "corpus"), "cache_dir": str(tmp_path / "cache")}
    training = {"seq_len": 16, "steps": 1}
    made = tokenize(RunConfig.from_mapping({"data": data, "training": training, "launch": IN_DEPOT}), 2)
    assert made.num_new_shards == 3
    assert [depot_jobs.about(job.name)["name"] for job in depot.iterdir()] == ["tokenize", "tokenize"]


def test_a_dataloader_is_refused_with_the_launchers_own_command(depot):
    with pytest.raises(ConfigError, match=r"launcher=depot: a job cannot read .*: depot-run 2 "):
        quick_start("tiny_llama3_50m", "standard", 2, **IN_DEPOT).launch_training([])


def test_what_another_launcher_asks_for_is_refused(depot, capsys):
    assert cli.main(["estimate-memory", "--launcher", "depot", "--device", "cpu", "--partition", "gpu"]) == 2
    refusal = "--partition is for Slurm jobs, and this run is one of the depot; add --launcher slurm"
    assert refusal in capsys.readouterr().err


def test_jobs_of_evaluations_that_it_would_refuse_are_told_before_a_run_begins(depot, monkeypatch, law):
    evaluation = {"data": {"law": str(law)}}
    config = RunConfig.from_mapping({"launch": IN_DEPOT, "evaluation": evaluation})
    assert validate_environment(config).errors == ()
    tasks = replace(depot_jobs.TASKS, refusal=lambda config: "the depot is full")
    monkeypatch.setattr(depot_jobs, "LAUNCHER", replace(depot_jobs.LAUNCHER, tasks=tasks))
    (error,) = validate_environment(config).errors
    assert "would refuse the evaluations: the depot is full; change evaluation.partition" in error


def test_it_describes_itself_and_evaluates_where_its_jobs_do(depot):
    config = RunConfig.from_mapping({"launch": IN_DEPOT})
    assert validate_environment(config).facts["depot"] == str(depot)
    assert evaluating_device(config, while_training=True) == "cpu"
    assert EvaluationConfig().device == "auto"


@pytest.mark.parametrize("name", [*LAUNCHERS, "depot"])
def test_a_launcher_does_what_its_facts_say(depot, name):
    launcher = launcher_of(name)
    facts = launcher.kind
    assert facts == LAUNCHERS[name]
    assert facts.runs_tasks == (launcher.tasks is not None)
    assert facts.section in {"", *request_sections()}
    assert facts.announces_end_with in {None, *HELD_SIGNALS}
    own = type(launcher.surroundings)
    assert facts.can_requeue == (own.queue_again is not Surroundings.queue_again)
    assert facts.can_exclude == (own.exclude is not Surroundings.exclude)
    assert facts.takes_fewer_nodes == (own.job_start is not Surroundings.job_start)
    assert bool(facts.allocates) == (own.step is not Surroundings.step)
