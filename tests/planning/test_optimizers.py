"""What planning makes of an optimizer's row."""

from dataclasses import replace

import pytest
from gathering_optimizer import NORMALISED
from toy_optimizer import SIGNUM

from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.memory.host import host_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import search
from llama_core.planning.search.candidates import Candidates
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.search.least_memory import NothingFitsError, least_devices
from llama_core.planning.search.lower_bounds import Bounds
from llama_core.planning.time.communication import communication
from llama_core.planning.time.compute import MEMORY_SHARE
from llama_core.planning.time.parts import HOST_BANDWIDTH
from llama_core.planning.time.step_time import step_time
from llama_core.planning.work import Work

H100 = gpu_spec("h100")
KINDS = (ADAMW, SIGNUM, NORMALISED)
ZERO = {
    0: ParallelPlan(dp_replicate=2),
    1: ParallelPlan(dp_shard=2, zero_stage=1),
    2: ParallelPlan(dp_shard=2, zero_stage=2),
    3: ParallelPlan(dp_shard=2, zero_stage=3),
}
OFFLOADED = ParallelPlan(dp_shard=2, zero_stage=3, zero_backend="deepspeed", offload="optimizer")


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in KINDS:
        monkeypatch.setitem(OPTIMIZERS, kind.name, kind)


def request(optimizer, *overrides, model="llama3_8b"):
    training = {"optimizer": optimizer, "precision": "bf16", "batch_size": 2}
    return RunConfig.from_mapping({"model": model, "training": training}, ["launch.device=cuda", *overrides])


def work(kind, plan):
    return Work.of(request(kind.name), plan)


@pytest.mark.parametrize("plan", [*ZERO.values(), OFFLOADED], ids=lambda plan: plan.summary())
def test_estimates_of_two_optimizers_differ_by_their_states_on_the_device(plan):
    lean, full = (estimate_memory(work(kind, plan)) for kind in (SIGNUM, ADAMW))
    updated = 0 if plan.offload != "none" else lean.phases["optimizer"]["gradients"] // 4
    for phase, categories in full.phases.items():
        assert categories["moments"] - lean.phases[phase]["moments"] == 4 * updated
        assert categories["moments"] == ADAMW.state_bytes * updated
        assert dict(categories) | {"moments": 0} == dict(lean.phases[phase]) | {"moments": 0}


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_offloaded_states_are_those_of_the_row(zero_stage):
    plan = replace(OFFLOADED, zero_stage=zero_stage)
    lean, full = (host_memory(request(kind.name), plan).offloaded_bytes for kind in (SIGNUM, ADAMW))
    assert full - lean == 4 * request("adamw").spec.num_parameters / 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_hosts_copy_for_a_checkpoint_is_as_large_as_the_checkpoint(kind):
    config = request(kind.name)
    memory = host_memory(config, ParallelPlan())
    assert memory.parts(estimate_memory(work(kind, ParallelPlan())))["checkpoint copy"] == config.checkpoint_bytes
    assert type(memory).from_dict(memory.as_dict(estimate_memory(work(kind, ParallelPlan())))) == memory


def optimizer_seconds(kind, plan):
    return step_time(work(kind, plan), H100).parts["optimizer"]


def test_an_update_takes_the_time_of_its_reads_and_writes():
    saved = optimizer_seconds(ADAMW, ZERO[0]) - optimizer_seconds(SIGNUM, ZERO[0])
    bytes_saved = (ADAMW.moved_bytes - SIGNUM.moved_bytes) * request("adamw").spec.num_parameters
    assert saved == pytest.approx(bytes_saved / (H100.memory_bandwidth * MEMORY_SHARE))
    saved = optimizer_seconds(ADAMW, OFFLOADED) - optimizer_seconds(SIGNUM, OFFLOADED)
    assert saved == pytest.approx(bytes_saved / 2 / HOST_BANDWIDTH)


def gathered(kind, plan):
    return sum(one.num_bytes for one in communication(work(kind, plan)) if one.collective == "all_gather")


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_update_that_gathers_sends_between_the_ranks_that_shard_and_takes_time_for_it(zero_stage):
    plan = ZERO[zero_stage]
    whole = 4 * request("adamw").spec.num_parameters
    assert gathered(NORMALISED, plan) - gathered(SIGNUM, plan) == whole
    assert gathered(ADAMW, plan) == gathered(SIGNUM, plan)
    added = optimizer_seconds(NORMALISED, plan) - optimizer_seconds(replace(NORMALISED, name="signum"), plan)
    assert added > 0.9 * (whole / 2) / H100.neighbour_bandwidth


def test_an_update_that_gathers_sends_nothing_where_nobody_shards():
    for plan in (ParallelPlan(), ZERO[0]):
        assert communication(work(NORMALISED, plan)) == communication(work(SIGNUM, plan))


def test_the_bounds_of_a_search_count_the_states_of_the_row():
    """Otherwise it discards plans that fit, or tries many that do not."""
    overrides = ("parallel.gpus=4", "training.batch_size=4", "parallel.tp=1", "parallel.pp=1")
    configs = [request(kind.name, *overrides) for kind in (SIGNUM, ADAMW)]
    lean, full = (Bounds(Candidates(config, H100), Fitting(config, None), lambda plan: None) for config in configs)
    variants = list(lean.candidates.variants())
    assert {variant.sharding.zero_stage for variant in variants} == {0, 1, 2, 3}
    for variant in variants:
        shards = 4 // variant.sharding.dp_replicate if variant.sharding.zero_stage else 1
        layers = full.spec.num_layers * full.spec.layer_parameters
        assert full._states(variant) - lean._states(variant) == 4 * layers / shards


def test_fewer_states_need_fewer_devices():
    lean, narrow, full = (
        least_devices(request(name, moments, "training.batch_size=64", model="llama3_70b"), H100).gpus
        for name, moments in (
            ("signum", "training.moments=fp32"),
            ("adamw", "training.moments=bf16"),
            ("adamw", "training.moments=fp32"),
        )
    )
    assert (lean, narrow, full) == (16, 16, 32)  # 12, 12 and 16 bytes x 70.55e9 parameters, over 66 GiB each


def test_a_search_that_finds_nothing_counts_the_bytes_of_the_row():
    for name, each in (("signum", 12), ("adamw", 16)):
        config = request(name, "parallel.gpus=1")
        with pytest.raises(NothingFitsError, match=rf"take {each} bytes x 8\.03e9 parameters / 1 ="):
            search(config, H100.usable_bytes, H100)
