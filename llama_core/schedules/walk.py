"""One rank's walk through an optimizer step: before each of its actions, how far it has come and what it holds.

Whatever adds up over a schedule's actions starts from here: the memory estimate asks what is alive, the rehearsal which
actions are alike, the traffic what moves, and the device's overhead and the clock how much is in flight.
"""

from collections.abc import Iterator, Sequence
from operator import add
from typing import Literal, NamedTuple

from llama_core.schedules.actions import BACKWARDS, Action, Kind, Schedule

Accumulated = Literal["none", "tables", "all"]
"""The parameters of a stage that have gradients of earlier microbatches: none, or all, or in between those outside the
layers, whose gradients a split backward does not put off."""


class Progress(NamedTuple):
    """How far a rank has come with one of its stages in a step."""

    has_run: bool = False
    accumulated: Accumulated = "none"
    repeated: bool = False
    """Whether the stage has run two or more backwards."""


class StepState(NamedTuple):
    """The position in the step that the bytes, FLOPs and transfers of an action depend on."""

    slot: int
    """Its stage, counted among those of the rank."""
    kind: Kind
    is_last: bool
    """Whether it is the rank's last action of its kind."""
    after_forward: bool
    """Whether the rank's previous action was a forward."""
    head_gathered: bool
    """Whether the head has run forward since the rank's last backward, which drops it in ZeRO 3."""
    last_backward: int | None
    """Slot of the rank's last backward; None before the first."""
    progress: tuple[Progress, ...]
    """That of each stage of the rank, in their order on it."""


class Held(NamedTuple):
    """How many tensors a rank holds outside the microbatch at work."""

    in_flight: tuple[int, ...]
    """Microbatches between their forward and their backward on each of the rank's stages."""
    deferred: tuple[int, ...]
    """Those whose weight gradients are deferred."""
    messages: int
    """Messages between stages: that which the action before sends, and that which the next one receives."""

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches of which each of the rank's stages holds something."""
        return tuple(map(add, self.in_flight, self.deferred))


class Turn(NamedTuple):
    """An action of a rank, and the rank around it."""

    action: Action
    state: StepState
    held: Held
    is_received: bool
    """Whether its input comes from another rank."""
    is_sent: bool
    """Whether its output goes to another rank."""


def walk(
    schedule: Schedule, rank: int, actions: Sequence[Action] | None = None, *, num_skipped: int = 0
) -> Iterator[Turn]:
    """Yield a rank's actions with the rank around each.

    Args:
        schedule: the schedule.
        rank: the rank's position in the pipeline.
        actions: those of its actions to walk; by default all.
        num_skipped: further microbatches between a stage's first and last one that are held but not walked.
    """
    actions = schedule.actions[rank] if actions is None else actions
    last_places = {action.kind: place for place, action in enumerate(actions)}
    received = [schedule.is_received(action) for action in actions]
    sent = [schedule.is_sent(action) for action in actions]
    state = _State(schedule, rank, num_skipped)
    for place, action in enumerate(actions):
        messages = (place > 0 and sent[place - 1]) + (place + 1 < len(actions) and received[place + 1])
        state.begin(action)
        step_state = state.step_state(action, is_last=place == last_places[action.kind])
        yield Turn(action, step_state, state.held(messages), received[place], sent[place])
        state.end(action)


class _State:
    """A rank of a pipeline between two of its actions.

    Args:
        schedule: the schedule.
        rank: the rank's position in the pipeline.
        num_skipped: as in ``walk``.
    """

    def __init__(self, schedule: Schedule, rank: int, num_skipped: int) -> None:
        self.schedule = schedule
        self.num_skipped = num_skipped
        hosted = schedule.stages_of(rank)
        self.slots = {stage: slot for slot, stage in enumerate(hosted)}
        self.in_flight = [0] * len(hosted)
        self.deferred = [0] * len(hosted)
        self.num_backwards = [0] * len(hosted)
        self.progress = (Progress(),) * len(hosted)
        self.after_forward = False
        self.head_gathered = False
        self.last_backward: int | None = None

    def step_state(self, action: Action, *, is_last: bool) -> StepState:
        """Return the state in which an action begins."""
        return StepState(
            self.slots[action.stage],
            action.kind,
            is_last,
            self.after_forward,
            self.head_gathered,
            self.last_backward,
            self.progress,
        )

    def held(self, messages: int) -> Held:
        """Return what is held around the action at work."""
        return Held(tuple(self.in_flight), tuple(self.deferred), messages)

    def begin(self, action: Action) -> None:
        """Take the microbatch at work from those around it."""
        slot = self.slots[action.stage]
        if action.kind in BACKWARDS:
            is_last = self.num_backwards[slot] == self.schedule.num_microbatches - 1
            self.in_flight[slot] -= 1 + self.num_skipped if is_last else 1
        elif action.kind is Kind.WEIGHT_GRADIENT:
            self.deferred[slot] -= 1

    def end(self, action: Action) -> None:
        """Record what an action leaves behind."""
        slot = self.slots[action.stage]
        before = self.progress[slot]
        accumulated = before.accumulated
        match action.kind:
            case Kind.FORWARD:
                self.in_flight[slot] += 1 if before.has_run else 1 + self.num_skipped
            case Kind.INPUT_GRADIENT:
                self.deferred[slot] += 1
                accumulated = "all" if accumulated == "all" else "tables"
            case _:
                accumulated = "all"
        is_backward = action.kind in BACKWARDS
        self.num_backwards[slot] += is_backward
        after = Progress(True, accumulated, self.num_backwards[slot] > 1)
        if after != before:
            self.progress = (*self.progress[:slot], after, *self.progress[slot + 1 :])
        self.after_forward = action.kind is Kind.FORWARD
        # a backward drops the head, also if it is another stage's
        is_head = action.stage == self.schedule.num_stages - 1
        self.head_gathered = (self.head_gathered or is_head) and not is_backward
        if is_backward:
            self.last_backward = slot
