"""Time a pipeline schedule: when every action runs, how long ranks wait, and how many microbatches they hold."""

from dataclasses import dataclass

from llama_core.schedules.actions import Kind, Schedule, TimedAction
from llama_core.schedules.walk import walk


@dataclass(frozen=True)
class Timeline:
    """One optimizer step of a schedule, with times in the unit of those given to ``simulate``."""

    schedule: Schedule
    lanes: tuple[tuple[TimedAction, ...], ...]
    """Actions of each rank, in order."""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(lane[-1].end for lane in self.lanes)

    def idle(self, rank: int) -> float:
        """Return how long ``rank`` waits: the makespan less its own work."""
        return self.makespan - sum(timed.end - timed.start for timed in self.lanes[rank])

    @property
    def bubble_ratio(self) -> float:
        """Fraction of the ranks' time that they wait."""
        num_ranks = self.schedule.num_ranks
        return sum(map(self.idle, range(num_ranks))) / (num_ranks * self.makespan)

    def peak_in_flight(self, rank: int) -> float:
        """Return the peak number of microbatches whose activations ``rank`` holds, in units of one full stage.

        It holds a microbatch from its forward to its backward or, if the backward is split, to its weight gradient. One
        of several chunks of a full stage counts as that fraction of it, and so does half a microbatch.
        """
        forwards = (turn for turn in walk(self.schedule, rank) if turn.action.kind is Kind.FORWARD)
        return max(1 + sum(turn.held.microbatches) for turn in forwards) / _actions_per_pass(self.schedule)


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input_gradient: float | None = None,
    weight_gradient: float | None = None,
) -> Timeline:
    """Return the timeline of ``schedule`` if each action starts as soon as it can and communication takes no time.

    Args:
        schedule: the schedule to time.
        forward: time of one microbatch's forward through one full stage (the model divided by the ranks).
        backward: time of its whole backward.
        input_gradient: time of the part that the previous stage waits for; half of ``backward`` if not given.
        weight_gradient: time of the rest; half of ``backward`` if not given.

    Raises:
        PlanError: if an action is missing, is listed twice or on the wrong rank, or waits forever.
    """
    times = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.INPUT_GRADIENT: backward / 2 if input_gradient is None else input_gradient,
        Kind.WEIGHT_GRADIENT: backward / 2 if weight_gradient is None else weight_gradient,
    }
    parts = _actions_per_pass(schedule)
    return Timeline(schedule, schedule.replay(lambda action: times[action.kind] / parts))


def _actions_per_pass(schedule: Schedule) -> float:
    """Return the number of actions in which a microbatch passes one full stage in one direction."""
    return schedule.num_stages / schedule.num_ranks * schedule.parts_per_microbatch
