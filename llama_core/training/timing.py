"""Timed steps: the throughput of a run, apart from its training."""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from llama_core.config.run import RunConfig
from llama_core.data.supply import Supply
from llama_core.machine.detect import software_versions
from llama_core.models.batch import Batch
from llama_core.parallel.ranks import is_first_rank, most_over_ranks, own_rank
from llama_core.planning.plan import AXES, ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import BenchmarkRecord
from llama_core.records.timelines import write_lane
from llama_core.training.engine import Engine, NativeEngine
from llama_core.training.measure import ActionClock, FlopsUtilisation, time_steps
from llama_core.training.parts.stop import StopRequest
from llama_core.training.profile import profiled

MAX_TIMINGS = 4
"""How often steps are timed, at most, while other programs have the cores."""


@dataclass(frozen=True, eq=False)
class TimedSteps:
    """Takes whole steps, which are neither recorded nor saved, and times them."""

    run: RunDirectory
    config: RunConfig
    plan: ParallelPlan
    engine: Engine
    batches: Supply
    take: Callable[[list[Batch]], object]
    """Takes one optimizer step on its microbatches."""
    stop: StopRequest
    utilisation: FlopsUtilisation
    memory_baseline_bytes: int
    """Memory alive before the model was built."""

    def record(self, device_label: str) -> BenchmarkRecord:
        """Time steps, after warm-up, and record when each action of a pipeline ran.

        If other programs had the cores meanwhile, steps are timed again, and those count that waited least.

        Raises:
            StoppedError: if any rank was asked to stop.
        """
        timing = self.config.benchmark
        device = self.batches.device
        stage = self.config.timed_stage
        rows = self.config.first_batch_size if stage is None else stage.batch_size
        watched = profiled(self.run, self.plan, own_rank(), device) if timing.profile else nullcontext()
        time_once = partial(
            time_steps,
            self._take_one,
            between=partial(self.stop.stop_before, "the timed steps were done"),
            num_steps=timing.steps,
            tokens_per_step=rows * self.config.seq_len,
            device=device,
            device_label=device_label,
            mfu=partial(self.utilisation, seq_len=self.config.seq_len),
        )
        try:
            record = _over_ranks(time_once(watched=watched, warmup_steps=timing.warmup_steps))
            num_timings = 1
            # the ranks agree: they look at the same number of waiting threads. A profile is of its own steps
            while record.disturbance and num_timings < MAX_TIMINGS and not timing.profile:
                again = _over_ranks(time_once(watched=nullcontext(), warmup_steps=0))
                record = min(record, again, key=lambda one: one.waiting_threads or 0.0)
                num_timings += 1
            self._record_timeline()
        finally:
            self.batches.stop()
        return replace(
            record,
            num_timings=num_timings,
            memory_baseline_bytes=self.memory_baseline_bytes,
            memory_peak_bytes=max(record.memory_peak_bytes, self.memory_baseline_bytes),
            host=platform.node(),
            versions=software_versions() if is_first_rank() else {},
        )

    def _take_one(self) -> None:
        self.take(self.batches.next_step())
        if is_first_rank() and self.run.heartbeat.exists():
            self.run.heartbeat.touch()  # no step is recorded, but the run is alive

    def _record_timeline(self) -> None:
        """Take one more step, and record when every action of the pipeline ran, on the first rank of each position."""
        plan = self.plan
        if plan.pp == 1 or not isinstance(self.engine, NativeEngine):
            return
        pipeline = self.engine.parallel.pipeline
        device = self.batches.device
        microbatches = self.batches.next_step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if self.stop.is_made():  # the ranks leave this together
            return
        clock = ActionClock(device)
        pipeline.on_action = clock.mark
        self.take(microbatches)
        pipeline.on_action = None
        rank = own_rank()
        if not any(plan.coordinate(rank, axis) for axis in AXES if axis != "pp"):
            write_lane(self.run, plan.coordinate(rank, "pp"), clock.lane())


def _over_ranks(record: BenchmarkRecord) -> BenchmarkRecord:
    """Return a rank's record with the most memory, and the most waiting threads, of any rank."""
    peak, reserved = most_over_ranks(record.memory_peak_bytes, record.memory_reserved_bytes)
    (waiting,) = most_over_ranks(-1 if record.waiting_threads is None else round(1e6 * record.waiting_threads))
    return replace(
        record,
        memory_peak_bytes=peak,
        memory_reserved_bytes=reserved,
        waiting_threads=None if waiting < 0 else 1e-6 * waiting,
    )
