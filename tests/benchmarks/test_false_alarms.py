"""How often healthy ranks are named: the simulation judges as a run does, and what is counted of runs adds up."""

import json
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import slow_ranks
from benchmarks.slow_ranks import (
    Noise,
    alarms,
    behind,
    drawn,
    false_alarms,
    looks_until_named,
    median_bounds,
    ratios_of_pairs,
    upper_bound,
    with_looks,
)
from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.stragglers import CORE_WAIT, SIGNALS, StragglerJudge

NOISY = Noise("", 0.1, lasting=0.1, of_node=0.05, last_stage=0.1, disturbed=0.1, in_a_row=3)
QUIET = Noise("", 0.005, last_stage=0.1)


@given(
    ranks=st.sampled_from([2, 8, 64]),
    device=st.sampled_from(sorted(SIGNALS)),
    noise=st.sampled_from([NOISY, QUIET]),
    seed=st.integers(0, 1000),
    slower=st.sampled_from([1.0, 1.12, 2.0]),
)
def test_all_looks_at_once_name_the_ranks_that_the_judge_names_look_by_look(ranks, device, noise, seed, slower):
    values_TR = drawn(noise, 60, ranks, np.random.default_rng(seed)).astype(float)
    values_TR[40:50, 0] *= slower
    judge = StragglerJudge(SIGNALS[device], ranks)
    state = np.zeros(ranks, bool)
    expected = []
    named = 0
    for step, values in enumerate(values_TR.tolist()):
        for change in judge.look(step, {PRODUCT: values, CORE_WAIT: [0.0] * ranks}):
            state[change.rank] = not change.is_over
            named += not change.is_over
        expected.append(state.copy())
    found = behind(values_TR, SIGNALS[device][PRODUCT])
    np.testing.assert_array_equal(found, expected)
    assert alarms(found) == named


def test_a_rank_that_is_named_twice_is_counted_twice():
    behind_TR = np.array([[1, 0], [1, 0], [0, 0], [1, 1]], bool)
    assert alarms(behind_TR) == 3


def test_a_rank_that_becomes_half_as_slow_again_is_named_once_most_looks_of_its_window_are_slow():
    assert looks_until_named(QUIET, 2, 0.5, repeats=3) == 4
    assert looks_until_named(QUIET, 64, 0.5, repeats=3) == 5
    assert looks_until_named(QUIET, 64, 0.01, repeats=3) is None


def test_noise_that_the_limits_allow_for_names_nobody_and_more_disturbed_looks_name_somebody():
    assert false_alarms(Noise("", 0.03), 64, looks=400) == 0
    assert false_alarms(Noise("", 0.03, disturbed=0.25), 64, looks=400) > 0


def test_noise_has_the_spread_and_the_disturbed_looks_that_it_says():
    generator = np.random.default_rng(0)
    assert np.log(drawn(Noise("", 0.05), 400, 64, generator)).std() == pytest.approx(0.05, rel=0.05)
    doubled = drawn(Noise("", 0.0, disturbed=0.02, in_a_row=2), 4000, 64, generator) == 2
    assert doubled.mean() == pytest.approx(0.02, rel=0.1)
    assert np.count_nonzero(doubled[1:] & doubled[:-1]) >= 0.9 * np.count_nonzero(doubled) / 2
    lasting = drawn(Noise("", 0.0, lasting=0.1), 5, 64, generator)
    assert (lasting == lasting[0]).all()
    assert len(np.unique(lasting[0])) > 60
    of_node = drawn(Noise("", 0.0, of_node=0.1), 5, 16, generator)
    assert all(len(np.unique(look)) == 2 for look in of_node)


@pytest.mark.parametrize(("found", "tried"), [(0, 50), (1, 50), (3, 20), (0, 3)])
def test_a_share_at_the_upper_bound_gives_as_few_as_were_found_once_in_twenty(found, tried):
    share = upper_bound(found, tried)
    assert sum(comb(tried, n) * share**n * (1 - share) ** (tried - n) for n in range(found + 1)) == pytest.approx(0.05)


def test_none_of_many_means_at_most_three_of_as_many():
    assert upper_bound(0, 50) == pytest.approx(3 / 50, rel=0.05)
    assert upper_bound(3, 3) == 1


def test_the_bounds_of_a_median_hold_in_nineteen_of_twenty_samples():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        low, high = median_bounds(generator.exponential(size=15))
        held += low <= np.log(2) <= high
    assert 0.95 <= held / 1000 < 0.99
    assert median_bounds([3, 1, 2]) == (1, 3)


def test_turns_are_compared_in_pairs_and_neither_a_drift_nor_the_order_favours_one_kind():
    began = [0.0]
    for step in range(160):
        began.append(began[-1] + (1 + step / 1000) * (1.02 if with_looks(step, 10) else 1.0))
    ratios = ratios_of_pairs(began, 10)
    assert len(ratios) == 8
    assert np.mean(ratios) == pytest.approx(1.02, abs=1e-3)


@pytest.mark.wide
def test_real_runs_are_counted_and_their_tables_put_on_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_ranks, "SIZES", (2, 8))
    page = tmp_path / "page.md"
    names = [f"slow ranks {part}" for part in slow_ranks.PARTS]
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- end of {name} -->\n" for name in names))
    arguments = ["--out", str(tmp_path), "--page", str(page), "--looks", "20", "--runs", "2", "--beside", "1"]
    assert slow_ranks.main([*arguments, "--steps", "90", "--only", "simulation", "runs"]) == 0
    runs = json.loads((tmp_path / "slow_ranks_runs.json").read_text())
    assert [run["is_loaded"] for run in runs] == [False, True]
    assert all(run["looks"] > 0 for run in runs)
    counts = ("before_first_step", "by_product", "by_core_wait")
    assert all(len(run["told"]) == sum(run[count] for count in counts) for run in runs)
    text = page.read_text()
    assert "| as it is |" in text
    assert "| beside " in text
    assert text.count("old") == 1  # the overhead's


@pytest.mark.wide
def test_a_run_takes_turns_with_looks_and_without(tmp_path):
    assert slow_ranks.main(["--out", str(tmp_path), "--only", "overhead", "--pairs", "1", "--turn-steps", "30"]) == 0
    figures = json.loads((tmp_path / "slow_ranks_overhead.json").read_text())
    assert len(figures["ratios"]) == 1
    assert figures["looks"] > 0


def test_more_loaded_runs_than_runs_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        slow_ranks.main(["--runs", "3", "--beside", "4"])
    assert refused.value.code == 2
    assert "--beside is 4, but there are only 3 runs" in capsys.readouterr().err
