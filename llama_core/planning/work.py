"""``Work``: what one optimizer step computes, and all that planning estimates from, stage by stage."""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, repeat
from typing import Self

from llama_core.attention import DocumentAttention, Kernel
from llama_core.config.models import ModelSpec
from llama_core.config.parameter_counts import trained_matrices
from llama_core.config.run import Precision, RecomputeMode, RunConfig
from llama_core.config.trained_ends import trains_embedding
from llama_core.objectives.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from llama_core.objectives.traits import ObjectiveType
from llama_core.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from llama_core.optimizers.traits import OptimizerType
from llama_core.planning.before import forwards_before_step
from llama_core.planning.fully_shard import Unit, units_of
from llama_core.planning.kernels import attention_kernel, runs_on_cuda
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import embedding_passes, final_norm_passes, head_passes
from llama_core.planning.program.layer import layer_passes
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, itemsize_of
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.prediction import prediction_passes
from llama_core.planning.program.setting import Setting


@dataclass(frozen=True)
class Stage:
    """What one rank computes of a pipeline stage. Equal stages take the same bytes, time and transfers."""

    modes: tuple[RecomputeMode, ...]
    """The recompute mode of each layer."""
    layers: tuple[Passes, ...]
    """The forward and the backward of each layer."""
    embedding: Passes | None
    """Those of the embedding, on the first stage."""
    final_norm: Passes | None
    """Those of the norm before the head, on the last stage."""
    head: Passes | None
    """Those of the head and the loss, on the last stage."""
    num_masks: int
    """Masks, or places of gathered keys, that its layers share: one, or more if their windows or chunks differ."""
    num_rotations: int
    """Cosines and sines that its layers share: one of each, or more if their rotary embeddings differ."""
    tied: bool
    """Whether the head is the embedding."""
    embeds_at_end: bool
    """Whether the last stage needs the embedding too: as its head, or for prediction modules."""
    shares_table: bool
    """Whether it has the embedding, and so has the last stage, which is on the same rank."""
    root: int
    """Parameters that ``fully_shard`` gathers for whichever stage of the rank runs: an embedding that the last stage
    needs too and, if it is the head, the final norm if the rank has that."""
    units: tuple[Unit[Passes], ...] = field(compare=False)
    """What ``fully_shard`` gathers at once, where the plan uses it. A table is a part of the stage whose head it is."""

    @property
    def num_modules(self) -> int:
        """The prediction modules, which are the last of its layers."""
        return sum(bool(layer.program.borrowed_weights) for layer in self.layers)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.head is not None

    @property
    def is_tied_apart(self) -> bool:
        """Whether the end of the model, on another rank, needs its embedding too."""
        return self.embeds_at_end and self.is_first and not self.is_last and not self.shares_table

    @property
    def ends(self) -> list[Passes]:
        """What it has of the embedding, the final norm and the head."""
        return [part for part in (self.embedding, self.final_norm, self.head) if part is not None]

    @property
    def num_trained_in_matrices(self) -> int:
        """Parameters of the trained matrices inside its layers, which an optimizer may treat apart."""
        return sum(layer.program.num_trained_in_matrices for layer in self.layers)

    def largest_trained(self, *, with_matrices: bool) -> int:
        """Return the parameters of the largest trained weight; the matrices inside layers count ``with_matrices``."""
        layers = [layer.program for layer in self.layers]
        inside = [program.largest_trained if with_matrices else program.largest_trained_vector for program in layers]
        return max(*inside, *(part.program.largest_trained for part in self.ends), 0)

    @property
    def kinds(self) -> Counter[tuple[Passes, RecomputeMode]]:
        """The kinds of its layers, each with its recomputation, and how many there are of each."""
        return Counter(zip(self.layers, self.modes, strict=True))


@dataclass(frozen=True)
class Work:
    """A model under a plan, on sequences of some length."""

    spec: ModelSpec
    plan: ParallelPlan
    seq_len: int
    """Tokens per sequence."""
    precision: Precision = "auto"
    """The dtype of activations and matrix products; ``auto`` counts as bf16, which every GPU in the hardware table
    supports."""
    documents: DocumentAttention = "none"
    """What attention's kernels are told of what a query does not see; a mask has ``seq_len`` squared elements."""
    on_cuda: bool = False
    """Whether CUDA's kernels make the loss and the norms."""
    optimizer: OptimizerType = OPTIMIZERS[DEFAULT_OPTIMIZER]
    """What updates the weights."""
    objective: ObjectiveType = OBJECTIVES[DEFAULT_OBJECTIVE]
    """What they are trained for."""

    @classmethod
    def of(cls, config: RunConfig, plan: ParallelPlan) -> Self:
        """Return the work of a resolved ``config`` under ``plan``."""
        return cls(
            spec=config.spec,
            plan=plan,
            seq_len=config.seq_len,
            precision=config.training.precision,
            documents=attention_kernel(config, plan).told,
            on_cuda=runs_on_cuda(config),
            optimizer=config.optimizer,
            objective=config.objective,
        )

    @property
    def update(self) -> OptimizerType:
        """The optimizer, as the device computes it."""
        return self.optimizer.on(cuda=self.on_cuda)

    @property
    def itemsize(self) -> int:
        """Bytes per element of activations."""
        return itemsize_of(self.precision)

    @cached_property
    def setting(self) -> Setting:
        """What the programs depend on beside the model."""
        plan = self.plan
        return Setting(
            rows=plan.rows_per_forward,
            seq_len=self.seq_len,
            itemsize=self.itemsize,
            is_fp16=self.precision == "fp16",
            documents=self.documents,
            on_cuda=self.on_cuda,
            compiles=plan.compile,
            attention=plan.attention,
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep,
            ep_nodes=plan.ep_nodes,
            folds_experts=plan.folds_experts,
            sharded_sequence=plan.sharded_sequence,
            uses_fully_shard=plan.uses_fully_shard,
            keeps_cast_weights=plan.keeps_cast_weights,
            splits_backward=plan.splits_backward,
            values_per_token=sum(self.objective.values_per_token.values()),
        )

    @cached_property
    def kernel(self) -> Kernel:
        """What computes attention of the last layer; that of another is told the same, and divides rows alike."""
        return self.setting.kernel(self.spec.attention(self.spec.num_layers - 1))

    @cached_property
    def layers(self) -> tuple[Passes, ...]:
        """The forward and the backward of every layer; equal ones are one object."""
        return _layers(self.spec, self.setting)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What a rank computes of every stage."""
        layers = self.plan.stage_layers(self.spec)
        modes = self.plan.recompute_modes(self.spec)
        last = len(layers) - 1
        hosted_with = {stage: set(hosted) for hosted in self.plan.layout.placement for stage in hosted}
        at_end = self.spec.embeds_at_end
        stages: list[Stage] = []
        for stage, own in enumerate(layers):
            is_last = stage == last
            embedding = self.embedding if stage == 0 else None
            final_norm = self.final_norm if is_last else None
            head = self.head if is_last else None
            shares_table = at_end and stage == 0 < last and last in hosted_with[0]
            has_table = (stage == 0 and not shares_table) or (is_last and at_end)
            units = units_of(
                self.spec,
                self.layers[own.start : own.stop],
                embedding=self.embedding if has_table else None,
                final_norm=final_norm,
                head=head,
            )
            stages.append(
                Stage(
                    modes=modes[stage],
                    layers=self.layers[own.start : own.stop],
                    embedding=embedding,
                    final_norm=final_norm,
                    head=head,
                    num_masks=len({self.spec.attention(layer) for layer in own}),
                    num_rotations=len({self.spec.rope(layer) for layer in own if self.spec.rotates(layer)}),
                    tied=self.spec.tied_embeddings,
                    embeds_at_end=at_end,
                    shares_table=shares_table,
                    root=self._root(hosted_with[stage]) if at_end else 0,
                    units=units,
                )
            )
        return tuple(stages)

    def hosted(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of a pipeline rank."""
        return tuple(self.stages[stage] for stage in self.plan.layout.stages_of(pp_rank))

    def trained_matrices(self, pp_rank: int, *, of_experts: bool) -> Iterator[tuple[int, int]]:
        """Yield rows and columns of trained matrices inside a pipeline rank's layers, whole.

        Args:
            pp_rank: the pipeline rank.
            of_experts: only those of the experts that one of the ranks has that divide them; otherwise only the others.
        """
        layers = self.plan.stage_layers(self.spec)
        of_layers = trained_matrices(self.spec)
        for stage in self.plan.layout.stages_of(pp_rank):
            for shape in chain.from_iterable(of_layers[layers[stage].start : layers[stage].stop]):
                *experts, rows, columns = shape
                if experts and of_experts:
                    yield from repeat((rows, columns), experts[0] // self.plan.ep)
                elif not experts and not of_experts:
                    yield rows, columns

    def _root(self, stages: Set[int]) -> int:
        """Return the parameters of the head and the final norm, or of the embedding, if one of ``stages`` has them."""
        is_head = self.spec.tied_embeddings
        if is_head and self.plan.num_stages - 1 in stages:
            return self.head.program.num_held + self.final_norm.program.num_held
        return 0 if stages.isdisjoint({0, self.plan.num_stages - 1}) else self.embedding.program.num_held

    @cached_property
    def embedding(self) -> Passes:
        """The forward and the backward of the embedding."""
        return embedding_passes(self.spec, self.setting)

    @cached_property
    def final_norm(self) -> Passes:
        """The forward and the backward of the norm before the head."""
        return final_norm_passes(self.spec, self.setting)

    @cached_property
    def head(self) -> Passes:
        """The forward and the backward of the head and the loss."""
        return head_passes(self.spec, self.setting, self.objective.program)

    @cached_property
    def stream_bytes(self) -> int:
        """Bytes of a rank's residual stream, [B, S, D]."""
        return self.setting.stream_tokens * self.spec.hidden_size * self.itemsize

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the step's tokens, their targets, with documents their positions, and what the objective reads.

        Of rows that are measured before the step, other ranks' columns are not kept.
        """
        plan = self.plan
        rows = plan.microbatch_size * plan.num_microbatches
        columns = self.seq_len
        if plan.cp > 1:  # this rank's columns, and the rows that all ranks of the sequence get
            columns += self.seq_len // plan.cp
        columns += forwards_before_step(self.objective) * self.seq_len
        num_int64 = 2 if self.documents == "none" else 3
        num_int64 += 2 * self.spec.mtp_layers
        num_bytes = (num_int64 * INT64_BYTES + self.setting.values_per_token * FP32_BYTES) * rows * columns
        if self.documents != "none" and self.kernel.moves == "exchange":
            # a rank that attends to whole rows needs their positions, and cuts no columns out of them
            num_bytes -= INT64_BYTES * rows * (self.seq_len // plan.cp)
        return num_bytes

    @property
    def rotation_bytes(self) -> int:
        """Bytes of a microbatch's cosines and sines, which the layers with one rotary embedding share."""
        own_seq = self.seq_len // self.plan.cp
        tokens = self.setting.tokens
        rotations = own_seq if self.documents == "none" else tokens  # without documents all rows share their positions
        return rotations * self.spec.rotated_dim * FP32_BYTES  # [B, 1, S, R] each, half as many as are rotated

    @property
    def mask_bytes(self) -> int:
        """Bytes of a microbatch's mask, which the layers with one window share."""
        cp = self.plan.cp
        if self.kernel.moves == "gather":  # instead, the place of every gathered key
            return self.setting.tokens * (2 * cp + 1) // 2 * INT64_BYTES
        if self.kernel.told != "mask":
            return 0
        if self.kernel.has_whole_rows:
            return self.setting.rows * self.seq_len**2 * self.itemsize  # [B, 1, S, S]
        # around a ring, half of it per block, and all of it for its own block
        return self.setting.tokens * (self.seq_len // cp) * self.itemsize * (cp + 1) // 2


@lru_cache(maxsize=512)
def _layers(spec: ModelSpec, setting: Setting) -> tuple[Passes, ...]:
    # the input of a frozen first layer may need no gradient
    return tuple(
        prediction_passes(spec, traits, setting)
        if traits.predicts
        else layer_passes(spec, traits, setting, follows_trained=layer > 0 or trains_embedding(spec))
        for layer, traits in enumerate(spec.layers)
    )
