"""The training engine: a model and its optimizer behind one interface, parallelised by torch or by DeepSpeed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import CheckpointError, PlanError
from llama_core.models import nf4
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs
from llama_core.models.layers import local_part
from llama_core.models.llama import Llama, packed_modules
from llama_core.models.objective import build_objective
from llama_core.optimizers.traits import RATE
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.balance import move_balance_biases
from llama_core.parallel.deepspeed import DeepSpeedModel
from llama_core.parallel.gradients import Update
from llama_core.parallel.pipeline import OnPhase
from llama_core.parallel.ranks import PATIENCE, first_complaint
from llama_core.planning.kernels import attention_kernel
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import LAYOUT
from llama_core.records.checksums import FileSum
from llama_core.training.optimizer import build_optimizer
from llama_core.training.reading import PlainPlanner, PlainReader
from llama_core.training.saving import BackgroundSaver

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}
"""The dtype of activations for each precision."""
CLIP_EPSILON = 1e-6  # the value in torch's clip_grad_norm_, so that norms near the limit are clipped the same

# States are keyed by parameter name, because each pipeline rank holds different parameters. Frozen parameters are not
# saved, and strict=True would reject their absence; an entry missing from a checkpoint still fails in dcp.load.
_STATE_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False)


class Engine(Protocol):
    """One rank's part of a model in training. All ranks call each method together."""

    model: Llama
    waits: bool
    """Whether a step waits for the device, so that the host cannot run ahead of it."""

    @property
    def own_loss(self) -> Tensor:
        """The sum of the losses that this rank has computed in the last step, a scalar; 0 if others have the head."""

    def initialize_weights(self, seed: int) -> None:
        """Draw the initial weights; a seed gives the same weights under every plan."""

    def set_weights(self, fill: Callable[[Llama], None]) -> None:
        """Call ``fill`` on the rank's model, or on one part of it after another, to set the parameters."""

    def non_finite_weights(self) -> Iterator[str]:
        """Yield the names of the weights of which this rank holds a NaN or infinity; reads all of its weights."""

    def replicated(self) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Tensor]]]:
        """Yield each parameter that this rank updates by itself, as others may update a replica of it.

        Each comes with its name, and its optimizer states by name.
        """

    def forward_backward(self, microbatches: Sequence[Batch], *, loss_scale: float, on_phase: OnPhase) -> Tensor:
        """Compute the gradients of one step, times ``loss_scale``, and return its mean loss over all ranks."""

    def update(
        self,
        loss: Tensor,
        *,
        learning_rate: float,
        max_grad_norm: float,
        loss_scale: float,
        on_phase: OnPhase,
    ) -> Update:
        """Clip the gradients by their global norm, update the weights with them, and drop them.

        The update is skipped if the loss or the norm is not finite on any rank.
        """

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[list[float], list[int]]:
        """Return the loss of every row of all ranks, summed over what counts in it, and how much that is.

        The rows come in turns: the first of each data-parallel rank, then the second. Every rank has as many.
        """

    def measure_rows(
        self, measure: Callable[[HeadInputs, Batch], Tensor], num_values: int, microbatches: Sequence[Batch]
    ) -> Tensor:
        """Return what ``measure`` makes of every row of all ranks, in turns: [rows, num_values], without gradients.

        Every rank has as many rows, all of one length. Where ranks cut rows, what they return is added up.
        """

    def save(self, folder: Path) -> "Future[dict[str, FileSum]]":
        """Start writing the current weights and optimizer states of all ranks to ``folder``.

        The future's result on the first rank is the checksum of every file, by its path in ``folder``.
        """

    def end_saving(self) -> None:
        """Give up the memory that saving keeps from one time to the next."""

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote.

        Raises:
            PlanError: if it was written under a plan whose state this engine cannot read.
        """


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step, as tensors on the device, so that a step need not wait for them."""

    loss: Tensor
    """Mean loss over what counts in all microbatches, fp32 scalar."""
    grad_norm: Tensor
    """Global gradient norm before clipping, fp32 scalar."""
    updated: Tensor
    """Whether the weights were updated, a boolean scalar; False if the loss or the norm was not finite."""


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Switch dropout off inside the block. Without dropout the mode stays: another one would compile anew."""
    engine.model.train(not drops_out(engine.model.spec))
    try:
        yield
    finally:
        engine.model.train()


def drops_out(spec: ModelSpec) -> bool:
    """Return whether a model has dropout in training."""
    return spec.lora is not None and spec.lora.lora_dropout > 0


def train_step(
    engine: Engine,
    microbatches: Sequence[Batch],
    *,
    learning_rate: float,
    max_grad_norm: float,
    loss_scale: float = 1.0,
    on_phase: OnPhase = lambda phase: None,
    may_update: Tensor | None = None,
) -> StepResult:
    """Accumulate the gradients of ``microbatches`` over all ranks, clip them, and update the weights once.

    The loss is the mean over all that counts in the step, so it does not depend on how the step is cut into
    microbatches and ranks.

    Args:
        engine: this rank's part of the model.
        microbatches: this rank's share of the step's sequences, in order, on its device.
        learning_rate: rate of this step.
        max_grad_norm: global norm above which gradients are scaled down.
        loss_scale: multiplies the loss in the backward; the gradients are divided by it afterwards.
        on_phase: called as each forward, backward and optimizer phase begins.
        may_update: False to skip the update as if the loss were not finite, a boolean scalar on the device; None for
            True. An engine that waits does not heed it.
    """
    loss = engine.forward_backward(microbatches, loss_scale=loss_scale, on_phase=on_phase)
    if may_update is not None:
        loss = loss.masked_fill(~may_update, math.nan)
    grad_norm, updated = engine.update(
        loss, learning_rate=learning_rate, max_grad_norm=max_grad_norm, loss_scale=loss_scale, on_phase=on_phase
    )
    return StepResult(loss, grad_norm, updated)


class NativeEngine:
    """A model parallelised by torch, and its optimizer. A step reads no value from the device, so it never waits.

    Args:
        parallel: this rank's part of the model, materialized.
        optimizer: the fused optimizer of its parameters.
    """

    waits = False

    def __init__(self, parallel: ParallelModel, optimizer: Optimizer) -> None:
        self.parallel = parallel
        self.optimizer = optimizer
        self.model = parallel.model
        self._saver = BackgroundSaver(parallel.device)
        self.initialize_weights = parallel.initialize_weights
        self.forward_backward = parallel.forward_backward
        self.evaluate = parallel.evaluate
        self.measure_rows = parallel.measure_rows

    @property
    def own_loss(self) -> Tensor:
        """The sum of the losses that this rank has computed in the last step."""
        return self.parallel.own_loss

    def set_weights(self, fill: Callable[[Llama], None]) -> None:
        """Call ``fill`` on the rank's model to set its parameters."""
        fill(self.model)
        self.parallel.weights_changed()

    def non_finite_weights(self) -> Iterator[str]:
        """Yield the names of the weights of which this rank holds a NaN or infinity."""
        for name, parameter in self.model.named_parameters():
            if not local_part(parameter.detach()).isfinite().all():
                yield name
        for name, module in packed_modules(self.model):
            if not nf4.is_finite(module):
                yield name

    def replicated(self) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Tensor]]]:
        """Yield this rank's parameters, with their names and optimizer states."""
        for name, parameter in self.model.named_parameters():
            states = self.optimizer.state.get(parameter, {})
            yield name, parameter, {kind: state for kind, state in states.items() if isinstance(state, Tensor)}

    def update(
        self,
        loss: Tensor,
        *,
        learning_rate: float,
        max_grad_norm: float,
        loss_scale: float,
        on_phase: OnPhase,
    ) -> Update:
        """Clip the gradients by their global norm, update the weights with them, and drop them."""
        grad_norm = self.parallel.gradients.norm() / loss_scale
        updated = torch.isfinite(loss) & torch.isfinite(grad_norm)
        on_phase("optimizer")
        clipped = (max_grad_norm / (grad_norm + CLIP_EPSILON)).clamp(max=1.0)
        # the fused kernel divides the gradients by grad_scale, and changes nothing if found_inf is 1
        optimizer: Any = self.optimizer
        optimizer.grad_scale = (loss_scale / clipped).float()
        optimizer.found_inf = (~updated).float()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        move_balance_biases(self.model, updated)
        self.parallel.weights_changed()
        self.parallel.data.end_step(updated)
        return Update(grad_norm, updated)

    def save(self, folder: Path) -> "Future[dict[str, FileSum]]":
        """Copy the weights and optimizer states; every rank then writes its shards in the background.

        Raises:
            OSError: if the folder cannot be written to; the future raises later errors.
        """
        return self._saver.save(self._state(), folder, self._writers)

    def end_saving(self) -> None:
        """Give up the memory that saving keeps from one time to the next."""
        self._saver.close()

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer states written by any number of ranks under any plan.

        Raises:
            PlanError: if DeepSpeed wrote them.
            CheckpointError, CheckpointException: on every rank, if they cannot be read.
        """
        if (folder / LAYOUT).exists():
            raise PlanError(
                f"{folder} was written by DeepSpeed, and only DeepSpeed can read its optimizer states; "
                "continue with parallel.zero_backend=deepspeed, or start a run from its weights (training.init_from)"
            )
        problem = ""
        try:
            reader = PlainReader(folder)
        except CheckpointError as error:
            problem = str(error)
        if problem := first_complaint(problem):
            raise CheckpointError(problem)
        state = self._state()
        # how weights are updated is for this run to say, and it may have changed since
        settings = {name: value for name, value in state["optimizer"].items() if name.startswith("param_groups.")}
        dcp.load(
            state,
            storage_reader=reader,
            planner=PlainPlanner(),
            process_group=self._writers,
            no_dist=self._writers is None,
        )
        state["optimizer"] |= settings
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_STATE_OPTIONS,
        )
        self.parallel.weights_changed()
        self.parallel.data.end_step(torch.tensor(False))  # what earlier gradients left belongs to other weights

    @cached_property
    def _writers(self) -> dist.ProcessGroup | None:
        """The process group of the writing threads, which communicate while training does too."""
        return dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None

    def _state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer, options=_STATE_OPTIONS)
        return {"model": weights, "optimizer": states}


def build_model(
    config: RunConfig,
    plan: ParallelPlan,
    device: torch.device,
    *,
    spec: ModelSpec | None = None,
    compute_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> ParallelModel:
    """Return this rank's part of the model of ``config``, parallelised by torch; it has no memory yet.

    Args:
        config: the resolved configuration.
        plan: how the model is divided.
        device: where this rank computes.
        spec: another architecture than that of ``config``.
        compute_dtype: another dtype of activations and matrix products, also of those that the run computes in fp8.
        weight_dtype: dtype of the parameters.

    Raises:
        PlanError: if the plan's number of ranks is not the number that was started.
    """
    precision = config.training.precision
    return ParallelModel(
        spec or config.spec,
        plan,
        device=device,
        compute_dtype=compute_dtype or COMPUTE_DTYPES[precision],
        weight_dtype=weight_dtype,
        fp8=precision == "fp8" and compute_dtype is None,
        documents=attention_kernel(config, plan, spec).told,
        objective=build_objective(config.training),
    )


def build_engine(config: RunConfig, plan: ParallelPlan, device: torch.device) -> Engine:
    """Return this rank's engine: its part of the model of ``config``, with uninitialised weights, and the optimizer.

    Raises:
        EnvironmentMismatchError: if the plan needs a package that is missing.
        PlanError: if the plan's number of ranks is not the number that was started.
    """
    new_optimizer = partial(build_optimizer, training=config.training)
    if plan.zero_backend == "deepspeed":
        return DeepSpeedModel(
            config.spec,
            plan,
            device=device,
            compute_dtype=COMPUTE_DTYPES[config.training.precision],
            build_optimizer=new_optimizer,
            objective=build_objective(config.training),
        )
    parallel = build_model(config, plan, device).materialize()
    return NativeEngine(parallel, new_optimizer(parallel.model))
