"""What decides about the bytes of a training framework's run, as data.

Defaults of the fields are those of PyTorch's own parts: ``fully_shard``, ``nn`` modules written out, AdamW.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Loss:
    """Bytes per logit on a rank while the loss's backward is under way."""

    eager: float
    sharded: float
    """With the vocabulary divided over tensor-parallel ranks."""
    compiled: float
    num_pieces: int = 1
    """Pieces in which tokens go through head and loss together, so that only one piece's logits exist at a time."""


CROSS_ENTROPY = Loss(eager=12, sharded=16, compiled=4)
"""``cross_entropy(logits.float())``, logits dropped before the backward. Eager: the saved log-softmax, the gradient of
``nll_loss`` and that of ``log_softmax``, all fp32. Sharded: ``loss_parallel`` makes its gradient out of four fp32
tensors (torch/distributed/tensor/parallel/loss.py, ``_nll_loss_and_log_softmax_backward``). Compiled: low-precision
logits and their gradient, for fp32 stays in registers."""


@dataclass(frozen=True)
class Adapters:
    """The low-rank adapters that a framework's recipe adds to queries and values."""

    rank: int = 8
    on_output: bool = False
    """Whether the matrix after attention has one."""
    on_ffn: bool = False
    """Whether the matrices of the feed-forward have."""
    drops_out: bool = False
    """Whether dropout comes before an adapter, which keeps its output and its mask."""


@dataclass(frozen=True)
class Framework:
    """One framework's defaults, from one month on."""

    name: str
    source: str
    """Where these can be read."""
    since: str = "2023-01"
    prints: Literal["allocated", "active", "reserved"] = "reserved"
    """The statistic its own log shows, taken where a row leaves it open."""
    sharding: Literal["fully_shard", "optimizer"] = "fully_shard"
    """Whether ranks divide weights too, and gather them when they need them, or hold whole weights and gradients and
    divide the optimizer's states alone (ZeRO-1)."""

    # states, in bytes per parameter
    master_bytes: float = 0
    """fp32 weights that the optimizer holds beside those of the forward."""
    moment_bytes: float = 8
    """Moments, where a row does not say how they are kept."""
    gradient_bytes: float = 4
    """Complete gradients."""
    persistent_gradients: bool = False
    """Whether gradients live in a buffer that is never freed."""
    reduce_bytes: float = 4
    """Gradients on their way through a reduction."""
    bucket_bytes: float = 0
    """Buckets through which gradients pass where there is more than one replica."""
    foreach_bytes: float = 0
    """Temporaries of an optimizer step that is not fused, per parameter of the shard."""
    accumulates: bool = False
    """Whether a row that does not say so has several microbatches per step, so that gradients outlive a backward."""
    pages_on_one_gpu: bool = False
    """Whether its recipe for one GPU pages moments to the host and steps within the backward."""

    # activations
    norm_saved: float = 6
    """Bytes per element of a norm's input that its backward keeps: 6 for a norm written out (the input in fp32, and the
    normalised values), 8 where both are fp32, 2 for a fused kernel."""
    norm_frozen: float = 4
    """The same where the norm's weight is frozen."""
    ffn_tensors: int = 4
    """Tensors as wide as a gated feed-forward that are kept: gate, its activation, up, and their product; 3 where
    activation and product are one kernel."""
    repeats_kv: bool = False
    """Whether keys and values are copied until there are as many heads as of queries."""
    keeps_gathered: bool = True
    """Whether, of a divided sequence, the gathered input of a matrix is kept, or gathered again in the backward."""
    selective: Literal["alternate", "products", "attention"] = "alternate"
    """What selective recompute keeps: attention and every second product of matrices; all products; or all but the
    inside of attention, which flash attention does not keep anyway."""
    loss: Loss = CROSS_ENTROPY

    # how ranks share the work
    own_pools: bool = False
    """Whether gathers and reductions allocate on streams of their own. The caching allocator hands no block from one
    stream to another, so what is reserved is the sum of the streams' peaks, not the peak of their sum."""
    tables_in_root: int = 1
    """How many of embedding and head stay gathered, and are reduced last, with the root of the model."""
    balances_cost: bool = False
    """Whether layers are dealt to pipeline stages by cost, the head counting as layers of its size."""
    unties_head: bool = False
    """Whether a head that the model ties to the embedding is a matrix of its own."""
    loads_whole: bool = False
    """Whether loading a checkpoint gathers all weights on every rank."""
    num_gpus: int | None = None
    """GPUs that a row means which does not say."""

    # finetuning
    adapters: Adapters = Adapters()
    quantised_bytes: float = 0.5625
    """Per parameter of a matrix in NF4: half a byte, and a scale for each block of 64."""
    quantises_head: bool = False
