"""Data parallelism: one interface for calling a rank's part of the model and combining its gradients.

* One rank: nothing is combined.
* Copies of a whole model (``zero_stage=0``, tp = pp = ep = 1): ``DistributedDataParallel`` and its compression hooks.
* Everything else: ``fully_shard``, as ``planning.fully_shard`` describes it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from llama_core.errors import EnvironmentMismatchError
from llama_core.models.layers import local_part
from llama_core.models.llama import Llama
from llama_core.parallel.mesh import Mesh, is_divided_over
from llama_core.planning.fully_shard import Resharding, Unit, units_of
from llama_core.planning.plan import ParallelPlan

FIRST_TO_SHARD_ALL = "2.13"
"""The first torch that shards experts over other ranks than the rest, and bytes of NF4."""
POWERSGD_RANK = 4
"""Rank of the factors that PowerSGD sends in place of a matrix."""
POWERSGD_START_STEP = 100
"""Number of initial steps that send whole gradients, while these still change fast."""


class DataParallel(Protocol):
    """How the ranks that hold the same parameters work together."""

    call: Callable[..., Tensor]
    """The model's forward, with the work of data parallelism around it."""

    def prepare(self, *, last: bool) -> None:
        """Prepare the next forward or backward; ``last`` says that it is the last of its kind in the step."""

    def release(self) -> None:
        """Drop the weights that a forward without a backward has gathered."""

    def end_step(self, updated: Tensor) -> None:
        """Drop the state that this step's gradients left for later steps, unless they have updated the weights."""


class Alone:
    """A model whose parameters no other rank holds."""

    def __init__(self, model: Llama) -> None:
        self.call: Callable[..., Tensor] = model

    def prepare(self, *, last: bool) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def end_step(self, updated: Tensor) -> None:
        """Do nothing."""


class Copies:
    """Copies of a whole model, whose gradients are averaged in buckets while the last backward runs."""

    def __init__(self, model: Llama, group: dist.ProcessGroup, plan: ParallelPlan) -> None:
        self.model = model
        # no init_sync: the seed already makes all copies equal
        self.replica = DistributedDataParallel(
            model, process_group=group, init_sync=False, gradient_as_bucket_view=True
        )
        # their buffers stay equal too; the argument of this name is deprecated, and older torch lacks the new one
        self.replica.broadcast_buffers = False
        self.call: Callable[..., Tensor] = self.replica
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        match plan.gradient_compression:
            case "bf16":
                self.replica.register_comm_hook(group, _halve)
            case "powersgd":
                self._powersgd = powerSGD_hook.PowerSGDState(
                    group,
                    matrix_approximation_rank=POWERSGD_RANK,
                    start_powerSGD_iter=POWERSGD_START_STEP,
                )
                self.replica.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)

    def prepare(self, *, last: bool) -> None:
        """Average gradients in the coming backward only if it is the last one."""
        self.replica.require_backward_grad_sync = last

    def release(self) -> None:
        """Do nothing: every copy is whole at all times."""

    def end_step(self, updated: Tensor) -> None:
        """Drop PowerSGD's unsent errors and next factors after a skipped update; with PowerSGD, wait for the device."""
        if self._powersgd is not None and not updated:
            self._powersgd.error_dict.clear()
            self._powersgd.p_memory_dict.clear()
            self._powersgd.q_memory_dict.clear()


def _halve(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # wrapped under another name: DDP refuses torch's hook by name on a CPU, although gloo can do it
    return default_hooks.bf16_compress_hook(group, bucket)


class Sharded:
    """A model whose parameters are sharded with ``fully_shard``, block by block.

    Args:
        model: a rank's part of the model; its parameters become shards.
        mesh: the ranks.
        plan: the plan.
        compute_dtype: the dtype of gathered weights.

    Raises:
        EnvironmentMismatchError: if the installed torch cannot shard this model.
    """

    def __init__(
        self,
        model: Llama,
        mesh: Mesh,
        plan: ParallelPlan,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        _check_torch(model, mesh, plan)
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        weight_dtype = next(trained).dtype
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.bfloat16 if plan.gradient_compression == "bf16" else weight_dtype,
            cast_forward_inputs=False,
        )
        shard = partial(
            fully_shard,
            mesh=_data_axes(mesh.weights),
            mp_policy=policy,
            shard_placement_fn=_placement(mesh),
        )
        self.resharding = Resharding.of(plan)
        stages = _units_of_stages(model, plan)
        for unit in chain.from_iterable(stages):
            shard(list(unit.parts), reshard_after_forward=self.resharding.drops_after_forward(unit))
        if model.output is not None:
            _call_head_as_module(model, model.output)
        # the rest is the root unit: nothing, or an embedding that both ends of the model use
        self.root = shard(model, reshard_after_forward=False)
        _set_prefetches(model, stages)
        self.groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.model: Callable[..., Tensor] = model
        gathers_all_stages = len(stages) > 1 and not self.resharding.shards_gradients
        self.call = self._first_forward if gathers_all_stages else self.model

    def _first_forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Run the model, and gather this rank's other stages, which a backward that keeps whole gradients reads too."""
        output = self.model(*inputs, **named)
        for group in self.groups:
            group.unshard()
        self.call = self.model
        return output

    def prepare(self, *, last: bool) -> None:
        """Set what the coming backward does with gradients and weights at this ZeRO stage."""
        resharding = self.resharding
        self.root.set_is_last_backward(last)
        self.root.set_requires_gradient_sync(resharding.reduces(last=last))
        self.root.set_requires_all_reduce(resharding.averages(last=last))
        self.root.set_reshard_after_backward(resharding.drops_after_backward(last=last))

    def release(self) -> None:
        """Drop all gathered weights."""
        for group in self.groups:
            group.reshard()

    def end_step(self, updated: Tensor) -> None:
        """Do nothing: nothing is left."""


def _check_torch(model: Llama, mesh: Mesh, plan: ParallelPlan) -> None:
    if torch.__version__ >= FIRST_TO_SHARD_ALL:
        return
    installed = f"needs torch {FIRST_TO_SHARD_ALL} or newer, but {torch.__version__} is installed; install that, or"
    if mesh.experts is not mesh.weights:
        raise EnvironmentMismatchError(f"parallel.ep={plan.ep} {installed} use parallel.ep=1")
    if model.spec.packed:
        raise EnvironmentMismatchError(f"lora.base=nf4 on several data-parallel ranks {installed} use one")


def _units_of_stages(model: Llama, plan: ParallelPlan) -> list[tuple[Unit[Any], ...]]:
    """Return the units of each stage of this rank, first stage first, without the root."""
    spec = model.spec
    stages: list[tuple[Unit[Any], ...]] = []
    for layers in plan.stage_layers(spec):
        if str(layers.start) not in model.layers:
            continue
        is_last = layers.stop == spec.num_blocks
        units = units_of(
            spec,
            [model.layers[str(layer)] for layer in layers],
            embedding=model.tok_embeddings if layers.start == 0 else None,
            final_norm=model.norm if is_last else None,
            head=model.output if is_last else None,
        )
        stages.append(tuple(unit for unit in units if unit.role != "root"))
    return stages


def _call_head_as_module(model: Llama, output: nn.Module) -> None:
    """Let the head compute inside a call of ``output``, where ``fully_shard`` gathers its weights."""
    output.forward = model.head
    # assigned as an attribute, the module itself would be a part of the model twice
    model.__dict__["head"] = output.__call__


def _set_prefetches(model: Llama, stages: Sequence[Sequence[Unit[Any]]]) -> None:
    """Make every unit of a stage gather the next one's weights before it computes, forward and backward.

    torch by itself issues a gather when the unit's own forward begins. It overlaps with the unit before only if the CPU
    is ahead of the device: not with small blocks, nor where a block waits for numbers from the device, as experts on
    other ranks do. In the backward, torch looks for the unit whose forward ran before. Under a pipeline that may belong
    to another stage, which holds the weights until it runs.
    """
    root: Any = model
    for units in stages:
        first: Any = units[0].parts[0]
        # nothing; an empty list would let torch search
        first.set_modules_to_backward_prefetch([first])
        if not units[0].gathers_in_backward:
            first.set_unshard_in_backward(False)
        for before, after in pairwise(units):
            used: Any = before.parts[0]
            following: Any = after.parts[0]
            used.set_modules_to_forward_prefetch([following])
            prefetched = used if before.gathers_in_backward else following
            following.set_modules_to_backward_prefetch([prefetched])
    # a tied embedding is in the root, whose backward begins every stage's
    last_layer = [unit for unit in stages[0] if unit.role == "layer"][-1].parts[0]
    root.set_modules_to_backward_prefetch([last_layer if len(stages) == 1 else root])


def _data_axes(weights: DeviceMesh) -> DeviceMesh:
    return weights["replicate", "shard"] if weights["replicate"].size() > 1 else weights["shard"]


def _placement(mesh: Mesh) -> Callable[[nn.Parameter], Any] | None:
    """Return how ``fully_shard`` is to shard each parameter; None for rows over the mesh that it is given."""
    if mesh.experts is mesh.weights:
        return partial(_shard_of_experts, mesh.weights)
    # older ones than ``FIRST_TO_SHARD_ALL`` lack them
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    info: Any = _get_mesh_info(_data_axes(mesh.experts))

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if not is_divided_over(parameter, "ep"):
            return None
        return ShardPlacementResult(_shard_of_experts(mesh.experts, parameter), info)

    return place


def _shard_of_experts(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard | None:
    """Return how to shard experts if their number does not divide evenly; None means by rows, like all else."""
    num_shards = mesh["shard"].size()
    uneven = parameter.ndim == 3 and len(local_part(parameter)) % num_shards
    return Shard(1) if uneven and local_part(parameter).shape[1] % num_shards == 0 else None
