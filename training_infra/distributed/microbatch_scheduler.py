"""Run one stage of a pipeline by callbacks, in the order of a schedule; needs no torch and no other rank."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from llama_core.errors import ConfigError, PlanError
from llama_core.schedules.actions import Action, Kind, Schedule
from llama_core.schedules.clock import Timeline, simulate
from llama_core.schedules.registry import build_schedule, schedule_type


@dataclass
class _Measured:
    """Seconds of every callback in one execution."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)


class MicrobatchScheduler:
    """The order in which one stage of a pipeline runs its microbatches.

    Args:
        num_microbatches: microbatches per optimizer step.
        microbatch_size: sequences per microbatch.
        num_pipeline_stages: ranks of the pipeline.
        current_stage: this rank, from 0.
        schedule_type: gpipe, 1f1b, interleaved, chimera, chimera_doubling, zb_h1, zbv or another that
            ``training_infra.parallelism.schedule_names`` returns, except those that split microbatches.
        num_chunks: parts of the model on each rank, for a schedule that takes them; 2 by default.

    Raises:
        ConfigError: if ``current_stage`` or ``microbatch_size`` is out of range.
        PlanError: if there is no such schedule, or it does not allow these numbers.
    """

    def __init__(
        self,
        num_microbatches: int,
        microbatch_size: int,
        num_pipeline_stages: int,
        current_stage: int,
        schedule_type: str = "1f1b",
        *,
        num_chunks: int | None = None,
    ) -> None:
        if not 0 <= current_stage < num_pipeline_stages:
            raise ConfigError(f"current_stage={current_stage}: there are {num_pipeline_stages} stages, counted from 0")
        if microbatch_size < 1:
            raise ConfigError(f"microbatch_size={microbatch_size} is not at least 1")
        self.num_microbatches = num_microbatches
        self.microbatch_size = microbatch_size
        self.num_pipeline_stages = num_pipeline_stages
        self.current_stage = current_stage
        self.schedule: Schedule = _schedule(schedule_type, num_pipeline_stages, num_microbatches, num_chunks)
        self._measured: _Measured | None = None

    def get_execution_schedule(self) -> list[Action]:
        """Return the actions of this stage in order; ``str`` of an action is a short form such as ``1F0``."""
        return list(self.schedule.actions[self.current_stage])

    def execute_schedule(
        self,
        forward_fn: Callable[[Any], Any],
        backward_fn: Callable[[Any], Any],
        optimizer_fn: Callable[[], Any],
        microbatches: Sequence[Any],
    ) -> list[Any]:
        """Run the callbacks in this stage's order, and return the outputs of its last chunk, by microbatch.

        Args:
            forward_fn: returns the output of a microbatch; called once for each chunk and microbatch.
            backward_fn: takes such an output; if the schedule splits backwards, called only for the first part.
            optimizer_fn: called once, at the end.
            microbatches: the ``num_microbatches`` microbatches.

        Raises:
            ConfigError: if the number of microbatches is wrong.
        """
        if len(microbatches) != self.num_microbatches:
            raise ConfigError(f"{len(microbatches)} microbatches for a schedule of {self.num_microbatches}")
        measured = _Measured()
        outputs: dict[tuple[int, int], Any] = {}
        results: dict[int, tuple[int, Any]] = {}
        for action in self.get_execution_schedule():
            stage = action.stage
            number = action.microbatch
            if action.kind is Kind.FORWARD:
                output = _timed(measured.forward, forward_fn, microbatches[number])
                outputs[stage, number] = output
                results[number] = max(results.get(number, (stage, output)), (stage, output), key=lambda one: one[0])
            elif action.kind in {Kind.BACKWARD, Kind.INPUT_GRADIENT}:
                _timed(measured.backward, backward_fn, outputs.pop((stage, number)))
        _timed(measured.optimizer, optimizer_fn)
        self._measured = measured
        return [results[number][1] for number in sorted(results)]

    def print_metrics(self) -> None:
        """Print the measured times of the callbacks, if they have run, and the simulated bubble."""
        name = self.schedule.name
        stage = self.current_stage
        print(
            f"{name}: stage {stage} of {self.num_pipeline_stages}, {self.num_microbatches} microbatches of "
            f"{self.microbatch_size}, {len(self.get_execution_schedule())} actions"
        )
        measured = self._measured
        if measured is None:
            print("measured: nothing yet; run the callbacks with execute_schedule")
        else:
            for what in ("forward", "backward", "optimizer"):
                seconds = getattr(measured, what)
                print(f"measured: {what:<10} {len(seconds):>4} calls, {1e3 * mean(seconds):.3f} ms each")
        timeline, times = self._simulated()
        print(
            f"simulated ({times}): bubble {timeline.bubble_ratio:.1%} of the pipeline's time, this stage waits "
            f"{timeline.idle(stage) / timeline.makespan:.1%} and holds at most {timeline.peak_in_flight(stage):g} "
            "microbatches"
        )

    def _simulated(self) -> tuple[Timeline, str]:
        measured = self._measured
        forward, backward = (sum(measured.forward), sum(measured.backward)) if measured else (0.0, 0.0)
        if forward > 0 and backward > 0:
            return simulate(self.schedule, forward=forward, backward=backward), "stages at the measured speed"
        return simulate(self.schedule), "a backward takes two forwards"


def _schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> Schedule:
    kind = schedule_type(name)
    if kind.parts_per_microbatch > 1:
        raise PlanError(
            f"schedule_type={name} splits every microbatch into {kind.parts_per_microbatch}, which callbacks cannot; "
            "use chimera with smaller microbatches"
        )
    chunks = num_chunks if num_chunks is not None else 2 if kind.takes_chunks else 1
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=chunks)


def _timed(seconds: list[float], callback: Callable[..., Any], *arguments: Any) -> Any:
    began = time.perf_counter()
    result = callback(*arguments)
    seconds.append(time.perf_counter() - began)
    return result
