import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import nightly

from llama_core.chain.planned import planned_as
from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_names, model_spec
from llama_core.config.run import RunConfig
from llama_core.machine.detect import Machine
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.auto import choose_plan
from llama_core.planning.search.candidates import MAX_CPU_MICROBATCH_TOKENS
from llama_core.planning.search.fitting import Fitting
from llama_core.planning.work import Work
from llama_core.rehearsal.trace import trace_rank
from llama_core.units import GIB, MIB, format_bytes


def data_parallel(ranks, zero_stage, **choices):
    """Return a plan whose ranks shard the model or, at stage 0, copy it."""
    axis = "dp_shard" if zero_stage else "dp_replicate"
    return ParallelPlan(zero_stage=zero_stage, **{axis: ranks}, **choices)


plans = st.builds(
    data_parallel,
    ranks=st.sampled_from([1, 2, 8]),
    zero_stage=st.integers(0, 3),
    microbatch_size=st.integers(1, 8),
    num_microbatches=st.integers(1, 3),
    recompute=st.sampled_from(["none", "full"]),
)
models = st.sampled_from(["tiny_llama3_50m", "llama3_8b"]).map(model_spec)


def estimate(spec, plan, *, seq_len=512, precision="bf16", documents="mask"):
    return estimate_memory(Work(spec, plan, seq_len, precision, documents))


@pytest.mark.parametrize("name", model_names())
def test_one_device_holds_sixteen_bytes_of_state_per_parameter_and_four_per_bias_that_balances(name):
    spec = model_spec(name)
    num_biases = sum(math.prod(shape) for shape in spec.buffer_shapes.values())
    assert estimate(spec, ParallelPlan()).state_bytes == 16 * spec.num_parameters + 4 * num_biases


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_between_steps_every_zero_stage_divides_all_states(stage, ranks):
    spec = model_spec("llama3_8b")
    profile = estimate(spec, data_parallel(ranks, stage))
    assert profile.state_bytes == pytest.approx(16 / ranks * spec.num_parameters, rel=1e-7)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_copies_divide_no_states(ranks):
    spec = model_spec("llama3_8b")
    assert estimate(spec, data_parallel(ranks, 0)).state_bytes == 16 * spec.num_parameters


@pytest.mark.parametrize(("stage", "num_holders"), [(1, 1), (2, 8), (3, 8)])
def test_within_a_step_gradients_are_divided_from_stage_2_on(stage, num_holders):
    spec = model_spec("llama3_8b")
    second_forward = estimate(spec, data_parallel(8, stage, num_microbatches=2)).phases["forward"]
    assert second_forward["gradients"] == pytest.approx(4 * spec.num_parameters / num_holders, rel=1e-7)


@pytest.mark.parametrize("stage", [1, 2])
def test_within_a_step_weights_are_whole_in_the_compute_dtype_below_stage_3(stage):
    spec = model_spec("llama3_8b")
    second_forward = estimate(spec, data_parallel(8, stage, num_microbatches=2)).phases["forward"]
    assert second_forward["communication"] >= 2 * spec.num_parameters


def test_stage_3_gathers_no_more_than_the_head_and_its_buffer():
    spec = model_spec("llama3_8b")
    forward = estimate(spec, data_parallel(8, 3, num_microbatches=2)).phases["forward"]
    head = spec.embedding_parameters + spec.hidden_size
    last_reduction = 4 * spec.embedding_parameters  # whose buffer is kept until the next
    assert forward["communication"] <= 2 * 2 * head + last_reduction


@pytest.mark.parametrize("place", range(1, 4))
def test_stage_3_holds_a_gathered_layer_and_the_buffers_of_it_and_of_the_next_one(place):
    spec, plan = model_spec("llama3_70b"), ParallelPlan(dp_shard=8, pp=5, zero_stage=3)
    forward = estimate_memory(Work(spec, plan, 512, "bf16"), pp_rank=place).phases["forward"]
    message = 2 * 512 * spec.hidden_size  # the gradient that arrives meanwhile
    assert forward["communication"] == 3 * 2 * spec.layer_parameters + message


@pytest.mark.parametrize(
    ("choices", "num_bytes"),
    [
        ({"zero_stage": 2, "schedule": "interleaved", "num_chunks": 2}, 4),
        ({"zero_stage": 2, "schedule": "1f1b"}, 0),
        ({"zero_stage": 1, "schedule": "interleaved", "num_chunks": 2}, 0),
    ],
    ids=["several stages", "one stage", "whole gradients"],
)
def test_copies_that_average_after_every_backward_keep_each_average_until_the_next(choices, num_bytes):
    spec, plan = model_spec("llama3_8b"), ParallelPlan(dp_shard=2, pp=2, num_microbatches=8, **choices)
    alone, copied = (
        estimate(spec, dataclasses.replace(plan, dp_replicate=copies)).phases["forward"]["communication"]
        for copies in (1, 2)
    )
    kept = num_bytes * spec.num_parameters / 2 / plan.dp_shard  # a rank has half of the parameters
    assert copied - alone == pytest.approx(kept, rel=1e-5)


def pipeline(schedule, zero_stage, pp=2, **choices):
    sizes = {"dp_shard": 2, "num_microbatches": 2 * pp} | choices
    return ParallelPlan(schedule=schedule, zero_stage=zero_stage, pp=pp, **sizes)


@pytest.mark.parametrize(
    ("plan", "pp_rank", "precision"),
    [
        (pipeline("chimera", 1), 0, "fp32"),
        nightly(pipeline("interleaved", 2, num_chunks=2, dp_replicate=2), 0, "bf16"),
        nightly(pipeline("chimera_doubling", 3, recompute="full"), 0, "bf16"),
        nightly(pipeline("chimera", 3, pp=4), 1, "fp32"),
        nightly(pipeline("interleaved", 3, num_chunks=2), 0, "bf16"),
        nightly(pipeline("1f1b", 3, pp=4), 1, "bf16"),
    ],
    ids=lambda value: value.summary() if isinstance(value, ParallelPlan) else value,
)
def test_the_estimate_of_large_weights_and_few_tokens_matches_a_counted_step(plan, pp_rank, precision):
    overrides = ("architecture.num_layers=10", "training.seq_len=512", f"training.precision={precision}")
    config = RunConfig.from_mapping({"model": "llama3_8b", "data": {"document_mask": False}}, overrides)
    counted = trace_rank(config, plan, pp_rank * plan.world_size // plan.pp, in_full=True).counter.peaks
    estimated = estimate_memory(Work(config.spec, plan, 512, precision), pp_rank=pp_rank)
    for phase in ("forward", "backward"):
        assert sum(estimated.phases[phase].values()) == pytest.approx(counted[phase].num_bytes, rel=0.01)


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
    # not the peak: one more token may cut the loss into two chunks, which halves the logits
    kept = [estimate(spec, plan, seq_len=length).phases["forward"]["activations"] for length in (seq_len, seq_len + 1)]
    assert kept[0] < kept[1]


@given(models, plans)
def test_fp32_never_takes_less_activation_memory_than_bf16_without_its_weight_copies(spec, plan):
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


@given(st.sampled_from([8, 64]), st.integers(1, 8), st.integers(1, 3))
def test_a_higher_stage_never_has_a_higher_peak(ranks, microbatch_size, num_microbatches):
    # with few ranks it can: the buffer of the last reduction, kept until the next, outweighs the saving
    sizes = {"microbatch_size": microbatch_size, "num_microbatches": num_microbatches}
    plans = [data_parallel(ranks, stage, **sizes) for stage in range(4)]
    peaks = [estimate(model_spec("llama3_8b"), plan).peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)


def test_the_next_forward_holds_the_gradients_of_earlier_microbatches():
    spec = model_spec("tiny_llama3_50m")
    first, second = (estimate(spec, ParallelPlan(num_microbatches=count)).phases["forward"] for count in (1, 2))
    assert (first["gradients"], second["gradients"]) == (0, 4 * spec.num_parameters)


def test_weights_of_one_device_are_not_gathered():
    assert estimate(model_spec("llama3_8b"), ParallelPlan()).phases["forward"]["communication"] == 0


def test_the_peak_is_the_largest_phase_and_not_their_sum():
    profile = MemoryProfile(
        {"forward": {"weights": 3, "loss": 5}, "backward": {"weights": 3}, "optimizer": {"weights": 7}}
    )
    assert (profile.peak_phase, profile.peak_bytes, profile.peak) == ("forward", 8, {"weights": 3, "loss": 5})
    assert profile.as_dict() == {"phases": profile.phases, "peak_phase": "forward", "peak_bytes": 8}


def judge(spec, plan, device):
    return MemoryEstimate(estimate(spec, plan, seq_len=8192, documents="none"), device.label, device.usable_bytes)


def test_full_training_of_8b_is_refused_on_one_device_for_its_states():
    verdict = judge(model_spec("llama3_8b"), ParallelPlan(), gpu_spec("h100"))
    assert not verdict.fits
    assert "128.5 GB" in verdict.notes[0]
    assert verdict.headroom_bytes == gpu_spec("h100").usable_bytes - verdict.profile.peak_bytes


def test_the_states_of_405b_on_64_devices_are_too_much_for_an_h100_and_not_for_an_h200():
    spec, plan = model_spec("llama3_405b"), ParallelPlan(dp_shard=64, zero_stage=3, recompute="full")
    assert "101.5 GB" in judge(spec, plan, gpu_spec("h100")).notes[0]
    assert estimate(spec, plan).state_bytes < gpu_spec("h200").usable_bytes


def test_a_peak_that_only_activations_push_over_the_limit_gets_remedies():
    verdict = judge(
        model_spec("llama3_8b"), ParallelPlan(dp_shard=8, zero_stage=3, microbatch_size=4), gpu_spec("h100")
    )
    assert not verdict.fits
    assert "parallel.recompute=full" in verdict.notes[0]


def test_an_estimate_is_recorded_with_its_verdict():
    record = MemoryEstimate(MemoryProfile({"optimizer": {"weights": 60}}), "a device", 100).as_dict()
    expected = {"device": "a device", "usable_bytes": 100, "fits": True, "headroom_bytes": 40, "notes": []}
    assert expected.items() <= record.items()


@pytest.mark.parametrize(
    ("model", "rows", "seq_len", "checkpoint_every", "measured_mib"),
    [
        ("tiny_llama3_50m", 8, 128, 3, 2462),
        ("tiny_llama3_50m", 1, 2048, 0, 2151),
        ("tiny_llama3_150m", 2, 512, 3, 5718),
    ],
)
def test_on_a_cpu_the_verdict_counts_what_a_real_process_took(model, rows, seq_len, checkpoint_every, measured_mib):
    """The measured resident sets of runs on two cores, in bf16; docs/memory.md."""
    training = {"steps": 6, "seq_len": seq_len, "batch_size": rows, "precision": "bf16"}
    training["checkpoint_every"] = checkpoint_every
    config = RunConfig.from_mapping({"model": model, "training": training, "launch": {"device": "cpu"}})
    machine = Machine((), None, cpu_native_bf16=True, memory_bytes=64 * GIB, available_memory_bytes=64 * GIB, cores=2)
    told = planned_as(config, machine).estimate
    assert told.held_bytes == pytest.approx(measured_mib * MIB, rel=0.07)
    assert told.usable_bytes - told.headroom_bytes == told.held_bytes
    assert f"{format_bytes(told.held_bytes)} with the whole process," in told.summary()


def test_the_default_microbatch_on_a_cpu_leaves_room():
    request = {"training": {"seq_len": 2048, "batch_size": 32}, "launch": {"device": "cpu"}}
    config = RunConfig.from_mapping({"model": "tiny_llama3_150m"} | request)
    plan = choose_plan(config, 64 * GIB)
    assert plan.microbatch_size * 2048 == MAX_CPU_MICROBATCH_TOKENS
    tight = choose_plan(config, 8 * GIB)
    assert Fitting(config, 8 * GIB).fits(tight)
    assert tight.microbatch_size < plan.microbatch_size


@pytest.mark.parametrize(
    ("plan", "pp_rank", "precision", "changes"),
    [
        (ParallelPlan(num_microbatches=2), 0, "fp32", {}),
        (ParallelPlan(tp=2, recompute="full"), 0, "bf16", {}),
        (data_parallel(2, 3, num_microbatches=2), 0, "bf16", {}),
        (ParallelPlan(pp=2, num_microbatches=4), 1, "bf16", {}),
        nightly(ParallelPlan(pp=2, num_microbatches=4), 0, "fp32", {"tied_embeddings": True}),
        nightly(data_parallel(2, 2, num_microbatches=2), 0, "fp32", {"tied_embeddings": True}),
        nightly(pipeline("interleaved", 3, num_chunks=2), 1, "bf16", {}),
        nightly(pipeline("chimera", 2), 0, "fp32", {}),
    ],
    ids=lambda value: value.summary() if isinstance(value, ParallelPlan) else str(value),
)
def test_the_estimate_of_prediction_modules_matches_a_counted_step(plan, pp_rank, precision, changes):
    sizes = {"hidden_size": 1024, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 2048, "vocab_size": 32000}
    architecture = sizes | {"num_layers": 5, "mtp_layers": 2} | changes
    config = RunConfig.from_mapping(
        {
            "model": "llama3_8b",
            "architecture": architecture,
            "data": {"document_mask": False},
            "training": {"seq_len": 512, "precision": precision},
        }
    )
    counted = trace_rank(config, plan, pp_rank * plan.world_size // plan.pp, in_full=True).counter.peaks
    estimated = estimate_memory(Work(config.spec, plan, 512, precision), pp_rank=pp_rank)
    for phase in ("forward", "backward"):
        assert sum(estimated.phases[phase].values()) == pytest.approx(counted[phase].num_bytes, rel=0.005)
