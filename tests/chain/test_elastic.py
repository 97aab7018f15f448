"""Runs that go on with fewer nodes; ``tests/slurm`` takes a node from a real job."""

import os
import shlex
import subprocess
from types import SimpleNamespace

import pytest

from llama_core.chain import prepare
from llama_core.chain.elastic import main, plan_attempt
from llama_core.chain.prepare import prepare_run
from llama_core.chain.preview import preview_script
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.launch.jobs.handle import PLANNER
from llama_core.launch.jobs.slurm import _host_bytes
from llama_core.launch.outcome import read_outcome
from llama_core.runs.loading import load_config, load_plan
from llama_core.sweep import steps as sweeps
from llama_core.sweep.grid import SweepConfig

SMALL = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}


def request(nodes=4, min_nodes=1, **parallel):
    """Return a request for ``nodes`` nodes of one rank each, which only data parallelism divides."""
    slurm = {"memory_gb_per_node": 4}
    return RunConfig.from_mapping(
        {
            "architecture": SMALL,
            "training": {"seq_len": 32, "batch_size": 8, "steps": 4},
            "parallel": {"gpus": nodes, "tp": 1, "pp": 1, "cp": 1} | parallel,
            "launch": {"launcher": "slurm", "device": "cpu", "nodes": nodes, "min_nodes": min_nodes, "slurm": slurm},
        }
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepare_run(request(), tmp_path / "run")


def test_an_attempt_on_fewer_nodes_has_a_plan_of_its_own_and_the_next_on_all_has_the_first_one(run):
    first, asked = load_plan(run), run.config.read_bytes()
    assert first.world_size == 4
    assert plan_attempt(run, 2) == (2, 2)
    fewer = load_plan(run)
    assert (fewer.world_size, fewer.batch_size) == (2, first.batch_size)
    assert run.config.read_bytes() == asked
    assert plan_attempt(run, 4) == (4, 4)
    assert load_plan(run) == first


def test_nodes_for_which_there_is_no_plan_stay_idle(run):
    """Three ranks cannot divide a batch of eight."""
    assert plan_attempt(run, 3) == (2, 2)
    assert load_plan(run).world_size == 2


def test_a_plan_for_as_many_nodes_is_kept(run):
    plan_attempt(run, 2)
    written = run.plan.stat().st_mtime_ns
    plan_attempt(run, 3)
    assert run.plan.stat().st_mtime_ns == written


def test_resuming_asks_for_all_nodes_again_unless_a_job_works_by_the_plan_for_fewer(run, monkeypatch):
    plan_attempt(run, 2)
    monkeypatch.setattr(prepare, "attach", lambda run: SimpleNamespace())
    prepare_run(request(), run.path, resume=True)
    assert (load_plan(run).world_size, load_config(run).launch.nodes) == (2, 4)
    monkeypatch.undo()
    prepare_run(request(), run.path, resume=True)
    assert (load_plan(run).world_size, load_config(run).launch.nodes) == (4, 4)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (lambda: request(min_nodes=5), "launch.min_nodes=5 is above launch.nodes=4"),
        (
            lambda: request(zero_stage=1, zero_backend="deepspeed"),
            "launch.min_nodes=1: DeepSpeed's checkpoints load on",
        ),
    ],
)
def test_impossible_fewest_nodes_are_refused_in_a_configuration(problem, sentence):
    with pytest.raises(ConfigError, match=sentence):
        problem()


def test_fewest_nodes_without_a_plan_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PlanError, match=r"^launch\.min_nodes=1: parallel\.gpus=1 is not a multiple of 2 "):
        prepare_run(request(pp=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fewest_nodes_that_are_too_small_are_refused_before_anything_is_written(tmp_path):
    launch = {"launcher": "slurm", "device": "cuda", "gpu_type": "h100", "nodes": 2, "min_nodes": 1}
    config = RunConfig.from_mapping({"model": "llama2_7b", "parallel": {"gpus": 2}, "launch": launch})
    with pytest.raises(DoesNotFitError, match=r"^launch\.min_nodes=1: "):
        prepare_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_node_is_asked_for_the_memory_that_it_needs_when_it_is_one_of_few(tmp_path):
    """Fewer ranks that shard the states hold more of them each."""
    slurm = {"launcher": "slurm", "device": "cpu", "nodes": 4}
    sharded = {"parallel.zero_stage": 3, "architecture.vocab_size": 65536, "architecture.hidden_size": 1024}
    config = request().with_overrides(*(f"{key}={value}" for key, value in sharded.items()), f"launch={slurm}")
    rigid = prepare_run(config, tmp_path / "rigid")
    elastic = prepare_run(config.with_overrides("launch.min_nodes=1"), tmp_path / "elastic")
    alone = prepare_run(config.with_overrides("launch.nodes=1", "parallel.gpus=1"), tmp_path / "alone")
    assert _host_bytes(rigid) < _host_bytes(elastic) == _host_bytes(alone)


def test_the_job_script_asks_for_a_range_of_nodes_and_starts_as_many_ranks_as_the_plan_has(run):
    script = preview_script(request(), run.path.with_name("other")).splitlines()
    assert {"#SBATCH --nodes=1-4", "#SBATCH --mincpus=4"} <= set(script)
    assert not [line for line in script if line.startswith("#SBATCH --ntasks")]
    planning = [line.replace(str(run.path.with_name("other")), str(run.path)) for line in script if "ranks" in line]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*planning, "env"])],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "1"},
    )
    assert {"SLURM_NNODES=2", "SLURM_JOB_NUM_NODES=2", "SLURM_NTASKS=2"} <= set(shown.stdout.splitlines())


STARTS_TWICE = """
planner() {
    if [ "$#" -eq 0 ]; then echo "ranks=2"; return; fi
    starts=$((starts + 1))
    [ "$starts" -lt 2 ]
}
srun() { echo "$ranks ranks"; return 3; }
"""


@pytest.mark.parametrize("setup", [[], ["set -euo pipefail", "starts=0"]], ids=["plain", "a setup that is strict"])
def test_the_script_of_a_job_with_spares_starts_its_ranks_until_they_do_not_go_on(tmp_path, monkeypatch, setup):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = request(min_nodes=None).with_overrides("launch.spare_nodes=1", f"launch.slurm.setup={setup}")
    script = preview_script(config, tmp_path / "run")
    assert {"#SBATCH --nodes=4-5", "#SBATCH --no-kill"} <= set(script.splitlines())
    planner = shlex.join([*PLANNER, str(tmp_path / "run"), "slurm"])
    ended = subprocess.run(
        ["bash", "-c", STARTS_TWICE + script.replace(planner, "planner")],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.splitlines()) == (3, ["2 ranks", "2 ranks"]), ended.stderr


@pytest.mark.parametrize("limit", ["requeue=false", "max_attempts=1"])
def test_spares_of_a_job_that_may_not_start_again_are_refused(limit):
    with pytest.raises(ConfigError) as refused:
        request(min_nodes=None).with_overrides("launch.spare_nodes=1", f"launch.slurm.{limit}")
    assert str(refused.value) == (
        "launch.spare_nodes=1 needs a job that starts again, which launch.slurm.requeue or launch.slurm.max_attempts "
        "forbids; leave it out"
    )


def test_a_job_that_cannot_be_planned_ends_with_the_reason(run, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    run.config.write_text(run.config.read_text().replace("min_nodes: 1", "min_nodes: 2"))
    assert main([str(run.path), "slurm"], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}) == 2
    assert read_outcome(run).status == "bad-config"
    assert capsys.readouterr().err.startswith("ERROR launch.min_nodes=2: ")


@pytest.mark.parametrize(
    ("min_nodes", "spare_nodes", "given"),
    [(1, 0, r"launch\.min_nodes=1"), (None, 2, r"launch\.spare_nodes=2"),
     (1, 2, r"launch\.min_nodes=1 and launch\.spare_nodes=2")],
)  # fmt: skip
def test_elements_of_a_sweep_always_get_their_nodes(tmp_path, min_nodes, spare_nodes, given):
    base = request(min_nodes=min_nodes).with_overrides(f"launch.spare_nodes={spare_nodes}").model_dump()
    sweep = SweepConfig.from_mapping({"name": "tiny", "base": base, "grid": {"training.seed": [1]}})
    with pytest.raises(ConfigError, match=f"{given}: elements are compared on equal nodes; leave that out"):
        sweeps.prepare(sweep, tmp_path / "sweep")
