"""What ranks ask of their communicators, as plain data: each way to disagree or to wait in a circle is reported."""

import pytest
from queues import pairs_in_line, transfers_in_line

from llama_core.rehearsal.call_order import (
    RECEIVE,
    SEND,
    Call,
    CalledOperation,
    Communicator,
    circle,
    collectives_in_line,
    mismatches,
    own_queue,
)

BOTH = Communicator((0, 1), purpose="shard")
ALSO_BOTH = Communicator((0, 1), number=1, purpose="tp")
THERE, BACK = Communicator((0, 1), number=2), Communicator((0, 1), number=3)


def collective(name="all_reduce", communicator=BOTH, *, elements=(8,), dtype="float32", where="", **options):
    waits = {name: options.pop(name, ()) for name in ("after", "host_after", "behind")}
    return Call(communicator, (CalledOperation(name, dtype, elements, **options),), where=where, **waits)


def transfer(name, peer, communicator, *, elements=(8,), dtype="float32", content="", **options):
    return Call(communicator, (CalledOperation(name, dtype, elements, peer=peer, content=content),), **options)


def send(peer, communicator=THERE, **options):
    return transfer(SEND, peer, communicator, **options)


def receive(peer, communicator=THERE, **options):
    return transfer(RECEIVE, peer, communicator, **options)


def exchange(sent, received):
    return collective("all_to_all", elements=sent, received=received)


GATHER, SCATTER = collective("all_gather"), collective("reduce_scatter")

FAULTS = {
    "a collective that one rank lacks": (
        [[GATHER, SCATTER], [GATHER]],
        "collective 2 on ranks 0, 1 (shard): rank 0 makes reduce_scatter of 8 float32, rank 1 none",
    ),
    "two collectives in another order": (
        [[GATHER, SCATTER], [SCATTER, GATHER]],
        "collective 1 on ranks 0, 1 (shard): rank 0 makes all_gather of 8 float32, rank 1 reduce_scatter of 8 float32",
    ),
    "equal collectives of other weights": (
        [[collective(content="layers.0")], [collective(content="layers.1", where="step 1")]],
        "rank 0 makes all_reduce of 8 float32 (layers.0), rank 1 all_reduce of 8 float32 (layers.1) in step 1",
    ),
    "another size": (
        [[collective()], [collective(elements=(9,))]],
        "rank 0 makes all_reduce of 8 float32, rank 1 all_reduce of 9 float32",
    ),
    "another dtype": (
        [[collective()], [collective(dtype="bfloat16")]],
        "rank 0 makes all_reduce of 8 float32, rank 1 all_reduce of 8 bfloat16",
    ),
    "another reduction": (
        [[collective("all_reduce (sum)")], [collective("all_reduce (max)")]],
        "rank 0 makes all_reduce (sum) of 8 float32, rank 1 all_reduce (max) of 8 float32",
    ),
    "a third rank that does other things": (
        [[collective(communicator=Communicator((0, 1, 2)))] * 2] * 2
        + [[collective(communicator=Communicator((0, 1, 2)))]],
        "collective 2 on ranks 0, 1, 2: rank 0 makes all_reduce of 8 float32, rank 2 none",
    ),
    "an all-to-all that expects other sizes": (
        [[exchange((1, 3), (1, 2))], [exchange((2, 4), (2, 4))]],
        "rank 0 sends 3 elements to rank 1, which expects 2, in all_to_all",
    ),
    "groups that are made in another order": (
        [[collective("split into [[0, 1]]")], [collective("split into [[0], [1]]")]],
        "rank 0 makes split into [[0, 1]] of 8 float32, rank 1 split into [[0], [1]] of 8 float32",
    ),
    "a send that nobody receives": (
        [[send(1), send(1, where="step 1")], [receive(0)]],
        "message 2 from rank 0 to rank 1 on ranks 0, 1: rank 0 makes send of 8 float32 to rank 1 in step 1, "
        "rank 1 none",
    ),
    "a receive that nobody sends": (
        [[send(1)], [receive(0), receive(0)]],
        "message 2 from rank 0 to rank 1 on ranks 0, 1: rank 0 makes none, rank 1 receive of 8 float32 from rank 0",
    ),
    "a receive from the wrong rank": (
        [[send(1, Communicator((0, 1, 2)))], [receive(2, Communicator((0, 1, 2)))], []],
        "message 1 from rank 2 to rank 1 on ranks 0, 1, 2: rank 2 makes none, rank 1 receive of 8 float32 from rank 2",
    ),
    "messages in another order": (
        [
            [send(1, content="microbatch 0"), send(1, content="microbatch 1")],
            [receive(0, content="microbatch 1"), receive(0, content="microbatch 0")],
        ],
        "rank 0 makes send of 8 float32 to rank 1 (microbatch 0), "
        "rank 1 receive of 8 float32 from rank 0 (microbatch 1)",
    ),
    "a message of another size": (
        [[send(1)], [receive(0, elements=(4,))]],
        "rank 0 makes send of 8 float32 to rank 1, rank 1 receive of 4 float32 from rank 0",
    ),
    "a message of another dtype": (
        [[send(1)], [receive(0, dtype="bfloat16")]],
        "rank 0 makes send of 8 float32 to rank 1, rank 1 receive of 8 bfloat16 from rank 0",
    ),
}


@pytest.mark.parametrize(("ranks", "line"), FAULTS.values(), ids=FAULTS)
def test_ranks_that_disagree_are_named_with_their_calls(ranks, line):
    assert any(line in found for found in mismatches(ranks)), mismatches(ranks)


def test_ranks_that_agree_have_no_mismatch():
    ranks = [
        [GATHER, exchange((1, 3), (1, 2)), send(1, content="x"), receive(1, BACK)],
        [receive(0, content="x"), GATHER, exchange((2, 4), (3, 4)), send(0, BACK)],
    ]
    assert mismatches(ranks) == []


def test_groups_of_the_same_ranks_are_not_confused():
    ranks = [[collective(), collective(communicator=ALSO_BOTH)], [collective(communicator=ALSO_BOTH), collective()]]
    assert mismatches(ranks) == []


QUEUES = (own_queue, collectives_in_line, pairs_in_line, transfers_in_line)
CIRCLES = {
    "two communicators, in one stream": (
        [
            [collective(), collective(communicator=ALSO_BOTH, after=(0,))],
            [collective(communicator=ALSO_BOTH), collective(after=(0,))],
        ],
        set(QUEUES),
        "on rank 0, all_reduce of 8 float32 on ranks 0, 1 (tp) waits for all_reduce of 8 float32 on ranks 0, 1 (shard)",
    ),
    "a host that reads a value first": (
        [
            [collective(), collective(communicator=ALSO_BOTH, host_after=(0,))],
            [collective(communicator=ALSO_BOTH), collective(after=(0,))],
        ],
        set(QUEUES),
        "on rank 1, all_reduce of 8 float32 on ranks 0, 1 (shard) waits for all_reduce of 8 float32 on ranks 0, 1 (tp)",
    ),
    "a transfer and a collective": (
        [[collective(), send(1, after=(0,))], [receive(0), collective(after=(0,))]],
        set(QUEUES),
        "on rank 1, all_reduce of 8 float32 on ranks 0, 1 (shard) waits for receive of 8 float32 from rank 0",
    ),
    "collectives that nothing but the device orders": (
        [
            [GATHER, collective("broadcast", ALSO_BOTH), GATHER, collective("broadcast", ALSO_BOTH)],
            [GATHER, collective("broadcast", ALSO_BOTH), collective("broadcast", ALSO_BOTH), GATHER],
        ],
        {collectives_in_line},
        "on rank 0, broadcast of 8 float32 on ranks 0, 1 (tp) waits for all_gather of 8 float32 on ranks 0, 1 (shard)",
    ),
    "a receive that is posted before a send": (
        [[send(1), receive(1, BACK), send(1)], [receive(0), receive(0), send(0, BACK, after=(0,))]],
        {pairs_in_line, transfers_in_line},
        "on rank 1, send of 8 float32 to rank 0 on ranks 0, 1 waits for receive of 8 float32 from rank 0 on ranks 0, 1",
    ),
    "two sends that face each other in one queue": (
        [[send(1), receive(1)], [send(0), receive(0)]],
        set(QUEUES),
        "on rank 0, receive of 8 float32 from rank 1 on ranks 0, 1 waits for send of 8 float32 to rank 1 on ranks 0, 1",
    ),
    "a message and a collective of one communicator": (
        [[GATHER, send(1, BOTH), GATHER], [GATHER, GATHER, receive(0, BOTH)]],
        set(QUEUES),
        "on rank 0, all_gather of 8 float32 on ranks 0, 1 (shard) waits for send of 8 float32 to rank 1 on ranks 0, 1",
    ),
    "first transfers, for which the hosts wait": (
        [[receive(1, BACK), send(1)], [receive(0), send(0, BACK)]],
        set(QUEUES),
        "on rank 1, connecting for send of 8 float32 to rank 0 on ranks 0, 1 waits for connecting for receive",
    ),
}


@pytest.mark.parametrize(("ranks", "queues", "clause"), CIRCLES.values(), ids=CIRCLES)
def test_a_circle_of_waiting_is_found_in_the_queues_that_close_it(ranks, queues, clause):
    assert mismatches(ranks) == []
    found = {queue_of: circle(ranks, queue_of) for queue_of in QUEUES}
    assert {queue_of for queue_of in QUEUES if found[queue_of]} == queues
    assert any(clause in line for line in found.values()), found


def test_a_circle_is_one_line_that_ends_where_it_begins():
    ranks, *_ = CIRCLES["a transfer and a collective"]
    assert circle(ranks) == (
        "on rank 1, all_reduce of 8 float32 on ranks 0, 1 (shard) waits for receive of 8 float32 from rank 0 on ranks "
        "0, 1; on rank 0, send of 8 float32 to rank 1 on ranks 0, 1 waits for all_reduce of 8 float32 on ranks 0, 1 "
        "(shard)"
    )


def test_what_one_stream_waits_for_holds_up_the_others_only_if_they_share_a_queue_of_the_device():
    connected = [collective(), collective(communicator=ALSO_BOTH)]
    ranks = [
        [*connected, collective(), collective(communicator=ALSO_BOTH, behind=(2,))],
        [*connected, collective(communicator=ALSO_BOTH), collective(behind=(2,))],
    ]
    assert circle(ranks) == ""
    assert "on rank 0, all_reduce of 8 float32 on ranks 0, 1 (tp) waits for" in circle(ranks, in_one_stream=True)


RING = Communicator((0, 1, 2))


def hop(rank):
    there, here = (rank + 1) % 3, (rank - 1) % 3
    return CalledOperation(SEND, "float32", (8,), peer=there), CalledOperation(RECEIVE, "float32", (8,), peer=here)


def test_a_ring_that_launches_its_sends_and_receives_together_has_no_circle():
    ranks = [[Call(RING, hop(rank)), Call(RING, hop(rank), after=(0,))] for rank in range(3)]
    assert mismatches(ranks) == []
    assert [circle(ranks, queue_of) for queue_of in QUEUES] == [""] * 4


def test_a_ring_that_launches_them_one_by_one_has():
    ranks = [[Call(RING, (operation,)) for operation in hop(rank)] for rank in range(3)]
    assert "on rank 2, receive of 8 float32 from rank 1 on ranks 0, 1, 2 waits for send" in circle(ranks)


def test_ranks_that_have_connected_do_not_wait_on_the_host():
    """The calls of ``CIRCLES``, after a first transfer in each direction for which the ranks met in one order."""
    connected = [[send(1), receive(1, BACK)], [receive(0), send(0, BACK)]]
    ranks = [[*connected[rank], *CIRCLES["first transfers, for which the hosts wait"][0][rank]] for rank in range(2)]
    assert circle(ranks) == ""
