"""What a rank holds at an action follows from the actions before it, counted here anew for each."""

from itertools import takewhile

from any_schedule import any_schedule
from hypothesis import given
from hypothesis import strategies as st

from llama_core.schedules.actions import BACKWARDS, Kind
from llama_core.schedules.registry import build_schedule
from llama_core.schedules.walk import walk


def walked(schedule, data):
    """Return one rank's actions, its stages, and its turns."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return schedule.actions[rank], schedule.stages_of(rank), list(walk(schedule, rank))


def count(actions, stage, *kinds):
    return sum(action.stage == stage and action.kind in kinds for action in actions)


@given(any_schedule, st.data())
def test_a_rank_holds_what_went_forward_and_has_not_come_back_but_for_the_microbatch_at_work(schedule, data):
    actions, stages, turns = walked(schedule, data)
    assert [turn.action for turn in turns] == list(actions)
    for number, turn in enumerate(turns):
        before, begun = actions[:number], actions[: number + 1]
        assert turn.held.in_flight == tuple(
            count(before, stage, Kind.FORWARD) - count(begun, stage, *BACKWARDS) for stage in stages
        )
        assert turn.held.deferred == tuple(
            count(before, stage, Kind.INPUT_GRADIENT) - count(begun, stage, Kind.WEIGHT_GRADIENT) for stage in stages
        )


@given(any_schedule, st.data())
def test_a_stage_has_all_gradients_once_a_backward_is_whole_and_those_of_its_tables_before(schedule, data):
    actions, stages, turns = walked(schedule, data)
    for number, turn in enumerate(turns):
        for stage, progress in zip(stages, turn.state.progress, strict=True):
            run = {action.kind for action in actions[:number] if action.stage == stage}
            assert progress.has_run == (Kind.FORWARD in run)
            assert (progress.accumulated == "all") == bool(run & {Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
            assert (progress.accumulated == "none") == run.isdisjoint({*BACKWARDS, Kind.WEIGHT_GRADIENT})
            assert progress.repeated == (count(actions[:number], stage, *BACKWARDS) > 1)


@given(any_schedule, st.data())
def test_the_head_stays_gathered_from_its_forward_to_the_ranks_next_backward(schedule, data):
    actions, stages, turns = walked(schedule, data)
    for number, turn in enumerate(turns):
        since = list(takewhile(lambda action: action.kind not in BACKWARDS, reversed(actions[:number])))
        assert turn.state.head_gathered == any(action.stage == schedule.num_stages - 1 for action in since)
        behind = actions[number - len(since) - 1] if len(since) < number else None
        assert turn.state.last_backward == (None if behind is None else stages.index(behind.stage))


@given(any_schedule, st.data())
def test_every_turn_that_sends_or_receives_has_its_message_in_the_list_with_communication(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    messages = [action.kind for action in schedule.with_communication()[rank]]
    turns = list(walk(schedule, rank))
    assert sum(turn.is_sent for turn in turns) == messages.count(Kind.SEND_F) + messages.count(Kind.SEND_B)
    assert sum(turn.is_received for turn in turns) == messages.count(Kind.RECV_F) + messages.count(Kind.RECV_B)


def test_microbatches_that_are_skipped_are_held_between_the_first_and_the_last_one():
    short, long = (build_schedule("gpipe", num_ranks=2, num_microbatches=count) for count in (4, 10))
    held = [sum(turn.held.in_flight) for turn in walk(short, 0, num_skipped=6)]
    whole = [sum(turn.held.in_flight) for turn in walk(long, 0)]
    assert held == [0, 7, 8, 9, 9, 8, 7, 0]
    assert (max(held), held[0], held[-1]) == (max(whole), whole[0], whole[-1])
