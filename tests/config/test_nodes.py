"""The nodes of a run: those that it asks for, or as few as hold its GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.hardware import fewest_nodes, gpu_names, gpu_spec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.evaluation.plan import evaluation_plan
from llama_core.launch.jobs.slurm_request import slurm_parameters
from llama_core.planning.search.auto import search
from llama_core.sweep.grid import SweepConfig
from training_infra import LlamaTrainingOrchestrator


def config(gpus, *overrides, device="cuda", gpu_type="a100", launcher="slurm"):
    launch = {"launcher": launcher, "device": device, "gpu_type": gpu_type}
    return RunConfig.from_mapping({"launch": launch, "parallel": {"gpus": gpus}}, overrides)


@given(st.integers(1, 5000), st.sampled_from(gpu_names()))
def test_nodes_that_nobody_asks_for_hold_as_many_gpus_each_and_none_holds_more_than_it_has(gpus, name):
    in_node = gpu_spec(name).gpus_per_node
    num_nodes = config(gpus, gpu_type=name).num_nodes
    assert gpus % num_nodes == 0
    assert gpus // num_nodes <= in_node
    fewer = [nodes for nodes in range(1, num_nodes) if gpus % nodes == 0]
    assert all(gpus // nodes > in_node for nodes in fewer)


@pytest.mark.parametrize("asked", [1, 3, 6, 12, 24])
def test_nodes_that_are_asked_for_stay(asked):
    assert config(24, f"launch.nodes={asked}").num_nodes == asked


@pytest.mark.parametrize(("gres", "num_nodes"), [("gpu:4", 4), ("gpu:h100:2,lscratch:1", 8), ("gpu:h100", 2)])
def test_nodes_have_as_many_gpus_as_the_job_asks_slurm_for(gres, num_nodes):
    options = f'launch.slurm.options={{gres: "{gres}"}}'
    assert config(16, options).num_nodes == num_nodes
    assert config(16, options, launcher="local").num_nodes == 2


@pytest.mark.parametrize("ranks", [16, 20, 64])
def test_processes_without_gpus_are_on_one_node(ranks):
    assert config(ranks, device="cpu").num_nodes == 1


@pytest.mark.parametrize(("gpus", "num_nodes"), [(24, 3), (40, 5), (512, 64)])
def test_nodes_follow_when_a_configuration_gets_other_devices(gpus, num_nodes, tmp_path):
    base = config(16)
    assert base.num_nodes == 2
    assert base.with_overrides(f"parallel.gpus={gpus}").num_nodes == num_nodes
    recorded = tmp_path / "config.yaml"
    recorded.write_text(base.to_yaml())
    assert RunConfig.load(recorded, [f"parallel.gpus={gpus}"]).num_nodes == num_nodes


def test_elements_of_a_sweep_over_devices_have_nodes_of_their_own():
    sweep = SweepConfig.from_mapping(
        {"name": "sizes", "base": config(8).model_dump(mode="json"), "grid": {"parallel.gpus": [8, 24, 96]}}
    )
    assert [sweep.config_of(element).num_nodes for element in sweep.elements()] == [1, 3, 12]


def test_python_plans_for_the_same_nodes(capsys):
    orchestrator = LlamaTrainingOrchestrator("llama3_8b", num_gpus=48)
    orchestrator.configure(gpu_type="h200")
    assert orchestrator.estimate_memory().host.num_ranks == 8
    orchestrator.print_configuration()
    assert "nodes=6 (8 x H200 141 GB on each)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("gpus", "nodes", "in_node"), [(40, 5, 8), (12, 2, 6), (7, 1, 7)])
def test_slurm_is_asked_for_as_many_nodes(gpus, nodes, in_node):
    asked = slurm_parameters(config(gpus), "run", "", gpus)
    assert (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"]) == (nodes, in_node, in_node)


def test_plans_and_evaluations_are_those_of_as_many_nodes_asked_for():
    model = ("model=llama3_70b", "evaluation={tasks: [hellaswag]}", "training.precision=bf16")
    open_nodes, asked = (config(48, *model, *more) for more in ((), ("launch.nodes=6",)))
    device = gpu_spec("a100")
    assert search(open_nodes, device.usable_bytes, device) == search(asked, device.usable_bytes, device)
    assert evaluation_plan(open_nodes, "cuda") == evaluation_plan(asked, "cuda")


def test_fewest_nodes_are_compared_with_those_that_hold_the_gpus():
    assert config(32, "launch.min_nodes=2").is_elastic
    assert not config(32, "launch.min_nodes=4").is_elastic
    with pytest.raises(ConfigError, match=r"launch\.min_nodes=5 is above launch\.nodes=4"):
        config(32, "launch.min_nodes=5")


@pytest.mark.parametrize("gpus", [1, 8, 72, 144])
def test_a_rack_whose_links_connect_72_gpus_is_one_node(gpus):
    assert fewest_nodes(gpus, gpu_spec("gb200")) == -(-gpus // 72)
