"""A schedule's waste and peak have closed forms, and a schedule that cannot run is refused with the reason."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from any_schedule import any_schedule, build, build_interleaved, chunks, even_ranks, microbatches, ranks
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from llama_core.errors import PlanError
from llama_core.schedules.actions import Action, Kind, Schedule, inputs
from llama_core.schedules.clock import simulate

times = st.integers(1, 9)
units = st.integers(1, 4)


def idle(timeline):
    """Return the idle time of every rank."""
    return [timeline.idle(rank) for rank in range(timeline.schedule.num_ranks)]


def peaks(timeline):
    return [timeline.peak_in_flight(rank) for rank in range(timeline.schedule.num_ranks)]


def peak_until_input_gradient(timeline, rank):
    """Return the most forwards without their input gradient on ``rank``, in full stages."""
    kinds = [timed.action.kind for timed in timeline.lanes[rank]]
    held = [kinds[:end].count("F") - kinds[:end].count("I") for end in range(len(kinds) + 1)]
    return max(held) * timeline.schedule.num_ranks / timeline.schedule.num_stages


def slots_used(schedule):
    """Return the slots that lists of forward doubling take if a pair's forward and one backward take a slot each."""
    waiting = [
        [
            list(group)
            for _, group in groupby(actions, lambda a: (a.stage, a.kind, a.microbatch // (2 if a.kind == "F" else 1)))
        ]
        for actions in schedule.actions
    ]
    done, num_slots = set(), 0
    while any(waiting):
        able = [
            jobs for jobs in waiting if jobs and all(done.issuperset(inputs(a, schedule.num_stages)) for a in jobs[0])
        ]
        done.update([action for jobs in able for action in jobs.pop(0)])
        num_slots += 1
    return num_slots


@given(any_schedule, times, times)
def test_every_action_starts_as_soon_as_its_rank_and_its_inputs_allow(schedule, forward, backward):
    timeline = simulate(schedule, forward=forward, backward=backward)
    ends = {timed.action: timed.end for lane in timeline.lanes for timed in lane}
    for lane in timeline.lanes:
        assert lane[0].start == max((ends[before] for before in inputs(lane[0].action, schedule.num_stages)), default=0)
        for previous, timed in pairwise(lane):
            assert timed.start == max(
                [previous.end, *(ends[before] for before in inputs(timed.action, schedule.num_stages))]
            )


@given(any_schedule)
def test_a_stage_runs_forward_after_the_previous_one_and_backward_after_the_next(schedule):
    timed = {timed.action: timed for lane in simulate(schedule).lanes for timed in lane}
    last = schedule.num_stages - 1
    for action, own in timed.items():
        ahead, behind = (replace(action, stage=action.stage + step) for step in (-1, 1))
        assert action.kind != "F" or action.stage == 0 or own.start >= timed[ahead].end
        assert action.kind not in {"B", "I"} or action.stage == last or own.start >= timed[behind].end
        assert action.kind not in {"B", "I"} or own.start >= timed[replace(action, kind=Kind.FORWARD)].end
        assert action.kind != "W" or own.start >= timed[replace(action, kind=Kind.INPUT_GRADIENT)].end


@given(any_schedule, times, times)
def test_all_ranks_together_do_the_work_of_all_microbatches(schedule, forward, backward):
    timeline = simulate(schedule, forward=forward, backward=backward)
    num_microbatches = schedule.num_microbatches / schedule.parts_per_microbatch
    work = schedule.num_ranks * timeline.makespan - sum(idle(timeline))
    assert work == approx(schedule.num_ranks * num_microbatches * (forward + backward))
    assert timeline.bubble_ratio == approx(sum(idle(timeline)) / (schedule.num_ranks * timeline.makespan))


@given(st.sampled_from(["gpipe", "1f1b"]), ranks, microbatches, times, times)
def test_gpipe_and_1f1b_waste_the_fill_and_drain_of_the_pipeline(name, num_ranks, num_microbatches, forward, backward):
    d, n = num_ranks, num_microbatches
    timeline = simulate(build(name, d, n), forward=forward, backward=backward)
    assert idle(timeline) == [(d - 1) * (forward + backward)] * d
    assert timeline.bubble_ratio == approx((d - 1) / (n + d - 1))


@given(ranks, microbatches)
def test_gpipe_holds_every_microbatch(num_ranks, num_microbatches):
    assert peaks(simulate(build("gpipe", num_ranks, num_microbatches))) == [num_microbatches] * num_ranks


@given(ranks, microbatches)
def test_1f1b_holds_one_microbatch_per_stage_from_a_rank_to_the_last(num_ranks, num_microbatches):
    timeline = simulate(build("1f1b", num_ranks, num_microbatches))
    assert peaks(timeline) == [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)]


@given(ranks, units, chunks, times, times)
def test_interleaving_divides_the_bubble_by_the_chunks_and_holds_more(num_ranks, num_groups, v, forward, backward):
    d, n = num_ranks, num_ranks * num_groups
    timeline = simulate(build_interleaved(d, num_groups, v), forward=v * forward, backward=v * backward)
    assert idle(timeline) == [(d - 1) * (forward + backward)] * d
    assert timeline.bubble_ratio == approx((d - 1) / (v * n + d - 1))
    assert peaks(timeline) == [min(v * n, (v - 1) * d + 2 * (d - 1 - r) + 1) / v for r in range(d)]


@given(even_ranks, units, times, st.integers(0, 9))
def test_direct_concatenation_wastes_more_with_every_unit_unless_backward_equals_forward(num_ranks, k, forward, slower):
    d, n, b = num_ranks, num_ranks * k, 1 + slower / 4
    timeline = simulate(build("chimera", d, n), forward=4 * forward, backward=4 * forward * b)
    expected = (d - 2) * (1 + (b - 1) * k)
    assert idle(timeline) == [4 * forward * expected] * d
    assert timeline.bubble_ratio == approx(expected / (n * (1 + b) + expected))


@given(even_ranks, times, st.integers(0, 9))
def test_one_unit_of_chimera_wastes_all_but_two_backwards(num_ranks, forward, slower):
    timeline = simulate(build("chimera", num_ranks, num_ranks), forward=forward, backward=forward + slower)
    assert idle(timeline) == [(num_ranks - 2) * (forward + slower)] * num_ranks


@given(even_ranks, units)
def test_chimera_holds_most_in_the_middle_of_the_pipeline(num_ranks, num_units):
    d = num_ranks
    timeline = simulate(build("chimera", d, d * num_units))
    assert peaks(timeline) == [min(d - r, d // 2) + min(r + 1, d // 2) for r in range(d)]


@given(even_ranks, units)
def test_doubling_wastes_two_slots_fewer_than_there_are_ranks(num_ranks, num_units):
    n = 2 * num_ranks * num_units
    assert slots_used(build("chimera_doubling", num_ranks, n)) - 3 * n / 2 == num_ranks - 2


@given(even_ranks, units, times)
def test_one_unit_of_doubling_wastes_a_quarter_less_than_several(num_ranks, num_units, forward):
    n = 2 * num_ranks * num_units
    timeline = simulate(build("chimera_doubling", num_ranks, n), forward=forward, backward=2 * forward)
    slots = (num_ranks - 2) * {1: 0.75}.get(num_units, 1)
    assert idle(timeline) == [slots * 2 * forward] * num_ranks
    assert timeline.bubble_ratio == approx(slots / (3 * n / 2 + slots))


@given(even_ranks, units, times)
def test_halving_wastes_half_as_much_as_doubling(num_ranks, num_units, forward):
    n = num_ranks * num_units
    timeline = simulate(build("chimera_halving", num_ranks, n), forward=2 * forward, backward=4 * forward)
    slots = (num_ranks - 2) * {1: 0.75}.get(num_units, 1)
    assert idle(timeline) == [slots * 2 * forward] * num_ranks
    assert timeline.bubble_ratio == approx(slots / (3 * n + slots))


@given(even_ranks, microbatches)
def test_doubling_holds_at_most_two_microbatches_per_rank_and_halving_one(num_ranks, num_microbatches):
    assert max(peaks(simulate(build("chimera_doubling", num_ranks, num_microbatches)))) <= 2 * num_ranks
    assert max(peaks(simulate(build("chimera_halving", num_ranks, num_microbatches)))) <= num_ranks


@given(even_ranks)
def test_doubling_and_halving_reach_their_memory_bounds(num_ranks):
    assert max(peaks(simulate(build("chimera_doubling", num_ranks, 4 * num_ranks)))) == 2 * num_ranks
    assert max(peaks(simulate(build("chimera_halving", num_ranks, 2 * num_ranks)))) == num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "backward", "most_units"),
    [(4, 2, 3), (6, 2, 2), (8, 2, 2), (12, 2, 2), (4, 3, 2), (6, 3, 1), (8, 3, 1)],
)
def test_direct_concatenation_beats_1f1b_for_few_units_only(num_ranks, backward, most_units):
    def makespan(name, num_units):
        return simulate(build(name, num_ranks, num_units * num_ranks), backward=backward).makespan

    assert [k for k in range(1, 7) if makespan("chimera", k) < makespan("1f1b", k)] == list(range(1, most_units + 1))


@given(ranks, st.integers(0, 14), times)
def test_zb_h1_fills_two_thirds_of_the_bubble_of_1f1b(num_ranks, more, time):
    d, n = num_ranks, num_ranks + more
    timeline = simulate(build("zb_h1", d, n), forward=time, backward=2 * time)
    assert idle(timeline) == [(d - 1) * time] * d
    assert timeline.bubble_ratio == approx((d - 1) / (3 * n + d - 1))


@given(st.integers(1, 6), st.integers(0, 5))
def test_zb_h1_with_few_microbatches_takes_as_long_as_the_last_ones_round_trip(num_microbatches, more_ranks):
    d, n = num_microbatches + more_ranks, num_microbatches
    way_to_last, last_rank, way_back, last_weight_gradient = d - 1, 2 * n, d - 1, 1
    makespan = simulate(build("zb_h1", d, n)).makespan
    assert makespan == way_to_last + last_rank + way_back + last_weight_gradient


@given(ranks, st.integers(0, 12), times)
def test_zbv_wastes_half_a_forward_for_each_rank_but_one(num_ranks, more, time):
    d, n = num_ranks, 2 * num_ranks - 1 + more
    timeline = simulate(build("zbv", d, n), forward=2 * time, backward=4 * time)
    assert idle(timeline) == [(d - 1) * time] * d
    assert timeline.bubble_ratio == approx((d - 1) / (6 * n + d - 1))


@given(st.sampled_from(["zb_h1", "zbv"]), ranks, microbatches)
def test_zero_bubble_schedules_hold_as_much_as_the_first_rank_of_1f1b(name, num_ranks, num_microbatches):
    timeline = simulate(build(name, num_ranks, num_microbatches))
    assert peaks(timeline) == [min(num_ranks, num_microbatches)] * num_ranks


@given(ranks, microbatches)
def test_until_the_input_gradient_zb_h1_holds_as_much_as_1f1b(num_ranks, num_microbatches):
    split, whole = (simulate(build(name, num_ranks, num_microbatches)) for name in ("zb_h1", "1f1b"))
    assert [peak_until_input_gradient(split, rank) for rank in range(num_ranks)] == peaks(whole)


@given(any_schedule, times, times)
def test_the_parts_of_a_backward_take_half_of_it_unless_told_otherwise(schedule, forward, backward):
    assumed = simulate(schedule, forward=forward, backward=2 * backward)
    told = simulate(schedule, forward=forward, backward=2 * backward, input_gradient=backward, weight_gradient=backward)
    assert assumed == told


def test_a_longer_weight_gradient_makes_a_step_longer():
    schedule = build("zb_h1", 2, 1)
    assert simulate(schedule, weight_gradient=7).makespan == simulate(schedule, weight_gradient=1).makespan + 6


def two_ranks(*lists):
    actions = tuple(tuple(map(Action.parse, text.split())) for text in lists)
    return Schedule("1f1b", 2, 1, actions, ((0,), (1,)))


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        (two_ranks("0B0 0F0", "1F0 1B0"), "rank 0 waits at 0B0 for 0F0 and 1B0; rank 1 waits at 1F0 for 0F0"),
        (two_ranks("0F0 0B0", "1B0 1F0"), "rank 0 waits at 0B0 for 1B0; rank 1 waits at 1B0 for 1F0"),
        (two_ranks("0F0 0B0", "1F0"), "microbatch 0 on stage 1 runs F instead of F, B or F, I, W"),
        (two_ranks("0F0 0B0", ""), "microbatch 0 on stage 1 runs nothing instead of"),
        (two_ranks("0F0 0B0", "1F0 1B0 1B0"), "microbatch 0 on stage 1 runs F, B, B instead of"),
        (two_ranks("0F0 0B0", "1F0 1I0"), "microbatch 0 on stage 1 runs F, I instead of"),
        (two_ranks("0F0 0B0", "1F0 1I0 1W0"), "rank 0 waits at 0B0 for 1B0"),
        (
            two_ranks("0F0 1B0", "1F0 0B0"),
            "microbatch 0 on stage 0 runs on rank 0, 1 instead of one of 0; microbatch 0",
        ),
        (two_ranks("1F0 1B0", "0F0 0B0"), "microbatch 0 on stage 0 runs on rank 1 instead of one of 0"),
        (two_ranks("0F0 0B0", "1F0 1B0 2F0"), "there is no microbatch 0 on stage 2"),
        (two_ranks("0F0 0F1 0B0", "1F0 1B0"), "there is no microbatch 1 on stage 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_the_reason(schedule, complaint):
    with pytest.raises(PlanError, match=complaint):
        simulate(schedule)
    with pytest.raises(PlanError, match=complaint):
        schedule.with_communication()
