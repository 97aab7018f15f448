"""A run that is to take some minutes chooses its number of steps once, from the time of its first ones."""

import pytest

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.training.parts.length import StepTimer


def chosen(seconds, *, minutes, warmup_steps, begin=0):
    """Return what is chosen after each step; ``seconds`` are those of the steps, one after another."""
    now = [0.0]
    timer = StepTimer(minutes, warmup_steps, clock=lambda: now[0])
    answers = []
    for step, taken in enumerate(seconds, start=begin + 1):
        now[0] += taken
        answers.append(timer.choose(step))
    return answers


def test_the_length_is_what_fits_after_the_warm_up_and_leaves_out_the_first_step():
    *early, last = chosen([9.0, 1.0, 1.0, 1.0], minutes=1, warmup_steps=4)
    assert early == [None] * 3
    assert last.num_steps == 4 + 48  # 60 s, less the 12 s that have passed
    assert last.step_seconds == 1.0
    assert last.timed_steps == 3
    assert last.reason.startswith(
        "52 steps fit into 1 min 00 s (training.minutes): a step takes 1 s, on average over 3"
    )


def test_a_run_whose_time_is_over_ends_with_its_warm_up():
    *_, last = chosen([1.0, 100.0], minutes=1, warmup_steps=2)
    assert last.num_steps == 2


def test_a_run_resumed_at_the_end_of_its_warm_up_times_one_more_step():
    first, second = chosen([5.0, 2.0], minutes=1, warmup_steps=4, begin=3)
    assert first is None
    assert second.num_steps == 5 + 26


@pytest.mark.parametrize("warmup", [None, 1])
def test_a_time_needs_a_warm_up_to_measure(warmup):
    with pytest.raises(ConfigError, match=r"training.minutes times the steps of the warm-up; give at least 2"):
        RunConfig.from_mapping({"training": {"minutes": 2, "warmup_steps": warmup}})
    RunConfig.from_mapping({"training": {"minutes": 2, "warmup_steps": warmup, "steps": 5}})
