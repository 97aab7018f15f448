"""Count the bytes, FLOPs and transfers of a computation while it runs, on real or fake tensors.

Bytes are those of tensors, each rounded up as the CUDA caching allocator rounds it. The allocator's reserve and the
libraries' own memory are not counted. A sharded tensor counts with this rank's shard.
"""

import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from llama_core.models.layers import local_part
from llama_core.parallel import gathered_attention
from llama_core.planning.memory.profile import STATES, Category, Phase
from llama_core.rehearsal.transfers import Transfer, transfer_of

CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds every request up to a multiple of this."""


def _flash_forward_flops(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _flash_backward_flops(_: Tensor, query: Tensor, key: Tensor, *__: Any, **___: Any) -> int:
    # five matrix products to the forward's two: the scores again, then the gradients of q, k, v and the scores
    return 10 * query.numel() * key.shape[-2]


def _documents_forward_flops(query: Tensor, *others: Any, **__: Any) -> int:
    row_length: int = others[5]
    return 4 * query.numel() * row_length  # every token against a whole row, however many documents there are


def _documents_backward_flops(_: Tensor, query: Tensor, *others: Any, **__: Any) -> int:
    row_length: int = others[7]
    return 10 * query.numel() * row_length


def _added_product_flops(_: Tensor, left: Tensor, right: Tensor, *__: Any, **___: Any) -> int:
    return 2 * left.numel() * right.shape[1]


_MISSING_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: _added_product_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
    torch.ops.llama_core.cpu_attention: _flash_forward_flops,
    torch.ops.llama_core.cpu_attention_backward: _flash_backward_flops,
    torch.ops.torch_attn._varlen_attn: _documents_forward_flops,
    torch.ops.torch_attn._varlen_attn_backward: _documents_backward_flops,
}
_FLOP_FORMULAS = ChainMap(_MISSING_FORMULAS, flop_registry)
"""FLOPs of each operator, attention counted in full."""

_ADD = torch.ops.aten.add.Tensor
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_DEVICE = torch.ops.prim.device.default
_LOOKED_INTO: dict[Any, Callable[..., Any]] = {
    gathered_attention.GATHERED_ATTENTION: gathered_attention.forward,
    gathered_attention.GATHERED_ATTENTION_BACKWARD: gathered_attention.backward,
}
"""Operators made of others, with the functions that run these: their memory, FLOPs and transfers count."""


FLASH_ROWS = 128
"""Rows that flash attention's backward sets apart after each document."""


def _workspace_of_documents(
    grad_out: Tensor, query: Tensor, key: Tensor, _: Tensor, __: Tensor, ___: Tensor, starts: Tensor, *____: Any
) -> tuple[int, ...]:
    """Return the bytes of each buffer of ``mha_varlen_bwd`` in torch's ``flash_api.cpp``."""
    rows = query.shape[0] + FLASH_ROWS * (len(starts) - 1)
    num_heads, head_dim = query.shape[1:]
    multiple = 32 if head_dim <= 128 else 64
    sums = 4 * rows * num_heads * (-(-head_dim // multiple) * multiple)  # the queries' gradients, in fp32
    expanded = grad_out.itemsize * key.shape[0] * num_heads * head_dim  # those of keys, or values, by query head
    return 4 * rows * num_heads, sums, *((expanded, expanded) if key.shape[1] < num_heads else ())


_WORKSPACES: dict[Any, Callable[..., tuple[int, ...]]] = {
    torch.ops.torch_attn._varlen_attn_backward: _workspace_of_documents,
}
"""Bytes of the buffers that an operator holds while it runs on CUDA; on fake tensors it makes none."""


def _copy_of_input(_: Tensor, reduced: Tensor, *__: Any) -> tuple[int, ...]:
    return (reduced.nbytes,)


_WORKSPACES_ON_CPU: dict[Any, Callable[..., tuple[int, ...]]] = {
    torch.ops.c10d._reduce_scatter_base_: _copy_of_input,
}
"""The same on a CPU, where gloo sums up a copy of what it reduces."""


class _FirstAddend(TorchDispatchMode):
    """Notes how many owners the first addend of a sum has, and its memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ADD:
            self.owners = _owners(args[0])
        return func(*args, **(kwargs or {}))


def _owners(tensor: Tensor) -> tuple[int, int]:
    """Return how many references there are to a tensor, and to its memory."""
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]  # torch's stub lacks it
    of_memory: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return of_tensor, of_memory


@cache
def _owners_if_dropped() -> tuple[int, int]:
    """Return the owners of a gradient to which autograd adds another one, if nobody else has it."""
    point = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        used_twice = point * 1
        total = used_twice * 2 + used_twice * 3
    noted = _FirstAddend()
    with noted:
        torch.autograd.grad(total, point, torch.ones(2))
    return noted.owners


def _is_sum_in_place(gradient: Tensor) -> bool:
    """Return whether autograd would make a sum in the memory of its first gradient.

    It does if it has the only reference to it, but not under a dispatch mode, which may have references of its own:
    ``InputBuffer::accumulate`` in torch's ``input_buffer.cpp``. A recomputation's sums are those of a forward.
    """
    in_backward = torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
    return in_backward and gradient.is_contiguous() and _owners(gradient) == _owners_if_dropped()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute's value inside the block."""
    before = getattr(owner, name)
    is_inherited = name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@dataclass
class _Block:
    """The memory of one storage, from its first appearance to its release."""

    num_bytes: int
    category: Category
    born: int
    """Number of blocks created before it."""
    storage: "weakref.ref[torch.UntypedStorage]"


@dataclass(frozen=True)
class LiveBytes:
    """The bytes that were alive at one instant."""

    num_bytes: int
    categories: Counter[Category]
    """The bytes by category."""
    where: str
    """The operator that ran last, and the last landmark before it."""
    num_born: int
    """Number of blocks created by then."""


@dataclass
class Segment:
    """A part of a computation, from one call of ``begin_segment`` to the next."""

    start: LiveBytes
    """The bytes alive when it began."""
    layer: int | None = None
    """The layer with which it continues the previous segment; None if it begins something new."""
    peaks: dict[Phase, LiveBytes] = field(default_factory=dict)
    """The peak in every phase that the segment touches."""
    flops: int = 0
    transfers: Counter[Transfer] = field(default_factory=Counter)
    """Calls of every transfer between ranks."""


class ByteCounter(TorchDispatchMode):
    """Counts the bytes by category, their peak in every phase, the FLOPs and the transfers of code that runs inside it.

    A new tensor gets the current ``category``. ``relabel`` changes it later, and also corrects the snapshots that the
    tensor is part of, so that they show its final category.

    Args:
        block_bytes: the allocator's unit; every storage is rounded up to a multiple of it.
        on_cuda: whether the code would run on CUDA, if its tensors are fake.
    """

    def __init__(self, block_bytes: int = CUDA_BLOCK_BYTES, *, on_cuda: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.category: Category = "temporaries"
        self.phase: Phase = "forward"
        self.landmark = "the start"
        """The last named place that the program passed, to help people find the peak."""
        self._block_bytes = block_bytes
        self._on_cuda = on_cuda
        self._blocks: dict[int, _Block] = {}
        self._alive: Counter[Category] = Counter()
        self._num_born = 0
        self.segments: list[Segment] = []
        self.begin_segment()
        self._is_paused = False
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Start counting, and patch the two functions whose memory the operators alone would misstate."""
        _owners_if_dropped()  # autograd is off inside operators
        self._patches.enter_context(replaced(torch.UntypedStorage, "resize_", self._resizing()))
        name = "_propagate_tensor_meta_non_cached"
        self._patches.enter_context(replaced(ShardingPropagator, name, self._paused(getattr(ShardingPropagator, name))))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """Return a counted ``UntypedStorage.resize_``; ``fully_shard`` allocates and frees gathered weights with it."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if block := self._blocks.get(id(storage)):
                self._alive[block.category] += self._rounded(num_bytes) - block.num_bytes
                block.num_bytes = self._rounded(num_bytes)
                self._move(block, "communication")
            return result

        return resize_and_tell

    def _paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped to run uncounted.

        DTensor infers a result's shape by running the operator once more, on fake tensors of the whole shape.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._is_paused
            self._is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = before

        return run

    @property
    def total_bytes(self) -> int:
        """Bytes alive now."""
        return self._alive.total()

    @property
    def flops(self) -> int:
        """FLOPs of all segments."""
        return sum(segment.flops for segment in self.segments)

    @property
    def peaks(self) -> dict[Phase, LiveBytes]:
        """The peak in every phase, over all segments."""
        most: dict[Phase, LiveBytes] = {}
        for phase, peak in chain.from_iterable(segment.peaks.items() for segment in self.segments):
            if phase not in most or peak.num_bytes > most[phase].num_bytes:
                most[phase] = peak
        return most

    def begin_segment(self, layer: int | None = None) -> None:
        """End the current segment and begin another; with a ``layer``, the new segment continues the current one."""
        self.segments.append(Segment(self._snapshot(self.landmark), layer))

    def forget_segments(self) -> None:
        """Drop all segments and begin a new first one; live bytes stay counted."""
        self.segments.clear()
        self.begin_segment()

    def _snapshot(self, where: str) -> LiveBytes:
        return LiveBytes(self.total_bytes, self._alive.copy(), where, self._num_born)

    def relabel(self, tensors: Iterable[Tensor], category: Category, *, unless: Collection[Category] = ()) -> None:
        """Count the memory of ``tensors`` under ``category``, even if it was not counted before.

        Memory that is already in a category of ``unless`` stays there.
        """
        for tensor in tensors:
            block = self._block_of(local_part(tensor).untyped_storage())
            if block.category not in unless:
                self._move(block, category)

    def relabel_since(self, num_born: int, old: Collection[Category], new: Category) -> None:
        """Move the live blocks created after the first ``num_born`` ones from the categories ``old`` to ``new``."""
        for block in self._blocks.values():
            if block.born >= num_born and block.category in old:
                self._move(block, new)

    @property
    def num_born(self) -> int:
        """Number of blocks created so far."""
        return self._num_born

    def _move(self, block: _Block, category: Category) -> None:
        if block.category == category:
            return
        tallies = [self._alive]
        for segment in reversed(self.segments):
            tallies += [s.categories for s in (segment.start, *segment.peaks.values()) if block.born < s.num_born]
            if segment.start.num_born <= block.born:
                break
        for tally in tallies:
            tally[block.category] -= block.num_bytes
            tally[category] += block.num_bytes
        block.category = category

    def _block_of(self, storage: torch.UntypedStorage) -> _Block:
        key = id(storage)
        if key in self._blocks:
            return self._blocks[key]
        num_bytes = self._rounded(storage.nbytes())
        block = _Block(num_bytes, self.category, self._num_born, self._watched(storage))
        self._blocks[key] = block
        self._num_born += 1
        self._alive[self.category] += num_bytes
        return block

    def _watched(self, storage: torch.UntypedStorage) -> "weakref.ref[torch.UntypedStorage]":
        """Return a reference that, as long as it exists, makes the storage's bytes uncounted when it is freed."""
        key = id(storage)

        def release(_: object) -> None:
            block = self._blocks.pop(key)
            self._alive[block.category] -= block.num_bytes

        return weakref.ref(storage, release)

    def _take_over(self, old: Tensor, new: Tensor) -> None:
        """Count ``new`` as the tensor in the memory of ``old``."""
        block = self._block_of(old.untyped_storage())
        del self._blocks[id(old.untyped_storage())]
        storage = new.untyped_storage()
        block.storage = self._watched(storage)
        self._blocks[id(storage)] = block

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, then count its results."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls ask for it
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches it again, as operators on this rank's shards
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # the operator would copy it
        kwargs = kwargs or {}
        if func in _LOOKED_INTO:
            super().__enter__()  # type: ignore[no-untyped-call]
            try:
                return _LOOKED_INTO[func](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        out = self._run(func, args, kwargs)
        if self._is_paused:
            return out
        segment = self.segments[-1]
        formula = _FLOP_FORMULAS.get(func.overloadpacket)
        if formula is not None:
            segment.flops += formula(*args, **kwargs, out_val=out)
        buffers = [args[0].new_empty(size, dtype=torch.uint8) for size in self._workspace(func, args)]
        for tensor in (*_tensors(out), *buffers):
            self._block_of(tensor.untyped_storage())
        self._label_buffers(func, args, kwargs)
        if (transfer := transfer_of(func, args, out)) is not None:
            segment.transfers[transfer] += 1
        peak = segment.peaks.get(self.phase)
        if peak is None or self.total_bytes > peak.num_bytes:
            segment.peaks[self.phase] = self._snapshot(f"{func} after {self.landmark}")
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; a sum of two gradients that autograd would make in place has the memory of the first."""
        is_in_place = func is _ADD and not self._is_paused and _is_sum_in_place(args[0])
        out = func(*args, **kwargs)
        if is_in_place:
            self._take_over(args[0], out)
        return out

    def _workspace(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the bytes of each buffer that an operator would hold while it runs, if it makes none here."""
        workspaces = _WORKSPACES if self._on_cuda else _WORKSPACES_ON_CPU
        buffers_of = workspaces.get(getattr(func, "overloadpacket", None))
        has_own = not self._on_cuda and not isinstance(args[0], FakeTensor)
        return () if buffers_of is None or has_own else buffers_of(*args)

    def _label_buffers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Label the buffers in which ``fully_shard`` gathers and reduces, and the tensors of other transfers."""
        if func is torch.ops.fsdp.chunk_cat.default:
            self.relabel(_tensors(args), "gradients")
            self.relabel(_tensors(kwargs), "communication")
        elif func.namespace == "fsdp":
            self.relabel(_tensors((args, kwargs)), "communication", unless=STATES)
        elif func.namespace == "c10d":
            self.relabel(_tensors((args, kwargs)), "communication", unless=(*STATES, "activations"))


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors that have memory of their own: a result that nobody has waited for yet only wraps one."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor for tensor in leaves if not isinstance(tensor, AsyncCollectiveTensor)]
