"""Two ways to order a rank's forwards and backwards: by fixed delays, or whichever is ready first."""

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from llama_core.schedules.actions import RELEASES, Action, Kind, inputs

T = TypeVar("T")
Slot = list[Action]
"""Actions that a rank runs without interruption."""


def passes(stage: int, kind: Kind, microbatches: Sequence[int]) -> list[Action]:
    """Return the action of one kind on one stage for each microbatch."""
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def pieces(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the items in pieces of ``size``; the last may be shorter."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def staggered(*delayed: tuple[int, Sequence[Action]]) -> tuple[Action, ...]:
    """Return the merged sequences: every tick takes the next action of each sequence whose delay is over."""
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
    """Return the order in which every rank empties its queues, with all ranks in lockstep, slot by slot.

    In each slot a rank takes the first queue head whose inputs were done in earlier slots, or waits. It takes no
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
    """Return how many more microbatches a rank holds after ``slot``."""
    return sum((action.kind is Kind.FORWARD) - (action.kind in RELEASES) for action in slot)


def _is_ready(slot: Slot, done: set[Action], num_stages: int) -> bool:
    return all(before in done for action in slot for before in inputs(action, num_stages))
