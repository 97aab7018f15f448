import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.sweep.divergence import FAR_ABOVE, divergence

losses = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40)


@given(losses, st.floats(0.1, 10))
def test_a_run_that_ends_where_it_began_or_below_has_not_diverged(between, start):
    assert divergence([start, *between, *[start] * 10]) == ""
    assert divergence([start, *between, *[0.5 * start] * 10]) == ""


@given(losses, st.floats(0.1, 10), st.floats(1.01 + FAR_ABOVE, 100))
def test_a_run_that_ends_far_above_its_start_has_diverged(between, start, factor):
    assert "far above" in divergence([start, *between, *[factor * start] * 10])


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_diverged(last):
    assert "not finite" in divergence([5.0, 4.0, last])
    assert "not finite" in divergence([5.0, 4.0, 3.0], held_out=last)


def test_a_single_high_batch_at_the_end_of_a_long_run_is_no_divergence():
    assert divergence([5.0, *[3.0] * 98, 90.0]) == ""


def test_a_run_without_a_step_has_not_diverged():
    assert divergence([]) == ""
