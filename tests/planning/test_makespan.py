from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from llama_core.errors import PlanError
from llama_core.parallel.pipeline import Pipeline
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.kernels import Pass
from llama_core.planning.time.makespan import EXACT_UNITS, forwards_alone, span
from llama_core.schedules.actions import Kind
from llama_core.schedules.clock import simulate
from llama_core.schedules.registry import schedule_names

times = st.floats(0.5, 2.0)


@given(st.sampled_from(schedule_names()), st.sampled_from([2, 4]), st.integers(2, EXACT_UNITS), times, times)
@settings(max_examples=60)
def test_even_stages_take_as_long_as_the_schedules_clock_says(name, pp, units, forward, backward):
    chunks = 2 if name == "interleaved" else 1
    plan = ParallelPlan(pp=pp, schedule=name, num_chunks=chunks, num_microbatches=units * pp, microbatch_size=2)
    timeline = simulate(plan.build_schedule(), forward=forward, backward=backward)
    parts = plan.num_stages / pp * plan.build_schedule().parts_per_microbatch
    span_ = span(plan, [Pass(forward / parts, backward / parts)] * plan.num_stages)
    assert span_.makespan == pytest.approx(timeline.makespan)
    assert span_.bubble == pytest.approx(min(map(timeline.idle, range(pp))))


@pytest.mark.parametrize("num_microbatches", [8, 31, 1000])
def test_the_bubble_of_even_stages_is_the_fill_and_drain_of_the_pipeline(num_microbatches):
    plan = ParallelPlan(pp=8, num_microbatches=num_microbatches)
    assert span(plan, [Pass(1.0, 2.0)] * 8) == pytest.approx((3 * (num_microbatches + 7), 3 * num_microbatches))


@given(st.sampled_from(schedule_names()), st.sampled_from([2, 4]), st.integers(7, 12), st.data())
@settings(max_examples=40)
def test_extrapolating_a_long_pipeline_of_uneven_stages_is_within_a_percent(name, pp, units, data):
    chunks = 2 if name == "interleaved" else 1
    plan = ParallelPlan(pp=pp, schedule=name, num_chunks=chunks, num_microbatches=units * pp, microbatch_size=2)
    uneven = st.floats(0.8, 1.25)
    passes = [Pass(data.draw(uneven), 2 * data.draw(uneven)) for _ in range(plan.num_stages)]
    assert span(plan, passes) == pytest.approx(span(plan, passes, exact_units=units), rel=0.01)
    forwards = [one.forward for one in passes]
    exact = forwards_alone(plan, forwards, exact_units=units)
    assert forwards_alone(plan, forwards) == pytest.approx(exact, rel=0.01)


def test_the_slowest_stage_sets_the_pace():
    plans = [ParallelPlan(pp=4, num_microbatches=count) for count in (100, 300)]
    passes = [Pass(1.0, 2.0), Pass(1.5, 3.5), Pass(1.0, 2.0), Pass(1.0, 2.0)]
    short, long = (span(plan, passes).makespan for plan in plans)
    assert long - short == pytest.approx(200 * 5.0)


def test_a_hop_delays_only_the_first_forward_and_the_last_backward():
    plan, passes = ParallelPlan(pp=4, schedule="gpipe", num_microbatches=64), [Pass(1.0, 2.0)] * 4
    late = span(plan, passes, hop=0.1).makespan - span(plan, passes).makespan
    assert late == pytest.approx(2 * 3 * 0.1)  # the first forward and the last backward pass every boundary


def test_a_hop_costs_nothing_between_stages_of_one_rank():
    plan, passes = ParallelPlan(pp=2, schedule="zbv", num_microbatches=1), [Pass(1.0, 2.0)] * 4
    late = span(plan, passes, hop=0.1).makespan - span(plan, passes).makespan
    assert late == pytest.approx(4 * 0.1)  # of three boundaries one is within the last rank


@pytest.mark.parametrize("units", [1, 8])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_forwards_alone_wait_only_while_the_pipeline_fills(schedule, chunks, units):
    plan = ParallelPlan(pp=4, schedule=schedule, num_chunks=chunks, num_microbatches=4 * units)
    assert forwards_alone(plan, [1.0] * plan.num_stages) == chunks * plan.num_microbatches + 3


def test_a_hop_delays_forwards_alone_once_on_the_way_to_each_further_rank():
    plan = ParallelPlan(pp=4, num_microbatches=8)
    assert forwards_alone(plan, [1.0] * 4, hop=0.25) == 8 + 3 * (1.0 + 0.25)


def engine_order(plan, rank):
    """The forwards of a rank, as (stage, microbatch), in the order in which the engine runs an evaluation."""
    schedule = plan.build_schedule()
    own = SimpleNamespace(schedule=schedule, num_ranks=plan.pp, rank=rank, layers=range(plan.num_stages))
    own.rank_of = partial(Pipeline.rank_of, own)
    actions = Pipeline._forwards(own, plan.num_microbatches)
    return [(action.stage, action.microbatch) for action in actions if action.kind is Kind.FORWARD]


def time_in_engine_order(plan, seconds):
    """Return the time of all forwards, if each rank runs its next one as soon as the stage before has ended."""
    waiting = [engine_order(plan, rank) for rank in range(plan.pp)]
    free = [0.0] * plan.pp
    ended = {}
    turns = cycle(range(plan.pp))
    while any(waiting):
        rank = next(turns)
        own = waiting[rank]
        if own and (own[0][0] == 0 or (own[0][0] - 1, own[0][1]) in ended):
            stage, microbatch = own.pop(0)
            start = max(free[rank], ended.get((stage - 1, microbatch), 0.0))
            ended[stage, microbatch] = free[rank] = start + seconds[stage]
    return max(free)


@given(st.sampled_from(schedule_names()), st.sampled_from([2, 4]), st.integers(1, 6), st.data())
@settings(max_examples=40)
def test_forwards_alone_take_as_long_as_the_engines_order_of_them(name, pp, units, data):
    chunks = 2 if name == "interleaved" else 1
    try:
        plan = ParallelPlan(pp=pp, schedule=name, num_chunks=chunks, num_microbatches=units * pp, microbatch_size=2)
    except PlanError:  # too few microbatches for both directions
        reject()
    seconds = [data.draw(times) for _ in range(plan.num_stages)]
    assert forwards_alone(plan, seconds) == pytest.approx(time_in_engine_order(plan, seconds))


@pytest.mark.parametrize("schedule", ["chimera", "chimera_halving", "chimera_doubling"])
@pytest.mark.parametrize("num_microbatches", [13, 18, 19, 20])
def test_a_last_group_that_is_not_whole_is_divided_over_both_ways(schedule, num_microbatches):
    plan = ParallelPlan(pp=4, schedule=schedule, num_microbatches=num_microbatches, microbatch_size=2)
    seconds = [1.0, 1.5, 0.5, 2.0]
    assert forwards_alone(plan, seconds, exact_units=num_microbatches) == time_in_engine_order(plan, seconds)
