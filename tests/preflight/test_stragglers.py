"""Ranks that fall behind while all of them train: who is named, since when, and who is not."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.outliers import FALSE_ALARM
from llama_core.preflight.stragglers import CORE_WAIT, DISTURBED, MIN_WINDOW, SIGNALS, StragglerJudge, window
from llama_core.records.stragglers import Straggler, still_behind

STEPS = range(10, 10_000, 10)


def judged(looks, device="cpu"):
    """Return all findings about some looks, each a pair of products and core waits by rank."""
    judge = StragglerJudge(SIGNALS[device], len(looks[0][0]))
    found = []
    for step, (products, waits) in zip(STEPS, looks, strict=False):
        found += judge.look(step, {PRODUCT: products, CORE_WAIT: waits})
    return found


def steady(num_ranks, value=0.001):
    return [value] * num_ranks


def test_a_rank_that_becomes_slow_is_named_within_a_window_with_its_first_slow_step():
    quick, slow = steady(8), [*steady(7), 0.003]
    found = judged([(quick, quick)] * 20 + [(slow, quick)] * window(8))
    (one,) = found
    assert (one.rank, one.since_step, one.is_over) == (7, STEPS[20], False)
    assert one.text == "a product of matrices takes 3 ms, and 1 ms on its peers"


def test_a_rank_that_recovers_is_named_again():
    quick, slow = steady(8), [*steady(7), 0.003]
    found = judged([(slow, quick)] * 10 + [(quick, quick)] * window(8))
    assert [(one.rank, one.since_step, one.is_over) for one in found] == [(7, STEPS[0], False), (7, STEPS[10], True)]


@pytest.mark.parametrize("num_ranks", [2, 3, 64])
def test_a_rank_whose_threads_wait_for_a_core_is_named(num_ranks):
    waits = [0.01] * num_ranks
    waits[1] = 0.7
    (one,) = judged([(steady(num_ranks), waits)] * window(num_ranks))
    assert one.text == "it was ready without a core 70 % of the time, and 1 % on its peers"


def test_a_rank_that_is_disturbed_now_and_then_is_not_named():
    quick, slow = steady(2), [0.01, 0.001]
    assert judged([(slow if look % 3 == 0 else quick, quick) for look in range(60)]) == []


def test_ranks_that_are_all_slow_are_no_stragglers():
    waits = [0.8] * 4
    assert judged([(steady(4, 0.01), waits)] * 20) == []


@pytest.mark.parametrize(("device", "noise"), [("cuda", 0.03), ("cpu", 0.15)])
@pytest.mark.parametrize("num_ranks", [2, 8, 512])
def test_noise_names_nobody(device, noise, num_ranks):
    drawn = random.Random(num_ranks)
    looks = [
        ([0.001 * max(0.5, drawn.gauss(1, noise)) for _ in range(num_ranks)], [drawn.random() * 0.2 + 1e-9] * num_ranks)
        for _ in range(100)
    ]
    assert judged(looks, device) == []


@given(num_ranks=st.integers(2, 100_000))
def test_more_ranks_are_judged_by_more_looks_so_that_disturbed_ones_name_a_healthy_rank_as_rarely(num_ranks):
    looks = window(num_ranks)
    disturbed = [math.comb(looks, k) * DISTURBED**k * (1 - DISTURBED) ** (looks - k) for k in range(looks + 1)]
    assert looks >= MIN_WINDOW
    assert num_ranks * sum(disturbed[looks // 2 + 1 :]) <= FALSE_ALARM
    assert looks <= window(num_ranks + 1) <= looks + 2


def test_what_a_rank_cannot_measure_is_left_out():
    products = [*steady(3), 0.004]
    (one,) = judged([(products, [0.0, 0.9, 0.1, 0.1])] * window(4))
    assert one.rank == 3


def test_looks_before_a_rollback_do_not_count():
    judge = StragglerJudge(SIGNALS["cpu"], 4)
    values = {PRODUCT: [*steady(3), 0.004], CORE_WAIT: steady(4)}
    for step in STEPS[: window(4) - 1]:
        assert list(judge.look(step, values)) == []
    judge.forget()
    assert list(judge.look(10, values)) == []


def test_a_rank_that_is_behind_by_two_signals_has_caught_up_when_both_have_ended():
    by_product = Straggler(1, "node7", "CPU", "product", "slow", since_step=10, step=60)
    by_wait = replace(by_product, signal="core wait", finding="without a core", step=70)
    caught_up = replace(by_wait, is_over=True, step=90)
    assert still_behind([by_product, by_wait]) == [by_product, by_wait]
    assert still_behind([by_product, by_wait, caught_up]) == [by_product]
    assert still_behind([by_product, by_wait, caught_up, replace(by_product, is_over=True)]) == []
