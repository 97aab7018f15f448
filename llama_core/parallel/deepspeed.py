"""The second ZeRO backend, DeepSpeed: it shards like ``zero.Sharded``, and can keep its shards in host memory.

Weights, gradients and moments are DeepSpeed's to keep, so that it replaces the whole of ``apply.ParallelModel`` and
not only its data parallelism. Only this file knows DeepSpeed.

Bytes per parameter that a rank of N holds between steps, w being 2 in bf16 and 4 in fp32:

====== ================================================== ==============================================
stage  held                                               and from the first to the last backward
====== ================================================== ==============================================
1      w + 12/N; in bf16 also 4, for the gradients        gradients whole, then 4/N
2      w + 12/N                                           gradients reduced to 4/N after every backward
3      (w + 12)/N and 4/N for the gradients               weights gathered for every block
====== ================================================== ==============================================

The 12 are fp32 weights and moments. They are held besides the weights that compute, in fp32 too. At stage 3 the
buffer in which gradients are sent is held as well.

Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021, arXiv:2101.06840, for the host memory.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from llama_core.config.models import ModelSpec
from llama_core.errors import CheckpointError, EnvironmentMismatchError, PlanError
from llama_core.models.batch import Batch
from llama_core.models.layers import Block, use_all_scores
from llama_core.models.llama import Llama, initialize_weights
from llama_core.models.lora import with_adapters
from llama_core.parallel.gradients import Update
from llama_core.parallel.pipeline import OnPhase
from llama_core.parallel.ranks import check_started, is_first_rank
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import LAYOUT
from llama_core.records.files import read_json, write_json

MAX_BUCKET_ELEMENTS = 50_000_000
"""Gradients or weights that are sent at once at most, in a buffer of that size."""
CHECKPOINT_TAG = "deepspeed"
"""The folder inside a checkpoint that holds what DeepSpeed writes."""


def deepspeed_config(
    plan: ParallelPlan, spec: ModelSpec, *, device_type: str, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a plan.

    ``gradient_compression=bf16`` sends gradients in bf16; otherwise they travel in fp32. DeepSpeed's own quantisation
    to 4 bits (ZeRO++) is not offered: it runs on CUDA at stage 3 alone.

    Args:
        plan: a plan with ``zero_backend=deepspeed``.
        spec: the model.
        device_type: ``cuda`` or ``cpu``.
        compute_dtype: fp32 or bf16; the weights that are updated are fp32 in either case.
    """
    host_memory = {"device": "cpu", "pin_memory": device_type == "cuda"}
    bucket = min(MAX_BUCKET_ELEMENTS, spec.num_parameters)
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # norms stay whole, as gathering one takes as long as gathering a matrix
        "stage3_param_persistence_threshold": spec.hidden_size,
        # while a block computes, the next one's weights are gathered; without the limit those of all others would be
        "stage3_max_live_parameters": 2 * (spec.layer_parameters + spec.embedding_parameters),
        "stage3_prefetch_bucket_size": min(MAX_BUCKET_ELEMENTS, spec.layer_parameters),
        "stage3_max_reuse_distance": 0,
        # it would replace torch.nn.functional.linear for the whole process
        "memory_efficient_linear": False,
    }
    if plan.offload != "none":
        zero["offload_optimizer"] = host_memory
    if plan.offload == "parameters":
        zero["offload_param"] = host_memory
    return {
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "bf16": {"enabled": compute_dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16" if plan.gradient_compression == "bf16" else "fp32",
        "zero_optimization": zero,
        # the same AdamW as without DeepSpeed, whose own would have to be compiled where it runs
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


class DeepSpeedModel:
    """A model that DeepSpeed trains, optimizer included.

    Args:
        spec: the architecture of the model.
        plan: how it is divided; the default process group has to exist.
        device: where this rank computes.
        compute_dtype: dtype of activations, matrix products and the weights in them; the updated weights are fp32.
        build_optimizer: makes the optimizer of a module's parameters; at stage 3 these are without elements by then.

    Raises:
        EnvironmentMismatchError: if the package ``deepspeed`` is missing.
        PlanError: if the plan has another number of ranks than were started.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        build_optimizer: Callable[[nn.Module], Optimizer],
    ) -> None:
        check_started(plan)
        self.plan, self.device = plan, device
        self._deepspeed = _import_deepspeed(device.type)
        config = deepspeed_config(plan, spec, device_type=device.type, compute_dtype=compute_dtype)
        self.model = self._build(spec, config, compute_dtype)
        if plan.attention == "math":
            use_all_scores(self.model)
        recompute_and_compile(self.model, plan, device)
        if plan.zero_stage == 3:
            # A block is gathered whole, before it is computed again: selective recomputation counts every operator in
            # its midst. DeepSpeed lets its weights go with the gradient of its input, which under adapters the first
            # one has only if asked to.
            self._deepspeed.utils.set_z3_leaf_modules(self.model, [Block])
            embedding = self.model.get_submodule("tok_embeddings")
            embedding.register_forward_hook(lambda module, inputs, out: out.requires_grad_())
        with redirect_stdout(StringIO()):  # stage 1 prints its memory use in bf16
            self.engine, *_ = self._deepspeed.initialize(
                model=self.model, optimizer=build_optimizer(self.model), config=config
            )

    def _build(self, spec: ModelSpec, config: dict[str, Any], compute_dtype: torch.dtype) -> Llama:
        """Return the model with undefined weights: at stage 3 this rank's shards alone are ever held."""
        if self.plan.zero_stage < 3:
            with torch.device("meta"):
                model = with_adapters(Llama(spec, compute_dtype=compute_dtype))
            return model.to_empty(device=self.device)
        with self._deepspeed.zero.Init(config_dict_or_path=config):
            return with_adapters(Llama(spec, compute_dtype=compute_dtype))

    def initialize_weights(self, seed: int) -> None:
        """Draw the initial weights: for one seed the same ones whatever the plan."""
        self.set_weights(partial(initialize_weights, seed=seed))

    def set_weights(self, fill: Callable[[Llama], None]) -> None:
        """Have ``fill`` set the weights, layer by layer: every rank holds one layer whole at a time."""
        for part in self._parts():
            fill(part)
            filled = {self.model.get_parameter(name): value.detach() for name, value in part.named_parameters()}
            with torch.no_grad(), self._deepspeed.zero.GatheredParameters(list(filled), modifier_rank=0):
                for parameter, value in filled.items():
                    parameter.copy_(value)
            for parameter, value in filled.items():
                self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)

    def _parts(self) -> Iterator[Llama]:
        """Yield the layers of the model one by one, whole, in fp32 and with undefined weights."""
        for layer in range(self.model.spec.num_layers):
            with torch.device("meta"):
                part = with_adapters(Llama(self.model.spec, layers=[layer]))
            yield part.to_empty(device=self.device)

    def forward_backward(self, microbatches: Sequence[Batch], *, loss_scale: float, on_phase: OnPhase) -> Tensor:
        """Compute the gradients of one step and return its loss.

        Args:
            microbatches: this rank's share of the step's sequences.
            loss_scale: 1: bf16 and fp32 need no other, and no plan has DeepSpeed train in fp16.
            on_phase: told as each forward and backward begins.

        Returns:
            The mean cross-entropy over the target tokens of all ranks, a scalar.

        Raises:
            ValueError: if ``loss_scale`` is not 1.
        """
        if loss_scale != 1:
            raise ValueError(f"loss_scale={loss_scale} with DeepSpeed, which would scale the loss again")
        num_targets = self._num_targets(microbatches).clamp(min=1)
        # DeepSpeed takes the mean over the ranks, and the loss is the mean over all targets
        scale = self.plan.dp / num_targets
        total = torch.zeros((), device=self.device)
        for batch in microbatches:
            on_phase("forward")
            self.engine.set_gradient_accumulation_boundary(batch is microbatches[-1])
            loss = self._loss_sum(batch)
            total += loss.detach()
            on_phase("backward")
            # zero, or NaN with a loss that is not finite: DeepSpeed leaves the update out if the gradient is not
            flaw = total - total
            self.engine.backward(loss * (scale + flaw), scale_wrt_gas=False)
        return self._sum_over_ranks(total) / num_targets

    def update(
        self, loss: Tensor, *, learning_rate: float, max_grad_norm: float, loss_scale: float, on_phase: OnPhase
    ) -> Update:
        """Clip the gradients by their global norm and update the weights with them, unless they are not finite.

        Args:
            loss: what ``forward_backward`` returned; where it is not finite, neither are the gradients.
            learning_rate: rate of this step.
            max_grad_norm: global norm above which gradients are scaled down.
            loss_scale: 1, as for ``forward_backward``.
            on_phase: told that the optimizer begins.
        """
        on_phase("optimizer")
        optimizer = self.engine.optimizer
        optimizer.clip_grad = max_grad_norm
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        return Update(grad_norm, self.engine.was_step_applied())

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        """Return the cross-entropy summed over the target tokens of all ranks, and how many they were.

        Args:
            microbatches: this rank's share, of as many microbatches as every other rank's.
        """
        total = torch.zeros((), device=self.device)
        for batch in microbatches:
            total += self._loss_sum(batch)
        self.engine.empty_partition_cache()  # weights that it has gathered for a backward
        return float(self._sum_over_ranks(total)), int(self._num_targets(microbatches))

    def save(self, folder: Path) -> "Future[None]":
        """Write the weights and moments of all ranks to ``folder``, and return when they are written."""
        self.engine.save_checkpoint(str(folder), tag=CHECKPOINT_TAG, save_latest=False)
        if is_first_rank():
            write_json(folder / LAYOUT, self._layout())
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote to ``folder``, wherever the folder is now; all ranks at once.

        Raises:
            PlanError: if it was not written by as many ranks at the same stage and in the same precision.
        """
        layout, own = read_json(folder / LAYOUT) if (folder / LAYOUT).exists() else None, self._layout()
        if layout != own:
            raise PlanError(
                f"{folder} was written by {_in_words(layout)}; DeepSpeed reads it under no other plan, "
                f"and this one is of {_in_words(own)}"
            )
        self.engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG)

    def _layout(self) -> dict[str, Any]:
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        return {"num_ranks": self.plan.world_size, "zero_stage": self.plan.zero_stage, "compute_dtype": dtype}

    def _loss_sum(self, batch: Batch) -> Tensor:
        loss: Tensor = self.engine(batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents)
        return loss

    def _num_targets(self, microbatches: Sequence[Batch]) -> Tensor:
        return self._sum_over_ranks(torch.stack([batch.num_targets() for batch in microbatches]).sum())

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value


def saved_weights(folder: Path) -> Callable[[str], Tensor]:
    """Return a function that reads one trained weight of a checkpoint by its name: whole, in fp32, without the ranks.

    The files are mapped, and pickled: opening a checkpoint runs what its writer put there.

    Args:
        folder: what ``DeepSpeedModel.save`` wrote to.

    Raises:
        EnvironmentMismatchError: if the package ``deepspeed`` is missing.
        CheckpointError: if the checkpoint cannot be read; from the function, if it does not hold the weight.
    """
    _import_deepspeed("cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it tells each step
        try:
            weights = get_fp32_state_dict_from_zero_checkpoint(
                str(folder), CHECKPOINT_TAG, exclude_frozen_parameters=True, lazy_mode=True
            )
        except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
            raise CheckpointError(f"cannot read {folder}: {error}") from None

    def read(name: str) -> Tensor:
        if name not in weights:
            raise CheckpointError(f"cannot read {name} from {folder}: it is not there")
        weight: Tensor = weights[name].contiguous()
        return weight

    return read


def _import_deepspeed(device_type: str) -> Any:
    """Return the package ``deepspeed``, made to compute on one kind of device and to compile nothing."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # it would take a GPU that is present
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise EnvironmentMismatchError(
            f"zero_backend=deepspeed needs the package {error.name}: pip install 'llama-training-infra[deepspeed]'"
        ) from error
    # it has yet to follow torch 2.13
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # an all-reduce in shared memory, which it would compile at the start, and which inference alone uses
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _in_words(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return "another backend"
    return "{num_ranks} DeepSpeed ranks at stage {zero_stage} in {compute_dtype}".format_map(layout)
