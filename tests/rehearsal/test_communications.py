"""The calls of all ranks of small plans match and can end; planted in the engine, each kind of fault is reported."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from queues import pairs_in_line

from llama_core.chain import steps
from llama_core.chain.prepare import prepare_run
from llama_core.config import models
from llama_core.config.models import model_spec
from llama_core.config.run import RunConfig
from llama_core.errors import DeadlockError, PlanError
from llama_core.launch.outcome import read_outcome
from llama_core.parallel import mesh, zero
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.pipeline import Pipeline
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal import communications
from llama_core.rehearsal.call_order import circle, collectives_in_line
from llama_core.rehearsal.communications import (
    MAX_RANKS,
    check_order,
    find_problems,
    record_calls,
    record_ranks,
    remembered_shapes,
    small_copy,
    small_spec,
)
from llama_core.rehearsal.trace import trace_rank
from llama_core.schedules.actions import Action, Kind, Schedule
from llama_core.schedules.registry import schedule_names, schedule_type
from llama_core.training import engine

ADAPTERS = st.fixed_dictionaries(
    {
        "lora_rank": st.just(8),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "target_modules": st.sampled_from(
            [["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["all-linear"], ["q_proj", "embed_tokens", "lm_head"]]
        ),
    }
)
EXPERTS = st.fixed_dictionaries(
    {
        "num_experts": st.sampled_from([2, 4]),
        "experts_per_token": st.sampled_from([1, 2]),
        "expert_size": st.sampled_from([0, 256]),
        "shared_size": st.sampled_from([0, 512]),
        "gate_inputs": st.booleans(),
        "biases": st.booleans(),
        "balance_bias": st.booleans(),
        "moe_layers": st.sampled_from([None, 2]),
    }
)
TRAINABLE = st.sampled_from([[], ["*norm*"], ["lm_head", "norm"], ["*embed*"], ["layers.[01].*"]])
TIED = st.sampled_from([{}, {"tied_embeddings": True}])


@pytest.fixture(autouse=True, scope="module")
def shapes():
    """Let DTensor infer each shape once for all plans."""
    with remembered_shapes():
        yield


def request(**sections):
    return RunConfig.from_mapping(
        {"model": "llama3_8b", "training": {"precision": "bf16", "seq_len": 4096}, "launch": {"device": "cuda"}}
        | sections
    )


@st.composite
def any_config(draw):
    """A configuration of every kind of model."""
    strategy = draw(
        st.one_of(
            st.fixed_dictionaries({"architecture": TIED}),
            st.fixed_dictionaries({"strategy": st.just("lora"), "lora": ADAPTERS}),
            st.fixed_dictionaries({"strategy": st.just("moe"), "moe": EXPERTS, "architecture": TIED}),
            st.fixed_dictionaries(
                {
                    "strategy": st.just("hybrid"),
                    "lora": ADAPTERS,
                    "moe": EXPERTS.map(lambda experts: experts | {"moe_layers": 2}),
                    "trainable": TRAINABLE,
                }
            ),
        )
    )
    return request(
        **strategy,
        training={"precision": draw(st.sampled_from(["bf16", "fp16", "fp32"])), "seq_len": 4096},
        data={"document_mask": draw(st.booleans())},
        launch={"device": draw(st.sampled_from(["cpu", "cuda"]))},
    )


@st.composite
def any_plan(draw, *, sizes, stages, microbatches, ep=1):
    """A plan with ``stages`` pipeline ranks, whose other axes have ``sizes``."""
    zero_stage, pp, ep = draw(st.sampled_from([0, 1, 2, 3])), draw(stages), draw(sizes) if ep > 1 else 1
    schedule = draw(st.sampled_from(schedule_names())) if pp > 1 else "1f1b"
    try:
        return ParallelPlan(
            tp=draw(sizes),
            pp=pp,
            cp=draw(sizes),
            dp_shard=draw(sizes) if zero_stage else 1,
            dp_replicate=draw(sizes),
            ep=ep,
            ep_nodes=draw(st.sampled_from([1, 1, ep])),
            expert_tp=draw(st.sampled_from([None, 1])),
            sequence_parallel=draw(st.booleans()),
            zero_stage=zero_stage,
            schedule=schedule,
            num_chunks=draw(st.sampled_from([2, 3])) if schedule_type(schedule).takes_chunks else 1,
            microbatch_size=draw(st.sampled_from([1, 2])),
            num_microbatches=draw(microbatches),
            recompute=draw(st.sampled_from(["none", "selective", "full"])),
            gradient_compression=draw(st.sampled_from(["none", "bf16", "powersgd"])),
            attention=draw(st.sampled_from(["auto", "math", "ulysses"])),
        )
    except PlanError:
        assume(False)


@st.composite
def small_plans(draw, stages, most_microbatches=4, max_ranks=MAX_RANKS):
    """Any kind of plan that can train any kind of model on a few ranks."""
    config = draw(any_config())
    sizes, microbatches = st.sampled_from([1, 1, 2, 2, 4]), st.integers(1, most_microbatches)
    plan = draw(any_plan(sizes=sizes, stages=stages, microbatches=microbatches, ep=2 if config.spec.moe else 1))
    assume(1 < plan.world_size <= max_ranks)
    try:
        plan.check(config.spec, seq_len=config.seq_len, precision=config.training.precision)
    except PlanError:
        assume(False)
    return config, plan


ALONE, STAGES = st.just(1), st.sampled_from([2, 2, 4])


def drawn(num_plans):
    """Report a fault without looking for a smaller one: that takes minutes."""
    return settings(
        max_examples=num_plans,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def problems_of_one_stream(config, plan, **options):
    """Return what would hang even if all streams of a rank shared one hardware queue."""
    ranks = record_ranks(config, plan, **options)
    return find_problems(ranks) or circle(ranks, collectives_in_line, in_one_stream=True)


@drawn(3)
@given(small_plans(ALONE | STAGES, max_ranks=2))
def test_the_calls_of_all_ranks_of_some_plans_match_and_can_end(case):
    assert not problems_of_one_stream(*case)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # a minute of processor time
@drawn(60)
@given(small_plans(ALONE, most_microbatches=2))
def test_the_calls_of_all_ranks_of_any_plan_match_and_can_end(case):
    assert not problems_of_one_stream(*case)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # a minute of processor time
@drawn(60)
@given(small_plans(STAGES))
def test_the_calls_of_all_ranks_of_any_pipeline_match_and_can_end(case):
    assert not problems_of_one_stream(*case)


@pytest.mark.nightly
@drawn(30)
@given(small_plans(ALONE | STAGES, max_ranks=4))
def test_they_do_so_over_several_steps_and_a_checkpoint(case):
    assert not problems_of_one_stream(*case, in_full=True)


# --- planted faults

PIPELINE = ParallelPlan(pp=2, num_microbatches=2)
SHARDS = ParallelPlan(dp_shard=2, zero_stage=3)
TENSORS = ParallelPlan(tp=2)
EXPERTS_OF_TWO = ParallelPlan(dp_replicate=2, ep=2)
SPARSE = {"strategy": "moe", "moe": {"num_experts": 4}}


def recorded(plan, plant):
    """Return the calls of all ranks, the last one with a fault in its engine."""
    record = partial(record_calls, request(**(SPARSE if plan.ep > 1 else {})), plan)
    *healthy, last = range(plan.world_size)
    ranks = [record(rank) for rank in healthy]
    with MonkeyPatch.context() as patch:
        plant(patch)
        return [*ranks, record(last)]


def no_count_of_targets(patch):
    patch.setattr(ParallelModel, "_count", lambda model, pieces: pieces[0].num_targets())


def count_targets_last(patch):
    """Count the targets of a step after its pipeline has run."""
    count, run, left = ParallelModel._count, Pipeline.forward_backward, []

    def count_later(model, pieces):
        left.append(partial(count, model, pieces))
        return pieces[0].num_targets()

    def run_first(pipeline, *arguments):
        losses = run(pipeline, *arguments)
        left.pop()()
        patch.setattr(ParallelModel, "_count", count)
        return losses

    patch.setattr(ParallelModel, "_count", count_later)
    patch.setattr(Pipeline, "forward_backward", run_first)


def no_prefetch(patch):
    patch.setattr(zero, "_set_prefetches", lambda model, plan: None)


def longer_microbatches(patch):
    patch.setattr(communications, "_batch", lambda config, plan, make=communications._batch: twice(make(config, plan)))


def twice(batch):
    return replace(batch, tokens_BS=batch.tokens_BS.repeat(2, 1), targets_BS=batch.targets_BS.repeat(2, 1))


def wider_activations(patch):
    wide = dict.fromkeys(communications.COMPUTE_DTYPES, communications.COMPUTE_DTYPES["fp32"])
    patch.setattr(communications, "COMPUTE_DTYPES", wide)


def no_sequence_parallelism(patch):
    patch.setattr(engine, "ParallelModel", partial(build_without_sequence_parallelism, ParallelModel))


def build_without_sequence_parallelism(build, spec, plan, **options):
    return build(spec, replace(plan, sequence_parallel=False), **options)


def other_loads(patch):
    patch.setattr(communications, "_dispatch_unevenly", lambda dispatch, *arguments: dispatch(*arguments))


def fewer_groups(patch):
    patch.setattr(mesh, "_transfer_groups", lambda plan, device_type: {})


def listed(change):
    """Return a fault in the actions of the last pipeline rank."""

    def plant(patch):
        make = Schedule.with_communication
        patch.setattr(
            Schedule, "with_communication", lambda schedule: tuple(change(list(actions)) for actions in make(schedule))
        )

    return plant


def without(*texts):
    """Return a change of a list of actions that leaves some out."""
    left_out = {Action.parse(text) for text in texts}
    return lambda actions: tuple(action for action in actions if action not in left_out)


def backwards_exchanged(actions):
    """Return a list of actions with the backwards of microbatches 0 and 1 in each other's place."""
    backwards = {Kind.BACKWARD, Kind.SEND_B}
    return tuple(
        replace(action, microbatch=1 - action.microbatch) if action.kind in backwards else action for action in actions
    )


FAULTS = {
    "a collective is missing": (
        PIPELINE,
        no_count_of_targets,
        r"collective \d on ranks 0, 1 \(all ranks\): rank 0 makes all_reduce \(sum\) of 1 int64 in step 1, "
        r"rank 1 all_reduce \(sum\) of 1 float32 in step 1",
    ),
    "weights are gathered in another order": (
        replace(SHARDS, recompute="full", num_microbatches=2),
        no_prefetch,
        r"rank 0 makes reduce_scatter \(avg\) of 5234 float32 \(from layers.0.* on\) in step 1, 0B0, "
        r"rank 1 all_gather of 627 bfloat16 \(from tok_embeddings.weight on\) in step 1, 0B0",
    ),
    "a rank has more rows": (
        TENSORS,
        longer_microbatches,
        r"rank 0 makes reduce_scatter \(sum\) of 264 bfloat16 in step 1, 0F0, "
        r"rank 1 reduce_scatter \(sum\) of 528 bfloat16 in step 1, 0F0",
    ),
    "a rank computes in another dtype": (
        SHARDS,
        wider_activations,
        r"rank 0 makes all_gather of \d+ bfloat16 \(from .*\) in step 1, 0F0, rank 1 all_gather of \d+ float32",
    ),
    "a rank keeps its sequence whole": (
        TENSORS,
        no_sequence_parallelism,
        r"rank 0 makes reduce_scatter \(sum\) of 264 bfloat16 in step 1, 0F0, "
        r"rank 1 all_reduce \(sum\) of 264 bfloat16 in step 1, 0F0",
    ),
    "a rank expects other tokens": (
        EXPERTS_OF_TWO,
        other_loads,
        r"rank 0 sends \d+ elements to rank 1, which expects \d+, in all_to_all in step 1, 0F0",
    ),
    "a rank makes other groups": (
        PIPELINE,
        fewer_groups,
        r"collective \d on ranks 0, 1 \(all ranks\): rank 0 makes (split into|new group of ranks) \S.* in the set-up, "
        r"rank 1 all_reduce \(sum\) of 1 int64 in step 1",
    ),
    "nobody receives a message": (
        PIPELINE,
        listed(without("1RECV_F1", "1F1", "1B1", "1SEND_B1")),
        r"message 3 from rank 0 to rank 1 .*: rank 0 makes send of 132 bfloat16 to rank 1 \(the output of stage 0 for "
        r"microbatch 1\) in step 1, rank 1 receive of 132 bfloat16 from rank 0 \(the output of stage 0 for "
        r"microbatch 0\) in the evaluation",
    ),
    "nobody sends a message": (
        PIPELINE,
        listed(without("1SEND_B1")),
        r"message 3 from rank 1 to rank 0 .*: rank 1 makes none, rank 0 receive of 132 bfloat16 from rank 1 \(the "
        r"gradient of the input of stage 1 for microbatch 1\) in step 1",
    ),
    "messages have changed places": (
        replace(PIPELINE, schedule="gpipe"),
        listed(backwards_exchanged),
        r"message 2 from rank 1 to rank 0 .*: rank 1 makes send of 132 bfloat16 to rank 0 \(.* for microbatch 1\) in "
        r"step 1, rank 0 receive of 132 bfloat16 from rank 1 \(.* for microbatch 0\) in step 1",
    ),
    "a rank waits for a message before a collective": (
        PIPELINE,
        count_targets_last,
        r"on rank 1, all_reduce \(sum\) of 1 int64 in step 1 on ranks 0, 1 \(all ranks\) waits for receive of 132 "
        r"bfloat16 from rank 0 .*; on rank 0, send of 132 bfloat16 to rank 1 .* waits for all_reduce \(sum\) of 1 ",
    ),
}


@pytest.mark.parametrize(("plan", "plant", "line"), FAULTS.values(), ids=FAULTS)
def test_a_fault_on_one_rank_is_reported_with_both_ranks_and_their_calls(plan, plant, line):
    problems = find_problems(recorded(plan, plant))
    assert any(re.search(line, problem) for problem in problems), problems


def on_one_group(patch):
    patch.setattr(Mesh, "transfer_group", lambda built, source, target: built.weights.get_group("pp"))


def not_connected(patch):
    patch.setattr(mesh.dist, "send", lambda *_, **__: None)
    patch.setattr(mesh.dist, "recv", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("plant", "schedule", "line"),
    [
        (
            on_one_group,
            "1f1b",
            "on rank 1, send of 132 bfloat16 to rank 0 (the gradient of the input of stage 1 for microbatch 0) in "
            "step 1 on ranks 0, 1 (all ranks) waits for receive of 132 bfloat16 from rank 0 (the output of stage 0 for "
            "microbatch 1)",
        ),
        (
            not_connected,
            "chimera",
            "waits for connecting for receive of 132 bfloat16 from rank 0 (the output of stage 0",
        ),
    ],
    ids=["both directions share a queue", "ranks connect at their first messages"],
)
def test_a_pipeline_needs_a_connected_group_for_each_direction(monkeypatch, plant, schedule, line):
    plant(monkeypatch)
    (problem,) = find_problems(record_ranks(request(), replace(PIPELINE, schedule=schedule)))
    assert line in problem


def test_in_the_engine_too_early_receives_need_a_queue_for_each_direction():
    assert "waits for receive" in circle(record_ranks(request(), PIPELINE), pairs_in_line)


# --- what a record holds


def test_a_record_has_the_calls_that_the_dry_run_counts(monkeypatch):
    """The dry run counts operators on fake tensors, and over the groups of a CPU; the step has every kind of call."""
    plan = ParallelPlan(tp=2, pp=2, cp=2, dp_shard=2, ep=2, zero_stage=3, num_microbatches=2, recompute="full")
    spec = small_spec(replace(model_spec("llama3_8b"), name="small"), plan, layers_per_stage=1)
    monkeypatch.setitem(models._REGISTRY, spec.name, spec)
    config = request(model="small", data={"document_mask": False}, **SPARSE)
    calls = [call for call in record_calls(config, plan, rank=0) if call.where.startswith("step 1")]
    recorded = Counter(operation.name.split()[0] for call in calls for operation in call.operations)
    recorded -= Counter({"receive": recorded["receive"]})  # the dry run counts a message where it is sent
    recorded -= Counter({"all_reduce": 2})  # the trainer asks for the most of some numbers and for the experts' loads
    counted = Counter()
    for segment in trace_rank(config, plan, 0, in_full=True).counter.segments:
        for transfer, number in segment.transfers.items():
            counted[transfer.collective] += number * (transfer.num_ranks > 1)
    assert recorded == counted


def test_a_gather_ahead_waits_for_no_transfer_of_the_layer_before_it():
    """The gather of layer 1 is issued before layer 0 attends, and the gather of the head before layer 1 does."""
    plan = ParallelPlan(cp=2, zero_stage=3)
    calls = record_calls(request(data={"document_mask": False}), plan, rank=0)
    hops = [number for number, call in enumerate(calls) if len(call.operations) == 2]
    head = next(number for number, call in enumerate(calls) if "norm.weight" in call.operations[0].content[:20])
    assert hops[0] < head < hops[1]
    assert hops[0] not in calls[head].after
    assert hops[0] in calls[hops[1]].after


def test_the_host_waits_for_the_numbers_of_tokens_before_it_sends_them():
    calls = record_calls(request(**SPARSE), EXPERTS_OF_TWO, rank=0)
    numbers, tokens = [number for number, call in enumerate(calls) if call.operations[0].received][:2]
    assert calls[numbers].operations[0].dtype == "int64"
    assert calls[tokens].host_after == (numbers,)


def test_ranks_send_different_numbers_of_tokens():
    ranks = record_ranks(request(**SPARSE), EXPERTS_OF_TWO)
    tokens = [[call.operations[0] for call in calls if call.operations[0].received][1] for calls in ranks]
    assert tokens[0].elements == tokens[1].elements[::-1] == tokens[0].received
    assert tokens[0].elements[0] > tokens[0].elements[1]


def test_recording_leaves_nothing_behind():
    state, names = torch.get_rng_state(), {name: vars(torch.Tensor).get(name) for name in ("item", "__bool__")}
    record_ranks(request(strategy="lora", lora={"lora_dropout": 0.1}), SHARDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: vars(torch.Tensor).get(name) for name in names} == names
    assert not dist.is_initialized()


# --- the check of a plan


LARGE_SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 64])


@drawn(30)
@given(any_plan(sizes=LARGE_SIZES, stages=LARGE_SIZES, microbatches=st.sampled_from([1, 2, 3, 12, 16, 30]), ep=2))
def test_every_plan_has_a_small_copy_with_its_kinds_of_ranks(plan):
    small = small_copy(plan)
    assert small.world_size <= 2 * MAX_RANKS
    assert small.num_microbatches <= max(4, 2 * small.pp)
    for axis in ("tp", "pp", "cp", "dp_shard"):
        assert (getattr(small, axis) > 1) == (getattr(plan, axis) > 1)
    for choice in ("schedule", "zero_stage", "recompute", "sequence_parallel", "gradient_compression"):
        assert getattr(small, choice) == getattr(plan, choice)


def test_a_checked_plan_says_how_much_matched_and_on_which_small_copy():
    checked = check_order(request(), ParallelPlan(pp=8, dp_shard=64, zero_stage=1, num_microbatches=16))
    assert re.fullmatch(
        r"[\d,]+ calls of 8 ranks match on \d+ communicators, and no call waits for itself; checked on a small copy of "
        r"the plan: 8 ranks \(dp_shard 2 x pp 4\), ZeRO 1, 1f1b, 8 x 1 sequences per step and rank",
        checked.summary(),
    )
    assert checked.as_dict()["plan"]["world_size"] == 8
    assert checked.num_calls > 200


def test_a_single_rank_has_nothing_to_agree_on():
    assert check_order(request(), ParallelPlan()) is None


def test_a_plan_that_would_hang_is_refused_in_one_line_and_its_directory_is_free(monkeypatch, tmp_path):
    on_one_group(monkeypatch)
    overrides = ("parallel.gpus=2", "parallel.pp=2", "launch.device=cpu", "training.steps=1")
    run = prepare_run(RunConfig.from_mapping({"model": "tiny_llama3_50m"}, overrides), tmp_path / "run")
    with pytest.raises(DeadlockError, match=r"\Athis plan would hang: on rank 1, send .*; use another plan.*\Z"):
        steps.rehearse(run)
    assert read_outcome(run).status == "bad-config"
    assert prepare_run(RunConfig.from_mapping({"model": "tiny_llama3_50m"}), run.path) == run
