"""Queues that a device might have beside those of its communicators, to see which of them would deadlock."""

from collections.abc import Hashable

from llama_core.rehearsal.call_order import Call


def pairs_in_line(rank: int, call: Call) -> Hashable | None:
    """Return a queue for all messages between two ranks, in both directions."""
    peers = {operation.peer for operation in call.operations}
    return frozenset({rank, *peers}) if call.is_transfer and len(peers) == 1 else None


def transfers_in_line(rank: int, call: Call) -> Hashable | None:
    """Return a queue for all messages of a rank."""
    return "transfers" if call.is_transfer else None
