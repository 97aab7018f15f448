"""The time of a run on a CPU is told before it starts, if a step takes minutes."""

import pytest

from llama_core.chain.expected import SLOW_STEP_SECONDS, slow_steps
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.units import TFLOP


def told(batch_size, num_tokens=None, **training):
    settings = {"seq_len": 2048, "batch_size": batch_size} | training
    config = RunConfig.from_mapping({"model": "tiny_llama3_150m", "training": settings, "launch": {"device": "cpu"}})
    return slow_steps(config, ParallelPlan(num_microbatches=batch_size), 0.1 * TFLOP, num_tokens)


def test_a_quick_step_is_not_announced():
    assert SLOW_STEP_SECONDS > 60
    assert told(1, steps=10) == ""


def test_a_slow_step_is_announced_with_the_run_and_what_is_quicker():
    assert told(64, steps=10).startswith("a step takes about 45 min 37 s on this CPU (")
    assert ", the 10 steps of the run 7 h 36 min; quicker: a smaller --batch-size" in told(64, steps=10)


@pytest.mark.parametrize(("tokens", "steps"), [(64 * 2048 * 3, 3), (10, 1)])
def test_the_length_of_a_run_comes_from_its_data(tokens, steps):
    assert f", the {steps} steps of the run" in told(64, num_tokens=tokens)
