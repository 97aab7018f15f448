"""Attention over a sequence divided over a ring of ranks: keys and values go around, block by block.

In compiled code the whole of it is one operator, because torch.compile cannot trace transfers between ranks.

Sources: Liu et al. 2023, arXiv:2310.01889; Dao 2023, arXiv:2307.08691, section 3.1 (the backward of a block needs
only the output and log-sum-exp of the whole row).
"""

# Shape suffixes: B batch, S tokens that this rank holds (Q its queries that see part of a block, J the keys of that
# block that they see), N query heads, K key/value heads, H head dim, 2 keys and values stacked

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from llama_core.models.block_attention import BlockKernel, BlockMask, block_backward, block_forward
from llama_core.models.cpu_attention import empty_tokens_first

RingMasks = tuple[BlockMask, ...]
"""The mask of every block on the ring, in order of arrival: this rank's own block first."""


def visible_parts(rank: int, source: int, num_tokens: int) -> tuple[slice, slice]:
    """Return which queries of ``rank`` see keys of ``source`` under the causal mask, and which keys they see."""
    whole = slice(0, num_tokens)
    half = num_tokens // 2
    if source < rank:
        return whole, slice(0, half)
    if source > rank:
        return slice(half, num_tokens), whole
    return whole, whole


def ring_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, masks: RingMasks, *, group: ProcessGroup) -> Tensor:
    """Return the attention of this rank's queries over the whole sequence, [B, N, S, H] in their dtype.

    Keys and values go around the ring of ``group``, for the key/value heads only. The next block arrives during the
    computation on the current one, so a rank holds two besides its own. The outputs of the blocks are merged by their
    log-sum-exp in fp32, or fp64 for fp64 inputs. The backward sends the blocks around once more, followed by their
    gradients, to which every rank adds its part, in the same wide dtype. It needs O(S) saved memory: queries, keys,
    values, output and log-sum-exp. Every rank of the group must call this in the same order. Not differentiable twice.

    Args:
        q_BNSH: queries, already rotated.
        k_BKSH: keys, already rotated; K divides N.
        v_BKSH: values.
        masks: the result of ``ring_masks`` for this microbatch.
        group: the ranks of the ring.
    """
    if torch.compiler.is_compiling():
        out_BNSH: Tensor = _ring_attention(q_BNSH, k_BKSH, v_BKSH, *_tensors_of(masks), group.group_name)[0]
    else:
        out_BNSH = _RingAttention.apply(q_BNSH, k_BKSH, v_BKSH, masks, group)  # type: ignore[no-untyped-call]
    return out_BNSH


def ring_kernel(group: ProcessGroup) -> BlockKernel:
    """Return the forward and the backward of ``ring_attention``, for what changes its results in between."""
    return BlockKernel(partial(_forward_alone, group=group), partial(_backward_alone, group=group))


def _forward_alone(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, masks: RingMasks, *, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        out_BNSH, lse_BNS = _ring_attention(q_BNSH, k_BKSH, v_BKSH, *_tensors_of(masks), group.group_name)
        return out_BNSH, lse_BNS
    return attention_over_blocks(q_BNSH, _around(torch.stack((k_BKSH, v_BKSH)), group), masks)


def _backward_alone(*tensors_and_masks: Any, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    grad_out_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH, lse_BNS, masks = tensors_and_masks
    if torch.compiler.is_compiling():
        grads: tuple[Tensor, Tensor, Tensor] = _ring_attention_backward(
            *tensors_and_masks[:-1], *_tensors_of(masks), group.group_name
        )
        return grads
    return _backward(grad_out_BNSH, q_BNSH, torch.stack((k_BKSH, v_BKSH)), out_BNSH, lse_BNS, masks, group)


def _tensors_of(masks: RingMasks) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the tensors of some masks, by their fields, as an operator takes them."""
    masked = [mask for mask in masks if mask.bias_B1QJ is not None]
    return [mask.bias_B1QJ for mask in masked], [mask.blind_B1Q for mask in masked]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, masks: RingMasks, group: ProcessGroup
    ) -> Tensor:
        kv_2BKSH = torch.stack((k_BKSH, v_BKSH))
        out_BNSH, lse_BNS = attention_over_blocks(q_BNSH, _around(kv_2BKSH, group), masks)
        ctx.save_for_backward(q_BNSH, kv_2BKSH, out_BNSH, lse_BNS)
        ctx.masks = masks
        ctx.group = group
        return out_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, kv_2BKSH, out_BNSH, lse_BNS = ctx.saved_tensors
        grads = _backward(grad_out_BNSH, q_BNSH, kv_2BKSH, out_BNSH, lse_BNS, ctx.masks, ctx.group)
        return *grads, None, None


def attention_over_blocks(q_BNSH: Tensor, blocks: Iterable[Tensor], masks: RingMasks) -> tuple[Tensor, Tensor]:
    """Return the output over all blocks of keys and values, [2, B, K, S, H] each, and its log-sum-exp."""
    own, *others = masks
    blocks = iter(blocks)
    out_BNSH, lse_BNS = _accumulators(*block_forward(q_BNSH, next(blocks), mask=own))
    for mask, block_2BKSH in zip(others, blocks, strict=True):
        merged = (out_BNSH[:, :, mask.queries], lse_BNS[:, :, mask.queries])
        _merge_(*merged, *block_forward(q_BNSH, block_2BKSH, mask=mask))
    return out_BNSH.to(q_BNSH.dtype), lse_BNS


def _backward(  # noqa: PLR0917 - as they are saved
    grad_out_BNSH: Tensor,
    q_BNSH: Tensor,
    kv_2BKSH: Tensor,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    masks: RingMasks,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    backward = partial(block_backward, grad_out_BNSH, q_BNSH, out_BNSH, lse_BNS)
    own, *others = masks
    blocks = _around(kv_2BKSH, group)
    grad_q_BNSH, grad_kv_2BKSH = backward(next(blocks), mask=own)
    travelling: _Hop | None = None
    for mask, block_2BKSH in zip(others, blocks, strict=True):
        part_q_BNQH, part_kv_2BKJH = backward(block_2BKSH, mask=mask)
        grad_q_BNSH[:, :, mask.queries] += part_q_BNQH
        # the sum over the ranks that this block has passed; the rank after its owner starts it
        sum_2BKSH, spare = travelling.wait() if travelling else (torch.zeros_like(grad_kv_2BKSH), None)
        sum_2BKSH[..., mask.keys, :] += part_kv_2BKJH
        del part_q_BNQH, part_kv_2BKJH  # before there is memory for what arrives
        travelling = _Hop(sum_2BKSH, spare, group)
        del sum_2BKSH, spare  # before the next ones are computed
    if travelling is not None:
        grad_kv_2BKSH += travelling.wait()[0]
    grad_k_BKSH, grad_v_BKSH = grad_kv_2BKSH.to(kv_2BKSH.dtype)
    return grad_q_BNSH.to(q_BNSH.dtype), grad_k_BKSH, grad_v_BKSH


class _Hop:
    """A block on its way to the next rank, while the previous rank's block arrives in ``spare`` memory."""

    def __init__(self, block: Tensor, spare: Tensor | None, group: ProcessGroup) -> None:
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        self._leaving = block
        self._arriving = torch.empty_like(block) if spare is None else spare
        self._transfers = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._leaving, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the block that has arrived, and the one that has left and whose memory is free again."""
        for transfer in self._transfers:
            transfer.wait()
        return self._arriving, self._leaving


def _around(own: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield this rank's block, then the previous rank's, and so on; each is valid until the next one is requested."""
    block = own
    spare = None
    for _ in range(dist.get_world_size(group) - 1):
        hop = _Hop(block, spare, group)
        yield block
        block, left = hop.wait()
        spare = None if left is own else left
    yield block


def _accumulators(out_BNSH: Tensor, lse_BNS: Tensor) -> tuple[Tensor, Tensor]:
    # copies, because selective recomputation keeps the kernel's results
    return out_BNSH.to(lse_BNS.dtype, copy=True), lse_BNS.clone()


def _merge_(out_BNQH: Tensor, lse_BNQ: Tensor, part_BNQH: Tensor, part_lse_BNQ: Tensor) -> None:
    """Merge a part into ``out_BNQH`` and ``lse_BNQ`` in place; every query sees some of the keys merged so far."""
    weight_BNQ1 = torch.sigmoid(part_lse_BNQ - lse_BNQ)[..., None]
    out_BNQH.lerp_(part_BNQH.to(out_BNQH.dtype), weight_BNQ1)
    lse_BNQ.copy_(torch.logaddexp(lse_BNQ, part_lse_BNQ))


@torch.library.custom_op("llama_core::ring_attention", mutates_args=())
def _ring_attention(  # noqa: PLR0917 - operators have positions
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, biases: list[Tensor], blinds: list[Tensor], group_name: str
) -> tuple[Tensor, Tensor]:
    group = _resolve_process_group(GroupName(group_name))
    masks = _as_ring_masks(q_BNSH, biases, blinds, group)
    out_BNSH, lse_BNS = attention_over_blocks(q_BNSH, _around(torch.stack((k_BKSH, v_BKSH)), group), masks)
    return _tokens_first(out_BNSH), lse_BNS.contiguous()


@torch.library.custom_op("llama_core::ring_attention_backward", mutates_args=())
def _ring_attention_backward(  # noqa: PLR0917 - operators have positions
    grad_out_BNSH: Tensor,
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    biases: list[Tensor],
    blinds: list[Tensor],
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = _resolve_process_group(GroupName(group_name))
    masks = _as_ring_masks(q_BNSH, biases, blinds, group)
    grads = _backward(grad_out_BNSH, q_BNSH, torch.stack((k_BKSH, v_BKSH)), out_BNSH, lse_BNS, masks, group)
    grad_q_BNSH, grad_k_BKSH, grad_v_BKSH = map(_tokens_first, grads)
    return grad_q_BNSH, grad_k_BKSH, grad_v_BKSH


@_ring_attention.register_fake
def _(q_BNSH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    return empty_tokens_first(q_BNSH), q_BNSH.new_empty(q_BNSH.shape[:-1], dtype=wide)


@_ring_attention_backward.register_fake
def _(_: Tensor, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_tokens_first(q_BNSH), empty_tokens_first(k_BKSH), empty_tokens_first(v_BKSH)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, biases, blinds, ctx.group_name = inputs
    ctx.save_for_backward(*qkv, *output, *biases, *blinds)


def _differentiate(ctx: Any, grad_out_BNSH: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    num_masks = len(saved[5:]) // 2
    biases = saved[5 : 5 + num_masks]
    blinds = saved[5 + num_masks :]
    grads = _ring_attention_backward(grad_out_BNSH, *saved[:5], biases, blinds, ctx.group_name)
    return *grads, [None] * num_masks, [None] * num_masks, None


_ring_attention.register_autograd(_differentiate, setup_context=_save)
RING_ATTENTION = torch.ops.llama_core.ring_attention.default
"""Replaces ``ring_attention`` in a compiled block: one operator that returns output and log-sum-exp."""


def _as_ring_masks(
    q_BNSH: Tensor, biases: Sequence[Tensor], blinds: Sequence[Tensor], group: ProcessGroup
) -> RingMasks:
    """Return the masks of ``ring_masks``, rebuilt from their tensors."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    sources = [(rank - step) % size for step in range(size)]
    parts = [visible_parts(rank, source, q_BNSH.shape[2]) for source in sources]
    if not biases:
        return tuple(BlockMask(*part, causal=source == rank) for part, source in zip(parts, sources, strict=True))
    tensors = zip(parts, biases, blinds, strict=True)
    return tuple(BlockMask(*part, causal=False, bias_B1QJ=bias, blind_B1Q=blind) for part, bias, blind in tensors)


def _tokens_first(x_BNSH: Tensor) -> Tensor:
    return x_BNSH.transpose(1, 2).contiguous().transpose(1, 2)
