from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.models import model_spec
from llama_core.config.parameter_counts import active_parameters
from llama_core.config.strategy import MoE
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


@given(
    st.integers(2, 12),
    st.integers(12, 40),
    st.sets(st.integers(0, 11), min_size=1),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["llama2_13b", "tiny_llama3_50m"]),
)
def test_stages_are_even_in_what_a_token_uses_wherever_the_experts_are(pp, num_layers, sparse, experts_per_token, name):
    moe = MoE(num_experts=16, experts_per_token=experts_per_token, moe_layers=tuple(sparse))
    spec = replace(model_spec(name), num_layers=num_layers, moe=moe)

    def heavier(stage, left, right):  # of two neighbours
        ends = spec.embedding_parameters * (stage == 0), spec.embedding_parameters * (stage == pp - 2)
        return max(
            end + sum(active_parameters(spec, layer) for layer in layers)
            for end, layers in zip(ends, (left, right), strict=True)
        )

    stages = [list(layers) for layers in ParallelPlan(pp=pp).stage_layers(spec)]
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
    for stage, (left, right) in enumerate(pairwise(stages)):
        assert left and right
        now = heavier(stage, left, right)
        assert len(left) == 1 or heavier(stage, left[:-1], [left[-1], *right]) >= now
        assert len(right) == 1 or heavier(stage, [*left, right[0]], right[1:]) >= now


def test_the_record_states_the_derived_sizes():
    record = ParallelPlan(dp_shard=8, zero_stage=3, microbatch_size=2, num_microbatches=4).as_dict()
    assert (record["world_size"], record["effective_zero_stage"], record["batch_size"]) == (8, 3, 64)


def test_all_problems_of_a_plan_are_reported_at_once():
    with pytest.raises(PlanError) as error:
        ParallelPlan(dp_shard=0, microbatch_size=-1, zero_stage=4, recompute="some")
    for problem in ("dp_shard=0", "microbatch_size=-1", "zero_stage=4", "recompute='some'"):
        assert problem in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert_tp": 2, "tp": 4}, "expert_tp=2 is neither 1 nor tp=4"),
        ({"expert_tp": 2}, "expert_tp=2 is neither 1 nor tp=1"),
        ({"expert_tp": 1, "tp": 4}, "expert_tp=1 needs an ep that is a multiple of tp=4, .* but ep is 1; use ep=4, or"),
        (
            {"expert_tp": 1, "tp": 4, "ep": 6, "dp_replicate": 2},
            "expert_tp=1 needs .* but ep is 6; use ep=8, or leave expert_tp out",
        ),
        ({"expert_tp": 1, "tp": 2, "ep": 4}, "ep=4 over tp=2 does not divide the 1 data-parallel ranks"),
        (
            {"expert_tp": 1, "tp": 2, "ep": 6, "dp_shard": 2, "dp_replicate": 3, "zero_stage": 1},
            "ep=6 over tp=2 neither divides dp_shard=2 nor is a multiple of it",
        ),
        (
            {"expert_tp": 1, "tp": 2, "ep": 2, "sequence_parallel": False},
            "expert_tp=1 needs sequence_parallel=true: without, all tensor-parallel ranks have the same tokens",
        ),
    ],
    ids=str,
)
def test_whole_experts_that_the_ranks_cannot_divide_are_refused_in_one_line(sizes, message):
    with pytest.raises(PlanError, match=rf"\A{message}") as refused:
        ParallelPlan(**sizes)
    assert "\n" not in str(refused.value)


def test_whole_experts_need_no_width_that_tensor_parallel_ranks_can_divide():
    spec = replace(model_spec("tiny_llama3_50m"), moe=MoE(num_experts=4, expert_size=25))
    ParallelPlan(tp=2, expert_tp=1, ep=2).check(spec, seq_len=32, precision="bf16")
    with pytest.raises(PlanError, match="tp=2 does not divide the 25 columns of an expert"):
        ParallelPlan(tp=2).check(spec, seq_len=32, precision="bf16")


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        ({}, {"ffn_size": 100}, "fp8 needs multiples of 16, but the feed-forward columns over tp=1 are 100; use bf16"),
        ({"tp": 4}, {}, "fp8 needs multiples of 16, but the key/value columns over tp=4 are 8; use bf16"),
        ({"cp": 4}, {}, "fp8 needs multiples of 16, but the tokens of a forward are 8; use bf16"),
        (
            {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
            {},
            "fp8 does not work with schedule=zb_h1; use schedule=1f1b or bf16",
        ),
        (
            {"dp_shard": 2, "zero_stage": 1, "zero_backend": "deepspeed"},
            {},
            "fp8 does not work with zero_backend=deepspeed; use native or bf16",
        ),
    ],
)
def test_what_has_no_products_in_fp8_is_refused_and_trains_in_bf16(plan, changes, message):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_size": 128, "vocab_size": 64}
    spec = replace(model_spec("tiny_llama3_50m"), **sizes | changes)
    with pytest.raises(PlanError) as refused:
        ParallelPlan(**plan).check(spec, seq_len=32, precision="fp8")
    assert message in str(refused.value)
    ParallelPlan(**plan).check(spec, seq_len=32, precision="bf16")


def test_a_plan_says_when_its_checkpoints_have_too_many_parts():
    plan = ParallelPlan(tp=8, dp_shard=1024, zero_stage=3)
    (note,) = plan.notes
    assert "8,192 parts" in note
    assert "164 s" in note
    assert replace(plan, dp_shard=64, dp_replicate=16).notes == ()
    assert replace(plan, zero_stage=0, dp_shard=1, dp_replicate=1024).notes == ()
