"""What the deployments of ``prefect.yaml`` need, and how long those for a CPU take."""

from pathlib import Path

import pytest
import yaml

from llama_core.chain.expected import rough_step
from llama_core.config.hardware import DEFAULT_GPU_TYPE, CpuRates, gpu_spec
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
OF_GPUS = [name for name, one in DEPLOYMENTS.items() if "gpu" in one["tags"]]
RUNS_ON_CPUS = [name for name, one in DEPLOYMENTS.items() if "config" in one["parameters"] and name not in OF_GPUS]
NODES = {1: "one node", 4: "four nodes", 8: "eight nodes"}


def config_of(name):
    """Return the configuration of a deployment's run, or the base of its sweep."""
    parameters = DEPLOYMENTS[name]["parameters"]
    return RunConfig.from_mapping(parameters.get("config") or parameters["sweep"]["base"])


def test_the_tags_say_which_deployments_are_for_gpus():
    assert [name for name in DEPLOYMENTS if config_of(name).launch.device == "cuda"] == OF_GPUS


@pytest.mark.parametrize("name", OF_GPUS)
def test_a_deployment_for_gpus_says_which_it_needs(name):
    config = config_of(name)
    gpu = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE)
    plural = "s" if config.parallel.gpus > 1 else ""
    gpus = f"{config.parallel.gpus} {gpu.name.upper()} GPU{plural} ({gpu.memory_bytes / 1e9:.0f} GB)"
    assert DEPLOYMENTS[name]["description"].endswith(f"; needs Slurm and {gpus} on {NODES[config.num_nodes]}.")


@pytest.mark.parametrize("name", RUNS_ON_CPUS)
def test_a_run_that_is_deployed_for_cpus_takes_minutes_on_two_cores(name):
    config = config_of(name)
    num_steps = config.training.steps + config.benchmark.warmup_steps + config.benchmark.steps
    plan = ParallelPlan(num_microbatches=config.batch_size)
    step = rough_step(config, plan, CpuRates.of_cores(2))
    assert num_steps * step.seconds < 15 * 60
