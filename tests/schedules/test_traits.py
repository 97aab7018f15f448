"""A schedule's traits and closed forms agree with the lists that run."""

from itertools import product

import pytest
from any_schedule import any_schedule
from hypothesis import given
from hypothesis import strategies as st

from llama_core.schedules.actions import Kind
from llama_core.schedules.clock import simulate
from llama_core.schedules.registry import schedule_names, schedule_type


@given(any_schedule)
def test_the_traits_match_the_action_lists(schedule):
    kind = schedule_type(schedule.name)
    kinds = {action.kind for actions in schedule.actions for action in actions}
    assert schedule.num_replicas == kind.replicas
    assert schedule.parts_per_microbatch == kind.parts_per_microbatch
    assert kind.splits_backward == (Kind.WEIGHT_GRADIENT in kinds)
    assert kind.takes_chunks or schedule.num_stages == kind.stages_per_rank * schedule.num_ranks


def closed_forms_and_clock(name, ranks, microbatches, backward=2):
    """Return a schedule's closed forms, and the idle times and peak that the clock finds in its lists."""
    kind = schedule_type(name)
    chunks = 2 if kind.takes_chunks else 1
    timeline = simulate(kind.build(ranks, microbatches, chunks), forward=1, backward=backward)
    idle = [timeline.idle(rank) for rank in range(ranks)]
    held = max(timeline.peak_in_flight(rank) for rank in range(ranks))
    said = (
        kind.idle(ranks, microbatches / ranks, chunks, backward=backward),
        kind.in_flight(ranks, microbatches, chunks),
    )
    return said, idle, held


@pytest.mark.parametrize("name", schedule_names())
def test_no_schedule_idles_or_holds_less_than_its_closed_form(name):
    for ranks, backward in product((2, 4, 6, 8), (2, 3)):
        step = ranks if schedule_type(name).takes_chunks else 1
        for microbatches in range(step, 3 * ranks + 1, step):
            said, idle, held = closed_forms_and_clock(name, ranks, microbatches, backward)
            assert said[0] <= min(idle) + 1e-9, (ranks, microbatches, backward)
            assert said[1] <= held + 1e-9, (ranks, microbatches)


@given(
    st.sampled_from(sorted(set(schedule_names()) - {"chimera_doubling", "chimera_halving"})),
    st.sampled_from([4, 6, 8]),
    st.integers(2, 6),
)
def test_all_but_the_chimera_forms_match_their_closed_forms_exactly(name, ranks, units):
    said, idle, held = closed_forms_and_clock(name, ranks, units * ranks)
    assert (said[0], said[1]) == (pytest.approx(max(idle)), pytest.approx(held))


@given(st.sampled_from(schedule_names()), st.sampled_from([4, 6, 8]), st.integers(3, 6))
def test_only_a_schedule_that_says_so_holds_all_microbatches_of_a_long_step(name, ranks, units):
    _, _, held = closed_forms_and_clock(name, ranks, units * ranks)
    assert schedule_type(name).holds_all == (held == units * ranks)
