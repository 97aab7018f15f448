"""Context parallelism: a rank holds a part of each sequence, and its attention reaches the other parts over a ring.

Where a kernel takes documents, on CUDA, packed documents need no ring: see ``gathered_attention``. Ranks may also
exchange heads, whose rows are then whole: see ``ulysses``. The rest of this text is not about these.

The sequence is cut into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, in this order. Under the causal
mask, every rank then has the same work at every step of the ring and computes nothing invisible. Count the work in
squares of chunk by chunk, where a triangle is half a square; every step takes two squares. For its own block a rank
computes two triangles and a square. For a lower rank's block it computes its two chunks of queries by the first chunk
of keys. For a higher rank's block it computes its second chunk of queries by both chunks of keys.

That holds with packed documents too: a mask hides scores of these squares, but CUDA's kernel computes them all. The one
that takes documents computes only what they see, so for it the chunks are cut by document: see ``document_chunks``.

Sources: Liu et al. 2023, arXiv:2310.01889 (the ring); Llama team 2024, arXiv:2407.21783, section 3.3.2 (the chunks).
"""

# Shape suffixes: B batch, L tokens of a row, S those that this rank holds (Q its queries that see part of a block, J
# the keys of that block that they see)

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce

from llama_core.attention import refusal
from llama_core.errors import PlanError
from llama_core.models.attention import Attention, first_seen
from llama_core.models.batch import Batch, Documents, at_places
from llama_core.models.block_attention import BlockMask
from llama_core.models.head import HeadInputs
from llama_core.models.layers import Linear, TokenEmbedding
from llama_core.models.llama import Llama
from llama_core.models.moe import mixtures
from llama_core.models.sinks import attend_with_sinks
from llama_core.parallel.document_chunks import DocumentChunks
from llama_core.parallel.gathered_attention import (
    HeldDocuments,
    gathered_attention,
    gathered_kernel,
    held_documents,
)
from llama_core.parallel.ring import RingMasks, ring_attention, ring_kernel, visible_parts
from llama_core.parallel.ulysses import ulysses_attention


def apply_context_parallel(model: Llama, group: ProcessGroup) -> None:
    """Make ``model``, or a part of one, work on the part of each sequence that ``shard_batch`` gives this rank.

    The heads may be divided over other ranks, if all ranks of ``group`` hold the same heads. Losses and gradients are
    then this rank's share of the sum. Blocks whose kernel exchanges heads get the parts of ``cut_batch`` instead.

    Args:
        model: the model, changed in place.
        group: the ranks that divide a sequence.

    Raises:
        PlanError: if no kernel over a divided sequence does what a layer needs.
    """
    if unserved := refusal(model.spec.attentions, cp=dist.get_world_size(group)):
        raise PlanError(unserved)
    model.head_inputs = partial(_head_of_part, model.head_inputs, group)
    if exchanges_heads(model):
        model.sequence_index = partial(_piece_places, group=group)
        model.attention_mask = partial(_mask_of_rows, model.attention_mask, dist.get_world_size(group))
    else:
        model.sequence_index = partial(_held_places, group=group)
        model.attention_mask = partial(_mask, cp_rank=dist.get_rank(group), cp_size=dist.get_world_size(group))
    for module in model.layers.modules():
        if isinstance(module, Attention) and module.kernel.moves == "exchange":
            module.attend = partial(ulysses_attention, attend=module.attend, group=group)
        elif isinstance(module, Attention):
            module.attend = partial(_attend, group=group)
    for mixture in mixtures(model):
        mixture.count_rows = partial(_count_over, mixture.count_rows, group)


def _count_over(count: Callable[[Tensor], Tensor], group: ProcessGroup, tokens_BE: Tensor) -> Tensor:
    """Return the tokens of each row and expert over the ranks of a group, given what counts those of this rank."""
    total_BE: Tensor = all_reduce(count(tokens_BE), "sum", group)
    return total_BE


def shard_batch(batch: Batch, cp_rank: int, cp_size: int) -> Batch:
    """Return a rank's part of each row of ``batch``.

    The documents stay those of whole rows: they say which keys of other ranks a query sees.

    Raises:
        PlanError: if rows cannot be cut into 2 * ``cp_size`` equal chunks.
    """
    if batch.documents is None:
        # the sequence is the last dim but for values of several numbers
        return batch.each_token(lambda x: shard_sequence(x.movedim(1, -1), cp_rank, cp_size).movedim(-1, 1))
    num_rows, row_length = batch.tokens_BS.shape
    chunks = DocumentChunks(batch.documents.starts, num_rows, row_length, 2 * cp_size)
    held_BS = shard_sequence(chunks.order, cp_rank, cp_size)
    return batch.each_token(lambda x: at_places(x, held_BS))


def exchanges_heads(model: Llama) -> bool:
    """Return whether the blocks of ``model`` attend to whole rows, of some heads."""
    return any(isinstance(module, Attention) and module.kernel.moves == "exchange" for module in model.layers.modules())


def cut_batch(batch: Batch, cp_rank: int, cp_size: int) -> Batch:
    """Return a rank's piece of each row of ``batch``, for exchanged heads; the positions stay those of whole rows.

    Raises:
        PlanError: if rows cannot be cut into ``cp_size`` equal pieces.
    """
    seq_len = batch.tokens_BS.shape[1]
    if seq_len % cp_size:
        raise PlanError(f"{seq_len} tokens cannot be cut into cp={cp_size} equal pieces; use a multiple of cp")
    own = batch.each_token(lambda x: x.chunk(cp_size, dim=1)[cp_rank].contiguous())
    return replace(own, positions_BS=batch.positions_BS)


def shard_sequence(x: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Return a rank's part, [..., S], of ``x``, whose last dim is the sequence, [..., cp_size * S].

    Raises:
        PlanError: if the sequence cannot be cut into 2 * ``cp_size`` equal chunks.
    """
    seq_len = x.shape[-1]
    num_chunks = 2 * cp_size
    if seq_len % num_chunks:
        below = seq_len - seq_len % num_chunks
        legal = " or ".join(str(length) for length in (below, below + num_chunks) if length)
        raise PlanError(
            f"{seq_len} tokens cannot be cut into 2 * cp = {num_chunks} equal chunks (cp={cp_size}); use {legal}"
        )
    chunks = x.chunk(num_chunks, dim=-1)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]), dim=-1)


def sequence_index(seq_len: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Return the places of a rank's tokens in a sequence that is not cut by document: int64, [S], ascending.

    Raises:
        PlanError: if the sequence cannot be cut into 2 * ``cp_size`` equal chunks.
    """
    return shard_sequence(torch.arange(seq_len, device=device), cp_rank, cp_size)


def _held_places(num_tokens: int, device: torch.device, *, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    return sequence_index(num_tokens * size, dist.get_rank(group), size, device)


def _piece_places(num_tokens: int, device: torch.device, *, group: ProcessGroup) -> Tensor:
    return torch.arange(num_tokens, device=device) + dist.get_rank(group) * num_tokens


def _mask_of_rows(
    make: Callable[..., Tensor | Documents | None],
    cp_size: int,
    positions_BL: Tensor | None,
    index_S: Tensor,
    *rest: Any,
) -> Tensor | Documents | None:
    return make(positions_BL, torch.arange(len(index_S) * cp_size, device=index_S.device), *rest)


def _head_of_part(
    head_inputs: Callable[[Tensor, Linear | TokenEmbedding], HeadInputs],
    group: ProcessGroup,
    x_BSD: Tensor,
    table: Linear | TokenEmbedding,
) -> HeadInputs:
    return head_inputs(x_BSD, table)._replace(sequence_group=group)


# by what a batch tells, as in the table of kernels: a mask goes with a ring, and documents with gathered keys
def _attend(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: RingMasks | HeldDocuments,
    sinks_N: Tensor | None = None,
    *,
    group: ProcessGroup,
) -> Tensor:
    if sinks_N is not None:
        kernel = (gathered_kernel if isinstance(mask, HeldDocuments) else ring_kernel)(group)
        return attend_with_sinks(q_BNSH, k_BKSH, v_BKSH, mask, sinks_N, kernel=kernel)
    if isinstance(mask, HeldDocuments):
        return gathered_attention(q_BNSH, k_BKSH, v_BKSH, mask, group=group)
    return ring_attention(q_BNSH, k_BKSH, v_BKSH, mask, group=group)


def _mask(
    positions_BS: Tensor | None,
    index_S: Tensor,
    dtype: torch.dtype,
    documents: Documents | None,
    window: int,
    **place: int,
) -> RingMasks | HeldDocuments:
    if documents is not None:
        if positions_BS is None:
            raise ValueError("a batch with documents has positions")
        return held_documents(documents._replace(window=window), *positions_BS.shape, **place)
    return ring_masks(positions_BS, index_S, dtype, window, **place)


def ring_masks(
    positions_BS: Tensor | None,
    index_S: Tensor,
    dtype: torch.dtype,
    window: int = 0,
    *,
    cp_rank: int,
    cp_size: int,
) -> RingMasks:
    """Return the masks that ``ring_attention`` needs for a microbatch, the same for all layers with one window.

    With documents or a window, the masks hold ``S * S * (cp + 1) / 2`` elements per row of the microbatch.

    Args:
        positions_BS: each token's position in its document if rows hold several documents, else None.
        index_S: the places of this rank's tokens in the whole sequence.
        dtype: the dtype of the queries.
        window: tokens that a query sees, itself included; 0 for all from the beginning of its document.
        cp_rank: this rank's place in the ring.
        cp_size: ranks of the ring.
    """
    num_tokens = len(index_S)
    masks = []
    for source in ((cp_rank - step) % cp_size for step in range(cp_size)):
        queries, keys = visible_parts(cp_rank, source, num_tokens)
        if positions_BS is None and not window:
            masks.append(BlockMask(queries, keys, causal=source == cp_rank))
            continue
        index_Q = index_S[queries]
        index_J = sequence_index(num_tokens * cp_size, source, cp_size, index_S.device)[keys]
        positions_BQ = index_Q[None] if positions_BS is None else positions_BS[:, queries]
        start_BQ1 = first_seen(positions_BQ, index_Q, window)[:, :, None]
        visible_BQJ = (index_J >= start_BQ1) & (index_J <= index_Q[:, None])
        masks.append(BlockMask.of_visible(queries, keys, visible_BQJ, dtype))
    return tuple(masks)
