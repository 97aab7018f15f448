"""Ranks that fall behind while all of them train: who is named, since when, and who is not."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.outliers import FALSE_ALARM
from llama_core.preflight.stragglers import (
    CORE_WAIT,
    DISTURBED,
    FIRST_LOOKS,
    MIN_RANKS_FOR_SLOWDOWN,
    MIN_WINDOW,
    SIGNALS,
    StragglerJudge,
    window,
)
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


def slowed_by_a_tenth(num_ranks):
    """Every second rank is always a tenth slower; the last of the others becomes as slow as they are, and recovers."""
    usual = [0.001, 0.0011] * (num_ranks // 2)
    slower = [*usual[:-2], 0.0011, usual[-1]]
    waits = steady(num_ranks)
    return [(usual, waits)] * (FIRST_LOOKS + 5) + [(slower, waits)] * 20 + [(usual, waits)] * 20


def test_a_rank_among_many_that_becomes_a_tenth_slower_than_it_was_is_named_though_others_always_were_as_slow():
    began, ended = judged(slowed_by_a_tenth(MIN_RANKS_FOR_SLOWDOWN), "cuda")
    assert (began.rank, began.since_step, began.is_over) == (62, STEPS[FIRST_LOOKS + 5], False)
    assert began.text.endswith("; 1.10 times as long as when the run began, and 1.00 times on its peers")
    assert (ended.rank, ended.since_step, ended.is_over) == (62, STEPS[FIRST_LOOKS + 25], True)


@pytest.mark.parametrize(("num_ranks", "device"), [(MIN_RANKS_FOR_SLOWDOWN - 2, "cuda"), (64, "cpu")])
def test_few_ranks_and_those_of_cpus_are_not_compared_with_what_they_were(num_ranks, device):
    assert judged(slowed_by_a_tenth(num_ranks), device) == []


def test_ranks_that_all_become_slower_are_named_by_nobody_and_a_rollback_forgets_no_first_looks():
    judge = StragglerJudge(SIGNALS["cuda"], 64)
    found = []
    for look, step in zip(range(FIRST_LOOKS + 40), STEPS, strict=False):
        if look == FIRST_LOOKS + 20:
            judge.forget()
        products = steady(64, 0.001 if look < FIRST_LOOKS else 0.0012)
        if look >= FIRST_LOOKS + 20:
            products[5] *= 1.1
        found += judge.look(step, {PRODUCT: products, CORE_WAIT: steady(64)})
    (one,) = found
    assert (one.rank, one.since_step) == (5, STEPS[FIRST_LOOKS + 20])
    assert one.text.endswith("; 1.32 times as long as when the run began, and 1.20 times on its peers")


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
