"""Which queues the messages of a schedule may share, where a send blocks until it is received."""

from any_schedule import any_schedule, build
from hypothesis import given, settings
from pytest import MonkeyPatch
from queues import pairs_in_line, transfers_in_line

from llama_core.rehearsal.call_order import (
    RECEIVE,
    SEND,
    Call,
    CalledOperation,
    Communicator,
    circle,
    mismatches,
    own_queue,
)
from llama_core.schedules import actions
from llama_core.schedules.actions import Kind

THERE = {Kind.SEND_F: 1, Kind.SEND_B: -1, Kind.RECV_F: -1, Kind.RECV_B: 1}
USED_BY = {
    Kind.FORWARD: Kind.RECV_F,
    Kind.BACKWARD: Kind.RECV_B,
    Kind.INPUT_GRADIENT: Kind.RECV_B,
    Kind.WEIGHT_GRADIENT: None,
}


def calls_of(schedule):
    """Return every rank's messages, each direction between two ranks on a communicator of its own.

    All ranks first connect in one order, as ``Mesh`` does. As in the executor, a computation waits for what it uses,
    and the next one for the sends before it.
    """
    return [_calls_of(rank, schedule, listed) for rank, listed in enumerate(schedule.with_communication())]


def _calls_of(rank, schedule, listed):
    calls = [message(rank, *route, "first") for route in schedule.routes if rank in route]
    ended, leaving, arriving = [], [], {}
    for action in listed:
        if action.kind in USED_BY:
            ended += [*arriving.get((USED_BY[action.kind], action.stage, action.microbatch), []), *leaving]
            leaving = []
            continue
        other = action.stage + THERE[action.kind]
        peer = schedule.rank_of(other, action.microbatch)
        content = f"{action.kind.name[-1]}{action.microbatch} over border {min(action.stage, other)}"
        if action.kind in {Kind.SEND_F, Kind.SEND_B}:
            leaving.append(len(calls))
            calls.append(message(rank, rank, peer, content, after=ended))
        else:
            arriving[action.kind, action.stage, action.microbatch] = [len(calls)]
            calls.append(message(rank, peer, rank, content, after=ended))
    return calls


def message(rank, source, target, content, after=()):
    name, peer = (SEND, target) if rank == source else (RECEIVE, source)
    communicator = Communicator(tuple(sorted((source, target))), number=int(source > target))
    return Call(communicator, (CalledOperation(name, peer=peer, content=content),), tuple(after))


@settings(max_examples=20)
@given(any_schedule)
def test_messages_can_end_if_each_direction_between_two_ranks_has_a_queue(schedule):
    ranks = calls_of(schedule)
    assert mismatches(ranks) == []
    assert circle(ranks, own_queue) == ""


@settings(max_examples=20)
@given(any_schedule)
def test_messages_whose_receives_are_not_posted_early_can_end_in_a_single_queue(schedule):
    with MonkeyPatch.context() as patch:
        patch.setattr(actions, "posting_early", lambda listed, rank_of: listed)
        ranks = calls_of(schedule)
    assert circle(ranks, transfers_in_line) == ""


def test_receives_that_are_posted_early_wait_for_each_other_if_both_directions_share_a_queue():
    """The least example: rank 1 expects microbatch 1 before it returns microbatch 0, and rank 0 the other way round."""
    ranks = calls_of(build("1f1b", 2, 2))
    assert circle(ranks, own_queue) == ""
    assert circle(ranks, pairs_in_line) == (
        "on rank 1, send to rank 0 (B0 over border 0) on ranks 0, 1 waits for receive from rank 0 (F1 over border 0) "
        "on ranks 0, 1; on rank 0, send to rank 1 (F1 over border 0) on ranks 0, 1 waits for receive from rank 1 (B0 "
        "over border 0) on ranks 0, 1"
    )
