"""The time of a run on a CPU is told before it starts, if a step takes minutes."""

from dataclasses import replace

import pytest

from llama_core.chain import expected
from llama_core.chain.expected import SLOW_STEP_SECONDS, expected_here, expected_step, slow_steps
from llama_core.chain.planned import plan_for_gpu
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.units import TFLOP, format_duration


def told(batch_size, num_sequences=None, **training):
    settings = {"seq_len": 2048, "batch_size": batch_size} | training
    config = RunConfig.from_mapping({"model": "tiny_llama3_150m", "training": settings, "launch": {"device": "cpu"}})
    return slow_steps(config, ParallelPlan(num_microbatches=batch_size), 0.1 * TFLOP, num_sequences)


def test_a_quick_step_is_not_announced():
    assert SLOW_STEP_SECONDS > 60
    assert told(1, steps=10) == ""


def test_a_long_run_of_quick_steps_is_announced():
    assert told(1, steps=1000).startswith("a step takes about 42.8 s on this CPU (")
    assert ", the 1,000 steps of the run 11 h 52 min; " in told(1, steps=1000)


def test_a_slow_step_is_announced_with_the_run_and_what_is_quicker():
    assert told(64, steps=10).startswith("a step takes about 45 min 37 s on this CPU (")
    assert ", the 10 steps of the run 7 h 36 min; quicker: a smaller --batch-size" in told(64, steps=10)


@pytest.mark.parametrize(("num_sequences", "steps"), [(64 * 3, "3 steps"), (64 * 3 - 1, "3 steps"), (1, "1 step")])
def test_the_length_of_a_run_comes_from_its_data(num_sequences, steps):
    assert f", the {steps} of the run" in told(64, num_sequences)


def test_a_plan_tells_the_time_of_any_run_on_this_cpu_and_of_none_elsewhere(monkeypatch):
    monkeypatch.setattr(expected, "_rate_here", lambda precision: 0.1 * TFLOP)
    plan = ParallelPlan(num_microbatches=2)

    def told(num_tokens, **launch):
        settings = {"training": {"seq_len": 128, "batch_size": 2, "steps": 30}, "launch": {"device": "cpu"} | launch}
        return expected_here(RunConfig.from_mapping(settings), plan, num_tokens)

    assert ", the 30 steps of the run " in told(None)
    assert ", the 7 steps of the run " in told(7 * 2 * 128)
    assert told(None, device="cuda") == told(None, launcher="slurm") == ""


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
