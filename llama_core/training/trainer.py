"""The training loop: optimizer steps with evaluations, checkpoints and metrics between them."""

import hashlib
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.config.hardware import recognise_gpu
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, UNNAMED
from llama_core.data.entropy import Entropies
from llama_core.data.supply import BatchSource, Supply
from llama_core.errors import DataError, NonFiniteError, StoppedError, TrainingFailedError, TrainingInfraError
from llama_core.machine.detect import software_versions
from llama_core.models.batch import IGNORE_INDEX, Batch, ones_per_token
from llama_core.models.objective import PreparingObjective
from llama_core.models.pretrained import checkpoints_behind, where_stored
from llama_core.parallel.expert import routing_statistics, routing_totals
from llama_core.parallel.measured import held_out_fields, measured_fields, measured_totals
from llama_core.parallel.ranks import (
    first_complaint,
    from_first_rank,
    has_lost_the_others,
    is_first_rank,
    most_over_devices,
    most_over_ranks,
    of_every_rank,
    own_rank,
    this_device,
    wait_for_all,
)
from llama_core.parallel.recompute import mixes_up_random_state
from llama_core.planning.memory.profile import Phase
from llama_core.planning.plan import AXES, ParallelPlan, document_attention
from llama_core.planning.time.step_time import model_flops_utilisation
from llama_core.records.activity import TimePart, record_activity
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.records.held_out import HeldOutRows
from llama_core.records.measurements import BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.records.metrics import drop_metrics_after
from llama_core.records.rollbacks import Rollback, data_skips, read_rollbacks, write_rollbacks
from llama_core.records.timelines import write_lane
from llama_core.training.checkpoint import Checkpointer, refuse_damaged_together
from llama_core.training.checkpoint_interval import CheckpointInterval
from llama_core.training.engine import COMPUTE_DTYPES, NativeEngine, StepResult, build_engine, train_step
from llama_core.training.flash import activate_flash_attention
from llama_core.training.length import ChosenLength, StepTimer
from llama_core.training.measure import ActionClock, MemoryMeter, StepClock, product_rate, time_steps
from llama_core.training.metrics import MetricsSinks, print_record
from llama_core.training.optimizer import LossScale
from llama_core.training.patience import Patience
from llama_core.training.profile import profiled
from llama_core.training.rates import learning_rate
from llama_core.training.reference import References
from llama_core.training.spikes import BadStep, Spikes
from llama_core.training.weights import Pretrained

logger = logging.getLogger(__name__)

SELDOM = 0.05
"""Share of microbatches that are worth another kind of attention: blocks have to be compiled for it once more."""
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
        self.validation = validation
        self._timer: StepTimer | None = None
        """Chooses the number of steps; None if it is known."""
        if total_steps is None:
            total_steps = self._chosen_before()
        self.total_steps = total_steps
        self.entropies = entropies
        self.references = references
        self.should_stop = should_stop
        self.on_step = on_step
        self.device = this_device(config.launch.device)
        self._drops_out = config.spec.lora is not None and config.spec.lora.lora_dropout > 0
        self._has_window = config.spec.sliding_window > 0
        self._takes_documents = document_attention(config, plan) == "varlen"
        # context-parallel ranks would have to send the keys around a ring instead
        has_causal_kernel = plan.cp == 1 and not mixes_up_random_state(plan)
        occurs = share_of_whole_rows**plan.rows_per_forward > SELDOM
        self._whole_rows_apart = self._takes_documents and has_causal_kernel and occurs and not self._has_window
        self._has_compiled = False
        supply = partial(
            Supply, split=self._microbatches, device=self.device, reads_ahead=bool(config.data.num_workers)
        )
        self.batches = supply(batches)
        self._timed_batches = supply(timed_batches) if timed_batches else self.batches
        self.meter = MemoryMeter(self.device)
        self.memory_baseline_bytes, self.memory_process_bytes = self.meter.allocated(), self.meter.resident()
        self._tell("building the model")
        activate_flash_attention(config, self.device)
        self.engine = build_engine(config, plan, self.device)
        self.loss_scale = LossScale.for_dtype(COMPUTE_DTYPES[config.training.precision])
        self.checkpointer = Checkpointer(
            run,
            keep=config.retention,
            num_bytes=config.checkpoint_bytes,
            from_python=config.data.source == DATALOADER,
            settings=config.to_yaml(),
        )
        self.step = 0
        self.tokens = 0
        self.runs_ahead = self.device.type == "cuda" and not self.loss_scale.is_dynamic
        """Whether to give the device the next step before the results of this one are read."""
        self._steps_ahead = 0
        self._step_seconds = 0.0
        self._skipped_in_a_row = 0
        self._num_sound_steps = 0
        """Steps so far, of this process and those before, whose loss and gradient were finite."""
        self._last_loss = math.nan
        self._last_eval = _Evaluation()
        self._patience = Patience(config.training)
        self._spikes = Spikes(config.training)
        self._interval = CheckpointInterval(config, plan.world_size)
        self._rollbacks = from_first_rank(read_rollbacks(run) if is_first_rank() else [])
        self._resume()
        self._resumed_at = self.step

    def _chosen_before(self) -> int:
        """Return the number of steps that an earlier attempt has chosen, or those of the warm-up until this one has."""
        chosen = None
        if is_first_rank() and self.run.length.exists():
            chosen = read_typed(self.run.length, ChosenLength)
        chosen = from_first_rank(chosen)
        if chosen is not None:
            return chosen.num_steps
        training = self.config.training
        assert training.minutes is not None
        assert training.warmup_steps is not None
        self._timer = StepTimer(training.minutes, training.warmup_steps)
        return training.warmup_steps + 1  # one more, so that no step counts as the last before the number is chosen

    def _choose_length(self) -> None:
        """Choose the number of steps, once the warm-up is over."""
        if self._timer is None:
            return
        chosen = from_first_rank(self._timer.choose(self.step))
        if chosen is None:
            self.total_steps = max(self.total_steps, self.step + 2)
            return
        self._timer = None
        self.total_steps = chosen.num_steps
        if is_first_rank():
            write_json(self.run.length, chosen)
            logger.info("%s", chosen.reason)

    def _tell(self, doing: str, part: TimePart = "startup") -> None:
        """Record what this rank does from now on."""
        if is_first_rank():
            record_activity(self.run, doing, part)

    def _tell_step(self) -> None:
        """Record that this rank goes on with the next step."""
        self._tell(f"in step {min(self.step + 1, self.total_steps)}", "steps")

    def _resume(self) -> None:
        self._tell("reading the weights")
        is_partly_frozen = self.config.spec.lora is not None  # torch's checkpoints do not hold frozen weights
        if is_partly_frozen:
            self._set_initial_weights()
        state = self.checkpointer.load(self.engine)
        if state is None and not is_partly_frozen:
            self._set_initial_weights()
        if state is not None:
            self._restore(state)
            logger.info("resuming after step %d", self.step)
        if is_first_rank():
            drop_metrics_after(self.run, self.step)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go back to the counters of a checkpoint."""
        self.step = state["step"]
        self.tokens = state["tokens"]
        self._num_sound_steps = state.get("sound_steps", self.step)
        self._last_loss = state["loss"]
        self._last_eval = _Evaluation()  # it may be of a step that is taken again, on other data
        self.batches.load_state_dict(state["data"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self._spikes.load_state_dict(state.get("spikes", {}))
        self._patience.load_state_dict(state.get("patience", {}))
        self._end_early_if_due()
        self._interval.restore(self.step, state.get("checkpoint_every"))

    def _end_early_if_due(self) -> None:
        """End the run before its last step if patience has run out, on all ranks if on the first."""
        is_early = self.config.training.patience > 0 and self.step < self.total_steps
        self._patience.verdict = from_first_rank(self._patience.judge()) if is_early else ""

    def _set_initial_weights(self) -> None:
        training = self.config.training
        if training.init_from is None:
            self.engine.initialize_weights(training.seed)
            return
        source = Path(training.init_from)
        for checkpoint in checkpoints_behind(source):
            refuse_damaged_together(checkpoint)
        pretrained = Pretrained(self.config.spec, source, seed=training.seed)
        self.engine.set_weights(pretrained.fill)
        pretrained.done()
        wait_for_all()  # a training collective would time out while a rank with a slow disk still reads

    def fit(self) -> TrainingSummary:
        """Train until ``total_steps``, or until patience has run out, with a checkpoint at the end.

        Raises:
            NonFiniteError: after more than ``max_skipped_steps`` steps in a row without a finite loss and gradient,
                or after one, if ``on_bad_step`` stops the run or the rollbacks are used up, or if the weights that it
                began with are not finite; at the end, if no step had a finite loss and gradient.
            LossSpikeError: likewise, after a spike.
            StoppedError: when ``should_stop`` returned True; a checkpoint of the last step has been saved.
            CheckpointError: if a checkpoint cannot be written.
        """
        started = time.perf_counter()
        self.meter.reset_peak()
        with self.meter.watching():
            self._take_steps()
            if not self._last_eval.rows and self.validation:  # resumed after the last step
                self._last_eval = self._evaluation_after(self.step)
        held_out = self._last_eval.joined
        own_peak = self.meter.peak()
        peak, reserved = most_over_ranks(own_peak, self.meter.reserved())
        return TrainingSummary(
            steps=self.step,
            tokens=self.tokens,
            train_loss=self._last_loss,
            eval_loss=held_out.mean if held_out else None,
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
            named_eval_rows=self._last_eval.named,
            ended_early=self.ended_early,
            **self._last_eval.measured,
        )

    def _take_steps(self) -> None:
        """Train to the end of the run; however it ends, complete the checkpoint that is being written."""
        sinks = MetricsSinks.open(self.run, self.config, resumed_at=self.step) if is_first_rank() else None
        under_way: deque[_StepUnderWay] = deque()
        finish: Callable[[], None] = self.checkpointer.finish_alone
        try:
            self._compile_blocks()
            self._refer()
            first = "in the first step" if self.step == 0 else f"in step {self.step + 1}, the first after the start"
            self._tell(first, "steps")
            while not self.is_over:
                under_way.append(self._begin_step())
                self._choose_length()
                stop, bad = self._finish_steps(under_way, sinks)
                if bad is not None:
                    under_way.clear()  # drop the steps after it; the device does them before it loads anything
                    sinks = self._roll_back(bad, sinks)
                    continue
                self._checkpoint_if_due(sinks, stop=stop)
            finish = self.checkpointer.finish
        except TrainingFailedError:  # on all ranks
            finish = self.checkpointer.finish
            raise
        except Exception as error:
            if has_lost_the_others(error):  # those that are silent will not take part in writing
                finish = partial(self.checkpointer.finish_alone, float(self.config.launch.collective_timeout_s))
            raise
        finally:
            self.batches.stop()
            self._tell("writing a checkpoint", "checkpoints")
            try:
                finish()
            finally:
                self.engine.end_saving()
                if sinks is not None:
                    sinks.close()

    def _refer(self) -> None:
        """Get the log-probabilities under the reference: of the weights that the run begins with.

        Raises:
            DataError: if a run that goes on has them no longer.
            StoppedError: when ``should_stop`` returned True.
        """
        if self.references is None:
            return
        if self.step > 0:
            self.references.read()
            return
        self._tell("computing the log-probabilities under the reference")
        with self._evaluating():
            self.references.compute(self.plan, self._log_probabilities)

    def _log_probabilities(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Return those of all answers in the rows of all ranks, in turns, and in the rows before those."""
        self._stop_if_asked("the reference was computed")
        pieces = [piece.to(self.device) for piece in self._microbatches(batch)]
        before = [piece.before for piece in pieces if piece.before is not None]
        values = [self.engine.log_probabilities_of_answers(rows) for rows in (pieces, before) if rows]
        return torch.stack(values, dim=-1).float().cpu().numpy()

    def benchmark(self, device_label: str) -> BenchmarkRecord:
        """Time whole steps from the current state, after warm-up; no metrics or checkpoints are written.

        Raises:
            StoppedError: when ``should_stop`` returned True.
        """
        timing = self.config.benchmark
        self._compile_blocks()
        self._tell("timing steps", "benchmark")
        try:
            record = time_steps(
                self._time_step,
                between=self._stop_if_asked,
                watched=profiled(self.run, self.plan, own_rank(), self.device) if timing.profile else nullcontext(),
                warmup_steps=timing.warmup_steps,
                num_steps=timing.steps,
                tokens_per_step=self._timed_rows * self.config.seq_len,
                device=self.device,
                device_label=device_label,
                mfu=partial(self._mfu, seq_len=self.config.seq_len),
            )
            self._record_timeline()
        finally:
            self._timed_batches.stop()
        peak, reserved = most_over_ranks(record.memory_peak_bytes, record.memory_reserved_bytes)
        (waiting,) = most_over_ranks(-1 if record.waiting_threads is None else round(1e6 * record.waiting_threads))
        return replace(
            record,
            memory_baseline_bytes=self.memory_baseline_bytes,
            memory_peak_bytes=max(peak, self.memory_baseline_bytes),
            memory_reserved_bytes=reserved,
            waiting_threads=None if waiting < 0 else 1e-6 * waiting,
            host=platform.node(),
            versions=software_versions() if is_first_rank() else {},
        )

    @property
    def _timed_rows(self) -> int:
        """The sequences of a timed step, over all ranks."""
        stage = self.config.timed_stage
        return self.config.first_batch_size if stage is None else stage.batch_size

    def _compile_blocks(self) -> None:
        """Compile the blocks for everything that training will give them, on all ranks at once.

        Otherwise the stages of a cold pipeline compile one after another, each when its first input arrives, while the
        ranks behind it wait; and the first evaluation stalls all of them once more.
        """
        if self._has_compiled or not self.plan.compile or not isinstance(self.engine, NativeEngine):
            return
        self._tell("compiling the blocks")
        parallel = self.engine.parallel
        for example in chain.from_iterable(map(self._examples, self.config.seq_lens)):
            microbatch = example.to(self.device)
            parallel.compile_blocks(microbatch)
            if self.config.objective.prepares:
                with torch.no_grad():
                    parallel.compile_blocks(microbatch)
            if self.validation:
                with self._evaluating(), torch.no_grad():
                    parallel.compile_blocks(microbatch)
        self._has_compiled = True

    def _examples(self, seq_len: int) -> Iterator[Batch]:
        """Yield a microbatch for each kind of attention that steps of a length need, in host memory."""
        config = self.config
        tokens_BS = torch.zeros((self._rows_per_forward(seq_len), seq_len), dtype=torch.int64)
        targets_BS = torch.full_like(tokens_BS, IGNORE_INDEX)
        rows = Batch(tokens_BS, targets_BS, None, per_token=ones_per_token(tokens_BS, config.objective.per_token))
        if config.data.document_mask or self._has_window:
            rows = rows.with_positions()
        yield rows.with_documents() if self._takes_documents else rows
        if self._whole_rows_apart:
            yield rows.with_documents(whole_rows_apart=True)

    def _record_timeline(self) -> None:
        """Take one more step, and record when every action of the pipeline ran, on the first rank of each position."""
        plan = self.plan
        rank = own_rank()
        if plan.pp == 1 or not isinstance(self.engine, NativeEngine):
            return
        pipeline = self.engine.parallel.pipeline
        microbatches = self._timed_batches.next_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        (stop,) = most_over_ranks(int(self.should_stop()))  # the ranks leave this together
        if stop:
            return
        clock = ActionClock(self.device)
        pipeline.on_action = clock.mark
        self._optimize(microbatches, on_phase=lambda phase: None)
        pipeline.on_action = None
        if not any(plan.coordinate(rank, axis) for axis in AXES if axis != "pp"):
            write_lane(self.run, plan.coordinate(rank, "pp"), clock.lane())

    def _stop_if_asked(self, before: str = "the timed steps were done") -> None:
        (stop,) = most_over_ranks(int(self.should_stop()))
        if stop:
            raise StoppedError(f"stopped after step {self.step}, before {before}")

    def _time_step(self) -> None:
        self._optimize(self._timed_batches.next_step(), on_phase=lambda phase: None)
        if is_first_rank() and self.run.heartbeat.exists():
            self.run.heartbeat.touch()  # no step is recorded, but the run is alive

    def _begin_step(self) -> "_StepUnderWay":
        """Give the device all work of the next step, without waiting for it."""
        clock = StepClock(self.device)
        if (position := data_skips(self._rollbacks).get(self.step)) is not None:
            self.batches.load_state_dict(position)
        microbatches = self.batches.next_step()
        scale = self.loss_scale.value
        result = self._optimize(microbatches, on_phase=clock.enter)
        self.step += 1
        num_tokens = sum(microbatch.tokens_BS.numel() for microbatch in microbatches) * self.plan.dp
        seq_len = microbatches[0].tokens_BS.shape[1]
        self.tokens += num_tokens
        meter = self.meter
        own = (meter.allocated(), meter.peak(), meter.reserved(), self.should_stop(), self._step_seconds)
        most = most_over_devices(self.device, *own)
        values = torch.stack([v.to(most) for v in (result.loss, result.grad_norm, result.updated)])
        routing = routing_totals(self.engine.model, self.plan)
        values = torch.cat((values, most)).to("cpu", non_blocking=True)
        routing = None if routing is None else routing.to("cpu", non_blocking=True)
        measured = measured_totals(self.engine.model, self.plan)
        measured = None if measured is None else measured.to("cpu", non_blocking=True)
        clock.stop()
        position = self.batches.state_dict()
        return _StepUnderWay(
            self.step, self.tokens, num_tokens, seq_len, scale, clock, values, routing, measured, position
        )

    def _finish_steps(
        self, under_way: "deque[_StepUnderWay]", sinks: MetricsSinks | None
    ) -> tuple[bool, BadStep | None]:
        """Record the steps that are under way; return whether any rank was asked to stop, and a bad step, if any.

        The newest stays under way if its results are not needed yet and the device may run ahead. So do the steps after
        a bad one, unless ``on_bad_step=skip``. All ranks decide alike, because they decide by the same numbers.
        """
        training = self.config.training
        stop = False
        saves = self.is_over or self._interval.is_due(self.step)
        evaluates = bool(self.validation) and (
            self.is_over
            or (training.eval_every > 0 and self.step % training.eval_every == 0)
            or (training.keep_best > 0 and saves)
        )
        needs_all = evaluates or saves
        while len(under_way) > (0 if needs_all or stop else self._steps_ahead):
            step = under_way.popleft()
            record, asked_to_stop, bad = self._finish_step(step, evaluates=evaluates and not under_way)
            stop = stop or asked_to_stop
            if sinks is not None:
                sinks.write(record)
                self.on_step(record)
            if self._skipped_in_a_row and step.step == self._resumed_at + 1:
                self._refuse_non_finite_weights(record)
            if bad is not None:
                return stop, bad
        return stop, None

    def _refuse_non_finite_weights(self, first: StepRecord) -> None:
        """Check the weights that this process began with, since its first step had no finite loss and gradient.

        Raises:
            NonFiniteError: if one of them is NaN or infinite, with where it comes from.
        """
        name = next(self.engine.non_finite_weights(), "")
        if place := first_complaint(name and self._where_read(name)):
            raise NonFiniteError(
                f"loss {first.loss:.4g} and gradient norm {first.grad_norm:.4g} before any update, because the weights "
                f"are not finite: {place}",
                "start from other weights; if these were copied or downloaded, do it again",
            )

    def _where_read(self, name: str) -> str:
        """Return where this process has read a weight from, or its name if it was drawn."""
        is_trained = self.engine.model.get_parameter(name).requires_grad
        if self._resumed_at and is_trained:
            return f"{name} of {self.run.checkpoints / checkpoint_name(self._resumed_at)}"
        source = self.config.training.init_from
        if source is None:
            return name
        try:
            return where_stored(name, self.config.spec, Path(source))
        except TrainingInfraError:  # the files have changed meanwhile, and the other ranks wait for an answer
            return f"{name} of {source}"

    def _finish_step(self, begun: "_StepUnderWay", *, evaluates: bool) -> tuple[StepRecord, bool, BadStep | None]:
        """Wait for a step; return its record, whether any rank was asked to stop when it began, and its problem.

        The last is None for a good step, and with ``on_bad_step=skip``.
        """
        seconds = begun.clock.seconds()
        self._last_loss, grad_norm, was_updated, allocated, peak, reserved, stop, slowest = begun.values.tolist()
        updated = bool(was_updated)
        overflowed = not updated and math.isfinite(self._last_loss) and begun.loss_scale > 1.0
        is_sound = updated or overflowed
        if is_sound:
            self._num_sound_steps += 1
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
        self.loss_scale.update(finite=updated)
        self._step_seconds = total = sum(seconds.values())
        self._steps_ahead = int(self.runs_ahead and slowest < RUN_AHEAD_SECONDS)
        flaw = "" if is_sound else f"loss {self._last_loss:.4g} and gradient norm {grad_norm:.4g}"
        spike = "" if overflowed else self._spikes.find(self._last_loss, grad_norm)
        bad = None
        if (flaw or spike) and self.config.training.on_bad_step != "skip":
            bad = BadStep(begun.step, flaw or spike, is_finite=not flaw, data=begun.position)
        evaluation = _Evaluation()
        if evaluates and bad is None:
            evaluation = self._last_eval = self._evaluation_after(begun.step)
            self._patience.add(begun.step, evaluation.loss, evaluation.named_losses)
            self._end_early_if_due()
            self._tell_step()
        record = StepRecord(
            step=begun.step,
            total_steps=self.total_steps,
            loss=self._last_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate(begun.step, self.config.training, self.total_steps),
            tokens=begun.tokens,
            tokens_per_second=begun.num_tokens / total,
            step_seconds=total,
            data_seconds=seconds["data"],
            forward_backward_seconds=seconds["forward"] + seconds["backward"],
            optimizer_seconds=seconds["optimizer"],
            backward_seconds=seconds["backward"],
            mfu=self._mfu(begun.num_tokens / total, begun.seq_len),
            memory_allocated_bytes=int(allocated),
            memory_peak_bytes=int(peak),
            memory_reserved_bytes=int(reserved),
            loss_scale=begun.loss_scale,
            skipped=not updated,
            eval_loss=evaluation.loss,
            time=time.time(),
            spike=bool(spike),
            eval_losses=evaluation.named_losses,
            **routing_statistics(begun.routing, self.config.spec),
            **measured_fields(self.engine.model, begun.measured),
            **evaluation.measured,
        )
        return record, bool(stop), bad

    def _roll_back(self, bad: BadStep, sinks: MetricsSinks | None) -> MetricsSinks | None:
        """Return to the newest checkpoint, leave out the data up to the bad step, and return the sinks to go on with.

        This happens in the process, because everything else that the steps need is here: data, compiled blocks, and
        ranks that have found each other. A new attempt would need a launcher that starts one; only Slurm's does.

        Raises:
            NonFiniteError, LossSpikeError: if ``on_bad_step`` stops the run instead, or no rollback is possible.
        """
        training = self.config.training
        used = len(self._rollbacks)
        ends = partial(bad.ends, self.run, self.config.data.source)
        if training.on_bad_step == "stop":
            raise ends("training.on_bad_step=stop", "rollback", "skip")
        if used >= training.max_rollbacks:
            raise ends(f"all {used} rollbacks are used up; training.max_rollbacks={training.max_rollbacks}", "skip")
        self._tell("returning to a checkpoint", "recomputed")
        self.checkpointer.finish()
        state = self.checkpointer.load(self.engine)
        if state is None:
            raise ends("there is no checkpoint yet to return to", "skip")
        self._restore(state)
        self._skipped_in_a_row = 0
        self._rollbacks.append(Rollback(self.step, bad.step, bad.reason, bad.data, time.time()))
        if sinks is None:
            return None
        logger.warning(
            "step %d is bad: %s; returned to step %d, and left out the data of steps %d to %d (rollback %d of %d)",
            *(bad.step, bad.reason, self.step, self.step + 1, bad.step, used + 1, training.max_rollbacks),
        )
        write_rollbacks(self.run, self._rollbacks)  # before any step on other data
        sinks.close()
        drop_metrics_after(self.run, self.step)
        self._tell_step()
        return MetricsSinks.open(self.run, self.config, resumed_at=self.step)

    def _optimize(self, microbatches: list[Batch], on_phase: Callable[[Phase], None]) -> StepResult:
        training = self.config.training
        if self._drops_out:
            self._seed_dropout()
        return train_step(
            self.engine,
            microbatches,
            learning_rate=learning_rate(self.step + 1, training, self.total_steps),
            max_grad_norm=training.max_grad_norm,
            loss_scale=self.loss_scale.value,
            on_phase=on_phase,
        )

    def _seed_dropout(self) -> None:
        """Seed dropout so that a repeated step, and tensor-parallel ranks with the same tokens, drop the same."""
        replica = dist.get_rank() // self.plan.tp if dist.is_initialized() else 0
        digest = hashlib.sha256(f"dropout {self.config.training.seed} {self.step} {replica}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8]))

    def _microbatches(self, batch: Batch) -> list[Batch]:
        """Split a batch into the rows of each forward, in host memory.

        Raises:
            DataError: if the batch lacks what the objective reads.
        """
        wanted = self.config.objective
        missing = [name for name in wanted.per_token if name not in batch.per_token]
        if missing:
            raise DataError(
                f"training.objective={wanted.name} reads {', '.join(missing)} of every token, which the batches do "
                "not have; give batches with them in per_token, from your own dataloader"
            )
        if self._has_window:
            batch = batch.with_positions()
        pieces = self._split(batch)
        objective = self.engine.model.objective
        if not isinstance(objective, PreparingObjective):
            return pieces
        before = self._split(objective.rows_before(batch))
        return [replace(piece, before=rows) for piece, rows in zip(pieces, before, strict=True)]

    def _split(self, batch: Batch) -> list[Batch]:
        pieces = batch.split(self._rows_per_forward(batch.tokens_BS.shape[1]))
        if not self._takes_documents:
            return pieces
        return [piece.with_documents(whole_rows_apart=self._whole_rows_apart) for piece in pieces]

    def _rows_per_forward(self, seq_len: int) -> int:
        """Return how many rows of a length a forward has: as many tokens as those of the longest stage."""
        rows = self.plan.rows_per_forward
        return rows * self.config.seq_len // seq_len if seq_len in self.config.seq_lens else rows

    def _evaluation_after(self, step: int) -> "_Evaluation":
        rows = self._evaluate()
        measured = measured_totals(self.engine.model, self.plan)
        return _Evaluation(step, rows, held_out_fields(self.engine.model, measured))

    def _evaluate(self) -> dict[str, HeldOutRows]:
        """Return the loss of the rows of the held-out batches, by name or as ``UNNAMED``."""
        self._tell("evaluating", "evaluation")
        with self._evaluating():
            return {name: self._evaluate_on(batches()) for name, batches in self.validation.items()}

    def _evaluate_on(self, batches: Iterable[Batch]) -> HeldOutRows:
        microbatches = [micro.to(self.device) for batch in batches for micro in self._microbatches(batch)]
        return self.engine.evaluate(microbatches) if microbatches else HeldOutRows((), ())

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch dropout off inside the block. Without dropout the mode stays: another one would compile anew."""
        self.engine.model.train(not self._drops_out)
        try:
            yield
        finally:
            self.engine.model.train()

    def _checkpoint_if_due(self, sinks: MetricsSinks | None, *, stop: bool) -> None:
        limit = self.config.training.max_skipped_steps
        if self._skipped_in_a_row > limit:
            raise NonFiniteError(
                f"the loss or gradient was not finite for {self._skipped_in_a_row} steps in a row, "
                f"up to step {self.step}; training.max_skipped_steps={limit}"
            )
        if self.is_over and not self._num_sound_steps:
            raise NonFiniteError(
                f"the loss or gradient was not finite in any of the {self.step} steps, so nothing was trained"
            )
        stop = stop and not self.is_over
        if stop or self.is_over or self._interval.is_due(self.step):
            self._tell("saving a checkpoint", "checkpoints")
            step_seconds = self._interval.seconds_per_step(self.step)
            began = time.perf_counter()
            if sinks is not None:
                sinks.flush()  # a resumed run does not repeat this step, so its record must not be lost
            evaluation = self._last_eval if self._last_eval.step == self.step else _Evaluation()
            state = {
                "tokens": self.tokens,
                "eval_loss": evaluation.loss,
                "eval_losses": evaluation.named_losses,
                "sound_steps": self._num_sound_steps,
                "loss": self._last_loss,
                "data": self.batches.state_dict(),
                "loss_scale": self.loss_scale.state_dict(),
                "spikes": self._spikes.state_dict(),
                "patience": self._patience.state_dict(),
                "checkpoint_every": self._interval.num_steps,
            }
            self.checkpointer.save(self.step, self.engine, state)
            if self._interval.is_auto:
                self._choose_interval(time.perf_counter() - began, step_seconds)
            self._tell_step()
        if stop:
            raise StoppedError(f"stopped after step {self.step} of {self.total_steps}")
        self.checkpointer.poll()

    def _choose_interval(self, save_seconds: float, step_seconds: float) -> None:
        """Choose when to save next, from the longest times that any rank has measured: all ranks choose alike."""
        before = self._interval.num_steps
        save, step = most_over_ranks(round(1e6 * save_seconds), max(1, round(1e6 * step_seconds)))
        chosen = self._interval.choose(self.step, 1e-6 * save, 1e-6 * step)
        if is_first_rank():
            write_json(self.run.checkpoint_interval, {**asdict(chosen), "reason": chosen.reason}, durable=False)
            if chosen.num_steps != before:
                logger.info("%s", chosen.reason)

    @property
    def ended_early(self) -> str:
        """Why the run ends before ``total_steps``, as a clause; empty if it does not."""
        return self._patience.verdict

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""
        return self.step >= self.total_steps or self.ended_early != ""

    def _mfu(self, tokens_per_second: float, seq_len: int) -> float | None:
        return model_flops_utilisation(
            tokens_per_second, self.config.spec, seq_len, self.plan.world_size, self._peak_flops
        )

    @cached_property
    def _peak_flops(self) -> float | None:
        """The device's peak in bf16; on the CPU, the rate of matrix products, measured; None for an unknown GPU."""
        if self.device.type == "cpu":
            return product_rate(self.config.training.precision)
        gpu = recognise_gpu(torch.cuda.get_device_name(self.device))
        return gpu.bf16_flops if gpu else None


@dataclass(frozen=True)
class _Evaluation:
    """The held-out rows of an evaluation; without any before the first one."""

    step: int = 0
    """The step that it came after."""
    rows: Mapping[str, HeldOutRows] = field(default_factory=dict)
    """By name, or as ``UNNAMED``."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the objective measured of all rows beside the loss, by the field of the record."""

    @cached_property
    def joined(self) -> HeldOutRows | None:
        """All rows."""
        return HeldOutRows.joined(self.rows.values()) if self.rows else None

    @property
    def loss(self) -> float | None:
        """The mean over all rows."""
        return None if self.joined is None else self.joined.mean

    @property
    def named(self) -> dict[str, HeldOutRows]:
        """The rows that have a name."""
        return {name: rows for name, rows in self.rows.items() if name != UNNAMED}

    @property
    def named_losses(self) -> dict[str, float]:
        """The mean of each name."""
        return {name: rows.mean for name, rows in self.named.items()}


@dataclass(frozen=True, eq=False)
class _StepUnderWay:
    """A step that the device has been given and whose results have not been read yet."""

    step: int
    tokens: int
    """Tokens trained on with this step."""
    num_tokens: int
    """Tokens of this step."""
    seq_len: int
    """Tokens of each of its sequences."""
    loss_scale: float
    clock: StepClock
    values: Tensor
    """Loss, norm, whether it updated; and the most over all ranks of: bytes alive, their peak, bytes taken, whether to
    stop, and the seconds of the step read last. In host memory, once the device has done the step."""
    routing: Tensor | None
    """The result of ``routing_totals``, likewise."""
    measured: Tensor | None
    """The result of ``measured_totals``, likewise."""
    position: Mapping[str, Any]
    """The position in the data after this step's."""
