"""The situations in which a rank of a pipeline computes during one optimizer step, from the schedule alone.

A rank's bytes depend on where it stands in the step: which of its stages have run and have gradients, and how many
microbatches it holds between their forward and their backward. That is the same for every model, so it is walked once
for each schedule.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from llama_core.planning.plan import remembered_schedule
from llama_core.schedules.actions import RELEASES, Kind, Schedule

BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})


Accumulated = Literal["none", "tables", "all"]
"""The parameters of a stage that have gradients of earlier microbatches: none, or all, or in between those outside the
layers, whose gradients a split backward does not put off."""


class Progress(NamedTuple):
    """How far a rank has come with one of its stages in a step."""

    has_run: bool = False
    accumulated: Accumulated = "none"
    repeated: bool = False
    """Whether the stage has run two or more backwards."""


class Situation(NamedTuple):
    """An action of a rank, with the position in the step that its bytes depend on."""

    place: int
    """Its stage, counted among those of the rank."""
    kind: Kind
    after_forward: bool
    """Whether the rank's previous action was a forward."""
    final: bool
    """Whether this is the rank's last backward of the step."""
    head_gathered: bool
    """Whether the last stage's head stayed gathered after an earlier forward."""
    has_reduced: bool
    """Whether a backward came before."""
    progress: tuple[Progress, ...]
    """That of each stage of the rank, in their order on it."""


class Held(NamedTuple):
    """How many tensors a rank holds outside the microbatch at work."""

    under_way: tuple[int, ...]
    """Microbatches between their forward and their backward on each of the rank's stages."""
    deferred: tuple[int, ...]
    """Those whose weight gradients are deferred."""
    messages: int
    """Messages between stages: that which the action before sends, and that which the next one receives."""

    def covers(self, other: "Held") -> bool:
        """Return whether there is at least as much of everything."""
        return self.messages >= other.messages and all(
            own >= others
            for own, others in zip(self.under_way + self.deferred, other.under_way + other.deferred, strict=True)
        )


class Turn(NamedTuple):
    """A time at which a rank is in some situation."""

    number: int
    """The number of its action."""
    held: Held


@lru_cache(maxsize=4096)
def situations(
    schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int, pp_rank: int, skipped: int
) -> tuple[tuple[Situation, tuple[Turn, ...]], ...]:
    """Return a rank's situations in a step, each with the turns, in order, at which it may hold most.

    Args:
        schedule: the name of the schedule.
        num_ranks: ranks of the pipeline.
        num_microbatches: those to step through.
        num_chunks: stages per rank, for a schedule that takes chunks.
        pp_rank: the rank.
        skipped: further microbatches between a stage's first and last one that are held but not stepped through.
    """
    built = remembered_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    seen: dict[Situation, dict[Held, int]] = {}
    for number, (situation, held) in enumerate(_Walk(built, pp_rank, skipped).steps()):
        seen.setdefault(situation, {}).setdefault(held, number)
    return tuple(
        (situation, tuple(sorted(Turn(numbers[held], held) for held in _fullest(numbers))))
        for situation, numbers in seen.items()
    )


def _fullest(amounts: Iterable[Held]) -> list[Held]:
    """Return the amounts that no other one covers."""
    kept: list[Held] = []
    for held in sorted(amounts, key=lambda held: -sum(held.under_way) - sum(held.deferred) - held.messages):
        if not any(other.covers(held) for other in kept):
            kept.append(held)
    return kept


class _Walk:
    """One rank of a pipeline, stepping through one optimizer step.

    Args:
        schedule: the schedule.
        pp_rank: the rank's position in the pipeline.
        skipped: as in ``situations``.
    """

    def __init__(self, schedule: Schedule, pp_rank: int, skipped: int) -> None:
        self.schedule = schedule
        self.skipped = skipped
        self.actions = schedule.actions[pp_rank]
        self.hosted = schedule.stages_of(pp_rank)
        self.under_way, self.deferred, self.num_backwards = ([0] * len(self.hosted) for _ in range(3))
        self.progress = (Progress(),) * len(self.hosted)
        self.head_gathered = self.has_reduced = False

    def steps(self) -> Iterator[tuple[Situation, Held]]:
        """Yield the situation of every action, and what is held around it."""
        places = {stage: place for place, stage in enumerate(self.hosted)}
        sent = [False, *map(self.schedule.is_sent, self.actions)]
        received = [*map(self.schedule.is_received, self.actions), False]
        last_backward = max(i for i, action in enumerate(self.actions) if action.kind is not Kind.FORWARD)
        after_forward = False
        for number, action in enumerate(self.actions):
            place = places[action.stage]
            kind = action.kind
            self._begin(place, kind)
            yield (
                Situation(
                    place,
                    kind,
                    after_forward,
                    number == last_backward,
                    self.head_gathered,
                    self.has_reduced,
                    self.progress,
                ),
                Held(tuple(self.under_way), tuple(self.deferred), sent[number] + received[number + 1]),
            )
            self._end(place, kind)
            after_forward = kind is Kind.FORWARD

    def _begin(self, place: int, kind: Kind) -> None:
        """Take the microbatch at work from those around it."""
        if kind in BACKWARDS:
            is_last = self.num_backwards[place] == self.schedule.num_microbatches - 1
            self.under_way[place] -= 1 + self.skipped if is_last else 1
        elif kind is Kind.WEIGHT_GRADIENT:
            self.deferred[place] -= 1

    def _end(self, place: int, kind: Kind) -> None:
        """Record what an action leaves behind."""
        before = self.progress[place]
        accumulated = before.accumulated
        if kind is Kind.FORWARD:
            self.under_way[place] += 1 if before.has_run else 1 + self.skipped
        elif kind is Kind.INPUT_GRADIENT:
            self.deferred[place] += 1
            accumulated = "all" if accumulated == "all" else "tables"
        if kind in RELEASES:
            self.num_backwards[place] += 1
            accumulated = "all"
        after = Progress(True, accumulated, self.num_backwards[place] > 1)
        if after != before:
            self.progress = (*self.progress[:place], after, *self.progress[place + 1 :])
        # a backward drops the head, also if it is another stage's
        is_head = self.hosted[place] == self.schedule.num_stages - 1
        self.head_gathered = (self.head_gathered or is_head) and kind not in BACKWARDS
        self.has_reduced = self.has_reduced or kind in BACKWARDS
