"""The memory and the step time of a job of another framework, on some device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llama_core.config.hardware import DeviceSpec
from llama_core.errors import PlanError
from llama_core.planning.frameworks.given import ReadJob
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.peak import Peak, peak_of
from llama_core.planning.frameworks.step import time_of
from llama_core.planning.time.cost import BILLION, Cost
from llama_core.planning.time.step_time import StepTime
from llama_core.units import counted, format_bytes, format_count

SMALLEST_MEASURED = 1e9
"""Parameters of the smallest model in the published rows, rounded down."""


@dataclass(frozen=True)
class FrameworkEstimate:
    """A job of another framework, with what it takes on a device."""

    asked: ReadJob
    device: DeviceSpec

    @property
    def job(self) -> Job:
        """The job."""
        return self.asked.job

    @cached_property
    def peak(self) -> Peak:
        """What its fullest rank reserves."""
        return peak_of(self.job, "reserved")

    @cached_property
    def printed(self) -> Peak:
        """The figure that the framework's own log shows: that of the last pipeline rank, which has the loss."""
        return peak_of(self.job, self.job.framework.prints, [self.job.pp - 1])

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak.num_bytes <= self.device.usable_bytes

    @cached_property
    def _timed(self) -> tuple[StepTime | None, str]:
        """The time of a step, or None and why there is none."""
        try:
            return time_of(self.job, self.device).under(self.job.framework.efficiencies), ""
        except PlanError as error:
            return None, str(error).removeprefix("no time: ")

    @property
    def step(self) -> StepTime | None:
        """The time of a step; None if it is not modelled."""
        return self._timed[0]

    @property
    def no_time(self) -> str:
        """Why there is no time; empty if there is one."""
        return self._timed[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, a sentence each."""
        if self.step is None or self.job.architecture.num_parameters >= SMALLEST_MEASURED:
            return self.asked.assumed
        return (
            *self.asked.assumed,
            "no published row has so few parameters; the seconds of every step may be too many for it",
        )

    def cost(self, tokens: float | None, dollars_per_gpu_hour: float) -> Cost | None:
        """Return the time and the price of training on some tokens, by default a billion; None without a time."""
        if self.step is None:
            return None
        told_by = "for scale" if tokens is None else "as asked for"
        return Cost.of(self.step, tokens or BILLION, told_by, dollars_per_gpu_hour)

    def lines(self) -> list[str]:
        """Return the estimate in lines, without the cost."""
        job = self.job
        traits = job.framework
        model = job.architecture
        lines = [
            f"{traits.name}: {format_count(model.num_parameters)} parameters, sequence length {job.seq_len}, "
            f"batch of {counted(job.global_batch, 'sequence')}",
            f"plan: {_plan_in_words(job)}",
            "",
            f"{'bytes of tensors':<18}{'at the peak of pipeline rank ' + str(self.peak.pp_rank):>14}",
        ]
        categories = {name: num_bytes for name, num_bytes in self.peak.breakdown.items() if num_bytes}
        lines += [f"{name:<18}{format_bytes(num_bytes):>14}" for name, num_bytes in categories.items()]
        lines += [f"{'total':<18}{format_bytes(sum(categories.values())):>14}", ""]
        verdict = "fits" if self.fits else "does not fit"
        printed = f"{format_bytes(self.printed.num_bytes)} {self.printed.statistic}"
        usable = f"{format_bytes(self.device.usable_bytes)} usable on {self.device.label}"
        lines.append(
            f"memory: about {format_bytes(self.peak.num_bytes)} reserved of {usable}: {verdict}; "
            f"{traits.name} prints about {printed}{' on its last rank' if job.pp > 1 else ''}"
        )
        lines.append(f"time: {self.step.summary()}" if self.step else f"time: unknown, because {self.no_time}")
        if self.step and traits.efficiencies.num_rows:
            lines.append(
                f"rates: fitted to {traits.efficiencies.num_rows} published rows of {traits.name}; left out, "
                f"they are {traits.efficiencies.left_out_error:.1%} off on average (docs/cost.md)"
            )
        if self.asked.read:
            lines.append(f"read: {', '.join(self.asked.read)}")
        if self.asked.ignored:
            lines.append(f"ignored: {', '.join(self.asked.ignored)}")
        return [*lines, *(f"note: {sentence}" for sentence in self.notes)]

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as a record."""
        job = self.job
        degrees = (
            "tp",
            "pp",
            "cp",
            "ep",
            "expert_tp",
            "dp_shard",
            "dp_replicate",
            "zero_stage",
            "num_chunks",
            "schedule",
        )
        others = ("micro_batch", "num_microbatches", "recompute", "recompute_every", "compiles", "float8", "seq_len")
        return {
            "framework": job.framework.name,
            "since": job.framework.since,
            "num_parameters": job.architecture.num_parameters,
            "gpus": job.world_size,
            "batch_size": job.global_batch,
            "plan": {name: getattr(job, name) for name in (*degrees, *others)},
            "gpu_type": self.device.name,
            "usable_bytes": self.device.usable_bytes,
            "reserved_bytes": round(self.peak.num_bytes),
            "printed_bytes": round(self.printed.num_bytes),
            "printed_statistic": self.printed.statistic,
            "peak": {name: round(num_bytes) for name, num_bytes in self.peak.breakdown.items()},
            "fits": self.fits,
            "step": self.step and self.step.as_dict(),
            "no_time": self.no_time,
            "read": list(self.asked.read),
            "ignored": list(self.asked.ignored),
            "assumed": list(self.notes),
        }


def _plan_in_words(job: Job) -> str:
    """Return how a job is divided, such as ``64 ranks (tp 8 x dp_shard 8), ZeRO 3, ...``."""
    axes = {name: getattr(job, name) for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp")}
    divided = " x ".join(f"{name} {degree}" for name, degree in axes.items() if degree > 1)
    parts = [counted(job.world_size, "rank") + (f" ({divided})" if divided else "")]
    if job.ep > 1:
        parts.append(f"ep {job.ep}" + (f" x expert_tp {job.expert_parts // job.ep}" if job.tp > 1 else ""))
    if job.zero_stage and job.dp_shard * job.cp > 1:
        parts.append(f"ZeRO {job.zero_stage}")
    if job.pp > 1:
        parts.append(job.schedule + (f", {job.num_chunks} stages per rank" if job.num_chunks > 1 else ""))
    microbatches = counted(job.num_microbatches, "microbatch", "es")
    parts.append(f"{microbatches} of {counted(job.micro_batch, 'sequence')}")
    if job.recompute != "none":
        every = f" of every {job.recompute_every}th layer" if job.recompute_every > 1 else ""
        parts.append(f"recompute {job.recompute}{every}")
    parts += ["compiled"] if job.compiles else []
    parts += ["fp8"] if job.float8 else []
    return ", ".join(parts)
