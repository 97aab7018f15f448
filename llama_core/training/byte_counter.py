"""Follows the bytes and FLOPs of a computation while it runs, on real and on fake tensors alike.

The bytes are those of tensors, each rounded up as the CUDA caching allocator rounds it; what the allocator keeps in
reserve and what libraries take for themselves is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from llama_core.planning.memory import Category, Phase

CUDA_BLOCK_BYTES = 512
"""What the CUDA caching allocator rounds every request up to."""


def _flash_forward_flops(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _flash_backward_flops(_: Tensor, query: Tensor, key: Tensor, *__: Any, **___: Any) -> int:
    # five products where the forward has two: the scores once more, then the gradients of q, k, v and of the scores
    return 10 * query.numel() * key.shape[-2]


_FLOP_FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
}
"""FLOPs of each operator, attention counted in full; torch's table lacks what training on a CPU adds to it."""


@dataclass
class _Block:
    """The memory of one storage, from its first appearance to its release."""

    num_bytes: int
    category: Category
    born: int
    """How many blocks there had been before it."""
    storage: "weakref.ref[torch.UntypedStorage]"


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once during a phase."""

    num_bytes: int
    categories: Counter[Category]
    """What they were, by category."""
    where: str
    """The operator that reached it, and the last landmark before it."""
    num_born: int
    """How many blocks there had been by then."""


class ByteCounter(TorchDispatchMode):
    """Counts bytes by category, their peak in every phase, and FLOPs, of what runs inside it.

    A new tensor belongs to the current ``category``. Whoever learns later what it has become says so with
    ``relabel``; peaks that it was part of are then corrected too, so that they say what the bytes turned out to be.

    Args:
        block_bytes: the allocator's unit; every storage is rounded up to a multiple of it.
    """

    def __init__(self, block_bytes: int = CUDA_BLOCK_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.category: Category = "temporaries"
        self.phase: Phase = "forward"
        self.landmark = "the start"
        """The last place in the program that was passed, for people who look for the peak."""
        self.flops = 0
        self.peaks: dict[Phase, Peak] = {}
        self._block_bytes = block_bytes
        self._blocks: dict[int, _Block] = {}
        self._alive: Counter[Category] = Counter()
        self._num_born = 0

    @property
    def total_bytes(self) -> int:
        """Bytes alive now."""
        return self._alive.total()

    def relabel(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Count the memory of ``tensors`` under ``category``, whether it was known before or not."""
        for tensor in tensors:
            self._move(self._block_of(tensor.untyped_storage()), category)

    def relabel_since(self, num_born: int, old: Category, new: Category) -> None:
        """Count what is alive of the blocks made after the first ``num_born`` ones under ``new`` instead of ``old``."""
        for block in self._blocks.values():
            if block.born >= num_born and block.category == old:
                self._move(block, new)

    @property
    def num_born(self) -> int:
        """How many blocks there have been so far."""
        return self._num_born

    def _move(self, block: _Block, category: Category) -> None:
        for tally in (self._alive, *(p.categories for p in self.peaks.values() if block.born < p.num_born)):
            tally[block.category] -= block.num_bytes
            tally[category] += block.num_bytes
        block.category = category

    def _block_of(self, storage: torch.UntypedStorage) -> _Block:
        key = id(storage)
        if key in self._blocks:
            return self._blocks[key]
        num_bytes = -(-storage.nbytes() // self._block_bytes) * self._block_bytes

        def release(_: object) -> None:
            block = self._blocks.pop(key)
            self._alive[block.category] -= block.num_bytes

        block = _Block(num_bytes, self.category, self._num_born, weakref.ref(storage, release))
        self._blocks[key] = block
        self._num_born += 1
        self._alive[self.category] += num_bytes
        return block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, then count what it made."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FLOP_FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._block_of(tensor.untyped_storage())
        total = self.total_bytes
        peak = self.peaks.get(self.phase)
        if peak is None or total > peak.num_bytes:
            where = f"{func} after {self.landmark}"
            self.peaks[self.phase] = Peak(total, self._alive.copy(), where, self._num_born)
        return out
