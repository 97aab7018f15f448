import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiers import nightly

from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, PlanError
from llama_core.planning.memory.estimate import estimate_ranks
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan, search
from llama_core.planning.search.candidates import Candidates
from llama_core.planning.search.choice import NOTICEABLE
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.search.least_memory import NothingFitsError
from llama_core.planning.search.search import Search
from llama_core.planning.work import Work
from llama_core.schedules.chimera import CHIMERA
from llama_core.schedules.clock import simulate
from llama_core.schedules.one_way import ONE_F_ONE_B
from llama_core.schedules.registry import schedule_names


def request(model, gpus, **settings):
    return RunConfig.from_mapping(
        {"model": model, "parallel": {"gpus": gpus}, "data": {"document_mask": False}},
        [f"{key.replace('__', '.')}={value}" for key, value in settings.items()],
    )


def searched(config, gpu_type="h100"):
    device = gpu_spec(gpu_type)
    return search(config, device.usable_bytes, device)


def peaks(config, plan):
    ranks = estimate_ranks(replace(Work.of(config, plan), on_cuda=False))
    return tuple(rank.peak_bytes for rank in ranks)


def experts(number, layers="null"):
    return {"strategy": "moe", "moe__num_experts": number, "moe__moe_layers": layers}


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_type", "batch_size", "more"),
    [
        ("tiny_llama3_150m", 4, "rtx4090", 64, {}),
        ("llama3_8b", 8, "h100", 8, {}),
        ("tiny_llama3_150m", 8, "rtx4090", 8, experts(4, 2)),
        nightly("llama2_13b", 8, "h100", 16, {}),
        nightly("llama2_7b", 8, "a100_40gb", 16, {}),
        nightly("tiny_llama3_150m", 8, "rtx4090", 16, experts(8)),
        nightly("llama2_13b", 16, "h100", 32, experts(16, "[4,8,12,16,20,24,28]")),
        nightly("llama3_2_1b", 16, "a100_40gb", 16, experts(8, "[8,9,10,11,12,13,14,15]")),
    ],
)
def test_no_plan_that_fits_is_a_percent_faster_and_none_is_better_than_its_bounds(
    model, gpus, gpu_type, batch_size, more
):
    config, device = request(model, gpus, training__batch_size=batch_size, **more), gpu_spec(gpu_type)
    candidates = Candidates(config, device)
    everything = Search(candidates, Fitting(config, device.usable_bytes), device)
    options = [option for option in map(everything.option, candidates.variants()) if option]
    assert searched(config, gpu_type).step.total <= 1.01 * min(option.step.total for option in options)
    # a bound is infinite if the memory bound says that nothing fits
    shares = {
        option.variant: option.step.total / everything.bounded.get(option.variant, math.inf) for option in options
    }
    assert min(shares.values()) > 0.94, min(shares, key=shares.get)


def test_expert_parallel_ranks_are_chosen_and_one_asks_for_others():
    sparse = {"training__batch_size": 16, "parallel__pp": 1, **experts(8)}
    choice = searched(request("llama3_2_1b", 16, **sparse))
    assert choice.plan.ep > 1
    assert choice.reasons["ep"].startswith(f"ep {choice.plan.ep}: with the best alternative, ")
    asked = searched(request("llama3_2_1b", 16, parallel__ep=2, **sparse))
    assert (asked.plan.ep, asked.reasons["ep"]) == (2, "ep 2: asked for")
    assert asked.step.total > choice.step.total
    assert "ep" not in searched(request("llama3_8b", 8)).reasons
    refused = searched(request("tiny_llama3_150m", 8, training__batch_size=8, **experts(6, 2))).rejected
    assert "ep 4: does not divide 6 experts" in refused


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        ({"parallel__ep": 16}, 2),
        ({"parallel__ep": 8}, 1),
        ({"parallel__ep": 8, "parallel__tp": 2, "parallel__expert_tp": 2}, 2),
        ({"parallel__ep": 8, "parallel__tp": 2, "parallel__expert_tp": 1}, 1),
        ({"parallel__ep": 16, "parallel__tp": 2, "parallel__expert_tp": 1}, 2),
        ({"parallel__ep": 16, "moe__experts_per_token": 1}, 1),
        ({"parallel__ep": 16, "parallel__ep_dispatch": "direct"}, 1),
        ({"parallel__ep": 16, "parallel__ep_dispatch": "two_step", "moe__experts_per_token": 1}, 2),
    ],
)
def test_tokens_cross_nodes_in_two_steps_where_they_have_several_experts_there(asked, nodes):
    config = request(
        "llama3_2_1b", 32, **{"parallel__pp": 1, "parallel__tp": 1, "training__batch_size": 32} | asked, **experts(16)
    )
    assert searched(config).plan.ep_nodes == nodes


def test_whole_experts_on_tensor_parallel_ranks_are_tried_beside_divided_ones():
    sparse = {"training__batch_size": 32, "parallel__pp": 1, "parallel__tp": 2, **experts(16)}
    choice = searched(request("llama3_2_1b", 32, **sparse))
    divided = searched(request("llama3_2_1b", 32, parallel__expert_tp=2, **sparse))
    assert choice.plan.folds_experts
    assert choice.step.total < divided.step.total
    assert choice.reasons["ep"].startswith(f"ep {choice.plan.ep} with expert_tp 1: with the best alternative, ")


def test_whole_experts_need_no_data_parallel_ranks():
    config = request("tiny_llama3_150m", 2, parallel__tp=2, parallel__expert_tp=1, **experts(4))
    assert choose_plan(config, None).ep == 2


def test_two_steps_inside_a_node_are_refused():
    config = request("llama3_2_1b", 32, parallel__ep=8, parallel__tp=1, parallel__ep_dispatch="two_step", **experts(16))
    with pytest.raises(PlanError, match=r"parallel\.ep_dispatch=two_step: .*does not span whole nodes.*use auto"):
        searched(config)


def test_no_option_exceeds_the_limit_on_any_rank():
    device = gpu_spec("h100")
    config = request("llama2_13b", 8, training__batch_size=16, parallel__recompute="none")
    candidates, fitting = Candidates(config, device), Fitting(config, device.usable_bytes)
    found = Search(candidates, fitting, device)
    plans = [option.plan for option in map(found.option, candidates.variants()) if option]
    assert plans
    assert all(max(peaks(config, plan)) <= FILL_LIMIT * device.usable_bytes for plan in plans)


asked = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "dp_replicate": st.sampled_from([1, 2]),
        "schedule": st.sampled_from(schedule_names()),
        "num_chunks": st.sampled_from([1, 2]),
        "microbatch_size": st.sampled_from([1, 2]),
        "num_microbatches": st.sampled_from([4, 8]),
        "ep": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    },
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.sampled_from([("llama3_8b", "h100"), ("llama2_7b", "a100_40gb"), ("tiny_llama3_150m", "rtx4090")]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([{}, experts(4, 2)]),
    asked,
)
def test_every_found_plan_is_legal_fits_on_all_ranks_and_honours_the_request(model, gpus, more, asked):
    try:
        settings = {f"parallel__{key}": value for key, value in asked.items()} | more
        config = request(model[0], gpus, training__seq_len=2048, training__batch_size=32, **settings)
        choice = searched(config, model[1])
    except (ConfigError, PlanError):
        assume(False)
    plan, device = choice.plan, gpu_spec(model[1])
    plan.check(config.spec, seq_len=config.seq_len, precision="bf16")
    assert (plan.world_size, plan.batch_size) == (gpus, 32)
    assert max(peaks(config, plan)) == choice.peak_bytes <= FILL_LIMIT * device.usable_bytes
    # without ZeRO all ranks are copies, and a requested chimera becomes the form that fits
    exempt = {"dp_replicate"} if plan.zero_stage == 0 else set()
    exempt |= {"schedule"} if asked.get("schedule") == "chimera" else set()
    assert {key: getattr(plan, key) for key in asked if key not in exempt} == {
        key: value for key, value in asked.items() if key not in exempt
    }
    assert plan.schedule.startswith(asked.get("schedule", ""))


def test_requested_copies_keep_zero_where_ranks_still_shard():
    for copies, stages in ((1, {1, 2, 3}), (2, {1, 2, 3}), (8, {0})):
        choice = searched(request("tiny_llama3_150m", 8, parallel__dp_replicate=copies, parallel__tp=1, parallel__pp=1))
        assert choice.plan.dp_replicate == copies
        assert choice.plan.zero_stage in stages


@given(st.sampled_from([4, 6, 8, 16]), st.integers(1, 80), st.sampled_from(["none", "full"]))
def test_chimera_is_dominated_exactly_when_1f1b_is_no_slower_on_the_clock(pp, num_microbatches, recompute):
    units = -(-num_microbatches // pp)
    backward = 3 if recompute == "full" else 2
    spans = [
        simulate(
            ParallelPlan(pp=pp, schedule=schedule, num_microbatches=units * pp).build_schedule(),
            forward=1,
            backward=backward,
        ).makespan
        for schedule in ("chimera", "1f1b")
    ]
    beaten = CHIMERA.is_beaten_by(ONE_F_ONE_B, pp, num_microbatches, backward=backward)
    assert beaten == (spans[0] >= spans[1])


@settings(max_examples=40)
@given(
    st.sampled_from(schedule_names()),
    st.sampled_from([2, 4, 6, 8]),
    st.integers(1, 12),
    st.integers(0, 7),
    st.sampled_from([0, 1, 2, 3]),
    st.lists(st.integers(0, 4), min_size=16, max_size=16),
)
def test_the_short_step_that_stands_for_a_long_one_has_the_same_peaks(schedule, pp, units, more, zero, recomputed):
    chunks, extra = (2, 0) if schedule == "interleaved" else (1, more)
    config, shards = request("tiny_llama3_50m", 1), 1 if zero == 0 else 2
    try:
        plan = ParallelPlan(
            pp=pp,
            schedule=schedule,
            num_chunks=chunks,
            num_microbatches=units * pp + extra,
            microbatch_size=2,
            zero_stage=zero,
            dp_shard=shards,
            recompute="none" if schedule in {"zb_h1", "zbv"} else "selective",
        )
        plan = replace(plan, recomputed_layers=tuple(recomputed[: plan.num_stages]))
        plan.check(config.spec, seq_len=config.seq_len, precision="bf16")
    except PlanError:
        assume(False)
    assert Fitting(config, None).peaks(plan) == peaks(config, plan)


def test_8b_on_one_node_gives_a_reason_for_each_choice():
    choice = searched(request("llama3_8b", 8))
    assert (choice.plan.tp, choice.plan.pp, choice.plan.zero_stage) == (1, 1, 3)
    assert set(choice.reasons) == {"tp", "pp", "cp", "sharding", "schedule", "microbatch", "recompute", "offload"}
    assert choice.reasons["tp"].startswith("tp 1: with the best alternative, 2, a step takes")
    assert "exceeds the limit by" in choice.reasons["recompute"]
    assert "ZeRO 0: weights, gradients and moments alone take 119.66 GiB at tp 1 x pp 1" in choice.rejected
    assert "cp 2: fewer than 8192 tokens per rank (sequence length 8192)" in choice.rejected
    assert all(other.step.total >= choice.step.total for other in choice.runners_up)


@pytest.mark.nightly
def test_70b_on_96_devices_lists_the_divisions_never_tried():
    rejected = searched(request("llama3_70b", 96, training__batch_size=192)).rejected
    assert "tp 3: does not divide 8 key/value heads" not in rejected
    assert "tp 3: crosses nodes of 8" in rejected
    assert any(line.startswith("pp 32: fewer than 3 layers") for line in rejected)
    assert any("chimera" in line for line in rejected)


@pytest.mark.nightly
def test_405b_on_64_h200_gets_a_pipeline_and_says_which_others_were_no_better():
    choice = searched(request("llama3_405b", 64), "h200")
    assert choice.plan.pp > 1
    assert any(
        {"gpipe", "chimera"} <= set(names.split(", ")) and why.startswith("no faster and no leaner than 1f1b at pp")
        for names, _, why in (line.partition(": ") for line in choice.rejected)
    )
    assert any(line.startswith("tp 16: crosses nodes of 8") for line in choice.rejected)


def test_405b_on_64_h100_is_refused_with_the_arithmetic_and_the_remedies():
    with pytest.raises(NothingFitsError) as caught:
        searched(request("llama3_405b", 64))
    error = caught.value
    assert error.exit_code == 3
    assert "16 bytes x 405.85e9 parameters / 64 = 101.5 GB per device" in str(error)
    remedies = str(error).split("would fit: ")[1].split("; ")
    assert {"parallel.gpus=128", "launch.gpu_type=h200 (H200 141 GB)"} <= set(remedies)
    assert error.plan.world_size == 64


def test_the_remedies_offered_when_nothing_fits_do_fit():
    with pytest.raises(NothingFitsError, match=r"parallel\.gpus=2; .*offload=parameters") as caught:
        searched(request("llama3_8b", 1))
    assert caught.value.plan.world_size == 1
    assert searched(request("llama3_8b", 2)).plan.world_size == 2
    offloaded = request("llama3_8b", 1, parallel__zero_backend="deepspeed", parallel__offload="parameters")
    assert searched(offloaded).plan.offload == "parameters"


def test_adapters_are_offered_when_fine_tuning_does_not_fit_and_then_fit():
    instruct, adapted = request("llama3_70b_instruct", 8), request("llama3_70b_instruct", 8, strategy="lora")
    with pytest.raises(NothingFitsError, match="would fit: strategy=lora; "):
        searched(instruct)
    with pytest.raises(NothingFitsError, match=r"would fit: parallel\.gpus="):  # it trains from scratch
        searched(request("llama3_70b", 8))
    assert searched(adapted).plan.world_size == 8
    with pytest.raises(
        NothingFitsError, match=r"parameters \+ 811\.7 GB of frozen weights\) / 8 = 101\.\d GB per device"
    ):
        searched(request("llama3_405b", 8, strategy="lora"))


def test_a_base_in_nf4_is_offered_when_adapters_do_not_fit_and_then_fits():
    adapted = request("llama2_13b", 1, strategy="lora")
    with pytest.raises(NothingFitsError, match=r"would fit: lora\.base=nf4; "):
        searched(adapted, "rtx4090")
    assert searched(adapted.with_overrides("lora.base=nf4"), "rtx4090").plan.world_size == 1
    with pytest.raises(NothingFitsError, match=r"would fit: strategy=lora with lora\.base=nf4; "):
        searched(request("llama3_70b_instruct", 1))
    # 401.65e9 numbers inside layers at 33 bytes for 64, and 4.2e9 at 2 bytes
    with pytest.raises(NothingFitsError, match=r"parameters \+ 215\.5 GB of frozen weights\) / 1 "):
        searched(request("llama3_405b", 1, strategy="lora", lora__base="nf4"))


def test_offload_is_chosen_only_when_nothing_less_fits():
    plans = [searched(request("llama3_8b", gpus, parallel__zero_backend="deepspeed")).plan for gpus in (8, 2)]
    assert [plan.offload for plan in plans] == ["none", "optimizer"]


def test_tensor_parallelism_across_nodes_is_planned_only_on_request_and_says_so():
    sizes = {"architecture__num_kv_heads": 32}
    asked = searched(request("llama3_8b", 16, parallel__tp=16, **sizes))
    assert asked.plan.tp == 16
    assert asked.reasons["tp"].startswith("tp 16: asked for; it crosses nodes of 8")
    assert "tp 16: crosses nodes of 8" in searched(request("llama3_8b", 16, **sizes)).rejected


def test_a_choice_has_a_record_and_lines_with_its_figures():
    choice = searched(request("llama3_8b", 8))
    record = json.loads(json.dumps(choice.as_dict()))
    assert ParallelPlan.from_dict(record["plan"]) == choice.plan
    text = "\n".join(choice.lines())
    assert all(sentence in text for sentence in (*choice.reasons.values(), *choice.rejected))
    assert choice.plan.summary() in text


def test_the_plan_for_a_device_is_the_one_the_search_finds():
    config, device = request("llama3_8b", 8), gpu_spec("h100")
    assert choose_plan(config, device.usable_bytes, device) == searched(config).plan


def test_plans_are_measured_with_the_requested_recomputation():
    config = request("llama2_7b", 2, training__batch_size=4, parallel__tp=2, parallel__recompute="full")
    choice = searched(config)
    assert choice.plan.recompute == "full"
    assert choice.peak_bytes <= choice.limit_bytes


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_type"), [("llama2_13b", 8, "a100"), ("llama2_13b", 8, "h100"), ("llama3_405b", 256, "a100")]
)
def test_a_plan_that_is_hardly_faster_is_not_preferred_to_a_simpler_one(model, gpus, gpu_type):
    choice = searched(request(model, gpus), gpu_type)
    others = [other for other in choice.runners_up if other.step.total <= (1 + NOTICEABLE) * choice.step.total]
    assert others  # plans that estimates cannot tell from it
    assert all(divided(choice.plan) < divided(other.plan) for other in others)
    if any(other.step.total < choice.step.total for other in others):
        assert choice.reasons["simpler"].startswith("simpler than the fastest, which is 0.")


def divided(plan):
    return plan.tp * plan.pp * plan.cp * plan.ep


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_plan_that_is_asked_for_is_not_replaced_by_a_simpler_one(tp, pp):
    plan = searched(request("llama2_13b", 8, parallel__tp=tp, parallel__pp=pp), "a100").plan
    assert (plan.tp, plan.pp) == (tp, pp)


def test_a_plan_that_is_noticeably_faster_is_preferred_to_a_simpler_one():
    choice = searched(request("llama3_405b", 256))
    simpler = [other for other in choice.runners_up if divided(other.plan) < divided(choice.plan)]
    assert simpler
    assert all(other.step.total > (1 + NOTICEABLE) * choice.step.total for other in simpler)
    assert "simpler" not in choice.reasons
