"""Compose a whole optimizer step from a few of its actions.

A schedule repeats itself: most of its many microbatches pass a rank in one of a few states, and the memory, FLOPs
and transfers of an action depend on its state alone. So we trace a few microbatches, in the rank's order, and let
each recording stand for every action in the same state. The bytes that the other microbatches hold meanwhile
differ between ranks and between actions; walking through the rank's whole list of actions adds them up.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from llama_core.config.models import ModelSpec
from llama_core.planning.fully_shard import Resharding
from llama_core.planning.memory.profile import Category, MemoryProfile, Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import LiveBytes, Segment
from llama_core.rehearsal.transfers import Transfer
from llama_core.schedules.actions import COMPUTATIONS, SENDS, Action, Kind, Schedule
from llama_core.schedules.walk import Progress, StepState, walk

_FORWARDS = {Kind.FORWARD, Kind.SEND_F, Kind.RECV_F}


@dataclass(frozen=True)
class Hosting:
    """The stages of a pipeline rank, and the traits of its plan that decide in what its actions differ."""

    schedule: Schedule
    pp_rank: int
    is_tied: bool
    """Whether the embedding is the head."""
    embeds_at_end: bool
    """Whether the last stage needs the embedding too."""
    resharding: Resharding
    """When ``fully_shard`` gathers weights and reduces gradients."""

    @classmethod
    def of(cls, plan: ParallelPlan, spec: ModelSpec, pp_rank: int) -> Self:
        """Return the hosting of a pipeline rank."""
        return cls(plan.build_schedule(), pp_rank, spec.tied_embeddings, spec.embeds_at_end, Resharding.of(plan))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages; a stage's index here is its slot."""
        return self.schedule.stages_of(self.pp_rank)

    def representative(self, state: StepState) -> StepState:
        """Return the state that stands for all in which an action of this rank is the same."""
        resharding = self.resharding
        hosts_end = not {0, self.schedule.num_stages - 1}.isdisjoint(self.stages)
        # an embedding that both ends need is in torch's root, which a forward gathers again after a backward
        gathers_root = resharding.drops_weights and self.embeds_at_end and hosts_end
        keeps_head = resharding.drops_weights and not self.is_tied
        progress: list[Progress] = []
        for slot, own in enumerate(state.progress):
            # another stage's forward changes nothing that this one's bytes depend on
            has_run = own.has_run and slot == state.slot
            # the second average of a step exists beside the first one, which became the gradient
            repeated = own.repeated and resharding.averages_every_backward
            progress.append(own._replace(has_run=has_run, repeated=repeated))
        return state._replace(
            after_forward=state.after_forward and gathers_root,
            head_gathered=state.head_gathered and keeps_head,
            # torch keeps the input of a reduce-scatter until the next one (reduce_scatter_states)
            last_backward=state.last_backward if resharding.shards_gradients else None,
            progress=tuple(progress),
        )


class Computation(NamedTuple):
    """Everything that decides the bytes, FLOPs and transfers of a computation."""

    state: StepState
    is_received: bool
    """Whether its input comes from another rank."""
    is_sent: bool
    """Whether its output goes to another rank."""

    @property
    def slot(self) -> int:
        """The stage's index among the rank's stages."""
        return self.state.slot

    @property
    def kind(self) -> Kind:
        """The kind of its action."""
        return self.state.kind


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


class PlacedStep(NamedTuple):
    """A step of a list of actions."""

    place: int
    """That of the action that computes in the step, or of the last one before it."""
    step: Step


def steps(actions: Sequence[Action], hosting: Hosting) -> list[Step]:
    """Return the steps of a rank's ``actions``, which include sends and receives."""
    return [placed.step for placed in _placed_steps(actions, hosting)]


def _placed_steps(actions: Sequence[Action], hosting: Hosting) -> Iterator[PlacedStep]:
    """Yield every step of ``actions``, in order."""
    places = _places_of_computations(actions)
    turns = walk(hosting.schedule, hosting.pp_rank, [actions[place] for place in places])
    latest = places[0]
    before: Computation | None = None
    sent: list[Release] = []
    for place, action in enumerate(actions):
        if action.kind in COMPUTATIONS:
            turn = next(turns)
            state = hosting.representative(turn.state)
            before = Computation(state, turn.is_received, turn.is_sent)
            latest = place
            yield PlacedStep(place, before)
            # the engine drops what it sent after the next computation (_forget_sent)
            for release in sent:
                yield PlacedStep(place, release)
            sent.clear()
        else:
            slot = hosting.stages.index(action.stage)
            yield PlacedStep(latest, Message(slot, action.kind, _name_of_peak(before)))
            if action.kind in SENDS:
                sent.append(Release(slot, action.kind))
    for release in sent:
        yield PlacedStep(latest, release)
    if before is not None:
        yield PlacedStep(latest, Closing(before.slot, before.kind))


def _places_of_computations(actions: Sequence[Action]) -> list[int]:
    return [place for place, action in enumerate(actions) if action.kind in COMPUTATIONS]


def _name_of_peak(before: Computation | None) -> tuple[int, Kind, bool] | None:
    """Return what names a peak that follows a computation: see ``Message.after``."""
    return None if before is None else (before.slot, before.kind, before.state.is_last)


def covering_actions(
    actions: Sequence[Action],
    hosting: Hosting,
    known: Collection[Step] = (),
) -> list[Action]:
    """Return the rank's actions, in order, of enough microbatches to cover every step that is not ``known``.

    Start with the first microbatch, and add the microbatches around the first step not yet covered until all are.
    """
    wanted = [placed for placed in _placed_steps(actions, hosting) if placed.step not in known]
    places = _places_of_computations(actions)
    chosen = {action.microbatch for action in actions[: places[0] + 1]}
    while True:
        kept = [action for action in actions if action.microbatch in chosen]
        covered = set(steps(kept, hosting))
        missing = [placed.place for placed in wanted if placed.step not in covered]
        if not missing:
            return kept
        chosen |= _next_microbatches(actions, places, missing, chosen)


def _next_microbatches(
    actions: Sequence[Action], places: Sequence[int], missing: Sequence[int], chosen: set[int]
) -> set[int]:
    """Return the microbatches to add for the first of the places ``missing`` that needs others than ``chosen``."""
    # if none does, the state depends on microbatches that are further away: then any others
    for place in (*missing, *places):
        around = _around(actions, places, place)
        if not around <= chosen:
            return around
    raise AssertionError("the whole step covers all of its steps")


def _around(actions: Sequence[Action], places: Sequence[int], place: int) -> set[int]:
    """Return the microbatches of a computation, of the one before it, and of the messages after each."""
    number = places.index(place)
    start = places[max(0, number - 1)]
    end = places[number + 1] if number + 1 < len(places) else len(actions)
    return {action.microbatch for action in actions[start:end]}


class Rise(NamedTuple):
    """The bytes by which a peak lies above another instant."""

    num_bytes: Counter[Category]
    where: str
    """The operator that reached the peak, and the landmark before it."""


@dataclass(frozen=True)
class BytesChange:
    """The changes between two instants, relative to the bytes alive at the first."""

    growth: Counter[Category]
    """Bytes at the end minus bytes at the start."""
    rises: Mapping[Phase, Rise]
    """Peak bytes of every phase minus bytes at the start."""
    flops: int
    transfers: Counter[Transfer]

    @classmethod
    def of(cls, segment: Segment, end: LiveBytes) -> "BytesChange":
        """Return the change over a segment that ended at ``end``."""
        start = segment.start.categories
        rises: dict[Phase, Rise] = {}
        for phase, peak in segment.peaks.items():
            rises[phase] = Rise(_less(peak.categories, start), peak.where)
        growth = _less(end.categories, start)
        return cls(growth, rises, segment.flops, segment.transfers)

    @classmethod
    def joined(cls, changes: Iterable["BytesChange"]) -> "BytesChange":
        """Return the change over several, one after the other."""
        growth: Counter[Category] = Counter()
        rises: dict[Phase, Rise] = {}
        flops = 0
        transfers = Counter[Transfer]()
        for change in changes:
            for phase, (num_bytes, where) in change.rises.items():
                # each change counts from its own start, after the growth so far
                height = growth.total() + num_bytes.total()
                if phase not in rises or height > rises[phase].num_bytes.total():
                    rises[phase] = Rise(_plus(growth, num_bytes), where)
            growth = _plus(growth, change.growth)
            flops += change.flops
            transfers += change.transfers
        return cls(growth, rises, flops, transfers)

    def placed(self, rename: Callable[[int], int]) -> "BytesChange":
        """Return the same change in places whose layers have other numbers."""
        rises: dict[Phase, Rise] = {}
        for phase, (num_bytes, where) in self.rises.items():
            rises[phase] = Rise(num_bytes, renamed_layers(where, rename))
        return replace(self, rises=rises)


@dataclass
class Recording:
    """A traced step, valid for all ranks whose stages have the same contents."""

    start: Counter[Category]
    """Bytes alive when a step begins."""
    prologue: BytesChange
    """The changes before the first action."""
    changes: dict[Step, BytesChange]
    """The changes in every step of a rank's work that was traced."""
    update_start: Counter[Category]
    """Bytes alive when the optimizer begins."""
    update: BytesChange
    """The changes in the optimizer."""

    def knows(self, wanted: Iterable[Step]) -> bool:
        """Return whether these steps can be composed."""
        return all(step in self.changes for step in wanted)

    def learn(self, other: "Recording", layers: Mapping[int, int]) -> None:
        """Add the changes of another recording of the same contents.

        Args:
            other: the recording.
            layers: this recording's number of each of the other's layers.
        """
        for step, change in other.changes.items():
            self.changes.setdefault(step, change.placed(layers.__getitem__))


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
    forward_flops: int = 0
    """FLOPs of all forwards alone."""
    forward_transfers: Counter[Transfer] = field(default_factory=Counter)
    """Transfers of all forwards, and sends of their outputs."""

    @property
    def profile(self) -> MemoryProfile:
        """The peaks as a memory profile."""
        return MemoryProfile({phase: dict(categories) for phase, categories in self.peaks.items()})

    def add(self, level: Counter[Category], change: BytesChange) -> None:
        """Add ``change``, which starts with ``level`` alive."""
        for phase, (num_bytes, where) in change.rises.items():
            height = level.total() + num_bytes.total()
            if phase not in self.peaks or height > self.peaks[phase].total():
                self.peaks[phase] = _plus(level, num_bytes)
                self.places[phase] = where
        self.flops += change.flops
        self.transfers += change.transfers


def compose(recording: Recording, wanted: Iterable[Step]) -> ComposedStep:
    """Return the optimizer step of a rank whose work is the steps ``wanted``."""
    composed = ComposedStep()
    level = recording.start
    composed.add(level, recording.prologue)
    level = _plus(level, recording.prologue.growth)
    for step in wanted:
        change = recording.changes[step]
        composed.add(level, change)
        if isinstance(step, Computation):
            composed.flops_of_one[step.slot, step.kind] = change.flops
        if not isinstance(step, Closing) and step.kind in _FORWARDS:
            composed.forward_flops += change.flops
            composed.forward_transfers += change.transfers
        level = _plus(level, change.growth)
    composed.add(recording.update_start, recording.update)
    return composed


def renamed_layers(where: str, rename: Callable[[int], int]) -> str:
    """Return the place ``where`` with its layer numbers mapped by ``rename``."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{rename(int(match[1]))}", where)


def _less(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] - other[category] for category in {*one, *other}})


def _plus(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    return Counter({category: one[category] + other[category] for category in {*one, *other}})
