"""The training loop: optimizer steps, with parts that are called between them."""

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.data.entropy import Entropies
from llama_core.data.supply import BatchSource, Supply
from llama_core.models.batch import Batch
from llama_core.parallel.ranks import is_first_rank, most_over_ranks, of_every_rank, this_device
from llama_core.planning.memory.profile import Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.records.metrics import drop_metrics_after
from llama_core.training.checkpoint import Checkpointer
from llama_core.training.engine import (
    COMPUTE_DTYPES,
    Engine,
    StepResult,
    build_engine,
    drops_out,
    train_step,
)
from llama_core.training.flash import activate_flash_attention
from llama_core.training.initial_weights import InitialWeights
from llama_core.training.inputs import StepInputs
from llama_core.training.measure import FlopsUtilisation, MemoryMeter, StepClock
from llama_core.training.metrics import import_what_records_need, print_record
from llama_core.training.optimizer import LossScale
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.bad_steps import BadSteps, StepCheck
from llama_core.training.parts.held_out import HeldOut
from llama_core.training.parts.length import RunLength
from llama_core.training.parts.memory import MemoryReport
from llama_core.training.parts.metrics_log import MetricsLog
from llama_core.training.parts.mirror import CheckpointMirror
from llama_core.training.parts.notices import BadStepNotices
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.patience import Patience
from llama_core.training.parts.preparations import CompiledBlocks, ReferenceModel
from llama_core.training.parts.repeats import Repeats
from llama_core.training.parts.replicas import ReplicaCheck
from llama_core.training.parts.saves import Saves
from llama_core.training.parts.spikes import BadStep
from llama_core.training.parts.stop import ASKED_TO_STOP, StopRequest
from llama_core.training.parts.stragglers import StragglerWatch
from llama_core.training.rates import learning_rate
from llama_core.training.reference import References
from llama_core.training.reports import Reports, in_words
from llama_core.training.step import SLOWEST_SECONDS, StepUnderWay, ValuesUnderWay
from llama_core.training.teacher import refer_to_teacher
from llama_core.training.timing import TimedSteps

logger = logging.getLogger(__name__)

RUN_AHEAD_SECONDS = 2.0
"""Steps that take longer gain nothing from a device that runs ahead, but a request to stop would wait for them."""


class Trainer:
    """One rank of a run: builds its part of the model, resumes from the newest checkpoint, and trains with the others.

    All ranks of a job create a trainer and call its methods together; rank 0 writes the metrics.

    Args:
        run: the run directory that metrics and checkpoints go to.
        config: the resolved configuration (no ``auto`` left).
        plan: how the work is divided. With more than one rank, the default process group must exist.
        batches: this rank's share of global batches, of ``config.batch_size`` sequences of ``config.seq_len`` tokens,
            or of as many tokens in sequences of another stage.
        timed_batches: those of timed steps, if they are not to be the ones after the last step.
        validation: functions by name, or as ``UNNAMED``, that return this rank's share of held-out batches for one
            evaluation, in the same order every time and the same number on every rank; empty to skip evaluation.
        total_steps: optimizer steps of the whole run; None to choose them by ``training.minutes``.
        entropies: entropies of the corpus's tokens, for the summary; None if unknown.
        share_of_whole_rows: the share of the rows that are a single document.
        references: the rows whose log-probabilities the objective compares with those under a reference; None if it
            reads none, or the batches bring them.
        should_stop: called after every step, also a timed one; once it returns True on any rank, the run stops, after
            it has saved a checkpoint of a trained step.
        on_step: called with the record of every step on rank 0, in addition to the metrics sinks.
    """

    engine: Engine
    """This rank's part of the model, and the optimizer."""
    batches: Supply
    """The microbatches of the steps, and the position in the data."""
    progress: RunProgress
    """How far the run is: all that the parts share."""
    loss_scale: LossScale
    parts: tuple[LoopPart, ...]
    """What happens between steps, in this order."""
    runs_ahead: bool
    """Whether to give the device the next step before the results of this one are read."""
    _steps_ahead: int
    """How many steps may be under way when the next one begins."""
    _last_loss: float

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        plan: ParallelPlan,
        *,
        batches: BatchSource,
        timed_batches: BatchSource | None = None,
        validation: Mapping[str, Callable[[], Iterable[Batch]]],
        total_steps: int | None,
        entropies: Entropies | None = None,
        share_of_whole_rows: float = 0.0,
        references: References | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[StepRecord], None] = print_record,
    ) -> None:
        self.run = run
        self.config = config
        self.plan = plan
        self.entropies = entropies
        self.device = this_device(config.launch.device)
        self.progress = RunProgress()
        self.length = RunLength(run, config.training, self.progress, total_steps)
        self.activity = ActivityLog(run, self.progress)
        self.reports = Reports()
        self.stop = StopRequest(should_stop, self.progress, self.reports)
        self._report_seconds = self.reports.declare(SLOWEST_SECONDS, "max", recorded=False)

        if is_first_rank():
            import_what_records_need(config)
        self.meter = MemoryMeter(self.device)
        self.memory_baseline_bytes = self.meter.allocated()
        self.memory_process_bytes = self.meter.resident()
        refer_to_teacher(references, config, plan, self.device, stop=self.stop, activity=self.activity)
        self.activity.tell("building the model")
        activate_flash_attention(config, self.device)
        self.engine = build_engine(config, plan, self.device)
        self.loss_scale = LossScale.for_dtype(COMPUTE_DTYPES[config.training.precision])
        self.initial_weights = InitialWeights(run, config)
        self.checkpointer = Checkpointer(
            run,
            keep=config.retention,
            num_bytes=config.checkpoint_bytes,
            from_python=config.data.source == DATALOADER,
            settings=config.to_yaml(),
        )
        self.inputs = StepInputs(
            config, plan, self.engine.model.objective, self.device, share_of_whole_rows=share_of_whole_rows
        )
        supply = partial(
            Supply, split=self.inputs.microbatches, device=self.device, reads_ahead=bool(config.data.num_workers)
        )
        self.batches = supply(batches)
        self._timed_batches = supply(timed_batches) if timed_batches else self.batches
        self.utilisation = FlopsUtilisation(config.spec, plan.world_size, config.training.precision, self.device)
        self.runs_ahead = self.device.type == "cuda" and not (self.loss_scale.is_dynamic or self.engine.waits)
        self._steps_ahead = 0
        self._last_loss = math.nan

        self.saves = Saves(
            run,
            config,
            plan.world_size,
            self.progress,
            checkpointer=self.checkpointer,
            engine=self.engine,
            gather=self._gather,
            activity=self.activity,
        )
        self.held_out = HeldOut(
            config.training,
            plan,
            self.progress,
            batches=validation,
            engine=self.engine,
            inputs=self.inputs,
            is_saved=self.saves.is_due,
            activity=self.activity,
        )
        self.check = StepCheck(config.training)
        replicas = ReplicaCheck(
            config.training.replica_check_every,
            plan,
            self.progress,
            engine=self.engine,
            reports=self.reports,
            device=self.device,
            is_due=lambda step: self.saves.is_due(step) or self.held_out.is_due(step),
        )
        self.repeats = Repeats(plan, engine=self.engine, device=self.device, begin_again=self._begin_again)
        memory = MemoryReport(self.meter, self.reports)
        self.metrics = MetricsLog(
            run,
            config,
            self.progress,
            utilisation=self.utilisation,
            reports=self.reports,
            on_step=on_step,
            memory_baseline_bytes=self.memory_baseline_bytes,
        )
        self.bad_steps = BadSteps(
            run,
            config,
            self.progress,
            check=self.check,
            engine=self.engine,
            initial_weights=self.initial_weights,
            batches=self.batches,
        )
        self.compiled = CompiledBlocks(
            plan, self.engine, self.inputs, evaluates=bool(validation), activity=self.activity
        )
        self.reference = ReferenceModel(
            references,
            plan,
            self.progress,
            engine=self.engine,
            inputs=self.inputs,
            stop=self.stop,
            activity=self.activity,
        )
        self.parts = (
            self.length,  # how many steps there are
            memory,
            self.stop,
            StragglerWatch(run, config, self.progress, reports=self.reports, device=self.device),
            self.check,  # was the step a good one?
            self.repeats,  # or does a device compute wrongly?
            replicas,  # do replicas still agree?
            self.held_out,  # the held-out loss after it
            Patience(config.training, self.progress),  # does that end the run?
            self.metrics,  # its record
            BadStepNotices(run, config.notify, self.progress),  # who is told of a bad one
            self.bad_steps,  # does a bad step end the run?
            # parts end in reverse: this one after the last save
            CheckpointMirror(run, config, self.checkpointer, self.activity),
            self.saves,
            self.compiled,  # the last two act before the first step only
            self.reference,
        )
        self._resume()

    @property
    def step(self) -> int:
        """The last step that the device was given."""
        return self.progress.step

    @property
    def total_steps(self) -> int:
        """The run's last step."""
        return self.progress.total_steps

    @property
    def ended_early(self) -> str:
        """Why the run ends before ``total_steps``, as a clause; empty if it does not."""
        return self.progress.ended_early

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""
        return self.progress.is_over

    def fit(self) -> TrainingSummary:
        """Train until ``total_steps``, or until patience has run out, with a checkpoint at the end.

        Raises:
            NonFiniteError, LossSpikeError, WrongDeviceError: after a bad step, as ``BadSteps`` says.
            StoppedError: when ``should_stop`` returned True; a checkpoint of the last step has been saved.
            CheckpointError: if a checkpoint cannot be written.
        """
        started = time.perf_counter()
        self.meter.reset_peak()
        with self.meter.watching():
            self._take_steps()
            self.held_out.ensure()
        evaluation = self.held_out.last
        held_out = evaluation.joined
        own_peak = self.meter.peak()
        peak, reserved = most_over_ranks(own_peak, self.meter.reserved())
        return TrainingSummary(
            steps=self.progress.step,
            tokens=self.progress.tokens,
            train_loss=self._last_loss,
            eval_loss=evaluation.loss,
            eval_tokens=held_out.count if held_out else 0,
            unigram_entropy=self.entropies.unigram if self.entropies else None,
            bigram_entropy=self.entropies.bigram if self.entropies else None,
            memory_baseline_bytes=self.memory_baseline_bytes,
            memory_peak_bytes=max(peak, self.memory_baseline_bytes),
            seconds=time.perf_counter() - started,
            memory_reserved_bytes=max(reserved, self.memory_process_bytes),
            memory_process_bytes=self.memory_process_bytes,
            memory_by_rank_bytes=of_every_rank(max(0, own_peak - self.memory_baseline_bytes)),
            loss_unit=self.config.objective.unit,
            eval_rows=held_out,
            named_eval_rows=evaluation.named,
            ended_early=self.ended_early,
            measured={f"eval_{name}": value for name, value in evaluation.measured.items()},
            shown=in_words(evaluation.measured, self.metrics.formats),
        )

    def benchmark(self, device_label: str) -> BenchmarkRecord:
        """Time whole steps from the current state, after warm-up; no metrics or checkpoints are written.

        Raises:
            StoppedError: when ``should_stop`` returned True.
        """
        self.compiled.begin()
        self.activity.tell("timing steps", "benchmark")
        timed = TimedSteps(
            self.run,
            self.config,
            self.plan,
            engine=self.engine,
            batches=self._timed_batches,
            take=self._optimize,
            stop=self.stop,
            utilisation=self.utilisation,
            memory_baseline_bytes=self.memory_baseline_bytes,
        )
        return timed.record(device_label)

    def _take_steps(self) -> None:
        """Train to the end of the run."""
        under_way: deque[StepUnderWay] = deque()
        with ExitStack() as ending:  # each part ends, the last first, even if another one raises
            for part in self.parts:
                ending.push(_to_end(part))
            ending.callback(self.batches.stop)
            for part in self.parts:
                part.begin()
            step = self.progress.step
            first = "in the first step" if step == 0 else f"in step {step + 1}, the first after the start"
            self.activity.tell(first, "steps")
            while not self.progress.is_over:
                # a step that follows a bad one updates no weight until that one is mended or left out
                may_update = under_way[-1].updated if under_way else None
                under_way.append(self._begin_step(may_update))
                bad = self._finish_steps(under_way)
                if bad is not None:
                    under_way.clear()  # drop the steps after it; the device does them before it loads anything
                    self._go_back(bad)

    def _begin_step(self, may_update: Tensor | None) -> StepUnderWay:
        """Give the device all work of the next step, without waiting for it.

        Args:
            may_update: whether it may update the weights, as for ``train_step``.
        """
        clock = StepClock(self.device)
        for part in self.parts:
            part.before_step()
        microbatches = self.batches.next_step()
        loss_scale = self.loss_scale.value
        result = self._optimize(microbatches, on_phase=clock.enter, may_update=may_update)
        num_tokens = sum(microbatch.tokens_BS.numel() for microbatch in microbatches) * self.plan.dp
        self.progress.step += 1
        self.progress.tokens += num_tokens
        for part in self.parts:
            part.step_begun()
        values = ValuesUnderWay(result, self.reports, self.engine.model, self.plan, self.device)
        clock.stop()
        return StepUnderWay(
            step=self.progress.step,
            tokens=self.progress.tokens,
            num_tokens=num_tokens,
            seq_len=microbatches[0].tokens_BS.shape[1],
            loss_scale=loss_scale,
            clock=clock,
            values=values,
            microbatches=microbatches,
            updated=result.updated,
            own_loss=self.engine.own_loss,
            position=self.batches.state_dict(),
        )

    def _finish_steps(self, under_way: deque[StepUnderWay]) -> BadStep | None:
        """Read the results of the steps that are under way, and hand them to the parts; return a bad step, if any.

        The newest stays under way if no part needs its results yet and the device may run ahead. So do the steps after
        one that makes the run go back. All ranks decide alike, because they decide by the same numbers.
        """
        must_finish = any(part.is_due(self.progress.step) for part in self.parts)
        asked_to_stop = False
        was_held = False  # by the step before it, so that it has updated nothing
        while len(under_way) > (0 if must_finish or asked_to_stop or was_held else self._steps_ahead):
            first = under_way.popleft()
            seconds = first.clock.seconds()  # waits for the device
            begun, values = self.repeats.read(first, was_held=was_held)
            was_held = begun is not first
            asked_to_stop = asked_to_stop or bool(values.reported[ASKED_TO_STOP])
            self.loss_scale.update(finite=values.updated)
            self._last_loss = values.loss
            self._report_seconds(sum(seconds.values()))
            slowest = values.reported.get(SLOWEST_SECONDS, 0.0)
            self._steps_ahead = int(self.runs_ahead and slowest < RUN_AHEAD_SECONDS)
            step = FinishedStep(
                step=begun.step,
                tokens=begun.tokens,
                num_tokens=begun.num_tokens,
                seq_len=begun.seq_len,
                loss_scale=begun.loss_scale,
                seconds=seconds,
                values=values,
                microbatches=begun.microbatches,
                own_loss=begun.own_loss,
                taken_again=begun is not first,
                measured={**values.measured.values, **self.reports.recorded(values.reported)},
                position=begun.position,
                is_newest=not under_way,
                asked_to_stop=asked_to_stop,
            )
            for part in self.parts:
                part.after_step(step)
            if step.bad is not None:
                return step.bad
        return None

    def _begin_again(self, begun: StepUnderWay) -> StepUnderWay:
        """Give the device the work of a step again which has updated no weight, like those after it."""
        result = self._optimize(begun.microbatches, step=begun.step)
        values = ValuesUnderWay(result, Reports(), self.engine.model, self.plan, self.device)
        return replace(begun, values=values, updated=result.updated, own_loss=self.engine.own_loss)

    def _optimize(
        self,
        microbatches: Sequence[Batch],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        *,
        step: int | None = None,
        may_update: Tensor | None = None,
    ) -> StepResult:
        """Train on this rank's share of a step; by default, of the one after ``progress.step``."""
        training = self.config.training
        step = self.progress.step + 1 if step is None else step
        if drops_out(self.config.spec):
            self._seed_dropout(step)
        return train_step(
            self.engine,
            microbatches,
            learning_rate=learning_rate(step, training, self.progress.total_steps),
            max_grad_norm=training.max_grad_norm,
            loss_scale=self.loss_scale.value,
            on_phase=on_phase,
            may_update=may_update,
        )

    def _seed_dropout(self, step: int) -> None:
        """Seed dropout so that a repeated step, and tensor-parallel ranks with the same tokens, drop the same."""
        replica = dist.get_rank() // self.plan.tp if dist.is_initialized() else 0
        name = f"dropout {self.config.training.seed} {step} {replica}"
        digest = hashlib.sha256(name.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8]))

    @property
    def _is_partly_frozen(self) -> bool:
        """Whether there are weights that torch's checkpoints do not hold."""
        return self.config.spec.lora is not None

    def _resume(self) -> None:
        """Go on from the newest checkpoint, or begin with the initial weights."""
        self.activity.tell("reading the weights")
        if self._is_partly_frozen:
            self.initial_weights.set(self.engine)
        state = self.checkpointer.load(self.engine)
        if state is None and not self._is_partly_frozen:
            self.initial_weights.set(self.engine)
        if state is not None:
            self._restore(state)
            logger.info("resuming after step %d", self.progress.step)
        if is_first_rank():
            drop_metrics_after(self.run, self.progress.step)

    def _gather(self) -> dict[str, Any]:
        """Make all parts ready for a checkpoint; return the state of the loop and of its parts."""
        state = {
            "tokens": self.progress.tokens,
            "loss": self._last_loss,
            "data": self.batches.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
        }
        for part in self.parts:
            part.before_checkpoint()
            state |= part.state_dict()
        return state

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``_gather`` returned for a checkpoint."""
        self.progress.step = state["step"]
        self.progress.tokens = state["tokens"]
        self._last_loss = state["loss"]
        self.batches.load_state_dict(state["data"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        for part in self.parts:
            part.load_state_dict(state)

    def _go_back(self, bad: BadStep) -> None:
        """Return to the newest checkpoint because of a bad step, in this process.

        Raises:
            NonFiniteError, LossSpikeError, WrongDeviceError: if there is none.
        """
        self.activity.tell("returning to a checkpoint", "recomputed")
        self.checkpointer.finish()
        if bad.suspects and self._is_partly_frozen:
            self.initial_weights.set(self.engine)
        state = self.checkpointer.load(self.engine)
        if state is None:
            raise self.bad_steps.ends(bad, "there is no checkpoint yet to return to", "skip")
        self._restore(state)
        for part in reversed(self.parts):
            part.went_back(bad)
        self.activity.tell_step()


def _to_end(part: LoopPart) -> Callable[[object, BaseException | None, object], None]:
    """Return what an ``ExitStack`` calls to end a part."""

    def end(kind: object, error: BaseException | None, trace: object) -> None:
        part.end(error)

    return end
