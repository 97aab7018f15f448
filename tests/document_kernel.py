"""Dense references in place of CUDA's kernel for packed documents, for tests on the CPU."""

import itertools
import math

import torch

from llama_core.models.block_attention import GROUPED_HEADS, BlockKernel


def dense_scores(q_TNH, k_UKH, query_starts, key_starts, window):
    """Return all scores, [N, T, U], -inf where a document's query does not see a key."""
    k_UNH = k_UKH.repeat_interleave(q_TNH.shape[1] // k_UKH.shape[1], dim=1)
    visible_TU = torch.zeros(len(q_TNH), len(k_UKH), dtype=torch.bool)
    for (q, q_end), (k, k_end) in zip(
        *(itertools.pairwise(x.tolist()) for x in (query_starts, key_starts)), strict=True
    ):
        n, m = q_end - q, k_end - k
        seen = torch.ones(n, m).tril(m - n).bool()
        visible_TU[q:q_end, k:k_end] = seen & ~seen.tril(m - n - window) if window else seen
    scores_NTU = torch.einsum("tnh,unh->ntu", q_TNH, k_UNH) * q_TNH.shape[2] ** -0.5
    return scores_NTU.masked_fill(~visible_TU, -math.inf), k_UNH


def dense_forward(q_TNH, k_UKH, v_UKH, query_starts, key_starts, most_queries, most_keys, window):
    assert query_starts.diff().max() <= most_queries
    assert key_starts.diff().max() <= most_keys
    wide_q, wide_k, wide_v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q_TNH, k_UKH, v_UKH))
    scores_NTU, _ = dense_scores(wide_q, wide_k, query_starts, key_starts, window)
    v_UNH = wide_v.repeat_interleave(q_TNH.shape[1] // v_UKH.shape[1], dim=1)
    out_TNH = torch.einsum("ntu,unh->tnh", scores_NTU.softmax(-1), v_UNH)
    return out_TNH.to(q_TNH.dtype), scores_NTU.logsumexp(-1)


def dense_backward(grad_out, q, k, v, out, lse, query_starts, key_starts, most_queries, most_keys, window):
    """Dao 2023, arXiv:2307.08691, section 3.1, without blocks."""
    dtype, num_groups = q.dtype, q.shape[1] // k.shape[1]
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in (grad_out, q, k, v, out))
    scores_NTU, k_UNH = dense_scores(q, k, query_starts, key_starts, window)
    weights_NTU = (scores_NTU - lse[..., None]).exp()
    grad_v_UNH = torch.einsum("ntu,tnh->unh", weights_NTU, grad_out)
    grad_weights_NTU = torch.einsum("tnh,unh->ntu", grad_out, v.repeat_interleave(num_groups, dim=1))
    grad_scores_NTU = weights_NTU * (grad_weights_NTU - (grad_out * out).sum(-1).T[..., None]) * q.shape[2] ** -0.5
    grad_k_UNH = torch.einsum("ntu,tnh->unh", grad_scores_NTU, q)
    grads = torch.einsum("ntu,unh->tnh", grad_scores_NTU, k_UNH), grad_k_UNH, grad_v_UNH
    return [grads[0].to(dtype), *(x.unflatten(1, (-1, num_groups)).sum(2).to(dtype) for x in grads[1:])]


DENSE = BlockKernel(dense_forward, dense_backward)


def attention_per_document(q_TNH, k_TKH, v_TKH, starts, key_starts, most, most_keys, *, window_size, **options):
    """Compute the document kernel's result, one document at a time."""
    before, after = window_size
    assert (after, most) == (0, most_keys)
    assert torch.equal(starts, key_starts)
    assert options == GROUPED_HEADS
    out = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert stop - start <= most
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        seen = torch.ones(stop - start, stop - start).tril().bool()
        seen = seen & ~seen.tril(-before - 1) if before >= 0 else seen
        scored = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        out.append(scored.transpose(0, 1))
    return torch.cat(out)
