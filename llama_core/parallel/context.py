"""Context parallelism: a rank holds a part of each sequence, and its attention reaches the other parts by a ring.

The sequence is cut into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, in this order. The causal mask
then gives every rank the same work at every step of the ring, and nothing invisible is computed. In squares of
chunk by chunk, with a triangle as half a square: of its own block a rank computes two triangles and a square, of a
lower rank's block its two chunks of queries by the first chunk of keys, and of a higher rank's block its second chunk
of queries by two chunks of keys: two squares each time.

Sources: Liu et al. 2023, arXiv:2310.01889 (the ring); Llama team 2024, arXiv:2407.21783, section 3.3.2 (the chunks).
"""

# Shape suffixes: B batch, S tokens that this rank holds (Q its queries that see some of a block, J the keys of that
# block which they see), N query heads, K key/value heads, H head dim, 2 keys and values stacked

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from llama_core.errors import PlanError
from llama_core.models.layers import Attention
from llama_core.models.llama import Llama
from llama_core.parallel.block_attention import BlockMask, block_backward, block_forward

RingMasks = tuple[BlockMask, ...]
"""The mask of every block that comes by on the ring, in the order of their coming: this rank's own one first."""


def apply_context_parallel(model: Llama, group: ProcessGroup) -> None:
    """Make ``model``, or the part of one, work on the part of each sequence that ``shard_sequence`` gives this rank.

    The heads may be divided over other ranks, as long as those of one ``group`` hold the same ones. Losses and
    gradients are then this rank's share of the sum.

    Args:
        model: the model, changed in place.
        group: the ranks that a sequence is divided over.
    """
    model.sequence_index = partial(_held_places, group=group)
    model.attention_mask = partial(ring_masks, group=group)
    # torch.compile cannot trace transfers between ranks; without this it breaks off inside the ring
    attend = partial(torch.compiler.disable(ring_attention), group=group)  # type: ignore[no-untyped-call]
    for module in model.layers.modules():
        if isinstance(module, Attention):
            module.attend = attend


def shard_sequence(x: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Return the part of ``x`` that a rank holds, [..., S]; its last dim is the sequence, [..., cp_size * S].

    Raises:
        PlanError: if the sequence is not 2 * ``cp_size`` equal chunks.
    """
    seq_len, num_chunks = x.shape[-1], 2 * cp_size
    if seq_len % num_chunks:
        below = seq_len - seq_len % num_chunks
        legal = " or ".join(str(length) for length in (below, below + num_chunks) if length)
        raise PlanError(
            f"a sequence of {seq_len} tokens is not 2 * cp = {num_chunks} equal chunks (cp={cp_size}); use {legal}"
        )
    chunks = x.chunk(num_chunks, dim=-1)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]), dim=-1)


def sequence_index(seq_len: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Return the places in the whole sequence of the tokens that a rank holds: int64, [S], ascending.

    Raises:
        PlanError: if the sequence is not 2 * ``cp_size`` equal chunks.
    """
    return shard_sequence(torch.arange(seq_len, device=device), cp_rank, cp_size)


def _held_places(num_tokens: int, device: torch.device, *, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    return sequence_index(num_tokens * size, dist.get_rank(group), size, device)


def ring_masks(positions_BS: Tensor | None, index_S: Tensor, dtype: torch.dtype, *, group: ProcessGroup) -> RingMasks:
    """Return what ``ring_attention`` needs to know of a microbatch, once for all layers.

    With documents the masks hold ``S * S * (cp + 1) / 2`` elements per row of the microbatch.

    Args:
        positions_BS: each token's position in its document where rows hold several documents; None where they do not.
        index_S: the places of this rank's tokens in the whole sequence.
        dtype: the dtype of the queries.
        group: the ranks of the ring.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_tokens = len(index_S)
    masks = []
    for source in ((rank - step) % size for step in range(size)):
        queries, keys = _visible_parts(rank, source, num_tokens)
        if positions_BS is None:
            masks.append(BlockMask(queries, keys, causal=source == rank))
            continue
        index_Q = index_S[queries]
        index_J = sequence_index(num_tokens * size, source, size, index_S.device)[keys]
        start_BQ1 = (index_Q - positions_BS[:, queries])[:, :, None]
        visible_BQJ = (index_J >= start_BQ1) & (index_J <= index_Q[:, None])
        masks.append(BlockMask.of_visible(queries, keys, visible_BQJ, dtype))
    return tuple(masks)


def _visible_parts(rank: int, source: int, num_tokens: int) -> tuple[slice, slice]:
    """Return which queries of ``rank`` see keys of ``source`` under the causal mask, and which keys those are."""
    whole, half = slice(0, num_tokens), num_tokens // 2
    if source < rank:
        return whole, slice(0, half)
    if source > rank:
        return slice(half, num_tokens), whole
    return whole, whole


def ring_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, masks: RingMasks, *, group: ProcessGroup) -> Tensor:
    """Return the attention of this rank's queries over the whole sequence, [B, N, S, H] in their dtype.

    Keys and values, of the key/value heads only, go around the ring of ``group``; the next block arrives while one is
    computed on, so that beside its own a rank holds two. The outputs of the blocks are merged by their log-sum-exp,
    in fp32, or fp64 for fp64 inputs. The backward sends the blocks around once more, followed by their gradients,
    which every rank adds to, in the same wide dtype. What is saved for it is O(S): queries, keys, values, output and
    log-sum-exp. Every rank of the group must call this in the same order. Not differentiable twice.

    Args:
        q_BNSH: queries, already rotated.
        k_BKSH: keys, already rotated; K divides N.
        v_BKSH: values.
        masks: what ``ring_masks`` returned for this microbatch.
        group: the ranks of the ring.

    Source: Liu et al. 2023, arXiv:2310.01889; Dao 2023, arXiv:2307.08691, section 3.1 (the backward of a block needs
    only the output and log-sum-exp of the whole row).
    """
    out_BNSH: Tensor = _RingAttention.apply(q_BNSH, k_BKSH, v_BKSH, masks, group)  # type: ignore[no-untyped-call]
    return out_BNSH


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, masks: RingMasks, group: ProcessGroup
    ) -> Tensor:
        kv_2BKSH = torch.stack((k_BKSH, v_BKSH))
        own, *others = masks
        blocks = _around(kv_2BKSH, group)
        out_BNSH, lse_BNS = _accumulators(*block_forward(q_BNSH, next(blocks), mask=own))
        for mask, block_2BKSH in zip(others, blocks, strict=True):
            merged = (out_BNSH[:, :, mask.queries], lse_BNS[:, :, mask.queries])
            _merge_(*merged, *block_forward(q_BNSH, block_2BKSH, mask=mask))
        out_BNSH = out_BNSH.to(q_BNSH.dtype)
        ctx.save_for_backward(q_BNSH, kv_2BKSH, out_BNSH, lse_BNS)
        ctx.masks, ctx.group = masks, group
        return out_BNSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BNSH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSH, kv_2BKSH, out_BNSH, lse_BNS = ctx.saved_tensors
        backward = partial(block_backward, grad_out_BNSH, q_BNSH, out_BNSH, lse_BNS)
        own, *others = ctx.masks
        blocks = _around(kv_2BKSH, ctx.group)
        grad_q_BNSH, grad_kv_2BKSH = backward(next(blocks), mask=own)
        travelling: _Hop | None = None
        for mask, block_2BKSH in zip(others, blocks, strict=True):
            part_q_BNQH, part_kv_2BKJH = backward(block_2BKSH, mask=mask)
            grad_q_BNSH[:, :, mask.queries] += part_q_BNQH
            # what the ranks that this block has passed have added up; the first one after its owner begins
            sum_2BKSH, spare = travelling.wait() if travelling else (torch.zeros_like(grad_kv_2BKSH), None)
            sum_2BKSH[..., mask.keys, :] += part_kv_2BKJH
            travelling = _Hop(sum_2BKSH, spare, ctx.group)
            del part_q_BNQH, part_kv_2BKJH, sum_2BKSH, spare  # not held while the next ones are computed
        if travelling is not None:
            grad_kv_2BKSH += travelling.wait()[0]
        grad_k_BKSH, grad_v_BKSH = grad_kv_2BKSH.to(kv_2BKSH.dtype)
        return grad_q_BNSH.to(q_BNSH.dtype), grad_k_BKSH, grad_v_BKSH, None, None


class _Hop:
    """A block on its way to the next rank, while the block of the rank before arrives in ``spare`` memory."""

    def __init__(self, block: Tensor, spare: Tensor | None, group: ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._leaving = block
        self._arriving = torch.empty_like(block) if spare is None else spare
        self._transfers = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._leaving, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the block that has arrived and the one that has left, whose memory is free again."""
        for transfer in self._transfers:
            transfer.wait()
        return self._arriving, self._leaving


def _around(own: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield this rank's block, then that of the rank before it, and so on, each until the next one is asked for."""
    block, spare = own, None
    for _ in range(dist.get_world_size(group) - 1):
        hop = _Hop(block, spare, group)
        yield block
        block, left = hop.wait()
        spare = None if left is own else left
    yield block


def _accumulators(out_BNSH: Tensor, lse_BNS: Tensor) -> tuple[Tensor, Tensor]:
    # copies, since selective recomputation keeps what the kernel returned
    return out_BNSH.to(lse_BNS.dtype, copy=True), lse_BNS.clone()


def _merge_(out_BNQH: Tensor, lse_BNQ: Tensor, part_BNQH: Tensor, part_lse_BNQ: Tensor) -> None:
    """Make ``out_BNQH`` and ``lse_BNQ`` those of both sets of keys; the first set is seen by every query."""
    weight_BNQ1 = torch.sigmoid(part_lse_BNQ - lse_BNQ)[..., None]
    out_BNQH.lerp_(part_BNQH.to(out_BNQH.dtype), weight_BNQ1)
    lse_BNQ.copy_(torch.logaddexp(lse_BNQ, part_lse_BNQ))
