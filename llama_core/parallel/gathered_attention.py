"""Attention to packed documents in a divided sequence: keys and values are gathered, and one kernel takes documents.

Instead of a mask, the kernel takes each document's keys as one range, which ends where its queries end. The queries of
a rank are two chunks of every row (see ``document_chunks``). A chunk sees itself and the chunks before it, so the
gathered keys of these are laid out for both, document by document. Every document is then part of both: its queries are
those in the chunk, perhaps none, and its keys those in the chunks that the chunk sees.

All of it is one operator, forward and backward: selective recomputation keeps its result, and compiled code, where
transfers between ranks cannot be traced, has it in its graph.

Source: Llama team 2024, arXiv:2407.21783, section 3.3.2 (gathering keys and values, for document masks).
"""

# Shape suffixes: B batch, S tokens that this rank holds, C tokens of a chunk (S / 2), N query heads, K key/value heads,
# H head dim, T queries (B * S), J keys that the chunks of a row see (together, (2 * cp + 1) * C), U keys of all rows
# (B * J)

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the fake kernels of torch.ops._c10d_functional
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from llama_core.models.batch import Documents
from llama_core.models.block_attention import VARLEN, BlockKernel, divided, divided_lse, joined, joined_lse
from llama_core.models.cpu_attention import empty_tokens_first
from llama_core.parallel.document_chunks import DocumentChunks

c10d = torch.ops._c10d_functional


class HeldDocuments(NamedTuple):
    """The part of some documents that a rank holds; every document is there once for each chunk of its row."""

    query_starts: Tensor
    """Where the queries of each begin among the rank's tokens, and where the last ones end: int32, ascending."""
    key_starts: Tensor
    """The same for the keys that the rank's chunks see."""
    key_places: Tensor
    """Where these keys are laid out, chunk after chunk for each of the rank's chunks: int64 [B, 2 * cp + 1, C]."""
    row_length: int
    """Tokens of a whole row, the most keys that a document can have."""
    window: int
    """Tokens that a query sees, itself included; 0 for all from the beginning of its document."""


def held_documents(
    documents: Documents, num_rows: int, num_tokens: int, *, cp_rank: int, cp_size: int
) -> HeldDocuments:
    """Return the part of ``documents`` that a rank holds; waits for no device.

    Args:
        documents: those of whole rows.
        num_rows: number of rows.
        num_tokens: tokens of a row that a rank holds.
        cp_rank: the rank's place among those that divide a row.
        cp_size: number of those ranks.
    """
    length = num_tokens // 2
    num_seen = 2 * cp_size + 1  # chunks that a rank's two chunks see
    chunks = DocumentChunks(documents.starts, num_rows, num_tokens * cp_size, 2 * cp_size)
    queries = []
    keys = []
    places = []
    for number, chunk in enumerate(held_chunks(cp_rank, cp_size)):
        num_keys = chunks.tokens_before(chunk + 1)
        num_queries = num_keys - chunks.tokens_before(chunk)
        queries.append(chunks.row * num_tokens + number * length + num_queries)
        chunks_before = chunks.row * num_seen + number * (cp_rank + 1)
        keys.append(chunks_before * length + num_keys)
        places.append(chunks.laid_out(keys[-1])[:, : (chunk + 1) * length])
    # In the order of rows, chunks and documents, both ascend. The end of the last row is needed once.
    query_starts, key_starts = (
        torch.cat((first, second[:-1])).sort().values.int() for first, second in (queries, keys)
    )
    key_places = torch.cat(places, dim=1).view(num_rows, num_seen, length)
    return HeldDocuments(query_starts, key_starts, key_places, documents.row_length, documents.window)


def gathered_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: HeldDocuments, *, group: ProcessGroup
) -> Tensor:
    """Return the attention of this rank's queries to the keys of their documents, [B, N, S, H] in their dtype.

    Keys and values are gathered, for the key/value heads only, and gathered again for the backward, so that a rank
    saves only its own tokens. Its gradients of all keys and values are summed over the ranks in fp32, or fp64 for fp64
    inputs. Every rank of the group must call this in the same order. Not differentiable twice.

    Args:
        q_BNSH: queries, already rotated.
        k_BKSH: keys, already rotated; K divides N.
        v_BKSH: values.
        documents: the result of ``held_documents`` for this microbatch.
        group: the ranks that divide every row.
    """
    out_BNSH: Tensor = GATHERED_ATTENTION(q_BNSH, k_BKSH, v_BKSH, *documents, group.group_name)[0]
    return out_BNSH


def gathered_kernel(group: ProcessGroup) -> BlockKernel:
    """Return the forward and the backward of ``gathered_attention``, for what changes its results in between."""
    return BlockKernel(
        partial(_forward_alone, group_name=group.group_name), partial(_backward_alone, group_name=group.group_name)
    )


def _forward_alone(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: HeldDocuments, *, group_name: str
) -> tuple[Tensor, Tensor]:
    out_BNSH, lse_NT = GATHERED_ATTENTION(q_BNSH, k_BKSH, v_BKSH, *documents, group_name)
    return out_BNSH, divided_lse(lse_NT, len(q_BNSH))


def _backward_alone(*tensors_and_documents: Any, group_name: str) -> tuple[Tensor, ...]:
    *tensors, lse_BNS, documents = tensors_and_documents
    grads: tuple[Tensor, ...] = GATHERED_ATTENTION_BACKWARD(*tensors, joined_lse(lse_BNS), *documents, group_name)
    return grads


def forward(  # noqa: PLR0917 - operators have positions
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    key_places: Tensor,
    row_length: int,
    window: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Return the output, [B, N, S, H], and the kernel's log-sum-exp; see ``gathered_attention``."""
    group = _resolve_process_group(GroupName(group_name))
    k_UKH, v_UKH = _seen(k_BKSH, v_BKSH, key_places, group)
    most_queries = min(row_length, q_BNSH.shape[2] // 2)
    bounds = (query_starts, key_starts, most_queries, row_length, window)
    out_TNH, lse = VARLEN.forward(_joined(q_BNSH), k_UKH, v_UKH, *bounds)
    return _divided(out_TNH, len(q_BNSH)), lse


def backward(  # noqa: PLR0917 - operators have positions
    grad_out_BNSH: Tensor,
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNSH: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    key_places: Tensor,
    row_length: int,
    window: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values."""
    group = _resolve_process_group(GroupName(group_name))
    grad_out_TNH, q_TNH, out_TNH = map(_joined, (grad_out_BNSH, q_BNSH, out_BNSH))
    k_UKH, v_UKH = _seen(k_BKSH, v_BKSH, key_places, group)
    most_queries = min(row_length, q_BNSH.shape[2] // 2)
    bounds = (query_starts, key_starts, most_queries, row_length, window)
    grad_q_TNH, *grads_UKH = VARLEN.backward(grad_out_TNH, q_TNH, k_UKH, v_UKH, out_TNH, lse, *bounds)
    del k_UKH, v_UKH
    # one after the other, because a sum takes as much memory as both
    grad_k_BKSH = _summed(_spread(grads_UKH.pop(0), key_places, group), k_BKSH.dtype, group)
    grad_v_BKSH = _summed(_spread(grads_UKH.pop(0), key_places, group), v_BKSH.dtype, group)
    return _divided(grad_q_TNH, len(q_BNSH)), grad_k_BKSH, grad_v_BKSH


def held_chunks(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks of each row that a rank holds, in order."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def _seen_chunks(group: ProcessGroup) -> list[tuple[int, int]]:
    """Return the chunks of a row that each of this rank's chunks sees: for each, the holder and its place there."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    held_by = {
        chunk: (holder, place) for holder in range(size) for place, chunk in enumerate(held_chunks(holder, size))
    }
    return [held_by[chunk] for last in held_chunks(rank, size) for chunk in range(last + 1)]


def _seen(k_BKSH: Tensor, v_BKSH: Tensor, key_places: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield the keys and the values that this rank's chunks see, [U, K, H] each."""
    size = dist.get_world_size(group)
    arriving = [
        c10d.all_gather_into_tensor(x_BKSH.transpose(1, 2).contiguous(), size, group.group_name)
        for x_BKSH in (k_BKSH, v_BKSH)
    ]
    while arriving:
        all_B2CKH = c10d.wait_tensor(arriving.pop(0)).view(size, len(k_BKSH), 2, -1, *k_BKSH.shape[1::2])
        seen_UKH = all_B2CKH.new_empty((key_places.numel(), *all_B2CKH.shape[-2:]))
        for (holder, place), places_BC in zip(_seen_chunks(group), key_places.unbind(1), strict=True):
            seen_UKH[places_BC] = all_B2CKH[holder, :, place]
        yield seen_UKH


def _spread(grad_UKH: Tensor, key_places: Tensor, group: ProcessGroup) -> Tensor:
    """Return gradients of keys or values by the rank that holds the keys, [cp, B, 2, C, K, H], in fp32 or wider."""
    batch, _, length = key_places.shape
    wide = torch.promote_types(grad_UKH.dtype, torch.float32)
    all_B2CKH = grad_UKH.new_zeros((dist.get_world_size(group), batch, 2, length, *grad_UKH.shape[1:]), dtype=wide)
    # chunk by chunk: one index_add_ would need a copy of the gradients in the wide dtype
    for (holder, place), places_BC in zip(_seen_chunks(group), key_places.unbind(1), strict=True):
        all_B2CKH[holder, :, place] += grad_UKH[places_BC]
    return all_B2CKH


def _summed(all_B2CKH: Tensor, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
    """Return this rank's part, [B, K, S, H], of the sum over the ranks of what ``_spread`` returned there."""
    arriving = c10d.reduce_scatter_tensor(all_B2CKH.flatten(0, 1), "sum", len(all_B2CKH), group.group_name)
    own_BSKH: Tensor = c10d.wait_tensor(arriving).to(dtype).flatten(1, 2)
    return own_BSKH.transpose(1, 2)


def _joined(x_BNSH: Tensor) -> Tensor:
    """Return [T, N, H], dense."""
    return joined(x_BNSH).contiguous()


def _divided(x_TNH: Tensor, batch: int) -> Tensor:
    return divided(x_TNH.contiguous(), batch)


_operator = torch.library.custom_op("llama_core::gathered_attention", forward, mutates_args=())
_backward_operator = torch.library.custom_op("llama_core::gathered_attention_backward", backward, mutates_args=())
GATHERED_ATTENTION = torch.ops.llama_core.gathered_attention.default
"""The operator: from the arguments of ``forward`` to its results."""
GATHERED_ATTENTION_BACKWARD = torch.ops.llama_core.gathered_attention_backward.default
"""The operator that computes its gradients: from the arguments of ``backward`` to its results."""


@_operator.register_fake
def _(q_BNSH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, num_heads, num_tokens = q_BNSH.shape[:3]
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    return empty_tokens_first(q_BNSH), q_BNSH.new_empty((num_heads, batch * num_tokens), dtype=wide)


@_backward_operator.register_fake
def _(_: Tensor, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_tokens_first(q_BNSH), empty_tokens_first(k_BKSH), empty_tokens_first(v_BKSH)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.row_length, ctx.window, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_out_BNSH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q_BNSH, k_BKSH, v_BKSH, *starts, out_BNSH, lse = ctx.saved_tensors
    grads: tuple[Tensor, ...] = GATHERED_ATTENTION_BACKWARD(
        grad_out_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH, lse, *starts, ctx.row_length, ctx.window, ctx.group_name
    )
    return *grads, *[None] * 6


_operator.register_autograd(_differentiate, setup_context=_save)
