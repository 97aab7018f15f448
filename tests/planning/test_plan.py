import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan

sizes = st.integers(1, 64)
plans = st.builds(
    ParallelPlan,
    dp_shard=sizes,
    dp_replicate=sizes,
    zero_stage=st.integers(1, 3),
    microbatch_size=sizes,
    num_microbatches=sizes,
    recompute=st.sampled_from(["none", "full"]),
)


@given(plans)
def test_a_recorded_plan_reads_back_unchanged(plan):
    assert ParallelPlan.from_dict(plan.as_dict()) == plan


@given(plans)
def test_the_batch_is_the_sum_over_all_ranks_and_microbatches(plan):
    ranks = plan.dp_shard * plan.dp_replicate
    assert plan.world_size == ranks
    assert plan.batch_size == ranks * plan.microbatch_size * plan.num_microbatches


@given(plans)
def test_a_zero_stage_takes_effect_only_with_ranks_to_shard_over(plan):
    assert plan.effective_zero_stage == {True: 0, False: plan.zero_stage}[plan.dp_shard == 1]


def test_the_record_states_the_derived_sizes():
    record = ParallelPlan(dp_shard=8, zero_stage=3, microbatch_size=2, num_microbatches=4).as_dict()
    assert (record["world_size"], record["effective_zero_stage"], record["batch_size"]) == (8, 3, 64)


def test_all_problems_of_a_plan_are_reported_at_once():
    with pytest.raises(PlanError) as error:
        ParallelPlan(dp_shard=0, microbatch_size=-1, zero_stage=4, recompute="some")
    for problem in ("dp_shard=0", "microbatch_size=-1", "zero_stage=4", "recompute='some'"):
        assert problem in str(error.value)
