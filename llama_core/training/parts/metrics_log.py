"""The record of every step, and where it goes."""

import time
from collections.abc import Callable, Mapping

from llama_core.config.run import RunConfig
from llama_core.parallel.ranks import is_first_rank
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import drop_metrics_after
from llama_core.training.measure import FlopsUtilisation
from llama_core.training.metrics import MetricsSinks
from llama_core.training.parts.memory import MEMORY_ALLOCATED, MEMORY_PEAK, MEMORY_RESERVED
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.spikes import BadStep
from llama_core.training.rates import learning_rate
from llama_core.training.reports import Reports, in_words


class MetricsLog(LoopPart):
    """Makes the record of every step; on the first rank, it goes to the sinks of the run.

    Args:
        run: the run.
        config: its configuration.
        progress: how far it is.
        utilisation: computes the MFU.
        reports: what parts of the loop report of a step; one may be declared until the first step.
        on_step: called with every record on the first rank, after the sinks.
        memory_baseline_bytes: memory alive before the model was built.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        progress: RunProgress,
        *,
        utilisation: FlopsUtilisation,
        reports: Reports,
        on_step: Callable[[StepRecord], None],
        memory_baseline_bytes: int,
    ) -> None:
        self._run = run
        self._config = config
        self._progress = progress
        self._utilisation = utilisation
        self._reports = reports
        self.on_step = on_step
        self._memory_baseline_bytes = memory_baseline_bytes
        self._sinks: MetricsSinks | None = None
        """None on other ranks than the first."""

    @property
    def formats(self) -> Mapping[str, str]:
        """How the console shows some metrics, by name: those of parts, then those of the objective."""
        return self._reports.formats | dict(self._config.objective.shown)

    def begin(self) -> None:
        """Open the sinks."""
        if is_first_rank():
            self._sinks = MetricsSinks.open(self._run, self._config, resumed_at=self._progress.step)

    def after_step(self, step: FinishedStep) -> None:
        """Record the step."""
        record = self._record(step)  # on every rank: the peak of a CPU is measured by all at once
        if self._sinks is not None:
            self._sinks.write(record)
            self.on_step(record)

    def before_checkpoint(self) -> None:
        """Flush the sinks: a resumed run does not repeat this step, so its record must not be lost."""
        if self._sinks is not None:
            self._sinks.flush()

    def went_back(self, bad: BadStep) -> None:
        """Take the steps after the checkpoint out of the metrics, and go on there."""
        if self._sinks is not None:
            self._sinks.close()
            drop_metrics_after(self._run, self._progress.step)
            self.begin()

    def end(self, error: BaseException | None) -> None:
        """Close the sinks."""
        if self._sinks is not None:
            self._sinks.close()

    def _record(self, step: FinishedStep) -> StepRecord:
        values = step.values
        seconds = step.seconds
        # a number for each expert of each layer is more than all else that a step records
        is_looked_at = step.evaluation.loss is not None or step.step == self._progress.total_steps
        tokens_per_second = step.num_tokens / step.total_seconds
        return StepRecord(
            step=step.step,
            total_steps=self._progress.total_steps,
            loss=values.loss,
            grad_norm=values.grad_norm,
            learning_rate=learning_rate(step.step, self._config.training, self._progress.total_steps),
            tokens=step.tokens,
            tokens_per_second=tokens_per_second,
            step_seconds=step.total_seconds,
            data_seconds=seconds["data"],
            forward_backward_seconds=seconds["forward"] + seconds["backward"],
            optimizer_seconds=seconds["optimizer"],
            backward_seconds=seconds["backward"],
            mfu=self._utilisation(tokens_per_second, step.seq_len),
            loss_scale=step.loss_scale,
            skipped=not values.updated,
            eval_loss=step.evaluation.loss,
            time=time.time(),
            spike=bool(step.spike),
            eval_losses=step.evaluation.named_losses,
            memory_allocated_bytes=int(values.reported[MEMORY_ALLOCATED]),
            memory_peak_bytes=int(values.reported[MEMORY_PEAK]),
            memory_reserved_bytes=int(values.reported[MEMORY_RESERVED]),
            measured=step.measured,
            shown=in_words(step.measured, self.formats),
            eval_shown=in_words(step.evaluation.measured, self.formats),
            memory_baseline_bytes=self._memory_baseline_bytes,
            expert_shares=values.measured.expert_shares if is_looked_at else {},
        )
