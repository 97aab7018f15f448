"""Apply a plan to a model, in the one order in which its parts work together."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.attention import DocumentAttention
from llama_core.config.models import ModelSpec
from llama_core.config.trained_ends import trains_embedding
from llama_core.models.attention import use_kernels
from llama_core.models.batch import Batch, looking_ahead
from llama_core.models.fp8 import use_fp8
from llama_core.models.head import HeadInputs
from llama_core.models.llama import Llama, initialize_weights, losses_by_row, measuring, with_adapters
from llama_core.models.moe import prepare_routers
from llama_core.models.objective import Objective, PredictingObjective
from llama_core.parallel.cast_weights import CastWeights
from llama_core.parallel.context import apply_context_parallel, cut_batch, exchanges_heads, shard_batch
from llama_core.parallel.expert import divide_experts
from llama_core.parallel.gradients import Gradients
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.pipeline import OnPhase, Pipeline
from llama_core.parallel.prepared import prepare
from llama_core.parallel.ranks import check_started
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.parallel.tensor import apply_tensor_parallel
from llama_core.parallel.whole_matrices import mark_copies
from llama_core.parallel.zero import Alone, Copies, DataParallel, Sharded
from llama_core.planning.plan import ParallelPlan


class ParallelModel:
    """One rank's part of a model, which trains with the others; built on the meta device, without memory.

    The order is fixed. Pipeline parallelism cuts the stages, which get their adapters. Expert parallelism divides the
    experts, and tensor parallelism every matrix. Context parallelism, recomputation and compilation change how blocks
    run. Data parallelism comes last, because it shards whatever parameters it finds.

    Args:
        spec: the architecture of the whole model.
        plan: how it is divided. More than one rank needs the default process group.
        device: where this rank computes.
        compute_dtype: dtype of activations and matrix products.
        weight_dtype: dtype of the parameters, their gradients and optimizer states.
        fp8: whether the matrices of the blocks multiply in fp8; ``compute_dtype`` is then bf16.
        documents: how attention is kept inside packed documents.
        objective: what the model is trained for; default: the model's, the next token.

    Raises:
        PlanError: if the plan's number of ranks is not the number started, or no kernel does what a layer needs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        weight_dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        documents: DocumentAttention = "none",
        objective: Objective | None = None,
    ) -> None:
        check_started(plan)
        self.plan = plan
        self.device = device
        self.mesh = Mesh.build(plan, device.type) if dist.is_initialized() else None
        self.model = _meta_model(spec, plan, self.mesh, compute_dtype=compute_dtype, weight_dtype=weight_dtype)
        if objective is not None:
            self.model.objective = objective
        if fp8:
            use_fp8(self.model.layers)
        mesh = self.mesh
        if mesh is not None:
            divide_experts(self.model, mesh.experts, mesh.expert_hops)
        if mesh is not None and plan.divides_matrices:
            apply_tensor_parallel(
                self.model,
                mesh.weights["tp"],
                sequence_parallel=plan.sequence_parallel,
                whole_experts=plan.folds_experts,
            )
        use_kernels(self.model, documents, asked=plan.attention, cp=plan.cp)
        if mesh is not None and mesh.cp_group is not None:
            apply_context_parallel(self.model, mesh.cp_group)
        recompute_and_compile(self.model, plan, device)
        self._sharded: Sharded | None = None
        if mesh is not None and plan.uses_fully_shard:
            self._sharded = Sharded(self.model, mesh, plan, compute_dtype=compute_dtype)

    def materialize(self) -> Self:
        """Allocate the parameters and return the model; its weights are still undefined."""
        self.model.to_empty(device=self.device)
        self.cast_weights = CastWeights(self.model) if self.plan.keeps_cast_weights else None
        self.data = self._data_parallel()
        self.pipeline = Pipeline(self.model, self.data, self.plan, self.mesh)
        self.gradients = Gradients(self.model, self.plan, self.mesh)
        return self

    def _data_parallel(self) -> DataParallel:
        if self._sharded is not None:
            return self._sharded
        if self.mesh is not None and self.plan.averages_in_buckets:
            mark_copies(self.model, self.mesh.weights.get_group("replicate"))
        # DDP's reducer needs real ranks; its buckets are the gradients themselves, so memory is the same without it
        is_trained = any(parameter.requires_grad for parameter in self.model.parameters())  # not a teacher
        if self.mesh is not None and self.plan.averages_in_buckets and is_trained and dist.get_backend() != "fake":
            return Copies(self.model, self.mesh.weights.get_group("replicate"), self.plan)
        return Alone(self.model)

    def initialize_weights(self, seed: int) -> None:
        """Draw the initial weights; a seed gives the same ones under every plan."""
        initialize_weights(self.model, seed)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Bring what was made from the weights up to date. Call it whenever they have changed."""
        if self.cast_weights is not None:
            self.cast_weights.refresh()

    def forward_backward(self, microbatches: Sequence[Batch], *, loss_scale: float, on_phase: OnPhase) -> Tensor:
        """Compute the gradients of one step and return its loss.

        Args:
            microbatches: this rank's share of the step's sequences, each whole; the same on all ranks that divide them.
            loss_scale: factor on the gradients.
            on_phase: called as each forward and backward begins.

        Returns:
            The mean loss over what counts on all ranks, a scalar.
        """
        prepare(self.model.objective, microbatches, self.measure_rows, on_phase)
        pieces = [self._own_columns(self._looking_ahead(batch)) for batch in microbatches]
        count = self._count(pieces).clamp(min=1)
        # data parallelism averages over the ranks, but the loss is the mean over all that counts
        ranks_averaged = self.plan.dp * self.plan.cp
        scale = loss_scale * ranks_averaged / count.to(self._wide)
        num_rows = self.plan.dp * sum(len(batch.tokens_BS) for batch in microbatches)
        # likewise the auxiliary losses are means over all rows; ranks that route the same tokens add up equal gradients
        num_equal = self.plan.tp_of_experts
        prepare_routers(self.model, scale.new_full((), loss_scale * ranks_averaged / (num_rows * num_equal)))
        losses = self.pipeline.forward_backward(pieces, scale, on_phase)
        self.gradients.complete()
        self.own_loss = torch.stack(list(losses)).sum() if losses else count.new_zeros((), dtype=self._wide)
        return self._sum_over_ranks(self.own_loss.clone()) / count

    def compile_blocks(self, batch: Batch, kinds: Sequence[tuple[int, bool]] | None = None) -> None:
        """Run every kind of block that this rank holds once, which compiles it, on a batch like those to come.

        Without gradients, only the forward runs. The weights stay as they are, and no gradient is left. All ranks must
        call it together.

        Args:
            batch: a microbatch of the sizes and the kind of attention of those to come, whole, on the device.
            kinds: some of ``kinds_of_blocks``; default: all.
        """
        piece = self._own_columns(self._looking_ahead(batch))
        num_rows, num_tokens = piece.tokens_BS.shape
        stream = (num_rows, num_tokens // self.model.sequence_shards, self.model.spec.hidden_size)
        prepare_routers(self.model, torch.ones((), dtype=self._wide, device=self.device))
        self.data.prepare(last=True)  # so that fully_shard forgets this as it forgets a step
        for layer, has_gradient in self.kinds_of_blocks() if kinds is None else kinds:
            inputs = piece.tokens_BS
            if layer > 0:
                inputs = torch.zeros(stream, dtype=self.model.compute_dtype, device=self.device)
                inputs.requires_grad_(has_gradient and torch.is_grad_enabled())
            out = self.model(inputs, piece, layers=range(layer, layer + 1))
            if out.requires_grad:
                torch.autograd.backward(out, torch.zeros_like(out))
        self.data.release()
        self.model.prediction_losses.take_measured()  # which no step has asked for
        for parameter in self.model.parameters():
            parameter.grad = None

    def kinds_of_blocks(self) -> list[tuple[int, bool]]:
        """Return a layer of each kind that this rank holds, and whether its input needs a gradient.

        The first layer of the model comes with the embedding and the last one with the head, so others are preferred.
        """
        spec = self.model.spec
        plan = self.plan
        modes = [mode for stage in plan.recompute_modes(spec) for mode in stage]
        kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for layers in plan.stage_layers(spec):
            has_gradient = layers.start > 0 or trains_embedding(spec)  # a stage's input comes with a gradient
            for layer in layers:
                if str(layer) in self.model.layers:
                    kinds[modes[layer], spec.layers[layer], has_gradient].append(layer)
                has_gradient = has_gradient or bool(spec.layers[layer].adapted or spec.layers[layer].trained)
        inner = range(1, spec.num_layers - 1)
        return [
            (min(layers, key=lambda layer: (layer not in inner, layer)), has_gradient)
            for (*_, has_gradient), layers in kinds.items()
        ]

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[list[float], list[int]]:
        """Return the loss of every row of all ranks, summed over what counts in it, and how much that is.

        The rows come in turns: the first of each data-parallel rank, then the second.

        Args:
            microbatches: this rank's share; every rank has as many rows.
        """
        prepare(self.model.objective, microbatches, self.measure_rows)
        pieces = [self._own_columns(batch) for batch in microbatches]
        with losses_by_row(self.model):
            losses = self.pipeline.evaluate(pieces)
        sizes = [len(piece.tokens_BS) for piece in pieces]
        losses_R = torch.zeros(sum(sizes), dtype=self._wide, device=self.device)
        for number, of_microbatch in enumerate(torch.split(losses_R, sizes)):
            if number in losses:  # else its last stage is on another rank
                of_microbatch.copy_(losses[number])
        counts_R = torch.stack([self.model.objective.count(row) for piece in pieces for row in piece.split(1)])
        copies = self.plan.tp  # ranks that all have the same loss
        losses_R = self._over_all_rows(losses_R) / copies
        counts_R = self._over_all_rows(counts_R) // (copies * self.plan.pp)
        return losses_R.tolist(), counts_R.tolist()

    @torch.no_grad()
    def measure_rows(
        self, measure: Callable[[HeadInputs, Batch], Tensor], num_values: int, microbatches: Sequence[Batch]
    ) -> Tensor:
        """Return some values of every row of all ranks, in turns: [rows, values].

        Args:
            measure: returns those of each row of a batch, [B, values]; where ranks cut rows, those of their tokens,
                which are added up.
            num_values: how many they are.
            microbatches: this rank's share; every rank has as many rows.
        """
        pieces = [self._own_columns(batch) for batch in microbatches]
        with measuring(self.model, measure):
            of_pieces = self.pipeline.evaluate(pieces)
        sizes = [len(piece.tokens_BS) for piece in pieces]
        values_RV = torch.zeros((sum(sizes), num_values), dtype=self._wide, device=self.device)
        for number, of_piece in enumerate(torch.split(values_RV, sizes)):
            if number in of_pieces:  # else its last stage is on another rank
                of_piece.copy_(of_pieces[number])
        return self._over_all_rows(values_RV) / self.plan.tp

    def _over_all_rows(self, values_R: Tensor) -> Tensor:
        """Return the values of the rows of all data-parallel ranks, in turns; ranks with the same rows add theirs."""
        if self.mesh is None:
            return values_R
        every_RD = values_R.new_zeros(len(values_R), self.plan.dp, *values_R.shape[1:])
        every_RD[:, self.plan.dp_rank(dist.get_rank())] = values_R
        dist.all_reduce(every_RD)
        return every_RD.flatten(0, 1)

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of losses and their scale."""
        return torch.promote_types(self.model.compute_dtype, torch.float32)

    def _looking_ahead(self, batch: Batch) -> Batch:
        """Return a batch to train on with what the prediction modules read, which only whole rows tell."""
        has_use = isinstance(self.model.objective, PredictingObjective)
        return looking_ahead(batch, self.model.spec.mtp_layers) if has_use else batch

    def _own_columns(self, batch: Batch) -> Batch:
        if self.mesh is None or self.plan.cp == 1:
            return batch
        shard = cut_batch if exchanges_heads(self.model) else shard_batch
        return shard(batch, self.mesh.rank("cp"), self.plan.cp)

    def _count(self, pieces: Sequence[Batch]) -> Tensor:
        total = torch.stack([self.model.objective.count(piece) for piece in pieces]).sum()
        if self.mesh is not None:
            dist.all_reduce(total)
            total = total // (self.plan.tp * self.plan.pp)  # tp and pp ranks count the same
        return total

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        if self.mesh is not None:
            dist.all_reduce(total)
            total = total / self.plan.tp
        return total


def _meta_model(
    spec: ModelSpec, plan: ParallelPlan, mesh: Mesh | None, *, compute_dtype: torch.dtype, weight_dtype: torch.dtype
) -> Llama:
    """Return this rank's part of the model on the meta device."""
    stages = plan.stage_layers(spec)
    pp_rank = mesh.rank("pp") if mesh else 0
    layers = {layer for stage in plan.build_schedule().stages_of(pp_rank) for layer in stages[stage]}
    with torch.device("meta"):
        return with_adapters(Llama(spec, compute_dtype=compute_dtype, layers=layers).to(weight_dtype))
