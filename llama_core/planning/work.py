"""``Work``: what one optimizer step computes, and all that planning estimates from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from llama_core.config.models import ModelSpec
from llama_core.config.run import Precision, RunConfig
from llama_core.objectives.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from llama_core.objectives.traits import ObjectiveType
from llama_core.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from llama_core.optimizers.traits import OptimizerType
from llama_core.planning.plan import DocumentAttention, ParallelPlan, document_attention, runs_on_cuda
from llama_core.planning.program.ends import embedding_passes, final_norm_passes, head_passes
from llama_core.planning.program.layer import layer_passes
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting


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
    """How attention is kept inside packed documents; a mask has ``seq_len`` squared elements."""
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
            documents=document_attention(config, plan),
            on_cuda=runs_on_cuda(config),
            optimizer=config.optimizer,
            objective=config.objective,
        )

    @property
    def itemsize(self) -> int:
        """Bytes per element of activations."""
        return FP32_BYTES if self.precision == "fp32" else FP32_BYTES // 2

    @cached_property
    def setting(self) -> Setting:
        """What the programs depend on beside the model."""
        return Setting.of(
            self.plan,
            seq_len=self.seq_len,
            itemsize=self.itemsize,
            documents=self.documents,
            on_cuda=self.on_cuda,
        )

    @cached_property
    def layers(self) -> tuple[Passes, ...]:
        """The forward and the backward of every layer; equal ones are one object."""
        # the input of a frozen first layer may need no gradient
        return tuple(
            layer_passes(self.spec, traits, self.setting, follows_trained=layer > 0 or self.spec.trains_embedding)
            for layer, traits in enumerate(self.spec.layers)
        )

    @property
    def embedding(self) -> Passes:
        """The forward and the backward of the embedding."""
        return embedding_passes(self.spec, self.setting)

    @property
    def final_norm(self) -> Passes:
        """The forward and the backward of the norm before the head."""
        return final_norm_passes(self.spec, self.setting)

    @property
    def head(self) -> Passes:
        """The forward and the backward of the head and the loss."""
        return head_passes(self.spec, self.setting, self.objective.program)

    @property
    def stream_bytes(self) -> int:
        """Bytes of a rank's residual stream, [B, S, D]."""
        return self.setting.stream_tokens * self.spec.hidden_size * self.itemsize

    @property
    def batch_bytes(self) -> int:
        """Bytes of the step's tokens, their targets, with documents their positions, and what the objective reads."""
        plan = self.plan
        rows = plan.microbatch_size * plan.num_microbatches
        columns = self.seq_len
        if plan.cp > 1:  # this rank's columns, and the rows that all ranks of the sequence get
            columns += self.seq_len // plan.cp
        num_int64 = 2 if self.documents == "none" else 3
        return (num_int64 * INT64_BYTES + len(self.objective.per_token) * FP32_BYTES) * rows * columns

    @property
    def shared_bytes(self) -> int:
        """Bytes that all layers of a microbatch share: cosines and sines, and a mask."""
        plan = self.plan
        own_seq = self.seq_len // plan.cp
        tokens = self.setting.tokens
        rotations = own_seq if self.documents == "none" else tokens  # without documents all rows share their positions
        shared = rotations * self.spec.head_dim * FP32_BYTES  # [B, 1, S, H/2] each
        if self.documents == "mask":
            # [B, 1, S, S]; around a ring, half of it per block, and all of it for its own block
            shared += tokens * own_seq * self.itemsize * (plan.cp + 1) // 2
        return shared
