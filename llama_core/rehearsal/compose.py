"""Compose a whole optimizer step from a few of its actions.

A schedule repeats itself: most of its many microbatches pass a rank in one of a few situations, and the memory, FLOPs
and transfers of an action depend on its situation alone. So we trace a few microbatches, in the rank's order, and let
each recording stand for every action in the same situation. The bytes that the other microbatches hold meanwhile
differ between ranks and between actions; walking through the rank's whole list of actions adds them up.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from llama_core.config.models import ModelSpec
from llama_core.planning.memory.profile import Category, MemoryProfile, Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import Segment, Snapshot
from llama_core.rehearsal.transfers import Transfer
from llama_core.schedules.actions import SENDS, Action, Kind

_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
_COMPUTATIONS = _BACKWARDS | {Kind.FORWARD, Kind.WEIGHT_GRADIENT}
_NEIGHBOURS = {
    Kind.FORWARD: (Kind.RECV_F, Kind.SEND_F),
    Kind.BACKWARD: (Kind.RECV_B, Kind.SEND_B),
    Kind.INPUT_GRADIENT: (Kind.RECV_B, Kind.SEND_B),
    Kind.WEIGHT_GRADIENT: (None, None),
}
"""How a computation's input comes from another rank, and its output goes to one."""


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
        stages = plan.layout.stages_of(pp_rank)
        last = plan.num_stages - 1
        ends = {0, last}.intersection(stages)
        has_root = spec.tied_embeddings and bool(ends)
        head = stages.index(last) if last in stages and not spec.tied_embeddings else None
        return cls(stages, plan.effective_zero_stage, has_root, head, plan.averages_every_backward)


@dataclass(frozen=True)
class Computation:
    """Everything that decides the bytes, FLOPs and transfers of a computation."""

    slot: int
    """The stage's index among the rank's stages."""
    kind: Kind
    is_received: bool
    """Whether its input comes from another rank."""
    is_sent: bool
    """Whether its output goes to another rank."""
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


class Message(NamedTuple):
    """A send or a receive; both only hold a tensor."""

    slot: int
    kind: Kind
    after: tuple[int, Kind, bool] | None
    """Slot and kind of the computation before, and whether it is the last of its kind: a peak is named after it."""


class Release(NamedTuple):
    """A sent tensor is dropped, after the computation that follows the send."""

    slot: int
    kind: Kind


class Closing(NamedTuple):
    """What follows the last computation: sums over ranks, and the norm of the gradients."""

    slot: int
    kind: Kind
    """Slot and kind of the last computation, after which a peak is named."""


Step = Computation | Message | Release | Closing
"""A part of a rank's work that has the same bytes, FLOPs and transfers whenever it occurs."""


def steps(actions: Sequence[Action], hosting: Hosting) -> list[Step]:
    """Return the steps of a rank's ``actions``, which include sends and receives."""
    return [step for _, step in _steps(actions, hosting)]


def _steps(actions: Sequence[Action], hosting: Hosting) -> Iterator[tuple[int, Step]]:
    """Yield every step of ``actions``, with the place of the computation that it belongs to, or the one before it."""
    slots = {stage: slot for slot, stage in enumerate(hosting.stages)}
    last_places = {action.kind: place for place, action in enumerate(actions)}
    of_others = {
        (action.stage, action.microbatch, action.kind) for action in actions if action.kind not in _COMPUTATIONS
    }
    before: Computation | None = None
    done: set[tuple[int, Kind]] = set()
    num_backwards: Counter[int] = Counter()
    leaving: list[Release] = []
    buffer = None
    head = False
    drops_root = hosting.zero_stage == 3 and hosting.has_root
    latest = next(place for place, action in enumerate(actions) if action.kind in _COMPUTATIONS)
    for place, action in enumerate(actions):
        slot = slots[action.stage]
        kind = action.kind
        if kind not in _COMPUTATIONS:
            yield latest, Message(slot, kind, (before.slot, before.kind, before.is_last) if before else None)
            leaving += [Release(slot, kind)] if kind in SENDS else []
            continue
        source, target = _NEIGHBOURS[kind]
        computation = Computation(
            slot=slot,
            kind=kind,
            is_received=(action.stage, action.microbatch, source) in of_others,
            is_sent=(action.stage, action.microbatch, target) in of_others,
            is_last=place == last_places[kind],
            done=frozenset(one for one in done if one[1] is not Kind.FORWARD or one[0] == slot),
            repeated=frozenset(s for s, n in num_backwards.items() if n > 1 and hosting.averages_often),
            buffer=buffer if hosting.zero_stage >= 2 else None,
            after_forward=drops_root and before is not None and before.kind is Kind.FORWARD,
            head=hosting.zero_stage == 3 and head,
        )
        latest = place
        before = computation
        yield place, computation
        yield from ((place, release) for release in leaving)
        leaving = []
        done.add((slot, kind))
        num_backwards[slot] += kind in _BACKWARDS
        buffer = slot if kind in _BACKWARDS else buffer
        head = (head or slot == hosting.head) and kind not in _BACKWARDS
    yield from ((latest, release) for release in leaving)
    if before is not None:
        yield latest, Closing(before.slot, before.kind)


def telling_actions(actions: Sequence[Action], hosting: Hosting, known: Collection[Step] = ()) -> list[Action]:
    """Return the rank's actions, in order, of enough microbatches to cover every step that is not ``known``.

    Start with the first microbatch, and add the microbatches around the first step not yet covered until all are.
    """
    wanted = [(place, step) for place, step in _steps(actions, hosting) if step not in known]
    places = [place for place, action in enumerate(actions) if action.kind in _COMPUTATIONS]
    chosen = {action.microbatch for action in actions[: places[0] + 1]}
    while True:
        kept = [action for action in actions if action.microbatch in chosen]
        covered = set(steps(kept, hosting))
        missing = [place for place, step in wanted if step not in covered]
        if not missing:
            return kept
        around = (_around(actions, places, place) for place in (*missing, *places))
        chosen |= next(microbatches for microbatches in around if not microbatches <= chosen)


def _around(actions: Sequence[Action], places: Sequence[int], place: int) -> set[int]:
    """Return the microbatches of a computation, of the one before it, and of the messages after each."""
    number = places.index(place)
    end = places[number + 1] if number + 1 < len(places) else len(actions)
    return {action.microbatch for action in actions[places[max(0, number - 1)] : end]}


@dataclass(frozen=True)
class Walk:
    """The changes between two instants, relative to the bytes alive at the first."""

    growth: Counter[Category]
    """Bytes at the end minus bytes at the start."""
    rises: Mapping[Phase, tuple[Counter[Category], str]]
    """Peak bytes of every phase minus bytes at the start, and where that peak was."""
    flops: int
    transfers: Counter[Transfer]

    @classmethod
    def of(cls, segment: Segment, end: Snapshot) -> "Walk":
        """Return the walk of a segment that ended at ``end``."""
        start = segment.start.categories
        rises = {phase: (_less(peak.categories, start), peak.where) for phase, peak in segment.peaks.items()}
        return cls(_less(end.categories, start), rises, segment.flops, segment.transfers)

    @classmethod
    def joined(cls, walks: Iterable["Walk"]) -> "Walk":
        """Return the walk of several, one after the other."""
        growth: Counter[Category] = Counter()
        rises: dict[Phase, tuple[Counter[Category], str]] = {}
        flops = 0
        transfers = Counter[Transfer]()
        for walk in walks:
            for phase, (rise, where) in walk.rises.items():
                if phase not in rises or growth.total() + rise.total() > rises[phase][0].total():
                    rises[phase] = _plus(growth, rise), where
            growth = _plus(growth, walk.growth)
            flops += walk.flops
            transfers += walk.transfers
        return cls(growth, rises, flops, transfers)

    def placed(self, rename: Callable[[int], int]) -> "Walk":
        """Return the walk with the numbers of the layers in its places changed."""
        rises = {phase: (rise, renamed_layers(where, rename)) for phase, (rise, where) in self.rises.items()}
        return replace(self, rises=rises)


@dataclass
class Recording:
    """A traced step, valid for all ranks whose stages have the same contents."""

    start: Counter[Category]
    """Bytes alive when a step begins."""
    prologue: Walk
    """The changes before the first action."""
    walks: dict[Step, Walk]
    """The changes in every step of a rank's work that was traced."""
    update_start: Counter[Category]
    """Bytes alive when the optimizer begins."""
    update: Walk
    """The changes in the optimizer."""

    def knows(self, wanted: Iterable[Step]) -> bool:
        """Return whether these steps can be composed."""
        return all(step in self.walks for step in wanted)

    def learn(self, other: "Recording", layers: Mapping[int, int]) -> None:
        """Add the walks of another recording of the same contents.

        Args:
            other: the recording.
            layers: this recording's number of each of the other's layers.
        """
        for step, walk in other.walks.items():
            self.walks.setdefault(step, walk.placed(layers.__getitem__))


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
                self.peaks[phase] = _plus(level, rise)
                self.places[phase] = where
        self.flops += walk.flops
        self.transfers += walk.transfers


def compose(recording: Recording, wanted: Iterable[Step]) -> ComposedStep:
    """Return the optimizer step of a rank whose work is the steps ``wanted``."""
    composed = ComposedStep()
    level = recording.start
    composed.add(level, recording.prologue)
    level = _plus(level, recording.prologue.growth)
    for step in wanted:
        walk = recording.walks[step]
        composed.add(level, walk)
        if isinstance(step, Computation):
            composed.flops_of_one[step.slot, step.kind] = walk.flops
        level = _plus(level, walk.growth)
    composed.add(recording.update_start, recording.update)
    return composed


def renamed_layers(where: str, rename: Callable[[int], int]) -> str:
    """Return the place ``where`` with its layer numbers mapped by ``rename``."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{rename(int(match[1]))}", where)


def _less(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] - other[category] for category in {*one, *other}})


def _plus(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] + other[category] for category in {*one, *other}})
