"""Ways to make one order of a rank's forwards and backwards: fixed delays between them, or whatever is ready first."""

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from llama_core.schedules.actions import RELEASES, Action, Kind, inputs

T = TypeVar("T")
Slot = list[Action]
"""What a rank does without looking at anything else in between."""


def passes(stage: int, kind: Kind, microbatches: Sequence[int]) -> list[Action]:
    """Return the action of one kind on one stage for each microbatch."""
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def pieces(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items in pieces of ``size``, of which the last may be shorter."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def staggered(*delayed: tuple[int, Sequence[Action]]) -> tuple[Action, ...]:
    """Return the sequences as one: in every tick the next action of each whose delay is over."""
    num_ticks = max(delay + len(actions) for delay, actions in delayed)
    return tuple(
        actions[tick - delay]
        for tick in range(num_ticks)
        for delay, actions in delayed
        if 0 <= tick - delay < len(actions)
    )


def first_ready(
    queues: Sequence[Sequence[Sequence[Slot]]], num_stages: int, most_held: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the order in which every rank empties its queues, all ranks in step, slot by slot.

    In each slot a rank takes the first head of its queues whose inputs were done in slots before, or waits. It takes no
    forward that would make it hold more than ``most_held`` microbatches, counted once for each of its stages.
    """
    waiting = [[deque(queue) for queue in of_rank] for of_rank in queues]
    orders: list[list[Action]] = [[] for _ in queues]
    held = [0] * len(queues)
    done: set[Action] = set()
    while any(map(any, waiting)):
        taken: list[Action] = []
        for rank, of_rank in enumerate(waiting):
            for queue in filter(None, of_rank):
                grown = held[rank] + _growth(queue[0])
                if grown <= most_held and _is_ready(queue[0], done, num_stages):
                    taken += queue[0]
                    orders[rank] += queue.popleft()
                    held[rank] = grown
                    break
        assert taken, "every rank waits for another"
        done.update(taken)
    return tuple(map(tuple, orders))


def _growth(slot: Slot) -> int:
    """Return how many microbatches more a rank holds after ``slot``."""
    return sum((action.kind is Kind.FORWARD) - (action.kind in RELEASES) for action in slot)


def _is_ready(slot: Slot, done: set[Action], num_stages: int) -> bool:
    return all(before in done for action in slot for before in inputs(action, num_stages))
