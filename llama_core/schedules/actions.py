"""A pipeline schedule: the actions of every rank, in order, with what ranks send to each other.

A stage is a group of consecutive layers; stages are counted from the input. A microbatch goes
forward through all stages, then backward from the last stage to the first. Actions are written as
in torch's pipelining CSV: ``0F3`` is the forward of microbatch 3 on stage 0.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import NamedTuple, Self

from llama_core.errors import PlanError


class Kind(StrEnum):
    """The kind of an action; the value is its spelling."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: the gradient of the stage's input and those of its weights."""
    INPUT_GRADIENT = "I"
    """The part of the backward that the previous stage waits for."""
    WEIGHT_GRADIENT = "W"
    """The rest of the backward, which no other stage waits for."""
    SEND_F = "SEND_F"
    """The stage sends its output to the next stage."""
    RECV_F = "RECV_F"
    """The stage receives its input from the previous stage."""
    SEND_B = "SEND_B"
    """The stage sends the gradient of its input to the previous stage."""
    RECV_B = "RECV_B"
    """The stage receives the gradient of its output from the next stage."""


BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""Actions that give the gradient of a stage's input."""
COMPUTATIONS = BACKWARDS | {Kind.FORWARD, Kind.WEIGHT_GRADIENT}
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RELEASES = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
"""Actions after which a stage no longer holds anything of the microbatch."""

_FEEDS = {Kind.RECV_F: {Kind.FORWARD}, Kind.RECV_B: BACKWARDS}
_WAYS_TO_RUN = (
    [Kind.FORWARD, Kind.BACKWARD],
    [Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT],
)
# any positive times give an order without deadlock; these give the lists that run best
_USUAL_TIMES = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT_GRADIENT: 1.0,
    Kind.WEIGHT_GRADIENT: 1.0,
}


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One step of one rank."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the action that ``text`` spells.

        Raises:
            PlanError: if ``text`` is not a stage, a kind and a microbatch.
        """
        match = re.fullmatch(rf"(\d+)({'|'.join(Kind)})(\d+)", text)
        if match is None:
            how = "write stage, kind and microbatch, such as 0F3 or 1RECV_B2"
            raise PlanError(f"{text!r} is not an action; {how}")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with the times at which it starts and ends."""

    action: Action
    start: float
    end: float


class Ordered(NamedTuple):
    """An action in an order of all ranks' actions, each after those that it waits for."""

    rank: int
    action: Action
    waits: tuple[tuple[int, bool], ...]
    """Places of the actions that have to end first, and whether another rank runs each."""


Placement = tuple[tuple[int, ...], ...]
"""The stages whose weights each rank holds."""


@dataclass(frozen=True)
class Schedule:
    """The computations of every rank of one pipeline for one optimizer step."""

    name: str
    """Name of the schedule on the command line."""
    num_stages: int
    """Stages the layers are divided into."""
    num_microbatches: int
    """Microbatches as the actions count them: each of the ``parts_per_microbatch`` parts is one."""
    actions: tuple[tuple[Action, ...], ...]
    """Computations of each rank, in order."""
    placement: Placement
    parts_per_microbatch: int = 1
    """Equal parts, by rows, that each microbatch is cut into before it enters the pipeline."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the weights of the same stage and sum their gradients."""
        return sum(map(len, self.placement)) // self.num_stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that ``rank`` hosts; in Chimera, the down pipeline's comes first."""
        return self.placement[rank]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs ``microbatch`` on ``stage``."""
        return self._ranks[stage, microbatch]

    @property
    def routes(self) -> tuple[tuple[int, int], ...]:
        """The directions in which ranks send to each other: sorted pairs of source and target."""
        routes: set[tuple[int, int]] = set()
        for stage in range(self.num_stages - 1):
            for microbatch in range(self.num_microbatches):
                rank = self.rank_of(stage, microbatch)
                next_rank = self.rank_of(stage + 1, microbatch)
                if rank != next_rank:
                    # outputs go one way, and their gradients the other
                    routes |= {(rank, next_rank), (next_rank, rank)}
        return tuple(sorted(routes))

    @cached_property
    def _ranks(self) -> Mapping[tuple[int, int], int]:
        ranks: dict[tuple[int, int], int] = {}
        for rank, actions in enumerate(self.actions):
            for action in actions:
                if action.kind is Kind.FORWARD:
                    ranks[action.stage, action.microbatch] = rank
        return ranks

    @cached_property
    def order(self) -> tuple["Ordered", ...]:
        """All ranks' actions in an order in which each comes after those that it waits for.

        Raises:
            PlanError: if an action waits forever.
        """
        order: list[Ordered] = []
        places: dict[Action, int] = {}
        waiting = [list(reversed(actions)) for actions in self.actions]
        while any(waiting):
            num_placed = len(order)
            for rank, actions in enumerate(waiting):
                while actions:
                    needed = inputs(actions[-1], self.num_stages)
                    if not all(before in places for before in needed):
                        break
                    action = actions.pop()
                    waits: list[tuple[int, bool]] = []
                    for before in needed:
                        place = places[before]
                        waits.append((place, order[place].rank != rank))
                    places[action] = len(order)
                    order.append(Ordered(rank, action, tuple(waits)))
            if len(order) == num_placed:
                deadlocked = "; ".join(self._waits(waiting, places))
                raise PlanError(f"schedule {self.name} deadlocks: {deadlocked}")
        return tuple(order)

    def starts(self, seconds: Sequence[float], hop: float = 0.0) -> list[float]:
        """Return when every action of ``order`` starts: as soon as its rank and its inputs allow.

        Args:
            seconds: how long each of these actions takes.
            hop: time to send an output or a gradient to another rank; only
                the receiver waits for it.

        Raises:
            PlanError: as ``order``.
        """
        free = [0.0] * self.num_ranks
        starts: list[float] = []
        ends: list[float] = []
        # a search spends much of its time here
        for (rank, _, waits), duration in zip(self.order, seconds, strict=True):
            start = free[rank]
            for place, is_sent in waits:
                arrival = ends[place] + hop if is_sent else ends[place]
                start = max(start, arrival)
            starts.append(start)
            ends.append(start + duration)
            free[rank] = start + duration
        return starts

    def replay(
        self,
        seconds: Callable[[Action], float],
        hop: float = 0.0,
    ) -> tuple[tuple[TimedAction, ...], ...]:
        """Return every rank's actions with their times, each as soon as its rank and inputs allow.

        Args:
            seconds: returns how long an action takes.
            hop: time to send an output or a gradient to another rank; only
                the receiver waits for it.

        Raises:
            PlanError: if an action is missing, is listed twice or on the
                wrong rank, or waits forever.
        """
        if problems := list(self._problems()):
            raise PlanError(f"schedule {self.name} is not complete: {'; '.join(problems)}")
        durations = [seconds(action) for _, action, _ in self.order]
        starts = self.starts(durations, hop)
        lanes: list[list[TimedAction]] = [[] for _ in self.actions]
        for (rank, action, _), start, duration in zip(self.order, starts, durations, strict=True):
            lanes[rank].append(TimedAction(action, start, start + duration))
        return tuple(map(tuple, lanes))

    def _problems(self) -> Iterator[str]:
        runs: dict[tuple[int, int], list[tuple[Kind, int]]] = defaultdict(list)
        for rank, actions in enumerate(self.actions):
            for action in actions:
                runs[action.stage, action.microbatch].append((action.kind, rank))
        expected = product(range(self.num_stages), range(self.num_microbatches))
        for stage, microbatch in sorted({*runs, *expected}):
            kinds = [kind for kind, _ in runs[stage, microbatch]]
            ranks = {rank for _, rank in runs[stage, microbatch]}
            where = f"microbatch {microbatch} on stage {stage}"
            if not (stage < self.num_stages and microbatch < self.num_microbatches):
                yield f"there is no {where}"
            elif sorted(kinds) not in map(sorted, _WAYS_TO_RUN):
                yield f"{where} runs {', '.join(kinds) or 'nothing'} instead of F, B or F, I, W"
            elif len(ranks) > 1 or stage not in self.placement[min(ranks)]:
                hosts = [str(rank) for rank, stages in enumerate(self.placement) if stage in stages]
                own = ", ".join(map(str, sorted(ranks)))
                yield f"{where} runs on rank {own} instead of one of {', '.join(hosts)}"

    def _waits(self, waiting: Sequence[Sequence[Action]], done: Container[Action]) -> Iterator[str]:
        for rank, actions in enumerate(waiting):
            for action in actions[-1:]:
                needed = inputs(action, self.num_stages)
                missing = [str(before) for before in needed if before not in done]
                yield f"rank {rank} waits at {action} for {' and '.join(missing)}"

    def with_communication(self) -> tuple[tuple[Action, ...], ...]:
        """Return every rank's actions with the sends and receives between them.

        No computation comes between a send and the computation of its tensor. A receive is posted
        before the computation that precedes its use, so that the tensor can arrive during that
        computation. The messages from one rank to another are received in the order in which they
        are sent. Adjacent stages on one rank need no communication.

        The lists cannot deadlock if receives do not block and each direction between two ranks has
        a queue of its own, even if a send blocks until its receive is posted. They come from one
        global order in which each send and its receive are a single event, by posting receives
        earlier: what a message waits for, in its queue or on its rank, is earlier in that order. In
        a queue for both directions it need not be: a receive that is posted early stands before
        sends that precede it in that order. 1F1B on two ranks with two microbatches then deadlocks.

        Raises:
            PlanError: as ``replay``.
        """
        lists: list[list[Action]] = [[] for _ in self.actions]
        for rank, action, ended in self._events():
            if not ended:
                lists[rank].append(action)
            elif (handed_on := self._hand_over(action)) is not None:
                send, receive = handed_on
                peer = self.rank_of(receive.stage, receive.microbatch)
                if peer != rank:
                    lists[rank].append(send)
                    lists[peer].append(receive)
        communicating: list[tuple[Action, ...]] = []
        for actions in lists:
            posted = posting_early(_receiving_late(actions), self.rank_of)
            communicating.append(tuple(posted))
        return tuple(communicating)

    def is_sent(self, action: Action) -> bool:
        """Return whether the result of a computation goes to another rank."""
        return self._meets_other_rank(action, 1 if action.kind is Kind.FORWARD else -1)

    def is_received(self, action: Action) -> bool:
        """Return whether a computation needs the result of another rank."""
        return self._meets_other_rank(action, -1 if action.kind is Kind.FORWARD else 1)

    def _meets_other_rank(self, action: Action, step: int) -> bool:
        """Return whether another rank takes part that has the stage ``step`` further."""
        stage = action.stage
        microbatch = action.microbatch
        if action.kind is Kind.WEIGHT_GRADIENT or not 0 <= stage + step < self.num_stages:
            return False
        return self.rank_of(stage + step, microbatch) != self.rank_of(stage, microbatch)

    def _events(self) -> Iterator[tuple[int, Action, bool]]:
        """Yield rank, action and whether it has ended, at each start and each end, in clock order.

        At equal times, ends come before starts, since starts depend on them. Among the ends, the
        action further along its pass comes first, so that a rank sends before it receives.
        """
        events = []
        for rank, lane in enumerate(self.replay(lambda action: _USUAL_TIMES[action.kind])):
            for timed in lane:
                stages_left = timed.action.stage * (-1 if timed.action.kind is Kind.FORWARD else 1)
                events.append((timed.end, 0, stages_left, rank, timed.action))
                events.append((timed.start, 1, 0, rank, timed.action))
        for _, is_start, _, rank, action in sorted(events):
            yield rank, action, not is_start

    def _hand_over(self, action: Action) -> tuple[Action, Action] | None:
        """Return the send after ``action`` and its receive; None if no stage needs the result."""
        stage = action.stage
        microbatch = action.microbatch
        if action.kind is Kind.FORWARD and stage < self.num_stages - 1:
            receive = Action(stage + 1, Kind.RECV_F, microbatch)
            return Action(stage, Kind.SEND_F, microbatch), receive
        if action.kind in _FEEDS[Kind.RECV_B] and stage > 0:
            receive = Action(stage - 1, Kind.RECV_B, microbatch)
            return Action(stage, Kind.SEND_B, microbatch), receive
        return None


def inputs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the computations that must end before ``action``, in a pipeline of ``num_stages``."""
    stage = action.stage
    kind = action.kind
    microbatch = action.microbatch
    if kind is Kind.FORWARD:
        return (Action(stage - 1, kind, microbatch),) if stage else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Action(stage, Kind.INPUT_GRADIENT, microbatch),)
    own = Action(stage, Kind.FORWARD, microbatch)
    return (own,) if stage == num_stages - 1 else (own, Action(stage + 1, kind, microbatch))


def _receiving_late(actions: Sequence[Action]) -> Iterator[Action]:
    """Yield ``actions`` with every receive delayed until its use, or the next send.

    A receive that waited beyond a send could change the order of messages.
    """
    pending: list[Action] = []
    for action in actions:
        if action.kind in _FEEDS:
            pending.append(action)
            continue
        num_due = 0
        for number, receive in enumerate(pending, start=1):
            if action.kind in SENDS or _is_fed(action, receive):
                num_due = number  # with those before it, which arrive first
        yield from pending[:num_due]
        del pending[:num_due]
        yield action


def posting_early(
    actions: Iterable[Action],
    rank_of: Callable[[int, int], int],
) -> Iterator[Action]:
    """Yield a rank's ``actions`` with every receive posted before the one in which it arrives.

    That is the computation that precedes its use, or an earlier one.

    Args:
        actions: computations, sends and receives, each receive before its use.
        rank_of: returns the rank that runs a stage for a microbatch. Receives from one rank stay in
            order.
    """
    actions = list(actions)
    due: dict[Action, int] = {}
    before = last = 0  # places of the last two computations
    waiting: list[Action] = []
    for place, action in enumerate(actions):
        if action.kind in _FEEDS:
            due[action] = place
            waiting.append(action)
        elif action.kind not in SENDS:
            before = last
            last = place
            used = [receive for receive in waiting if _is_fed(action, receive)]
            for receive in used:
                due[receive] = min(due[receive], before)
                waiting.remove(receive)
    # a receive that comes before one of the same rank is posted no later than that one
    soonest: dict[int, int] = {}
    for receive in reversed(due):
        step = -1 if receive.kind is Kind.RECV_F else 1
        source = rank_of(receive.stage + step, receive.microbatch)
        place = min(due[receive], soonest.get(source, len(actions)))
        due[receive] = place
        soonest[source] = place
    posted: dict[int, list[Action]] = defaultdict(list)
    for receive, place in due.items():
        posted[place].append(receive)
    for place, action in enumerate(actions):
        yield from posted[place]
        if action.kind not in _FEEDS:
            yield action


def _is_fed(action: Action, receive: Action) -> bool:
    """Return whether a computation needs what ``receive`` brings."""
    of_same_pass = (action.stage, action.microbatch) == (receive.stage, receive.microbatch)
    return of_same_pass and action.kind in _FEEDS[receive.kind]


def one_stage_each(num_ranks: int) -> Placement:
    """Return the placement of one stage on each rank."""
    return tuple((rank,) for rank in range(num_ranks))
