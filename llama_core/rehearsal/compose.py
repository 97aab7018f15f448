"""Compose a whole optimizer step from a few of its actions.

A schedule repeats itself: most of its many microbatches pass a rank in one of a few situations, and the memory, FLOPs
and transfers of an action depend on its situation alone. So we trace a few microbatches, in the rank's order, and let
each recording stand for every action in the same situation. The bytes that the other microbatches hold meanwhile
differ between ranks and between actions; walking through the rank's whole list of actions adds them up.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Self

from llama_core.config.models import ModelSpec
from llama_core.planning.memory.peaks import Category, MemoryProfile, Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import Snapshot, Span
from llama_core.rehearsal.transfers import Transfer
from llama_core.schedules.actions import SENDS, Action, Kind

_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
_COMPUTATIONS = _BACKWARDS | {Kind.FORWARD, Kind.WEIGHT_GRADIENT}


@dataclass(frozen=True)
class Hosting:
    """The stages of a rank, and the properties that its situations depend on."""

    stages: tuple[int, ...]
    """The stages; a stage's index here is its slot."""
    zero_stage: int
    """The effective ZeRO stage."""
    has_root: bool
    """Whether it holds an embedding tied to the head; every stage's forward gathers it."""
    head: int | None
    """Slot of the stage with a head of its own."""
    averages_often: bool
    """Whether replicas average gradients after every backward, and keep each average until the next."""

    @classmethod
    def of(cls, plan: ParallelPlan, spec: ModelSpec, pp_rank: int) -> Self:
        """Return the hosting of a pipeline rank."""
        stages, last = plan.layout.stages_of(pp_rank), plan.num_stages - 1
        ends = {0, last}.intersection(stages)
        has_root = spec.tied_embeddings and bool(ends)
        head = stages.index(last) if last in stages and not spec.tied_embeddings else None
        return cls(stages, plan.effective_zero_stage, has_root, head, plan.averages_every_backward)


@dataclass(frozen=True)
class Situation:
    """Everything that decides the bytes, FLOPs and transfers of a computation and the sends and receives after it.

    A sent tensor is dropped after the next computation.
    """

    slot: int
    """The stage's index among the rank's stages."""
    kind: Kind
    transfers: tuple[tuple[Kind, int], ...]
    """The sends and receives before the next computation, each with the slot of its stage."""
    leaving: tuple[tuple[Kind, int], ...]
    """The sends before it, likewise."""
    is_received: bool
    """Whether its input comes from another rank."""
    is_last: bool
    """Whether it is the last of its kind."""
    done: frozenset[tuple[int, Kind]]
    """Backwards so far, by slot and kind, and this slot's forward if it ran: they tell which gradients are accumulated
    and which weights gathered."""
    repeated: frozenset[int]
    """Slots that ran two or more backwards and therefore keep an average; empty unless ``averages_often``."""
    buffer: int | None
    """Slot of the last backward, if the buffer in which it reduced gradients is still alive."""
    after_forward: bool
    """Whether the computation before was a forward, which gathered the tied embedding; False unless ZeRO 3 drops it."""
    head: bool
    """Whether the head stayed gathered after an earlier forward; False unless ZeRO 3 drops it."""


def situations(actions: Sequence[Action], hosting: Hosting) -> list[Situation]:
    """Return the situation of every computation in a rank's ``actions``, which include sends and receives."""
    slots = {stage: slot for slot, stage in enumerate(hosting.stages)}
    last_places = {action.kind: place for place, action in enumerate(actions)}
    received = {(action.stage, action.microbatch, action.kind) for action in actions}
    before = None
    done: set[tuple[int, Kind]] = set()
    num_backwards: Counter[int] = Counter()
    leaving: tuple[tuple[Kind, int], ...] = ()
    buffer, head, found = None, False, []
    for place, action in _computations(actions):
        slot, kind = slots[action.stage], action.kind
        source = Kind.RECV_F if kind is Kind.FORWARD else Kind.RECV_B
        transfers = tuple((other.kind, slots[other.stage]) for other in _transfers_after(actions, place))
        found.append(
            Situation(
                slot=slot,
                kind=kind,
                transfers=transfers,
                leaving=leaving,
                is_received=(action.stage, action.microbatch, source) in received,
                is_last=place == last_places[kind],
                done=frozenset(one for one in done if one[1] is not Kind.FORWARD or one[0] == slot),
                repeated=frozenset(s for s, n in num_backwards.items() if n > 1 and hosting.averages_often),
                buffer=buffer if hosting.zero_stage >= 2 else None,
                after_forward=hosting.zero_stage == 3 and hosting.has_root and before is Kind.FORWARD,
                head=hosting.zero_stage == 3 and head,
            )
        )
        leaving = tuple(transfer for transfer in transfers if transfer[0] in SENDS)
        done.add((slot, kind))
        num_backwards[slot] += kind in _BACKWARDS
        buffer, before = slot if kind in _BACKWARDS else buffer, kind
        head = (head or slot == hosting.head) and kind not in _BACKWARDS
    return found


def _computations(actions: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    return ((place, action) for place, action in enumerate(actions) if action.kind in _COMPUTATIONS)


def _transfers_after(actions: Sequence[Action], place: int) -> Iterator[Action]:
    """Return the actions between the computation at ``place`` and the next one."""
    later = (actions[number] for number in range(place + 1, len(actions)))
    return takewhile(lambda action: action.kind not in _COMPUTATIONS, later)


def telling_actions(actions: Sequence[Action], hosting: Hosting) -> list[Action]:
    """Return the rank's actions, in order, of enough microbatches to cover every situation that the rank meets.

    Start with the first microbatch, and add the microbatches around the first situation not yet covered until all are.
    """
    wanted, places = situations(actions, hosting), [place for place, _ in _computations(actions)]
    chosen = {action.microbatch for action in actions[: places[0] + 1]}
    while True:
        kept = [action for action in actions if action.microbatch in chosen]
        known = set(situations(kept, hosting))
        missing = [number for number, situation in enumerate(wanted) if situation not in known]
        if not missing:
            return kept
        around = (_around(actions, places, number) for number in (*missing, *range(len(wanted))))
        chosen |= next(microbatches for microbatches in around if not microbatches <= chosen)


def _around(actions: Sequence[Action], places: Sequence[int], number: int) -> set[int]:
    """Return the microbatches of a computation, of the one before it, and of the transfers after each."""
    end = places[number + 1] if number + 1 < len(places) else len(actions)
    return {action.microbatch for action in actions[places[max(0, number - 1)] : end]}


def one_pass(actions: Sequence[Action]) -> list[Action]:
    """Return the actions of the last microbatch through each of a rank's stages."""
    last_passes = {action.stage: action.microbatch for action in actions}
    return [action for action in actions if action.microbatch in last_passes.values()]


@dataclass(frozen=True)
class Walk:
    """The changes between two moments, relative to the bytes alive at the first."""

    growth: Counter[Category]
    """Bytes at the end minus bytes at the start."""
    rises: Mapping[Phase, tuple[Counter[Category], str]]
    """Peak bytes of every phase minus bytes at the start, and where that peak was."""
    flops: int
    transfers: Counter[Transfer]

    @classmethod
    def of(cls, span: Span, end: Snapshot) -> "Walk":
        """Return the walk of a span that ended at ``end``."""
        start = span.start.categories
        rises = {phase: (_less(peak.categories, start), peak.where) for phase, peak in span.peaks.items()}
        return cls(_less(end.categories, start), rises, span.flops, span.transfers)


@dataclass
class Recording:
    """A traced step, valid for all ranks whose stages have the same contents."""

    start: Counter[Category]
    """Bytes alive when a step begins."""
    prologue: Walk
    """The changes before the first computation."""
    walks: dict[Situation, Walk]
    """The changes in every situation that was traced."""
    update_start: Counter[Category]
    """Bytes alive when the optimizer begins."""
    update: Walk
    """The changes in the optimizer."""

    def knows(self, wanted: Iterable[Situation]) -> bool:
        """Return whether a step in these situations can be composed."""
        return all(situation in self.walks for situation in wanted)


def record(spans: Sequence[Span], end: Snapshot, met: Sequence[Situation]) -> Recording:
    """Return the recording of a traced step.

    Args:
        spans: one before the first computation, one per computation, and the optimizer's.
        end: the bytes alive when the last span ended.
        met: the situations of the computations.
    """
    ends = [*(span.start for span in spans[1:]), end]
    prologue, *steps, update = (Walk.of(span, last) for span, last in zip(spans, ends, strict=True))
    return Recording(
        start=spans[0].start.categories.copy(),
        prologue=prologue,
        walks=dict(zip(met, steps, strict=True)),
        update_start=spans[-1].start.categories.copy(),
        update=update,
    )


@dataclass
class ComposedStep:
    """One rank's step, composed of recorded parts."""

    peaks: dict[Phase, Counter[Category]] = field(default_factory=dict)
    places: dict[Phase, str] = field(default_factory=dict)
    """The operator that reached each phase's peak, and the landmark before it."""
    flops: int = 0
    flops_of_one: dict[tuple[int, Kind], int] = field(default_factory=dict)
    """FLOPs of one computation, by slot and kind."""
    transfers: Counter[Transfer] = field(default_factory=Counter)

    @property
    def profile(self) -> MemoryProfile:
        """The peaks as a memory profile."""
        return MemoryProfile({phase: dict(categories) for phase, categories in self.peaks.items()})

    def add(self, level: Counter[Category], walk: Walk) -> None:
        """Add ``walk``, which starts with ``level`` alive."""
        for phase, (rise, where) in walk.rises.items():
            if phase not in self.peaks or level.total() + rise.total() > self.peaks[phase].total():
                self.peaks[phase], self.places[phase] = _plus(level, rise), where
        self.flops += walk.flops
        self.transfers += walk.transfers


def compose(recording: Recording, wanted: Iterable[Situation]) -> ComposedStep:
    """Return the step of a rank that goes through the situations ``wanted``."""
    step, level = ComposedStep(), recording.start
    step.add(level, recording.prologue)
    level = _plus(level, recording.prologue.growth)
    for situation in wanted:
        walk = recording.walks[situation]
        step.add(level, walk)
        step.flops_of_one[situation.slot, situation.kind] = walk.flops
        level = _plus(level, walk.growth)
    step.add(recording.update_start, recording.update)
    return step


def renamed_layers(where: str, layers: Mapping[int, int]) -> str:
    """Return the place ``where`` with its layer numbers mapped by ``layers``."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{layers[int(match[1])]}", where)


def _less(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] - other[category] for category in {*one, *other}})


def _plus(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] + other[category] for category in {*one, *other}})
