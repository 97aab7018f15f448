"""What attention of a layer has to compute, and the kernels that compute it: a record and a table that all others ask.

From what a layer needs to the kernel that serves it::

      ModelSpec.attention(layer)     rows of documents?     parallel.attention, cp     device, dtype
                  |                          |                       |                       |
            AttentionNeeds <-----------------+                       |                       |
                  |                                                  |                       |
                  v                                                  |                       |
      chosen_kernel: the first row that serves all layers <----------+-----------------------+
                  |                                      \
                  |  what it is told:                     +---> no row does: refusal, one line,
                  |  nothing, a mask, or documents              when the plan is made
                  |
                  +---> training.inputs, evaluation.inference.row_losses: what a batch carries
                  |
                  v
      kernel_told: the row of each layer, given what is told, parallel.attention and cp
                  |
                  +---> planning.program, planning.time: bytes, FLOPs, transfers
                  +---> models.attention.use_kernels: what a block computes with
                  +---> parallel.recompute: whether its recomputation can be compiled

      planning.plan and parallel.context ask refusal before that; whatever generates asks check_cached:
      evaluation.generate, evaluation.plan, and both caches (in evaluation.inference).

Which row serves::

      a query sees                  |  a forward has whole rows       ranks divide a row (cp)   earlier forwards' keys
      ------------------------------+-----------------------------------------------------------------------------------
      all before it                 |  causal                         ring, ulysses             cache
      ... and a CPU trains          |  cpu causal (bf16)
      not all of it, CUDA, 16 bits  |  varlen                         gathered, varlen ulysses  no documents: refused
      not all of it, elsewhere      |  masked                         masked ring or ulysses    cache, in one document
      ... and a CPU trains          |  cpu masked (bf16, fp32)
      with a soft cap, or with math |  all scores, masked scores      refused                   cache with all scores

A chunk is a shorter document to all of them but ``gathered``, for which the masked ring stands in: which tokens a rank
holds follows from the documents of a row, and would have to for layers with and without chunks alike.

A block calls its kernel on queries, keys, values and what the row is told. A cache stands before that: it gives the
kernel the keys and values of earlier forwards too. The rows of the CPU stand in for ``causal`` and ``masked`` where a
backward follows, and only there: without one, torch's own kernels are as fast.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llama_core.errors import PlanError

DocumentAttention = Literal["none", "mask", "varlen"]
"""What a kernel is told of what a query does not see before it: nothing, as it sees all; an additive mask; or where
each document begins and how long the window is, with which it skips the other scores and holds no mask."""
Trait = Literal["documents", "window", "chunk", "soft cap"]
"""What causal attention over whole rows lacks."""
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
"""The dtype of activations."""
Moves = Literal["nothing", "ring", "gather", "exchange", "cache"]
"""How a forward gets keys and values of tokens that it does not have: ranks that divide a row pass them around block by
block, gather them, or exchange their tokens of all heads for all tokens of some heads; a cache keeps those of earlier
forwards."""


class AttentionNeeds(NamedTuple):
    """What attention of one layer has to compute, whatever kernel does it."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    window: int = 0
    """Tokens that a query sees, itself included; 0 for all earlier ones."""
    chunk: int = 0
    """Tokens of a chunk: a document is cut into as many as it takes, and a query sees only keys of its own; 0 for one
    chunk."""
    documents: bool = False
    """Whether a row may hold several documents, which do not see each other."""
    soft_cap: float = 0.0
    """Scores become ``cap * tanh(scores / cap)`` before the softmax; 0 leaves them."""
    sinks: bool = False
    """Whether each query head has a logit that joins the softmax's denominator and has no value.

    No trait, since every kernel serves it: see ``models.sinks``.
    """

    @property
    def scale(self) -> float:
        """The factor on products of queries and keys, which makes scores of them."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def traits(self) -> frozenset[Trait]:
        """What a kernel must serve."""
        has: dict[Trait, bool] = {
            "documents": self.documents,
            "window": self.window > 0,
            "chunk": self.chunk > 0,
            "soft cap": self.soft_cap > 0,
        }
        return frozenset(trait for trait, is_there in has.items() if is_there)

    @property
    def hides_in_document(self) -> bool:
        """Whether a query does not see all of its document before it, so that even one alone has to be told of."""
        return self.window > 0 or self.chunk > 0

    def share_of_causal(self, length: int) -> float:
        """Return the share of the causal scores of ``length`` tokens that are visible in one document."""
        whole, rest = divmod(length, self.chunk or length)
        visible = whole * self._visible(self.chunk or length) + self._visible(rest)
        return 2 * visible / (length * (length + 1))

    def _visible(self, length: int) -> float:
        """Return the visible scores of one chunk."""
        seen = min(self.window or length, length)
        # the first queries see fewer tokens than the window has
        return seen * (2 * length - seen + 1) / 2


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention."""

    name: str
    serves: frozenset[Trait]
    told: DocumentAttention
    moves: Moves = "nothing"
    holds_scores: bool = False
    """Whether it holds all scores, in fp32, as torch's math kernel does: what ``parallel.attention=math`` asks for, and
    what no fused kernel serves."""
    device: str = ""
    """The only kind of device that has it; empty for all."""
    dtypes: frozenset[Dtype] = frozenset()
    """The only dtypes of activations that it takes; empty for all."""
    only_trains: bool = False
    """Whether it is of use only where a backward follows; it then stands in for the kernel of every device."""

    @property
    def divides_rows(self) -> bool:
        """Whether each rank has a part of each row."""
        return self.moves in {"ring", "gather", "exchange"}

    @property
    def has_whole_rows(self) -> bool:
        """Whether the kernel itself gets whole rows, perhaps of some heads."""
        return self.moves not in {"ring", "gather"}

    @property
    def is_cached(self) -> bool:
        """Whether a cache keeps the keys and values of earlier forwards."""
        return self.moves == "cache"

    @property
    def skips_hidden(self) -> bool:
        """Whether it computes no score that documents and windows hide."""
        return self.told == "varlen"

    @property
    def is_fused_causal(self) -> bool:
        """Whether torch may run a faster kernel than flash attention, over whole rows and without a mask."""
        return self.told == "none" and self.has_whole_rows

    @property
    def has_random_state(self) -> bool:
        """Whether torch may save a random state for a recomputation, as for ``scaled_dot_product_attention``."""
        return self.told != "varlen"

    def repeats_heads(self, *, has_16_bits: bool) -> bool:
        """Return whether CUDA's kernel needs a key head for each query head, of which a backward keeps copies."""
        is_torchs_choice = self.has_whole_rows and not self.holds_scores
        return is_torchs_choice and (self.told == "mask" or not has_16_bits)

    def runs_on(self, device: str, dtype: Dtype) -> bool:
        """Return whether a kind of device has it for activations of a dtype."""
        return self.device in {"", device} and (not self.dtypes or dtype in self.dtypes)


NONE: frozenset[Trait] = frozenset()
IN_DOCUMENT: frozenset[Trait] = frozenset({"window", "chunk"})
HIDDEN: frozenset[Trait] = IN_DOCUMENT | {"documents"}
CAPPED: frozenset[Trait] = frozenset({"soft cap"})
SIXTEEN_BITS: frozenset[Dtype] = frozenset({"bf16", "fp16"})
# backwards of our own, faster than torch's; in fp32 only because they skip keys that a mask hides
CPU_CAUSAL = Kernel("cpu causal", NONE, "none", device="cpu", dtypes=frozenset({"bf16"}), only_trains=True)
CPU_MASKED = Kernel("cpu masked", HIDDEN, "mask", device="cpu", dtypes=frozenset({"bf16", "fp32"}), only_trains=True)
CAUSAL = Kernel("causal", NONE, "none")
VARLEN = Kernel("varlen", HIDDEN, "varlen", device="cuda", dtypes=SIXTEEN_BITS)
MASKED = Kernel("masked", HIDDEN, "mask")
RING = Kernel("ring", NONE, "none", "ring")
GATHERED = Kernel("gathered", HIDDEN - {"chunk"}, "varlen", "gather", device="cuda", dtypes=SIXTEEN_BITS)
MASKED_RING = Kernel("masked ring", HIDDEN, "mask", "ring")
ULYSSES = Kernel("ulysses", NONE, "none", "exchange")
VARLEN_ULYSSES = Kernel("varlen ulysses", HIDDEN, "varlen", "exchange", device="cuda", dtypes=SIXTEEN_BITS)
MASKED_ULYSSES = Kernel("masked ulysses", HIDDEN, "mask", "exchange")
ALL_SCORES = Kernel("all scores", CAPPED, "none", holds_scores=True)
MASKED_SCORES = Kernel("masked scores", HIDDEN | CAPPED, "mask", holds_scores=True)
# a cache continues one text in each row, so it knows no documents
CACHE = Kernel("cache", IN_DOCUMENT, "mask", "cache")
SCORES_OF_CACHE = Kernel("cache with all scores", IN_DOCUMENT | CAPPED, "mask", "cache", holds_scores=True)
KERNELS = (
    CPU_CAUSAL,
    CAUSAL,
    VARLEN,
    CPU_MASKED,
    MASKED,
    RING,
    GATHERED,
    MASKED_RING,
    ULYSSES,
    VARLEN_ULYSSES,
    MASKED_ULYSSES,
    ALL_SCORES,
    MASKED_SCORES,
    CACHE,
    SCORES_OF_CACHE,
)
"""In order of preference."""


def kernels_of(asked: str, *, cp: int = 1, cached: bool = False) -> tuple[Kernel, ...]:
    """Return the rows that a plan may use, in order of preference.

    Args:
        asked: ``parallel.attention``.
        cp: ranks that divide a row.
        cached: whether a cache keeps the keys and values of earlier forwards.
    """
    found = []
    for kernel in KERNELS:
        has_keys = kernel.divides_rows == (cp > 1) and kernel.is_cached == cached
        if has_keys and _is_asked(kernel, asked):
            found.append(kernel)
    return tuple(found)


def _is_asked(kernel: Kernel, asked: str) -> bool:
    if asked == "math":
        return kernel.holds_scores
    # exchanged heads are what Ulysses is; with whole rows, it changes nothing
    return not kernel.divides_rows or (kernel.moves == "exchange") == (asked == "ulysses")


def refusal(needs: Iterable[AttentionNeeds], *, asked: str = "auto", cp: int = 1, cached: bool = False) -> str:
    """Return why no kernel serves what the layers of a model need, on any device; an empty text if one does."""
    traits = _traits(needs)
    if _serving(traits, asked, cp, cached):
        return ""
    rows = kernels_of(asked, cp=cp, cached=cached)
    offered = ", ".join(kernel.name for kernel in rows if not kernel.only_trains) or "no kernel"
    wanted = " and ".join(sorted(traits))
    if cached:
        return f"attention with {wanted} has no kernel among those of a cache ({offered}), so no text can be generated"
    remedies = {
        "cp=1": _serving(traits, asked, 1),
        "attention=auto": _serving(traits, "auto", cp),
        "cp=1 and attention=auto": _serving(traits, "auto", 1),
    }
    remedy = next((f"; use {remedy}" for remedy, serving in remedies.items() if serving), "")
    among = f"those of cp={cp} and attention={asked} ({offered})"
    return f"attention with {wanted} has no kernel among {among}{remedy}"


def check_cached(needs: Iterable[AttentionNeeds]) -> None:
    """Refuse layers whose attention a cache of generation does not serve.

    Raises:
        PlanError: saying what no row for caches has.
    """
    if unserved := refusal(needs, cached=True):
        raise PlanError(unserved)


def chosen_kernel(
    needs: Collection[AttentionNeeds],
    *,
    device: str,
    dtype: Dtype,
    asked: str = "auto",
    cp: int = 1,
    trains: bool = True,
) -> Kernel:
    """Return the kernel that serves all layers of a model, which decides what a batch tells them.

    Args:
        needs: what its layers need.
        device: the kind of device.
        dtype: the dtype of activations.
        asked: ``parallel.attention``.
        cp: ranks that divide a row.
        trains: whether a backward follows.

    Raises:
        PlanError: if no kernel serves all that is needed.
    """
    for kernel in _serving(_traits(needs), asked, cp):
        if kernel.runs_on(device, dtype) and (trains or not kernel.only_trains):
            return kernel
    raise PlanError(refusal(needs, asked=asked, cp=cp))


def kernel_told(needs: AttentionNeeds, told: DocumentAttention, *, asked: str = "auto", cp: int = 1) -> Kernel:
    """Return the kernel of one layer, where ``chosen_kernel`` has decided what the kernels of all layers are told.

    What is told leaves no choice by device but where a CPU trains: a row for that stands in for the one returned here,
    and holds and sends the same.

    Raises:
        PlanError: if no such kernel serves what the layer needs.
    """
    # what is hidden is a matter of what the kernel is told
    for kernel in _serving(needs.traits - HIDDEN, asked, cp):
        if kernel.told == told and not kernel.only_trains:
            return kernel
    raise PlanError(refusal([needs], asked=asked, cp=cp))


def _traits(needs: Iterable[AttentionNeeds]) -> frozenset[Trait]:
    return NONE.union(*(layer.traits for layer in needs))


def _serving(traits: frozenset[Trait], asked: str, cp: int, cached: bool = False) -> list[Kernel]:
    return [kernel for kernel in kernels_of(asked, cp=cp, cached=cached) if traits <= kernel.serves]
