"""Trace a real step of one rank's part of a model, on fake tensors and among fake ranks, with a byte counter."""

import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.batch import Batch, Documents, ones_per_token
from llama_core.parallel import apply
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.pipeline import _Execution
from llama_core.parallel.zero import DataParallel, Sharded
from llama_core.planning.kernels import attention_kernel, runs_on_cuda
from llama_core.planning.memory.profile import Category, Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.before import with_rows_before
from llama_core.rehearsal.byte_counter import ByteCounter, replaced
from llama_core.rehearsal.compose import BytesChange, Closing, Hosting, Recording, Step, covering_actions, steps
from llama_core.rehearsal.folding import FoldedLayers, FoldedStage, folded_stage, state_of
from llama_core.rehearsal.kernels import kernels_of
from llama_core.rehearsal.labels import GradientBuckets, Labels
from llama_core.rehearsal.transfers import axes_by_group, on_axes
from llama_core.schedules.actions import Action
from llama_core.training.engine import NativeEngine, build_model, train_step
from llama_core.training.optimizer import build_optimizer

_UNLABELLED: tuple[Category, ...] = ("temporaries",)


@dataclass(frozen=True)
class Trace:
    """One traced optimizer step of one rank."""

    counter: ByteCounter
    """Has one segment before the first action, one or more per step of the rank's work, one without meaning before the
    closing, one for the update, and one after the step."""
    met: list[Step]
    """The steps of the rank's work."""
    stages: tuple[FoldedStage, ...]
    """The stages of the rank, with the layers that ran."""

    @cached_property
    def recording(self) -> Recording | None:
        """The recording from which other optimizer steps are composed; None if layers that ran cannot stand for others.

        They can if the layers beside each gap are alike, and if a step composed with all layers ends with the bytes
        that are then alive.
        """
        segments = self.counter.segments
        parts: list[list[tuple[int | None, BytesChange]]] = []
        for segment, after in pairwise(segments):
            if segment.layer is None:
                parts.append([])
            parts[-1].append((segment.layer, BytesChange.of(segment, after.start)))
        ((_, prologue),), *worked, _, closing, ((_, update),) = parts
        changes: dict[Step, BytesChange] = {}
        level = segments[0].start.categories.copy()
        level.update(prologue.growth)
        for step, part in zip(self.met, [*worked, closing], strict=True):
            if isinstance(step, Closing) and any(
                level[name] != held for name, held in segments[-3].start.categories.items()
            ):
                return None
            change = self.stages[step.slot].unfolded(part)
            if change is None:
                return None
            changes[step] = change
            level.update(change.growth)
        return Recording(
            segments[0].start.categories.copy(), prologue, changes, segments[-2].start.categories.copy(), update
        )


def trace_rank(
    config: RunConfig, plan: ParallelPlan, rank: int, *, in_full: bool = False, known: Collection[Step] = ()
) -> Trace:
    """Run an optimizer step of one rank of ``plan`` without allocating, and trace it.

    The other ranks do not exist: during the trace, a fake process group completes every transfer at once without
    moving data.

    Args:
        config: the resolved configuration (no ``auto`` left).
        plan: how the work is divided.
        rank: the rank to trace.
        in_full: run all microbatches and layers, not just enough to cover every step of the rank's work.
        known: steps that need not be covered.

    Raises:
        PlanError: if the plan has no such rank, or a process group exists already.
    """
    traced = _traced(config, plan, rank, in_full=in_full, folds=not in_full, known=known)
    if in_full or traced.recording is not None:
        return traced
    return _traced(config, plan, rank, in_full=False, folds=False, known=known)


def _traced(
    config: RunConfig, plan: ParallelPlan, rank: int, *, in_full: bool, folds: bool, known: Collection[Step]
) -> Trace:
    with alone_among(plan.world_size, rank), kernels_of(config, plan):
        model = build_model(config, plan, torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return trace_steps(model, config, in_full=in_full, folds=folds, known=known)


def trace_steps(
    model: ParallelModel, config: RunConfig, *, in_full: bool, folds: bool = False, known: Collection[Step] = ()
) -> Trace:
    """Return the trace of a step that begins with the optimizer's states; see also ``trace_rank``.

    ``model`` has no memory yet; its tensors may be real or fake.
    """
    counter = ByteCounter(on_cuda=runs_on_cuda(config))
    with counter:
        tracer = _Tracer(model.materialize(), config, counter, folds=folds)
        whole = tuple(tracer.pipeline.actions)
        tracer.create_states()
        tracer.left_out.hide()
        counter.forget_segments()
        actions = whole if in_full else covering_actions(whole, tracer.hosting, known)
        tracer.take_step(actions)
    axes = axes_by_group(model.mesh)
    for segment in counter.segments:
        segment.transfers = on_axes(segment.transfers, axes)
    return Trace(counter, steps(actions, tracer.hosting), tracer.stages)


class _Tracer:
    """A model, its optimizer, and the hooks that report them to the counter."""

    def __init__(self, model: ParallelModel, config: RunConfig, counter: ByteCounter, *, folds: bool) -> None:
        self.plan = model.plan
        self.config = config
        self.counter = counter
        self.model = model.model
        self.data = model.data
        self.pipeline = model.pipeline
        self.gradients = model.gradients
        self.copies = model.cast_weights.copies if model.cast_weights is not None else []
        self.hosting = Hosting.of(model.plan, config.spec, self.pipeline.rank)
        self.optimizer = build_optimizer(model.model, config.training)
        self.engine = NativeEngine(model, self.optimizer)
        self.labels = Labels(counter, model.model)
        self.buckets = GradientBuckets(model.model, model.plan)
        counter.relabel(self.buckets.gradients.values(), "gradients")
        every: list[Any] = list(self.pipeline.layers)
        if folds:
            every = [folded_stage(self.plan, config.spec, stage) for stage in range(len(every))]
        self.pipeline.layers = tuple(every)
        self.stages = tuple(every[stage] if folds else FoldedStage(every[stage], []) for stage in self.hosting.stages)
        self.left_out = FoldedLayers(self.model, self.stages)
        for stage in self.stages:
            for layer in stage.watched:
                self._watch(layer)

    def create_states(self) -> None:
        """Update the weights with gradients of zero, which makes the states that every later step begins with."""
        counter = self.counter
        training = self.config.training
        _gather_once(self.data)
        counter.relabel(self.model.parameters(), "weights")  # fully_shard has padded uneven shards
        counter.relabel(self.model.buffers(), "weights")
        counter.relabel(self.copies, "weights")
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.engine.update(
            torch.zeros(()),
            learning_rate=training.learning_rate,
            max_grad_norm=training.max_grad_norm,
            loss_scale=1.0,
            on_phase=self.labels.enter,
        )
        counter.relabel((s for state in self.optimizer.state.values() for s in state.values()), "moments")

    def take_step(self, actions: Sequence[Action]) -> None:
        """Take an optimizer step that runs ``actions`` only, and begin the segment after it."""
        counter = self.counter
        training = self.config.training
        self._inputs_since: int | None = counter.num_born
        self.pipeline.actions = tuple(actions)
        self.buckets.expect(actions)
        num_forwards = self.plan.build_schedule().num_microbatches
        microbatches = [_fake_batch(self.config, self.plan) for _ in range(num_forwards)]
        for batch in microbatches:
            counter.relabel(batch.tensors(), "activations")
        with (
            self._spans_of_messages(),
            replaced(self.gradients, "complete", self._closing(self.gradients.complete)),
            replaced(apply, "prepare", lambda *args: None),  # its forward is counted as those of the step
        ):
            train_step(
                self.engine,
                microbatches,
                learning_rate=training.learning_rate,
                max_grad_norm=training.max_grad_norm,
                on_phase=self._enter,
            )
        counter.begin_segment()

    def _enter(self, phase: Phase) -> None:
        if self._inputs_since is not None:  # context parallelism has cut its part out of every microbatch
            self.counter.relabel_since(self._inputs_since, _UNLABELLED, "activations")
            self._inputs_since = None
        self.counter.begin_segment()
        self.labels.enter(phase)
        self.buckets.enter(phase)

    def _watch(self, layer: int) -> None:
        """Begin a segment with every forward and backward of a layer."""

        def begin(*_: object) -> None:
            self.counter.begin_segment(layer)

        def begin_with_gradient(module: object, args: object, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(begin)  # type: ignore[no-untyped-call]

        block = self.model.layers[str(layer)]
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(begin_with_gradient)

    def _closing(self, complete: Callable[[], None]) -> Callable[[], None]:
        """Return ``complete``, which begins what follows the last computation, with the gradients of all layers."""

        def complete_all() -> None:
            self.counter.begin_segment()
            self.left_out.accumulate(self.buckets.gradients)
            self.counter.begin_segment()
            complete()

        return complete_all

    @contextmanager
    def _spans_of_messages(self) -> Iterator[None]:
        """Begin a segment with every send and receive, and with every tensor that is dropped after it was sent."""

        def beginning(function: Callable[..., None]) -> Callable[..., None]:
            def run(*args: Any) -> None:
                self.counter.begin_segment()
                function(*args)

            return run

        def one_by_one(forget: Callable[[Any], None]) -> Callable[[Any], None]:
            def run(execution: Any) -> None:
                sent = execution.leaving[:]
                execution.leaving.clear()
                while sent:
                    execution.leaving.append(sent.pop(0))
                    self.counter.begin_segment()
                    forget(execution)

            return run

        with ExitStack() as stack:
            for name in ("_send_output", "_send_input_gradient", "_receive"):
                stack.enter_context(replaced(_Execution, name, beginning(getattr(_Execution, name))))
            stack.enter_context(replaced(_Execution, "_forget_sent", one_by_one(_Execution._forget_sent)))
            yield


def _gather_once(data: DataParallel) -> None:
    """Do now what a model's first forward would do: pad uneven shards, make memory to gather in, gather every stage."""
    if isinstance(data, Sharded):
        state_of(data.root)._lazy_init()
        for group in data.groups:
            group.unshard()
        data.release()
        data.call = data.model


@contextmanager
def alone_among(world_size: int, rank: int, backend: str = "fake") -> Iterator[None]:
    """Act as one of several ranks while the others do not exist.

    Args:
        world_size: number of ranks.
        rank: the one to act as.
        backend: torch's name for process groups that need no others.

    Raises:
        PlanError: if there is no such rank, or this process already has a process group.
    """
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is not one of the plan's ranks 0 to {world_size - 1}")
    if dist.is_initialized():
        raise PlanError(
            f"this process is already rank {dist.get_rank()} of {dist.get_world_size()}, and a dry run needs a process "
            "without a process group; rehearse before creating the group"
        )
    if world_size == 1:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_without_torchs_advice())
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))  # a process group installs its own
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_clear_sharding_prop_cache)  # it caches meshes, but a later equal mesh has its own groups
        stack.callback(dist.destroy_process_group)
        yield


@contextmanager
def _without_torchs_advice() -> Iterator[None]:
    """Silence torch's advice on how to use fewer collectives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        logger = logging.getLogger("torch.distributed.tensor._redistribute")
        with replaced(logger, "disabled", True):
            yield


def _fake_batch(config: RunConfig, plan: ParallelPlan) -> Batch:
    rows = plan.rows_per_forward
    tokens = torch.zeros((rows, config.seq_len), dtype=torch.int64)
    told = attention_kernel(config, plan).told
    positions = None if told == "none" else torch.zeros_like(tokens)
    # one document per row: the number of documents hardly changes the memory
    documents = Documents(torch.zeros(rows + 1, dtype=torch.int32), config.seq_len) if told == "varlen" else None
    values = ones_per_token(tokens, config.objective.values_per_token)
    batch = Batch(tokens, torch.zeros_like(tokens), positions, documents, values)
    return with_rows_before(batch, config.objective)
