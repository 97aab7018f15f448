import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_names, model_spec
from llama_core.planning.memory import MemoryEstimate, MemoryProfile, estimate_memory
from llama_core.planning.plan import ParallelPlan

STATES = ("weights", "gradients", "moments")
plans = st.builds(
    ParallelPlan,
    dp_shard=st.sampled_from([1, 2, 8]),
    zero_stage=st.integers(0, 3),
    microbatch_size=st.integers(1, 8),
    num_microbatches=st.integers(1, 3),
    recompute=st.sampled_from(["none", "full"]),
)
models = st.sampled_from(["tiny_llama3_50m", "llama3_8b"]).map(model_spec)


def estimate(spec, plan, *, seq_len=512, precision="bf16", document_mask=True):
    return estimate_memory(spec, plan, seq_len=seq_len, precision=precision, document_mask=document_mask)


@pytest.mark.parametrize("name", model_names())
def test_one_device_holds_sixteen_bytes_of_state_per_parameter(name):
    spec = model_spec(name)
    assert estimate(spec, ParallelPlan()).state_bytes == 16 * spec.num_parameters


@pytest.mark.parametrize(
    ("stage", "whole", "shared"), [(0, 16, 0), (1, 8, 8), (2, 4, 12), (3, 0, 16)], ids="zero{}".format
)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zero_divides_the_states_by_its_closed_form(stage, whole, shared, ranks):
    spec = model_spec("llama3_8b")
    profile = estimate(spec, ParallelPlan(dp_shard=ranks, zero_stage=stage))
    assert profile.state_bytes == pytest.approx((whole + shared / ranks) * spec.num_parameters, rel=1e-7)


@given(models, plans, st.sampled_from(["bf16", "fp32"]))
def test_activations_grow_with_the_microbatch(spec, plan, precision):
    larger = dataclasses.replace(plan, microbatch_size=plan.microbatch_size + 1)
    kept = [estimate(spec, p, precision=precision).phases["forward"]["activations"] for p in (plan, larger)]
    assert kept[0] < kept[1]


@given(models, plans)
def test_the_peak_grows_when_the_microbatch_doubles_past_one_chunk_of_the_loss(spec, plan):
    peaks = [
        estimate(spec, dataclasses.replace(plan, microbatch_size=size), seq_len=2048).peak_bytes for size in (4, 8, 16)
    ]
    assert peaks == sorted(peaks)


@given(models, plans, st.integers(16, 2000))
def test_activations_grow_with_the_sequence(spec, plan, seq_len):
    # not the peak: where one token more cuts the loss into two chunks, it holds half the logits
    kept = [estimate(spec, plan, seq_len=length).phases["forward"]["activations"] for length in (seq_len, seq_len + 1)]
    assert kept[0] < kept[1]


@given(models, plans)
def test_fp32_never_takes_less_activation_memory_than_bf16_less_its_weight_copies(spec, plan):
    narrow = estimate(spec, plan, seq_len=2048, precision="bf16").phases["forward"]["activations"]
    copies = 2 * spec.num_layers * spec.layer_parameters
    assert estimate(spec, plan, seq_len=2048, precision="fp32").phases["forward"]["activations"] >= narrow - copies


@given(models, plans)
def test_recomputation_keeps_fewer_activations(spec, plan):
    kept = [
        estimate(spec, dataclasses.replace(plan, recompute=mode)).phases["forward"]["activations"]
        for mode in ("full", "none")
    ]
    assert kept[0] < kept[1] / 2


@given(plans)
def test_a_higher_stage_never_keeps_more_states(plan):
    spec = model_spec("llama3_8b")
    states = [estimate(spec, dataclasses.replace(plan, zero_stage=stage)).state_bytes for stage in range(4)]
    assert states == sorted(states, reverse=True)


def test_gradients_of_earlier_microbatches_are_there_in_the_next_forward():
    spec = model_spec("tiny_llama3_50m")
    first, second = (estimate(spec, ParallelPlan(num_microbatches=count)).phases["forward"] for count in (1, 2))
    assert (first["gradients"], second["gradients"]) == (0, 4 * spec.num_parameters)


def test_only_sharded_weights_are_gathered():
    spec = model_spec("llama3_8b")
    one, sharded = (
        estimate(spec, ParallelPlan(dp_shard=ranks, zero_stage=3)).phases["forward"]["communication"]
        for ranks in (1, 8)
    )
    assert one == 0
    assert sharded == 2 * max(2 * spec.layer_parameters, spec.embedding_parameters)


def test_the_peak_is_the_largest_phase_and_not_their_sum():
    profile = MemoryProfile(
        {"forward": {"weights": 3, "loss": 5}, "backward": {"weights": 3}, "optimizer": {"weights": 7}}
    )
    assert (profile.peak_phase, profile.peak_bytes, profile.peak) == ("forward", 8, {"weights": 3, "loss": 5})
    assert profile.as_dict() == {"phases": profile.phases, "peak_phase": "forward", "peak_bytes": 8}


def judge(spec, plan, device):
    return MemoryEstimate(estimate(spec, plan, seq_len=8192, document_mask=False), device.label, device.usable_bytes)


def test_full_training_of_8b_is_refused_on_one_device_for_its_states():
    verdict = judge(model_spec("llama3_8b"), ParallelPlan(), gpu_spec("h100"))
    assert not verdict.fits
    assert "128.5 GB" in verdict.notes[0]
    assert verdict.headroom_bytes == gpu_spec("h100").usable_bytes - verdict.profile.peak_bytes


def test_the_states_of_405b_on_64_devices_are_too_much_for_an_h100_and_not_for_an_h200():
    spec, plan = model_spec("llama3_405b"), ParallelPlan(dp_shard=64, zero_stage=3, recompute="full")
    assert "101.5 GB" in judge(spec, plan, gpu_spec("h100")).notes[0]
    assert estimate(spec, plan).state_bytes < gpu_spec("h200").usable_bytes


def test_a_peak_that_only_activations_push_over_is_answered_with_remedies():
    verdict = judge(
        model_spec("llama3_8b"), ParallelPlan(dp_shard=8, zero_stage=3, microbatch_size=4), gpu_spec("h100")
    )
    assert not verdict.fits
    assert "parallel.recompute=full" in verdict.notes[0]


def test_an_estimate_is_recorded_with_its_verdict():
    record = MemoryEstimate(MemoryProfile({"optimizer": {"weights": 60}}), "a device", 100).as_dict()
    expected = {"device": "a device", "usable_bytes": 100, "fits": True, "headroom_bytes": 40, "notes": []}
    assert expected.items() <= record.items()
