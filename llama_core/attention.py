"""What attention of a layer has to compute, and the kernels that compute it: a record and a table that all others ask.

::

    ModelSpec, layer, rows of documents?      parallel.attention, cp      device, precision
                  |                                    |                         |
           AttentionNeeds                              |                         |
                  |                                    |                         |
                  +-----------> chosen_kernel: the first row that serves <-------+      none does: PlanError
                                          |
          a query sees                    |  a rank has whole rows          ranks divide a row (cp)
          --------------------------------+-------------------------------------------------------------
          all before it                   |  causal                         ring
          not all of it, CUDA, 16 bits    |  varlen                         gathered
          not all of it, elsewhere        |  masked                         masked ring
          with a soft cap, or with math   |  all scores, masked scores      none
                                          |
                     planning, rehearsal, batches, blocks ask the row what it is told, holds and sends

A block calls its kernel on queries, keys, values and what the row is told (``models/layers.py``). The caches of
generation stand before that: they give it earlier keys and values too, and so serve what it serves. When a CPU trains,
``models/cpu_attention.py`` takes the place of torch's own backward of ``causal`` and ``masked``, where it is faster.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llama_core.errors import PlanError

DocumentAttention = Literal["none", "mask", "varlen"]
"""What a kernel is told of what a query does not see before it: nothing, as it sees all; an additive mask; or where
each document begins and how long the window is, with which it skips the other scores and holds no mask."""
Trait = Literal["documents", "window", "soft cap"]
"""What causal attention over whole rows lacks."""
Moves = Literal["nothing", "ring", "gather"]
"""What ranks that divide a row do with its keys and values: pass them around block by block, or gather them."""


class AttentionNeeds(NamedTuple):
    """What attention of one layer has to compute, whatever kernel does it."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    window: int = 0
    """Tokens that a query sees, itself included; 0 for all earlier ones."""
    documents: bool = False
    """Whether a row may hold several documents, which do not see each other."""
    soft_cap: float = 0.0
    """Scores become ``cap * tanh(scores / cap)`` before the softmax; 0 leaves them."""

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
            "soft cap": self.soft_cap > 0,
        }
        return frozenset(trait for trait, is_there in has.items() if is_there)

    @property
    def hides_in_document(self) -> bool:
        """Whether a query does not see all of its document before it, so that even one alone has to be told of."""
        return self.window > 0

    def share_of_causal(self, length: int) -> float:
        """Return the share of the causal scores of ``length`` tokens that are visible in one document."""
        seen = min(self.window or length, length)
        # the first queries see fewer tokens than the window has
        return seen * (2 * length - seen + 1) / (length * (length + 1))


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

    @property
    def divides_rows(self) -> bool:
        """Whether each rank has a part of each row."""
        return self.moves != "nothing"

    @property
    def skips_hidden(self) -> bool:
        """Whether it computes no score that documents and windows hide."""
        return self.told == "varlen"

    @property
    def is_fused_causal(self) -> bool:
        """Whether torch may run a faster kernel than flash attention, over whole rows and without a mask."""
        return self.told == "none" and not self.divides_rows

    def repeats_heads(self, *, is_narrow: bool) -> bool:
        """Return whether CUDA's kernel needs a key head for each query head, of which a backward keeps copies."""
        is_torchs_choice = not self.divides_rows and not self.holds_scores
        return is_torchs_choice and (self.told == "mask" or not is_narrow)

    def runs_on(self, device: str, *, is_narrow: bool) -> bool:
        """Return whether a kind of device has it, for activations of 16 bits or of more."""
        return self.told != "varlen" or has_document_kernel(device, is_narrow=is_narrow)


NONE: frozenset[Trait] = frozenset()
HIDDEN: frozenset[Trait] = frozenset({"documents", "window"})
CAPPED: frozenset[Trait] = frozenset({"soft cap"})
CAUSAL = Kernel("causal", NONE, "none")
VARLEN = Kernel("varlen", HIDDEN, "varlen")
MASKED = Kernel("masked", HIDDEN, "mask")
RING = Kernel("ring", NONE, "none", "ring")
GATHERED = Kernel("gathered", HIDDEN, "varlen", "gather")
MASKED_RING = Kernel("masked ring", HIDDEN, "mask", "ring")
ALL_SCORES = Kernel("all scores", CAPPED, "none", holds_scores=True)
MASKED_SCORES = Kernel("masked scores", HIDDEN | CAPPED, "mask", holds_scores=True)
KERNELS = (CAUSAL, VARLEN, MASKED, RING, GATHERED, MASKED_RING, ALL_SCORES, MASKED_SCORES)
"""In order of preference."""


def has_document_kernel(device: str, *, is_narrow: bool) -> bool:
    """Return whether a kind of device has the varlen kernel, which takes 16 bits alone."""
    return device == "cuda" and is_narrow


def kernels_of(asked: str, *, cp: int) -> tuple[Kernel, ...]:
    """Return the rows that a plan may use, in order of preference; ``asked`` is ``parallel.attention``."""
    of_division = [kernel for kernel in KERNELS if kernel.divides_rows == (cp > 1)]
    if asked == "auto":
        return tuple(of_division)
    return tuple(kernel for kernel in of_division if kernel.holds_scores)


def refusal(needs: Iterable[AttentionNeeds], *, asked: str = "auto", cp: int = 1) -> str:
    """Return why no kernel serves what the layers of a model need, on any device; an empty text if one does."""
    traits = _traits(needs)
    if _serving(traits, asked, cp):
        return ""
    offered = ", ".join(kernel.name for kernel in kernels_of(asked, cp=cp)) or "no kernel"
    remedies = {
        "cp=1": _serving(traits, asked, 1),
        "attention=auto": _serving(traits, "auto", cp),
        "cp=1 and attention=auto": _serving(traits, "auto", 1),
    }
    remedy = next((f"; use {remedy}" for remedy, serving in remedies.items() if serving), "")
    wanted = " and ".join(sorted(traits))
    among = f"those of cp={cp} and attention={asked} ({offered})"
    return f"attention with {wanted} has no kernel among {among}{remedy}"


def chosen_kernel(
    needs: Collection[AttentionNeeds], *, device: str, is_narrow: bool, asked: str = "auto", cp: int = 1
) -> Kernel:
    """Return the kernel of all layers of a model.

    Args:
        needs: what its layers need.
        device: the kind of device.
        is_narrow: whether activations have 16 bits.
        asked: ``parallel.attention``.
        cp: ranks that divide a row.

    Raises:
        PlanError: if no kernel serves all that is needed.
    """
    for kernel in _serving(_traits(needs), asked, cp):
        if kernel.runs_on(device, is_narrow=is_narrow):
            return kernel
    raise PlanError(refusal(needs, asked=asked, cp=cp))


def kernel_told(needs: AttentionNeeds, told: DocumentAttention, *, asked: str = "auto", cp: int = 1) -> Kernel:
    """Return the kernel of one layer, where ``chosen_kernel`` has decided what the kernels of all layers are told.

    Raises:
        PlanError: if no such kernel serves what the layer needs.
    """
    # what is hidden is a matter of what the kernel is told
    for kernel in _serving(needs.traits - HIDDEN, asked, cp):
        if kernel.told == told:
            return kernel
    raise PlanError(refusal([needs], asked=asked, cp=cp))


def _traits(needs: Iterable[AttentionNeeds]) -> frozenset[Trait]:
    return NONE.union(*(layer.traits for layer in needs))


def _serving(traits: frozenset[Trait], asked: str, cp: int) -> list[Kernel]:
    return [kernel for kernel in kernels_of(asked, cp=cp) if traits <= kernel.serves]
