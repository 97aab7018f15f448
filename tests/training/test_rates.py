import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.run import TrainingConfig
from llama_core.training.rates import learning_rate, warmup_steps

schedules = st.sampled_from(["cosine", "wsd", "constant"])


def training(**settings):
    return TrainingConfig(**settings)


@given(schedule=schedules, total=st.integers(1, 500), warmup=st.integers(0, 50), step=st.integers(1, 500))
def test_the_rate_stays_between_zero_and_the_peak(schedule, total, warmup, step):
    rate = learning_rate(min(step, total), training(lr_schedule=schedule, warmup_steps=min(warmup, total)), total)
    assert 0 < rate <= 3e-4


@given(schedule=schedules, total=st.integers(20, 500))
def test_warmup_rises_in_equal_steps_to_the_peak(schedule, total):
    config = training(lr_schedule=schedule, warmup_steps=10)
    rates = [learning_rate(step, config, total) for step in range(1, 11)]
    assert rates == pytest.approx([3e-4 * step / 10 for step in range(1, 11)])


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 3e-5), ("wsd", 3e-5), ("constant", 3e-4)])
def test_the_last_step_has_the_final_rate_of_its_schedule(schedule, last):
    assert learning_rate(200, training(lr_schedule=schedule), 200) == pytest.approx(last)


@given(schedule=st.sampled_from(["cosine", "wsd"]), total=st.integers(30, 300))
def test_after_warmup_the_rate_never_rises(schedule, total):
    config = training(lr_schedule=schedule)
    rates = [learning_rate(step, config, total) for step in range(warmup_steps(config, total) + 1, total + 1)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_at_the_peak_until_its_last_fifth():
    config = training(lr_schedule="wsd", warmup_steps=10, decay_fraction=0.2)
    assert [learning_rate(step, config, 100) for step in range(10, 81)] == pytest.approx([3e-4] * 71)
    assert learning_rate(81, config, 100) < 3e-4
