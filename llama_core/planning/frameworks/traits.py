"""The traits of a training framework that determine the memory and the time of its runs, as data.

The fields default to PyTorch's own behaviour: ``fully_shard``, unfused ``nn`` modules, AdamW.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Loss:
    """Bytes per logit on a rank during the loss's backward."""

    eager: float
    sharded: float
    """With the vocabulary divided over tensor-parallel ranks."""
    compiled: float
    num_pieces: int = 1
    """Pieces in which tokens pass through head and loss; only one piece's logits exist at a time."""


CROSS_ENTROPY = Loss(eager=12, sharded=16, compiled=4)
"""``cross_entropy(logits.float())``, logits dropped before the backward. Eager: the saved log-softmax, the gradient of
``nll_loss`` and that of ``log_softmax``, all fp32. Sharded: ``loss_parallel`` computes its gradient from four fp32
tensors (torch/distributed/tensor/parallel/loss.py, ``_nll_loss_and_log_softmax_backward``). Compiled: low-precision
logits and their gradient, because fp32 stays in registers."""


@dataclass(frozen=True)
class Adapters:
    """The low-rank adapters that a framework's recipe adds to queries and values."""

    rank: int = 8
    on_output: bool = False
    """Whether attention's output matrix has one."""
    on_ffn: bool = False
    """Whether the matrices of the feed-forward have one."""
    drops_out: bool = False
    """Whether dropout precedes each adapter; it keeps its output and its mask."""


@dataclass(frozen=True)
class Efficiencies:
    """How long the parts of a framework's step take, beside this engine's on the same devices.

    They are fitted to published throughputs by ``benchmarks/published/fitting.py``: docs/cost.md.
    """

    products: float = 1.0
    """Time of matrix products, as a multiple of this engine's."""
    tensor_parallel: float = 1.0
    """Time that tensor parallelism adds, as a multiple of this engine's, which overlaps none of it."""
    step_seconds: float = 0.0
    """Seconds of every step, whatever its size."""
    num_rows: int = 0
    """Published rows that they are fitted to."""
    left_out_error: float = 0.0
    """Mean absolute error of these rows, each predicted without the rows of its configuration."""


@dataclass(frozen=True)
class Framework:
    """One framework's defaults, from one month on."""

    name: str
    source: str
    """Where the defaults are documented."""
    since: str = "2023-01"
    prints: Literal["allocated", "active", "reserved"] = "reserved"
    """The statistic that its own log shows, assumed if a row names none."""
    sharding: Literal["fully_shard", "optimizer"] = "fully_shard"
    """``fully_shard``: ranks shard weights too, and gather them when needed. ``optimizer``: ranks hold whole weights
    and gradients, and shard only the optimizer's states (ZeRO-1)."""

    # states, in bytes per parameter
    master_bytes: float = 0
    """fp32 master weights of the optimizer, beside the weights of the forward."""
    moment_bytes: float = 8
    """Moments, unless a row gives their dtype."""
    gradient_bytes: float = 4
    """Complete gradients."""
    persistent_gradients: bool = False
    """Whether gradients live in a buffer that is never freed."""
    reduce_bytes: float = 4
    """Gradients during a reduction."""
    bucket_bytes: float = 0
    """Gradient buckets, with more than one replica."""
    foreach_bytes: float = 0
    """Temporaries of an unfused optimizer step, per parameter of the shard."""
    accumulates: bool = False
    """Whether a row without a number has several microbatches per step, so that gradients outlive a backward."""
    pages_on_one_gpu: bool = False
    """Whether its recipe for one GPU pages moments to the host and runs the optimizer in the backward."""

    # activations
    norm_saved: float = 6
    """Bytes that a norm keeps for its backward, per input element: 6 for an unfused norm (the input in fp32 and the
    normalised values), 8 if both are fp32, 2 for a fused kernel."""
    norm_frozen: float = 4
    """The same if the norm's weight is frozen."""
    ffn_tensors: int = 4
    """Kept tensors as wide as a gated feed-forward: gate, its activation, up, and their product; 3 if one kernel
    computes activation and product."""
    repeats_kv: bool = False
    """Whether keys and values are repeated to the number of query heads."""
    keeps_gathered: bool = True
    """With sequence parallelism: whether a matrix's gathered input is kept (True) or gathered again in the backward."""
    selective: Literal["alternate", "products", "attention"] = "alternate"
    """What selective recompute keeps: ``alternate``, attention and every second matrix product; ``products``, attention
    and all products; ``attention``, all but the inside of attention, which flash attention does not keep anyway."""
    loss: Loss = CROSS_ENTROPY

    # how ranks share the work
    own_pools: bool = False
    """Whether gathers and reductions allocate on their own streams. The caching allocator never moves a block between
    streams, so the reserved memory is the sum of the streams' peaks, not the peak of their sum."""
    tables_in_root: int = 1
    """How many of embedding and head belong to the root module, which stays gathered and is reduced last."""
    balances_cost: bool = False
    """Whether layers are assigned to pipeline stages by cost; the head costs as much as layers of its size."""
    unties_head: bool = False
    """Whether a tied head becomes a separate matrix."""
    loads_whole: bool = False
    """Whether loading a checkpoint gathers all weights on every rank."""
    num_gpus: int | None = None
    """GPUs assumed if a row gives no number."""

    # finetuning
    adapters: Adapters = Adapters()
    quantised_bytes: float = 0.5625
    """Bytes per parameter of a matrix in NF4: half a byte, plus a scale for each block of 64."""
    quantises_head: bool = False

    # time
    fused_kernels: bool = False
    """Whether norm, rotation and activation are kernels of their own, even if nothing is compiled."""
    attention: Literal["flash", "cudnn"] = "flash"
    """Whose kernel computes a causal row."""
    efficiencies: Efficiencies = Efficiencies()
