import multiprocessing
import os
import time
from dataclasses import replace

import pytest

from llama_core.config.architecture import ArchitectureConfig
from llama_core.config.rope import LinearScaling
from llama_core.config.run import RunConfig
from llama_core.errors import PlanError, TrainingFailedError
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.parity import _tiny_config, check_parity
from llama_core.rehearsal.rank_processes import run_ranks
from llama_core.rehearsal.small_plan import shrunk

pytestmark = pytest.mark.nightly

LARGE = ParallelPlan(tp=8, pp=16, dp_shard=64, zero_stage=3, num_microbatches=64, recompute="full")


def asked_for():
    return RunConfig.from_mapping({"model": "llama3_405b"})


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, pp=2, num_microbatches=4),
        ParallelPlan(cp=2, zero_stage=3, num_microbatches=2),
        ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
        ParallelPlan(pp=2, schedule="chimera", dp_replicate=2, num_microbatches=4),
    ],
    ids=ParallelPlan.summary,
)
def test_a_small_copy_matches_one_process_and_the_rehearsed_bytes(plan):
    result = check_parity(asked_for(), plan)
    assert result.changes == ()
    assert result.agrees, result.summary()
    assert len(result.measured_bytes) == plan.pp
    assert not replace(result, loss_difference=1e-6).agrees
    assert not replace(result, measured_bytes=(2 * result.rehearsed_bytes[0],) * plan.pp).agrees


def test_a_small_copy_of_a_relative_matches_one_process_and_the_rehearsed_bytes():
    """Its norms are after attention and feed-forward: they take results of collectives that nobody has waited for."""
    result = check_parity(
        RunConfig.from_mapping({"model": "olmo3_7b"}), ParallelPlan(tp=2, pp=2, sequence_parallel=False)
    )
    assert result.agrees, result.summary()


def test_a_small_copy_of_unequal_layers_matches_the_rehearsed_bytes_where_gloo_copies_what_it_reduces():
    """Its second layer has experts, so that the reduction of that layer's gradients is the peak."""
    plan = ParallelPlan(dp_shard=4, ep=2, zero_stage=3)
    result = check_parity(RunConfig.from_mapping({"model": "llama4_maverick"}), plan)
    assert result.agrees, result.summary()


def test_a_small_copy_has_the_configured_traits_and_needs_no_recorded_folder():
    traits = {"rope_theta": 2e4, "rope_scaling": {"factor": 2.0}, "tied_embeddings": True}
    asked = RunConfig.from_mapping({"model": "llama2_7b", "architecture": traits})
    recorded = asked.model_copy(
        update={"model": "/gone/My-Llama", "architecture": ArchitectureConfig.record("/gone/My-Llama", asked.spec)}
    )
    for config in (asked, recorded):
        spec = _tiny_config(config, ParallelPlan(tp=2)).spec
        assert (spec.rope_theta, spec.rope_scaling, spec.tied_embeddings) == (2e4, LinearScaling(2.0), True)
        assert spec.hidden_size == 64


def test_a_large_plan_runs_with_fewer_ranks_of_the_same_kinds():
    result = check_parity(asked_for(), LARGE, max_ranks=8)
    assert result.plan.world_size == 8
    assert result.agrees, result.summary()
    assert set(result.changes) == {"tp 8 -> 2", "pp 16 -> 2", "dp_shard 64 -> 2", "num_microbatches 64 -> 4"}
    assert result.as_dict()["changes"] == list(result.changes)


@pytest.mark.parametrize("max_ranks", [8, 16, 64, 256])
def test_a_shrunk_plan_has_no_more_ranks_than_allowed_and_keeps_every_axis(max_ranks):
    small = shrunk(LARGE, max_ranks)
    assert small.world_size <= max_ranks
    assert min(small.tp, small.pp, small.dp_shard) >= 2
    assert (small.zero_stage, small.schedule, small.recompute) == (3, "1f1b", "full")


@pytest.mark.parametrize("max_ranks", [8, 16, 32])
def test_whole_experts_stay_whole_in_a_shrunk_plan(max_ranks):
    plan = ParallelPlan(tp=8, expert_tp=1, ep=64, ep_nodes=8, dp_shard=16, dp_replicate=2, zero_stage=3)
    small = shrunk(plan, max_ranks)
    assert small.world_size <= max_ranks
    assert small.folds_experts
    assert small.ep == small.tp * min(plan.ep_over_dp, small.dp)


def test_a_plan_with_too_many_kinds_of_ranks_is_refused():
    with pytest.raises(PlanError, match="needs 8 processes, more than 4"):
        shrunk(LARGE, 4)


def test_a_plan_that_deepspeed_shards_has_no_small_copy():
    with pytest.raises(PlanError, match=r"\A.*parallel\.zero_backend=native.*\Z"):
        check_parity(asked_for(), ParallelPlan(dp_shard=2, zero_stage=3, zero_backend="deepspeed"))


def own_rank():
    return os.environ["RANK"]


def fail_on_rank_one():
    if os.environ["RANK"] == "1":
        raise ValueError("rank one broke")
    time.sleep(600)


def never_answer():
    time.sleep(600)


def test_results_come_in_the_order_of_the_ranks():
    assert run_ranks(3, own_rank, timeout_s=300) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("function", "timeout_s", "message"),
    [(fail_on_rank_one, 60, "rank one broke"), (never_answer, 1, "rank 0, 1 of 2 gave no answer in time")],
)
def test_a_failure_ends_all_ranks_and_is_reported(function, timeout_s, message):
    with pytest.raises(TrainingFailedError, match=message):
        run_ranks(2, function, timeout_s=timeout_s)
    assert not multiprocessing.active_children()
