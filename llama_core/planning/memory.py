"""The bytes one rank holds while it trains, by category and phase, from arithmetic alone.

What is modelled is this engine: fp32 weights, gradients and AdamW moments; activations in the compute dtype, to which
every layer casts its weights at use; attention that keeps its output and log-sum-exp but no scores; a linear
cross-entropy that goes through the tokens in chunks and computes its gradients in the forward; a fused optimizer
without temporaries. The terms are the tensors that ``llama_core.models`` hands to autograd, on a device without fused
norms; each says which tensor it is. Bytes are those of tensors: the allocator's rounding, its fragmentation and the
device's context come on top.

Sources: Korthikanti et al. 2022, arXiv:2205.05198, for counting activations by saved tensor; Rajbhandari et al. 2020,
arXiv:1910.02054, for what each ZeRO stage divides. With fp32 states the stages 0, 1, 2, 3 over N ranks take
16, 8 + 8/N, 4 + 12/N and 16/N bytes per parameter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llama_core.config.models import ModelSpec
from llama_core.config.run import Precision
from llama_core.planning.plan import ParallelPlan
from llama_core.units import GB, GIB, MIB, format_bytes

Category = Literal["weights", "gradients", "moments", "activations", "loss", "communication", "temporaries"]
Phase = Literal["forward", "backward", "optimizer"]
STATES: tuple[Category, ...] = ("weights", "gradients", "moments")

FP32_BYTES = 4

FILL_LIMIT = 0.9
"""Share of a device's usable bytes that tensors may take: a caching allocator reserves at least a tenth more."""


@dataclass(frozen=True)
class MemoryProfile:
    """The bytes alive at the peak of each phase of a step, by category."""

    phases: Mapping[Phase, Mapping[Category, int]]

    @property
    def peak_phase(self) -> Phase:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> Mapping[Category, int]:
        """The categories at the peak of the whole step."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once: the maximum over the phases, not their sum."""
        return sum(self.peak.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments when all of them exist: as the optimizer updates."""
        return sum(self.phases["optimizer"].get(category, 0) for category in STATES)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as a record, with the peak that follows from it for those who read it."""
        return {
            "phases": {phase: dict(categories) for phase, categories in self.phases.items()},
            "peak_phase": self.peak_phase,
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True)
class MemoryEstimate:
    """A profile held against a device."""

    profile: MemoryProfile
    device: str
    """The device as people call it."""
    usable_bytes: int
    """Bytes a training process may use there."""

    @property
    def headroom_bytes(self) -> int:
        """Usable bytes less the peak; negative where it does not fit."""
        return self.usable_bytes - self.profile.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable bytes."""
        return self.headroom_bytes >= 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What is in the way where it does not fit, and what to do; or how little is left where it just does."""
        states = self.profile.state_bytes
        if states > self.usable_bytes:
            return (
                f"weights, gradients and moments alone take {states / GB:.1f} GB per device, more than the "
                f"{self.usable_bytes / GB:.1f} GB usable on {self.device}; shard them over more devices (parallel.gpus "
                "with parallel.zero_stage=3)",
            )
        if not self.fits:
            return (
                f"the peak is {format_bytes(-self.headroom_bytes)} above what {self.device} can hold; try "
                "parallel.microbatch_size=1, parallel.recompute=full or a shorter training.seq_len",
            )
        if self.profile.peak_bytes > FILL_LIMIT * self.usable_bytes:
            return (
                f"only {format_bytes(self.headroom_bytes)} of {self.device} are left, which fragmentation may take",
            )
        return ()

    def summary(self) -> str:
        """Return the verdict in one line."""
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"peak {format_bytes(self.profile.peak_bytes)} in the {self.profile.peak_phase}, "
            f"{verdict} the {format_bytes(self.usable_bytes)} of {self.device}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as a flat record."""
        return self.profile.as_dict() | {
            "device": self.device,
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "notes": list(self.notes),
        }


def state_bytes(spec: ModelSpec, plan: ParallelPlan) -> dict[Category, int]:
    """Return the bytes of weights, gradients and moments on one rank, as ``plan``'s ZeRO stage divides them."""
    whole = FP32_BYTES * spec.num_parameters
    shard = FP32_BYTES * -(-spec.num_parameters // plan.dp_shard)
    stage = plan.effective_zero_stage
    return {
        "weights": shard if stage >= 3 else whole,
        "gradients": shard if stage >= 2 else whole,
        "moments": 2 * (shard if stage >= 1 else whole),
    }


def estimate_memory(
    spec: ModelSpec, plan: ParallelPlan, *, seq_len: int, precision: Precision, document_mask: bool
) -> MemoryProfile:
    """Return the peak of each phase on one rank, from the second step on, when the moments exist.

    Args:
        spec: the architecture.
        plan: how a batch is divided over ranks and microbatches, and what is recomputed.
        seq_len: tokens per sequence.
        precision: the dtype of activations and matrix products; ``auto`` counts as bf16, which every GPU in the
            hardware table has.
        document_mask: whether attention is kept inside packed documents, which takes a mask of ``seq_len`` squared.
    """
    step = _Step(spec, plan, seq_len=seq_len, itemsize=4 if precision == "fp32" else 2, document_mask=document_mask)
    return MemoryProfile(
        {
            "forward": max(step.forward(), key=_total),
            "backward": max(step.backward(), key=_total),
            "optimizer": step.optimizer(),
        }
    )


_Moment = dict[Category, int]


def _total(moment: Mapping[Category, int]) -> int:
    return sum(moment.values())


LOSS_MIN_CHUNK_BYTES = 128 * MIB
LOSS_MAX_CHUNK_BYTES = GIB
LOSS_NUM_BLOCKS = 16
"""The sizes of ``models.loss``, which cannot be imported here without torch; a test holds the two together."""


def loss_chunk_tokens(spec: ModelSpec, itemsize: int) -> int:
    """Return the most tokens whose logits the linear cross-entropy holds at once: ``models.loss``'s own rule."""
    row_bytes = spec.vocab_size * itemsize
    chunk_bytes = min(max(spec.hidden_size * row_bytes, LOSS_MIN_CHUNK_BYTES), LOSS_MAX_CHUNK_BYTES)
    return max(1, chunk_bytes // row_bytes)


class _Step:
    """The tensors of one optimizer step on one rank, in bytes, and the moments at which it may hold most."""

    def __init__(
        self, spec: ModelSpec, plan: ParallelPlan, *, seq_len: int, itemsize: int, document_mask: bool
    ) -> None:
        self.spec, self.plan, self.itemsize = spec, plan, itemsize
        tokens = plan.microbatch_size * seq_len
        self.states = state_bytes(spec, plan)
        self.sharded_weights = plan.effective_zero_stage >= 3
        self.narrow = itemsize < FP32_BYTES
        self.full = plan.recompute == "full"

        self.stream = tokens * spec.hidden_size * itemsize  # one [B, S, D] of the residual stream's dtype
        self.wide = tokens * spec.hidden_size * FP32_BYTES  # the same in fp32
        self.ffn = tokens * spec.ffn_size * itemsize  # one [B, S, F]
        self.table = FP32_BYTES * spec.embedding_parameters  # the embedding or the head, or its gradient
        self.w2_cast = spec.hidden_size * spec.ffn_size * itemsize if self.narrow else 0
        self.w2_gradient = spec.hidden_size * spec.ffn_size * FP32_BYTES

        inputs_per_token = 3 if document_mask else 2  # int64: token, target, position
        self.inputs = 8 * inputs_per_token * tokens * plan.num_microbatches
        rotations = tokens if document_mask else seq_len  # without documents all rows share their positions
        self.shared = rotations * spec.head_dim * FP32_BYTES  # cos and sin, [B, 1, S, H/2] each
        self.shared += tokens * seq_len * itemsize if document_mask else 0  # the additive mask, [B, 1, S, S]
        self.norm = 2 * self.wide + tokens * FP32_BYTES  # the input in fp32, the input normalised, its scale
        self.layer = self._saved_by_a_layer(tokens)
        self.loss_saved = self.stream + self.table  # gradients of the hidden states and of the head
        self.loss_working = self._loss_working(tokens)

    def _saved_by_a_layer(self, tokens: int) -> int:
        spec = self.spec
        attention = (
            self.norm
            + self.stream  # the norm's output: input of wq, wk, wv
            + tokens * (spec.q_size + 2 * spec.kv_size) * self.itemsize  # rotated q and k, and v
            + 2 * tokens * spec.q_size * self.itemsize  # the output, and its copy with the heads last: input of wo
            + tokens * spec.num_heads * FP32_BYTES  # log-sum-exp
        )
        # the norm's output: input of w1 and w3; then gate, silu(gate), up, and their product: input of w2
        feed_forward = self.norm + self.stream + 4 * self.ffn
        # sharded weights are gathered in the compute dtype and dropped after use instead
        casts = self.itemsize * spec.layer_parameters if self.narrow and not self.sharded_weights else 0
        return attention + feed_forward + casts

    def _loss_working(self, tokens: int) -> int:
        spec = self.spec
        chunk = -(-tokens // -(-tokens // loss_chunk_tokens(spec, self.itemsize)))
        head_cast = spec.embedding_parameters * self.itemsize if self.narrow and not self.sharded_weights else 0
        return (
            self.loss_saved
            + self.stream  # the hidden states, those of ignored targets zeroed
            + head_cast
            + chunk * spec.vocab_size * self.itemsize  # logits of one chunk, then their gradients
            + -(-chunk // LOSS_NUM_BLOCKS) * spec.vocab_size * FP32_BYTES  # fp32 rows for the softmax
            + -(-spec.vocab_size // LOSS_NUM_BLOCKS) * spec.hidden_size * self.itemsize  # rows of the head's gradient
            + tokens * (8 + 1 + FP32_BYTES)  # answers, which of them are ignored, losses
        )

    @property
    def kept(self) -> int:
        """Activations alive when the forward has ended."""
        return self._alive_below(self.spec.num_layers) + self.norm

    def _alive_below(self, num_layers: int) -> int:
        """Activations of the first ``num_layers`` layers, with what all layers share."""
        return self.inputs + self.shared + num_layers * (self.stream if self.full else self.layer)

    def _gathered(self, gradient: bool) -> int:
        """Weights and gradients that sharded ranks hold whole for the time of a block."""
        spec, stage = self.spec, self.plan.effective_zero_stage
        # the block at work and the one fetched ahead, or the embedding or head
        weights = max(2 * spec.layer_parameters, spec.embedding_parameters) * self.itemsize if stage >= 3 else 0
        return weights + (spec.layer_parameters * FP32_BYTES if stage >= 2 and gradient else 0)

    def _gradients(self, num_parameters: int) -> int:
        """Gradients that have come into being with those of ``num_parameters``, earlier microbatches included."""
        if self.plan.num_microbatches > 1:
            return self.states["gradients"]
        return self.states["gradients"] * num_parameters // self.spec.num_parameters

    def _moment(
        self, *, gradients: int, activations: int, loss: int = 0, temporaries: int = 0, communication: int = 0
    ) -> _Moment:
        return {
            "weights": self.states["weights"],
            "gradients": gradients,
            "moments": self.states["moments"],
            "activations": activations,
            "loss": loss,
            "communication": communication,
            "temporaries": temporaries,
        }

    def forward(self) -> Iterator[_Moment]:
        """Yield the moments of a forward at which most may be alive, the last microbatch's."""
        gathered = self._gathered(gradient=False)
        gradients = self._gradients(0)
        # the last chunk of the loss; the final norm's output is dropped with it
        yield self._moment(
            gradients=gradients,
            activations=self.kept,
            loss=self.loss_working,
            temporaries=self.stream,
            communication=gathered,
        )
        if self.full:  # the last layer's feed-forward: silu(gate), up, their product; the stream and the norm's output
            yield self._moment(
                gradients=gradients,
                activations=self._alive_below(self.spec.num_layers),
                temporaries=3 * self.ffn + 2 * self.stream,
                communication=gathered,
            )

    def backward(self) -> Iterator[_Moment]:
        """Yield the moments of a backward at which most may be alive, in their order."""
        spec = self.spec
        gathered = self._gathered(gradient=True)
        # the loss scales what its forward saved into gradients of its own
        yield self._moment(
            gradients=self._gradients(0 if spec.tied_embeddings else spec.embedding_parameters),
            activations=self.kept,
            loss=self.loss_saved,
            temporaries=self.stream + (self.table if self._head_gradient_waits else 0),
            communication=gathered,
        )
        # the final norm: gradients of its output and of what it saved, in fp32
        yield self._moment(
            gradients=self._gradients(0 if spec.tied_embeddings else spec.embedding_parameters),
            activations=self.kept - self.wide,
            temporaries=5 * self.wide + (self.table if spec.tied_embeddings else 0),
            communication=gathered,
        )
        # memory goes up or down evenly from layer to layer, so that the last and the first tell the peak
        for layer in (spec.num_layers - 1, 0):
            yield self._in_feed_forward(layer)
        yield from self._in_embedding()

    @property
    def _head_gradient_waits(self) -> bool:
        """Whether the head's gradient is no parameter's gradient yet, or is added to one and dropped."""
        return self.spec.tied_embeddings or self.plan.num_microbatches > 1

    def _in_feed_forward(self, layer: int) -> _Moment:
        """Return the moment after w2's backward: the layer is still whole but for what w2 had saved."""
        spec = self.spec
        above = (spec.num_layers - 1 - layer) * spec.layer_parameters + spec.hidden_size * (1 + spec.ffn_size)
        remaining = self.layer - self.ffn - (0 if self.sharded_weights else self.w2_cast)
        activations, temporaries = self._alive_below(layer), self.stream  # the upstream gradient
        if self.full:
            activations += self.stream
            # in fp32 the recomputed layer's first norm keeps the very tensor that checkpointing kept
            temporaries += remaining - (0 if self.narrow else self.stream)
        else:
            activations += remaining
        # gradients of the product, silu(gate) and up; or, with few tokens, w2's gradient before it is widened
        temporaries += max(3 * self.ffn, self.ffn + self.w2_cast)
        if self.plan.num_microbatches > 1:
            temporaries += self.w2_gradient  # waits to be added to the accumulated one
        if spec.tied_embeddings:
            temporaries += self.table  # the head's gradient waits for the embedding's
        return self._moment(
            gradients=self._gradients(above + (0 if spec.tied_embeddings else spec.embedding_parameters)),
            activations=activations,
            temporaries=temporaries,
            communication=self._gathered(gradient=True),
        )

    def _in_embedding(self) -> Iterator[_Moment]:
        """Yield the moments at the end of the backward, where the embedding's gradient is made in one piece."""
        spec, tied = self.spec, self.spec.tied_embeddings
        accumulates = self.plan.num_microbatches > 1
        gathered = self._gathered(gradient=True)
        upstream = self.stream + (self.wide if self.narrow else 0)
        layers = self._gradients(spec.num_parameters - spec.embedding_parameters)
        yield self._moment(
            gradients=layers if tied else self._gradients(spec.num_parameters),
            activations=self.inputs,
            temporaries=upstream + self.table * (2 if tied else int(accumulates)),
            communication=gathered,
        )
        if tied:  # the two gradients and their sum
            yield self._moment(
                gradients=self._gradients(spec.num_parameters),
                activations=self.inputs,
                temporaries=self.table * (3 if accumulates else 2),
                communication=gathered,
            )

    def optimizer(self) -> _Moment:
        """Return the moment of the update, which works in place."""
        return self._moment(gradients=self.states["gradients"], activations=self.inputs)
