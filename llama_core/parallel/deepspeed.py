"""The second ZeRO backend, DeepSpeed: like ``zero.Sharded``, or with shards in host memory.

DeepSpeed owns the weights, gradients and optimizer states, so it replaces all of
``apply.ParallelModel``, not only its data parallelism. Only this file knows DeepSpeed.

Bytes per parameter that a rank of N holds between steps with AdamW, where w is 2 in bf16 and 4 in
fp32:

====== ============================================ ==============================================
stage  held                                         also, from the first to the last backward
====== ============================================ ==============================================
1      w + 12/N; in bf16 also 4, for the gradients  gradients whole, then 4/N
2      w + 12/N                                     gradients reduced to 4/N after every backward
3      (w + 12)/N and 4/N for the gradients         weights gathered for every block
====== ============================================ ==============================================

The 12 bytes are fp32 weights and moments, held in addition to the compute weights, even in fp32.
Stage 3 also holds the buffer in which gradients are sent.

Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021, arXiv:2101.06840, for the host
memory.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from llama_core.config.models import ModelSpec
from llama_core.errors import CheckpointError, EnvironmentMismatchError, PlanError
from llama_core.imports import how_to_install
from llama_core.models.attention import use_kernels
from llama_core.models.batch import Batch
from llama_core.models.block import Block
from llama_core.models.head import HeadInputs
from llama_core.models.llama import Llama, initialize_weights, losses_by_row, measuring, with_adapters
from llama_core.models.objective import Objective
from llama_core.models.saved_tensors import only_tensors
from llama_core.optimizers.traits import RATE
from llama_core.parallel.gradients import Update
from llama_core.parallel.pipeline import OnPhase
from llama_core.parallel.prepared import prepare
from llama_core.parallel.ranks import check_started, is_first_rank, on_first_rank
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import LAYOUT, place_of
from llama_core.records.checksums import FileSum, SummedFile
from llama_core.records.files import DAMAGE, open_file, read_json, write_json

MAX_BUCKET_ELEMENTS = 50_000_000
"""Most gradients or weights that are sent at once, in a buffer of that size."""
CHECKPOINT_TAG = "deepspeed"
"""The folder of DeepSpeed's files inside a checkpoint."""


def deepspeed_config(
    plan: ParallelPlan, spec: ModelSpec, *, device_type: str, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a plan.

    ``gradient_compression=bf16`` sends gradients in bf16; otherwise they travel in fp32.
    DeepSpeed's own 4-bit quantisation (ZeRO++) is not offered: it runs only on CUDA at stage 3.

    Args:
        plan: a plan with ``zero_backend=deepspeed``.
        spec: the model.
        device_type: ``cuda`` or ``cpu``.
        compute_dtype: fp32 or bf16; the updated weights are fp32 in either case.
    """
    host_memory = {"device": "cpu", "pin_memory": device_type == "cuda"}
    bucket = min(MAX_BUCKET_ELEMENTS, spec.num_parameters)
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # norms stay whole, because gathering one takes as long as gathering a matrix
        "stage3_param_persistence_threshold": spec.hidden_size,
        # gather the next block's weights while a block computes; without a limit, all other
        # blocks' would be gathered
        "stage3_max_live_parameters": 2 * (spec.layer_parameters + spec.embedding_parameters),
        "stage3_prefetch_bucket_size": min(MAX_BUCKET_ELEMENTS, spec.layer_parameters),
        "stage3_max_reuse_distance": 0,
        # if true, it replaces torch.nn.functional.linear for the whole process
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
        # the same AdamW as without DeepSpeed; DeepSpeed's own must be compiled where it runs
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # each optimizer says itself whether it runs here
        "steps_per_print": None,
    }


class DeepSpeedModel:
    """A model that DeepSpeed trains, optimizer included.

    Args:
        spec: the architecture of the model.
        plan: how it is divided; needs the default process group.
        device: where this rank computes.
        compute_dtype: dtype of activations, matrix products and the weights in them; the
            updated weights are fp32.
        build_optimizer: makes the optimizer of a module's parameters; at stage 3 these
            have no elements by then.
        objective: what the model is trained for; default: the model's, the next token.

    Raises:
        EnvironmentMismatchError: if the package ``deepspeed`` is missing.
        PlanError: if the plan's number of ranks is not the number started.
    """

    waits = True

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        build_optimizer: Callable[[nn.Module], Optimizer],
        objective: Objective | None = None,
    ) -> None:
        check_started(plan)
        self.plan = plan
        self.device = device
        self._deepspeed = _import_deepspeed(device.type)
        config = deepspeed_config(plan, spec, device_type=device.type, compute_dtype=compute_dtype)
        self.model = self._build(spec, config, compute_dtype)
        if objective is not None:
            self.model.objective = objective
        use_kernels(self.model, asked=plan.attention)
        recompute_and_compile(self.model, plan, device)
        if plan.zero_stage == 3:
            # Gather a block whole before recomputing it, because selective recomputation counts
            # every operator inside it. DeepSpeed releases a block's weights with the gradient of
            # its input; under adapters, the first block's input has one only if we ask for it.
            self._deepspeed.utils.set_z3_leaf_modules(self.model, [Block])
            embedding = self.model.get_submodule("tok_embeddings")
            embedding.register_forward_hook(lambda module, inputs, out: out.requires_grad_())
        with redirect_stdout(StringIO()):  # stage 1 prints its memory use in bf16
            self.engine, *_ = self._deepspeed.initialize(
                model=self.model, optimizer=build_optimizer(self.model), config=config
            )

    def _build(self, spec: ModelSpec, config: dict[str, Any], compute_dtype: torch.dtype) -> Llama:
        """Return the model with undefined weights; at stage 3 a rank only ever has its shards."""
        if self.plan.zero_stage < 3:
            with torch.device("meta"):
                model = with_adapters(Llama(spec, compute_dtype=compute_dtype))
            return model.to_empty(device=self.device)
        with self._deepspeed.zero.Init(config_dict_or_path=config):
            return with_adapters(Llama(spec, compute_dtype=compute_dtype))

    def initialize_weights(self, seed: int) -> None:
        """Draw the initial weights; a seed gives the same ones under every plan."""
        self.set_weights(partial(initialize_weights, seed=seed))

    def set_weights(self, fill: Callable[[Llama], None]) -> None:
        """Set the weights with ``fill``, layer by layer: a rank has one whole layer at a time."""
        gathered = self._deepspeed.zero.GatheredParameters
        for part in self._parts():
            fill(part)
            filled: dict[nn.Parameter, Tensor] = {}
            for name, weight in part.named_parameters():
                filled[self.model.get_parameter(name)] = weight.detach()
            with torch.no_grad(), gathered(list(filled), modifier_rank=0):
                for parameter, value in filled.items():
                    parameter.copy_(value)
            # the fp32 weights that the optimizer updates are another copy
            for parameter, value in filled.items():
                self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)

    def non_finite_weights(self) -> Iterator[str]:
        """Yield the names of the weights of which this rank holds a NaN or infinity."""
        for name, parameter in self.model.named_parameters():
            # this rank's shard, at stage 3
            held: Tensor = getattr(parameter, "ds_tensor", parameter.detach())
            if not held.isfinite().all():
                yield name

    def replicated(self) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Tensor]]]:
        """Yield nothing: one rank updates each part of the weights, and the others get its result in every step."""
        yield from ()

    def _parts(self) -> Iterator[Llama]:
        """Yield the layers of the model one by one, whole, in fp32 and with undefined weights."""
        for layer in range(self.model.spec.num_layers):
            with torch.device("meta"):
                part = with_adapters(Llama(self.model.spec, layers=[layer]))
            yield part.to_empty(device=self.device)

    def forward_backward(
        self,
        microbatches: Sequence[Batch],
        *,
        loss_scale: float,
        on_phase: OnPhase,
    ) -> Tensor:
        """Compute the gradients of one step and return its loss.

        Args:
            microbatches: this rank's share of the step's sequences.
            loss_scale: 1; bf16 and fp32 need no other, and no plan trains in fp16 with DeepSpeed.
            on_phase: called as each forward and backward begins.

        Returns:
            The mean loss over what counts on all ranks, a scalar.

        Raises:
            ValueError: if ``loss_scale`` is not 1.
        """
        if loss_scale != 1:
            why = "DeepSpeed would scale the loss again"
            raise ValueError(f"loss_scale={loss_scale}: {why}; use 1")
        prepare(self.model.objective, microbatches, self.measure_rows, on_phase)
        count = self._count(microbatches).clamp(min=1)
        # DeepSpeed averages over the ranks, but the loss is the mean over all that counts
        scale = self.plan.dp / count
        total = torch.zeros((), device=self.device)
        for batch in microbatches:
            on_phase("forward")
            self.engine.set_gradient_accumulation_boundary(batch is microbatches[-1])
            loss = self._loss(batch)
            total += loss.detach()
            on_phase("backward")
            # zero, or NaN if the loss is not finite: DeepSpeed skips the update only if a gradient
            # is not finite
            flaw = total - total
            self.engine.backward(loss * (scale + flaw), scale_wrt_gas=False)
        self.own_loss = total.clone()
        return self._sum_over_ranks(total) / count

    def update(
        self,
        loss: Tensor,
        *,
        learning_rate: float,
        max_grad_norm: float,
        loss_scale: float,
        on_phase: OnPhase,
    ) -> Update:
        """Clip the gradients by their global norm and update the weights.

        Gradients that are not finite update nothing.

        Args:
            loss: the result of ``forward_backward``; if it is not finite,
                neither are the gradients.
            learning_rate: learning rate of this step.
            max_grad_norm: global norm above which gradients are scaled down.
            loss_scale: 1, as for ``forward_backward``.
            on_phase: called as the optimizer begins.
        """
        on_phase("optimizer")
        optimizer = self.engine.optimizer
        optimizer.clip_grad = max_grad_norm
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE, 1.0)
        self.engine.step()
        grad_norm = torch.as_tensor(
            self.engine.get_global_grad_norm(),
            dtype=torch.float32,
            device=self.device,
        )
        return Update(grad_norm, torch.tensor(self.engine.was_step_applied()))

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[list[float], list[int]]:
        """Return the loss of every row of all ranks, summed over what counts in it, and how much that is.

        The rows come in turns: the first of each rank, then the second.

        Args:
            microbatches: this rank's share; every rank has as many rows.
        """
        prepare(self.model.objective, microbatches, self.measure_rows)
        with losses_by_row(self.model):
            losses_R = torch.cat([self._loss(batch) for batch in microbatches])
        self.engine.empty_partition_cache()  # drop weights gathered for a backward
        counts: list[Tensor] = []
        for batch in microbatches:
            counts += [self.model.objective.count(row) for row in batch.split(1)]
        all_losses = self._over_all_rows(losses_R).tolist()
        all_counts = self._over_all_rows(torch.stack(counts)).tolist()
        return all_losses, all_counts

    @torch.no_grad()
    def measure_rows(
        self,
        measure: Callable[[HeadInputs, Batch], Tensor],
        num_values: int,
        microbatches: Sequence[Batch],
    ) -> Tensor:
        """Return some values of every row of all ranks, in turns: [rows, values].

        Args:
            measure: returns those of each row of a batch, [B, values].
            num_values: how many they are.
            microbatches: this rank's share; every rank has as many rows.
        """
        with measuring(self.model, measure):
            values_RV = torch.cat([self._loss(batch) for batch in microbatches])
        self.engine.empty_partition_cache()
        return self._over_all_rows(values_RV)

    def _over_all_rows(self, values_R: Tensor) -> Tensor:
        every_RD = values_R.new_zeros(len(values_R), self.plan.dp, *values_R.shape[1:])
        every_RD[:, dist.get_rank()] = values_R
        return self._sum_over_ranks(every_RD).flatten(0, 1)

    def save(self, folder: Path) -> "Future[dict[str, FileSum]]":
        """Write the weights and optimizer states of all ranks to ``folder`` before this returns.

        The future's result on the first rank is the checksum of every file that DeepSpeed writes,
        by its path in ``folder``.
        """
        sums: dict[str, FileSum] = {}

        def write(state_dict: Any, path: str) -> None:
            with Path(path).open("wb") as file:
                summed = SummedFile(file)
                torch.save(state_dict, cast("IO[bytes]", summed))
            sums[str(Path(path).relative_to(folder))] = summed.sum()

        self.engine.checkpoint_engine.save = write
        self.engine.save_checkpoint(str(folder), tag=CHECKPOINT_TAG, save_latest=False)
        if is_first_rank():
            write_json(folder / LAYOUT, self._layout())
        written: Future[dict[str, FileSum]] = Future()
        of_all_ranks: dict[str, FileSum] = {}
        for of_rank in on_first_rank(sums):  # nothing on the other ranks
            of_all_ranks |= of_rank
        written.set_result(of_all_ranks)
        return written

    def end_saving(self) -> None:
        """Do nothing: ``save`` keeps nothing."""

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote to ``folder``, even if the folder has moved.

        All ranks call it together.

        Raises:
            PlanError: if the number of ranks, the ZeRO stage or the compute dtype differs from the
                writer's.
            CheckpointError: if a file holds something else than DeepSpeed writes.
        """
        layout = read_json(folder / LAYOUT) if (folder / LAYOUT).exists() else None
        own = self._layout()
        if layout != own:
            raise PlanError(
                f"{folder} was written by {_in_words(layout)}; DeepSpeed can resume it only under "
                f"the same plan, but this one is of {_in_words(own)}"
            )
        groups = self.engine.optimizer.param_groups
        # how weights are updated is for this run to say, and it may have changed since
        settings: list[dict[str, Any]] = []
        for group in groups:
            kept = {name: value for name, value in group.items() if name != "params"}
            settings.append(kept)
        with _plain_values_only():
            self.engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG)
        for group, own in zip(self.engine.optimizer.param_groups, settings, strict=True):
            group.update(own)

    def _layout(self) -> dict[str, Any]:
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        return {
            "num_ranks": self.plan.world_size,
            "zero_stage": self.plan.zero_stage,
            "compute_dtype": dtype,
        }

    def _loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.engine(batch.tokens_BS, batch)
        return loss

    def _count(self, microbatches: Sequence[Batch]) -> Tensor:
        counts = [self.model.objective.count(batch) for batch in microbatches]
        return self._sum_over_ranks(torch.stack(counts).sum())

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value


def saved_weights(folder: Path) -> Callable[[str], Tensor]:
    """Return a function that reads one trained weight of a checkpoint by name: whole, in fp32.

    It needs no other rank. The files are memory-mapped.

    Args:
        folder: the folder that ``DeepSpeedModel.save`` wrote to.

    Raises:
        EnvironmentMismatchError: if the package ``deepspeed`` is missing.
        CheckpointError: if the checkpoint cannot be read. The function raises it for a
            weight that is not there.
    """
    _import_deepspeed("cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    own = folder
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints every step
        try:
            with _own_files(folder) as own, _plain_values_only():
                weights = get_fp32_state_dict_from_zero_checkpoint(
                    str(own), CHECKPOINT_TAG, exclude_frozen_parameters=True, lazy_mode=True
                )
        except (CheckpointError, OSError, RuntimeError, *DAMAGE) as error:
            text = str(error).replace(str(own), str(folder))
            raise CheckpointError(f"cannot read {folder}: {text}") from None

    def read(name: str) -> Tensor:
        if name not in weights:
            raise CheckpointError(f"cannot read {name} from {folder}: it is not there")
        weight: Tensor = weights[name].contiguous()
        return weight

    return read


@contextmanager
def _own_files(folder: Path) -> Iterator[Path]:
    """Yield a folder that looks like a checkpoint's, with names for its files, which are open.

    They are regular files, no links. DeepSpeed opens files by name: it would follow a link, or wait
    for the writer of a pipe, that has taken the place of a file meanwhile.
    """
    files = list((folder / CHECKPOINT_TAG).iterdir())
    soft, hard = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (min(hard, soft + len(files)), hard))
    with TemporaryDirectory() as name, ExitStack() as stack:
        names = Path(name, CHECKPOINT_TAG)
        names.mkdir()
        for file in files:
            opened = stack.enter_context(open_file(file, place_of(folder)))
            (names / file.name).symlink_to(f"/proc/self/fd/{opened.fileno()}")
        yield names.parent


@contextmanager
def _plain_values_only() -> Iterator[None]:
    """Let ``torch.load`` read DeepSpeed's files as tensors and plain values, and nothing else.

    DeepSpeed itself would run any code that the writer of a file put there.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(value: int) -> Any:
        return ZeroStageEnum(value)

    def stage_by_name(kind: object, name: str) -> Any:
        if kind is not stage:
            raise UnpicklingError(f"it names {name} of something that is no stage of ZeRO")
        return ZeroStageEnum[name]

    # as Python 3.11.2, for one, pickles a member of an enum
    by_name = (stage_by_name, "builtins.getattr")
    by_value = (stage, f"{ZeroStageEnum.__module__}.{ZeroStageEnum.__qualname__}")
    switches = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in switches}
    os.environ |= switches
    try:
        with only_tensors(LossScaler, fragment_address, by_value, by_name):
            yield
    except UnpicklingError:
        what = "a file is damaged, or holds something else than DeepSpeed writes"
        raise CheckpointError(what) from None
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_deepspeed(device_type: str) -> Any:
    """Return the package ``deepspeed``, set to compute on a kind of device and compile nothing."""
    # by default it takes a GPU if there is one
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        remedy = how_to_install(error.name or "deepspeed")
        what = f"zero_backend=deepspeed needs the package {error.name}"
        raise EnvironmentMismatchError(f"{what}; {remedy}") from error
    # DeepSpeed has not caught up with torch 2.13
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # a shared-memory all-reduce, only for inference, that it would compile at startup
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _in_words(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return "another backend"
    return "{num_ranks} DeepSpeed ranks at stage {zero_stage} in {compute_dtype}".format_map(layout)
