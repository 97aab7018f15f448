"""The time of a run on a CPU is told before it starts, if a step takes minutes."""

from dataclasses import replace

import pytest

from llama_core.calibration.lookup import KnownDevice
from llama_core.chain import expected
from llama_core.chain.expected import (
    LONG_RUN_SECONDS,
    SLOW_STEP_SECONDS,
    expected_here,
    expected_step,
    record_expected_step,
    rough_step,
    slow_steps,
)
from llama_core.chain.planned import plan_for_gpu
from llama_core.config.hardware import CALL_SECONDS, CpuRates, gpu_spec
from llama_core.config.measured_rates import Measured, MeasuredRates
from llama_core.config.run import RunConfig
from llama_core.data.check import DataCheck
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import forward_time_of, hardware_flops_per_token, step_time_of
from llama_core.preflight.checks import BEYOND_PROFILE, BEYOND_SHEET
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.records.measurements import ExpectedStep
from llama_core.records.step_parts import HEAD, HOST, PRODUCTS
from llama_core.units import GB, TFLOP, format_duration

RATES = CpuRates(0.1 * TFLOP, 0.05 * TFLOP, 10 * GB)


def asked(batch_size, **training):
    settings = {"seq_len": 2048, "batch_size": batch_size} | training
    config = RunConfig.from_mapping({"model": "tiny_llama3_150m", "training": settings, "launch": {"device": "cpu"}})
    return config, ParallelPlan(num_microbatches=batch_size)


def told(batch_size, num_sequences=None, reference_tokens=0, **training):
    config, plan = asked(batch_size, **training)
    return slow_steps(config, plan, rough_step(config, plan, RATES), num_sequences, reference_tokens)


@pytest.fixture(autouse=True)
def unmeasured_machine(monkeypatch):
    """What a machine's profile knows is no part of these laws."""
    monkeypatch.setattr(expected, "measured_step", lambda config, plan, may_measure=False, tell=None: None)


def test_a_quick_step_is_not_announced():
    assert SLOW_STEP_SECONDS > 60
    assert told(1, steps=10) == ""


def test_a_long_run_of_quick_steps_is_announced():
    step = rough_step(*asked(1), RATES).seconds
    assert told(1, steps=1000).startswith(f"a step takes about {format_duration(step)} on the CPU (")
    assert f", the 1,000 steps of the run {format_duration(1000 * step)}; " in told(1, steps=1000)


def test_a_slow_step_is_announced_with_the_run_and_what_is_quicker():
    step = rough_step(*asked(64), RATES).seconds
    assert told(64, steps=10).startswith(f"a step takes about {format_duration(step)} on the CPU (")
    of_run = f", the 10 steps of the run {format_duration(10 * step)}; quicker: a smaller --batch-size"
    assert of_run in told(64, steps=10)


def test_a_step_takes_its_products_and_its_calls():
    """However fast both rates are, Python calls every operation."""
    config, plan = asked(4)
    slow, quick = (
        rough_step(config, plan, CpuRates(rate, rate, 1e6 * GB)).parts for rate in (0.1 * TFLOP, 0.2 * TFLOP)
    )
    assert slow[PRODUCTS] == pytest.approx(2 * quick[PRODUCTS])
    of_products = hardware_flops_per_token(config.spec, 1, "none") * 4 * 2048 / (0.1 * TFLOP)
    assert of_products < slow[PRODUCTS] + slow[HEAD] < 1.5 * of_products
    fast = rough_step(config, plan, CpuRates(1e6 * TFLOP, 1e6 * TFLOP, 1e6 * GB))
    layers = 4 * config.spec.num_layers
    assert 3 * 20 * layers * CALL_SECONDS < fast.seconds < 3 * 60 * layers * CALL_SECONDS
    assert fast.parts[HOST] + fast.parts[HEAD] > 0.99 * fast.seconds


def test_a_run_on_another_machines_cpu_is_expected_to_take_what_any_core_takes(tmp_path):
    launch = {"device": "cpu", "launcher": "slurm", "slurm": {"cpus_per_rank": 4}}
    config = RunConfig.from_mapping(PAIRS | {"launch": launch})
    plan = ParallelPlan(num_microbatches=2)
    run = RunDirectory(tmp_path)
    run.config.write_text(config.to_yaml())
    write_json(run.plan, plan.as_dict())
    told = expected_step(run)
    record_expected_step(run)
    step = read_typed(run.expected, ExpectedStep)
    assert step.seconds == rough_step(config, plan, CpuRates.of_cores(4)).seconds
    assert (step.rates, step.is_rough) == ("assumed", True)
    assert step.told_by.startswith("if it multiplies matrices at 0.24 TFLOP/s and copies ")
    assert expected_step(run) == told
    assert " takes roughly " in told


@pytest.mark.parametrize(("num_sequences", "steps"), [(64 * 3, "3 steps"), (64 * 3 - 1, "3 steps"), (1, "1 step")])
def test_the_length_of_a_run_comes_from_its_data(num_sequences, steps):
    assert f", the {steps} of the run" in told(64, num_sequences)


def test_a_plan_tells_the_time_of_any_run_on_this_cpu_and_of_none_elsewhere(monkeypatch):
    monkeypatch.setattr(expected, "_rates_here", lambda precision, seq_len: RATES)
    plan = ParallelPlan(num_microbatches=2)

    def told(num_tokens, **launch):
        settings = {"training": {"seq_len": 128, "batch_size": 2, "steps": 30}, "launch": {"device": "cpu"} | launch}
        return expected_here(RunConfig.from_mapping(settings), plan, num_tokens)

    assert ", the 30 steps of the run " in told(None)
    assert ", the 7 steps of the run " in told(7 * 2 * 128)
    assert told(None, device="cuda") == told(None, launcher="slurm") == ""


PAIRS = {"training": {"objective": "dpo", "seq_len": 128, "batch_size": 2, "steps": 30}}


def test_the_time_of_a_run_on_this_cpu_has_that_of_its_reference(monkeypatch):
    """A forward is a third of a step without recomputation: that of 300 sequences takes as long as 50 steps of two."""
    monkeypatch.setattr(expected, "_rates_here", lambda precision, seq_len: RATES)
    config = RunConfig.from_mapping(PAIRS | {"launch": {"device": "cpu"}})
    plan = ParallelPlan(num_microbatches=2)
    step = rough_step(config, plan, RATES).seconds
    told = expected_here(config, plan, None, 300 * 128)
    of_steps, of_reference = map(format_duration, (30 * step, 50 * step))
    assert told.endswith(f"the 30 steps of the run {of_steps}, the reference before the first step {of_reference}")
    assert "reference" not in expected_here(config, plan, None, 0)


def test_a_step_that_measures_other_rows_before_takes_the_time_of_their_forward():
    settings = {"model": "llama3_8b", "parallel": {"gpus": 8}, "launch": {"device": "cuda", "gpu_type": "h100"}}

    def planned(objective):
        training = {"objective": objective, "precision": "bf16", "batch_size": 8}
        return plan_for_gpu(RunConfig.from_mapping(settings | {"training": training}))

    kto = planned("kto")
    plan = kto.plan
    gpu = gpu_spec("h100")
    tokens = plan.batch_size * kto.config.seq_len
    more = step_time_of(kto.config, plan, gpu).total - step_time_of(planned("dpo").config, plan, gpu).total
    assert more == pytest.approx(forward_time_of(kto.config, plan, gpu, tokens), rel=0.01)
    assert more == pytest.approx(kto.step.parts["preparation"])
    assert 0.15 < kto.step.parts["preparation"] / kto.step.total < 0.35


def test_a_long_reference_of_a_short_run_is_announced():
    # a forward is a third of a step
    rows = round(3 * 1.05 * LONG_RUN_SECONDS / rough_step(*asked(1, objective="dpo"), RATES).seconds)
    assert "reference before the first step 1 h" in told(1, steps=10, objective="dpo", reference_tokens=rows * 2048)


def test_whoever_waits_for_the_first_step_on_a_gpu_learns_how_long_the_reference_takes(tmp_path, monkeypatch):
    planned = plan_for_gpu(RunConfig.from_mapping({"model": "llama3_8b", "parallel": {"gpus": 8}} | PAIRS))
    run = RunDirectory(tmp_path)
    run.config.write_text(planned.config.to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    assert "reference" not in expected_step(run)
    write_json(run.data, {"num_sequences": 10_000, "num_validation_tokens": 1280})
    cost = planned.cost(1, DataCheck("", num_tokens=10_000 * 128, num_held_out_tokens=1280))
    assert cost.reference_seconds > 1
    assert f", and the reference before the first {format_duration(cost.reference_seconds)}" in expected_step(run)
    monkeypatch.setattr(expected, "newest_step", lambda run: 2)  # a run that goes on reads it
    assert "reference" not in expected_step(run)


def test_the_cost_of_a_run_has_that_of_its_reference_or_says_that_it_is_without():
    def cost(objective, data=None):
        training = PAIRS["training"] | {"objective": objective}
        config = RunConfig.from_mapping({"model": "llama3_8b", "parallel": {"gpus": 8}, "training": training})
        return plan_for_gpu(config).cost(1e6, data)

    data = DataCheck("", num_tokens=9_000_000, num_held_out_tokens=1_000_000)
    without = cost("simpo", data)
    dpo = cost("dpo", data)
    assert without.reference_seconds == 0
    assert "reference" not in without.summary()
    assert dpo.seconds == pytest.approx(without.seconds + dpo.reference_seconds, rel=0.01)
    assert dpo.dollars == pytest.approx(dpo.seconds / 3600 * 8 * dpo.dollars_per_gpu_hour)
    assert f" with {format_duration(dpo.reference_seconds)} for the reference, " in dpo.summary()
    unknown = cost("dpo")
    assert unknown.reference_seconds is None
    assert unknown.seconds == pytest.approx(dpo.seconds - dpo.reference_seconds)
    assert " without the reference's forward over the data, " in unknown.summary()


def test_the_step_expected_of_a_gpu_is_the_planned_one(tmp_path):
    """With a mask no score is skipped, and only the four devices of a node share a link."""
    config = RunConfig.from_mapping(
        {
            "model": "llama3_2_1b",
            "parallel": {"gpus": 8, "tp": 8},
            "training": {"precision": "fp32", "seq_len": 4096, "batch_size": 8},
            "data": {"document_mask": True},
            "launch": {"nodes": 2, "gpu_type": "h100"},
        }
    )
    planned, run = plan_for_gpu(config), RunDirectory(tmp_path)
    run.config.write_text(planned.config.to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    assert replace(planned, choice=None).step == planned.step
    assert expected_step(run).startswith(f"expected: about {format_duration(planned.step.total)} a step on ")


def test_the_step_of_a_gpu_is_recorded_with_its_parts_and_where_its_rates_come_from(tmp_path):
    planned = plan_for_gpu(RunConfig.from_mapping({"model": "llama3_8b", "parallel": {"gpus": 8}} | PAIRS))
    run = RunDirectory(tmp_path)
    run.config.write_text(planned.config.to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    told = expected_step(run)
    record_expected_step(run)
    step = read_typed(run.expected, ExpectedStep)
    assert step.seconds == pytest.approx(planned.step.total)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.rates == "data sheet"
    assert step.told_by == "from the data sheet of H100 SXM 80 GB"
    assert expected_step(run) == told


def recorded_product(folder, config):
    """Return the product that is expected of each rank of a run."""
    planned = plan_for_gpu(config) if config.launch.device == "cuda" else None
    run = RunDirectory(folder)
    run.config.write_text((planned.config if planned else config).to_yaml())
    write_json(run.plan, (planned.plan if planned else ParallelPlan(num_microbatches=2)).as_dict())
    record_expected_step(run)
    return read_typed(run.expected, ExpectedStep).product


ON_H100 = {"model": "llama3_8b", "parallel": {"gpus": 8}, "launch": {"device": "cuda", "gpu_type": "h100"}}


def test_the_product_before_the_first_step_is_expected_by_the_data_sheet_of_a_gpu(tmp_path):
    product = recorded_product(tmp_path, RunConfig.from_mapping(ON_H100))
    h100 = gpu_spec("h100")
    assert product.seconds == pytest.approx(2 * 8192**3 / (h100.matmul_share * h100.bf16_flops))
    assert product.limit_seconds == BEYOND_SHEET * product.seconds
    assert product.told_by == f"data sheet of {h100.label}"


def test_a_profile_that_has_the_product_is_preferred_to_the_data_sheet(tmp_path, monkeypatch):
    rates = MeasuredRates({"product bf16 input": Measured({(8192, 8192, 8192): 0.002})})
    measured = replace(gpu_spec("h100"), measured={8: rates}, source="measured here")
    monkeypatch.setattr(expected, "device_for", lambda *arguments: KnownDevice(measured))
    monkeypatch.setattr(expected, "step_on_gpu", lambda config, plan: ExpectedStep(1.0, 1.0, "a test"))
    product = recorded_product(tmp_path, RunConfig.from_mapping(ON_H100))
    assert (product.seconds, product.limit_seconds) == (0.002, BEYOND_PROFILE["cuda"] * 0.002)
    assert product.told_by == "measured here"


def test_nothing_is_expected_of_a_processor_that_was_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(expected, "_rates_here", lambda precision, seq_len: RATES)
    monkeypatch.setattr(expected, "device_for", lambda *arguments, **options: KnownDevice(None))
    settings = {"training": {"seq_len": 128, "batch_size": 2, "steps": 3}, "launch": {"device": "cpu"}}
    assert recorded_product(tmp_path, RunConfig.from_mapping(settings)) is None
