"""Attention of a layer: the functions that compute it, the masks that hide tokens from it, and its usual matrices."""

# Shape suffixes: B batch, S sequence (i queries, j keys), J keys with those of earlier tokens, T tokens (B * S),
# D model dim, N query heads, K key/value heads, H head dim

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from llama_core.attention import CAUSAL, MASKED, DocumentAttention, Kernel, kernel_told
from llama_core.config.model_spec import ModelSpec
from llama_core.models.batch import Documents
from llama_core.models.block_attention import GROUPED_HEADS, divided, joined
from llama_core.models.cpu_attention import cpu_attention, is_faster
from llama_core.models.layers import Linear, NormOfHeads, PlainNorm, RMSNorm, local_part
from llama_core.models.rotation import Positional, Rotation, rotate, with_temperature
from llama_core.models.sinks import attend_with_sinks, kept_by_keys

FUSED_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.llama_core.cpu_attention.default,
    }
)
"""The operators of ``attend``: their results are small beside the scores that they never hold, so it keeps them too."""


def first_seen(positions_BS: Tensor, index_S: Tensor, window: int) -> Tensor:
    """Return the place in the row of the first key that each query sees, in the shape of ``positions_BS``.

    Args:
        positions_BS: places of the queries in their documents.
        index_S: places of the queries in the row.
        window: tokens that a query sees, itself included; 0 for all from the beginning of its document.
    """
    start_BS = index_S - positions_BS
    return torch.maximum(start_BS, index_S - (window - 1)) if window else start_BS


def document_mask(positions_BS: Tensor, dtype: torch.dtype, window: int = 0, *, num_earlier: int = 0) -> Tensor:
    """Return the additive attention mask for rows of packed documents: 0 where query i sees key j, else -inf.

    ``positions_BS`` restarts at 0 with each document, so query i sees the keys i - positions[i] <= j <= i, or the last
    ``window`` of them. Shape [B, 1, S, J]; there are ``num_earlier`` keys before those of the first query. It is
    additive and in the queries' dtype because SDPA would convert a boolean mask to this in every layer, and keep every
    copy for the backward.
    """
    index_J = torch.arange(num_earlier + positions_BS.shape[1], device=positions_BS.device)
    index_S = index_J[num_earlier:]
    start_BS1 = first_seen(positions_BS, index_S, window)[:, :, None]
    visible_BSJ = (index_J >= start_BS1) & (index_J <= index_S[:, None])
    mask_BSJ = torch.zeros(visible_BSJ.shape, dtype=dtype, device=positions_BS.device)
    return mask_BSJ.masked_fill_(~visible_BSJ, -math.inf)[:, None]


def attend(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | Documents | None) -> Tensor:
    """Return softmax attention, [B, N, S, H]: causal, inside documents, or under an additive mask.

    Which of the fused kernels it is follows from what the mask tells, and on a CPU from whether a backward follows.
    """
    if isinstance(mask, Documents):
        return _attend_documents(q_BNSH, k_BKSH, v_BKSH, mask)
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BNSH, k_BKSH, v_BKSH))
    if is_trained and is_faster(q_BNSH, mask):
        out_BNSH: Tensor = cpu_attention(q_BNSH, k_BKSH, v_BKSH, mask, mask is None)[0]
        return out_BNSH
    return _attend_with_torch(q_BNSH, k_BKSH, v_BKSH, mask)


def _attend_with_torch(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
    row = CAUSAL if mask is None else MASKED
    has_fewer_key_heads = k_BKSH.shape[1] < q_BNSH.shape[1]
    if q_BNSH.is_cuda and has_fewer_key_heads and row.repeats_heads(has_16_bits=q_BNSH.dtype.itemsize == 2):
        # SDPA would not refuse grouped heads, but take the math kernel, which holds all scores
        queries_per_key = q_BNSH.shape[1] // k_BKSH.shape[1]
        k_BKSH, v_BKSH = (x.repeat_interleave(queries_per_key, dim=1) for x in (k_BKSH, v_BKSH))
    return F.scaled_dot_product_attention(
        q_BNSH,
        k_BKSH,
        v_BKSH,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=k_BKSH.shape[1] < q_BNSH.shape[1],
    )


def attend_with_all_scores(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
    """Return the same as ``attend`` from torch's math kernel: matrix products and a softmax, with all scores held."""
    with sdpa_kernel(SDPBackend.MATH):
        return _attend_with_torch(q_BNSH, k_BKSH, v_BKSH, mask)


def attend_with_own_scores(
    q_BNSH: Tensor,
    k_BKJH: Tensor,
    v_BKJH: Tensor,
    mask: Tensor | None,
    sinks_N: Tensor | None = None,
    *,
    scale: float,
    soft_cap: float,
) -> Tensor:
    """Return attention with a soft cap on its scores or with sinks, all scores held, in fp32 or wider.

    Args:
        q_BNSH: queries.
        k_BKJH: keys; K divides N.
        v_BKJH: values.
        mask: is added to the scores; None for a causal one.
        sinks_N: see ``softmax_with_sinks``; None without sinks.
        scale: makes scores of products.
        soft_cap: scores become ``cap * tanh(scores / cap)``; 0 leaves them.

    Source: Gemma Team 2024, arXiv:2408.00118, section 2 (logit soft-capping).
    """
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    queries_per_key = q_BNSH.shape[1] // k_BKJH.shape[1]
    dtype = q_BNSH.dtype
    q_BNSH = _laid_out(q_BNSH, wide)
    if queries_per_key > 1:
        k_BNJH, v_BNJH = (x.to(wide).repeat_interleave(queries_per_key, dim=1) for x in (k_BKJH, v_BKJH))
    else:
        k_BNJH, v_BNJH = (_laid_out(x, wide) for x in (k_BKJH, v_BKJH))
    # one name for all, so that each is freed as soon as the next is there
    scores_BNSJ = q_BNSH @ k_BNJH.mT
    if soft_cap:
        scores_BNSJ = scores_BNSJ * (scale / soft_cap)
        scores_BNSJ = torch.tanh(scores_BNSJ)
        scores_BNSJ = scores_BNSJ * soft_cap
    else:
        scores_BNSJ = scores_BNSJ * scale
    scores_BNSJ = scores_BNSJ + (_causal_mask(scores_BNSJ) if mask is None else mask)
    if sinks_N is None:
        scores_BNSJ = torch.softmax(scores_BNSJ, dim=-1)
    else:
        scores_BNSJ = softmax_with_sinks(scores_BNSJ, sinks_N.to(wide))
    out_BSNH = (scores_BNSJ @ v_BNJH).transpose(1, 2)
    return _laid_out(out_BSNH, dtype).transpose(1, 2)


def softmax_with_sinks(scores_BNSJ: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the softmax of scores and one more logit, which every query of a head sees, without that logit's share.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.3 (sinks); OpenAI 2025, arXiv:2508.10925, section 2.3, where
    the logit is learned.
    """
    weights_BNSJ: Tensor = _SoftmaxWithSinks.apply(scores_BNSJ, sinks_N)  # type: ignore[no-untyped-call]
    return weights_BNSJ


class _SoftmaxWithSinks(torch.autograd.Function):
    """A softmax that leaves some of the weight to a sink; its backward is that of a softmax."""

    @staticmethod
    def forward(ctx: Any, scores_BNSJ: Tensor, sinks_N: Tensor) -> Tensor:
        weights_BNSJ = torch.softmax(scores_BNSJ, dim=-1)
        # the logarithm of a weight is its score less the log-sum-exp, which the largest tells best
        lse_BNS1 = scores_BNSJ.amax(-1, keepdim=True).sub_(weights_BNSJ.amax(-1, keepdim=True).log_())
        weights_BNSJ.mul_(kept_by_keys(lse_BNS1, sinks_N[:, None, None]))
        ctx.save_for_backward(weights_BNSJ)
        return weights_BNSJ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNSJ: Tensor) -> tuple[Tensor, Tensor]:
        (weights_BNSJ,) = ctx.saved_tensors
        dtype = weights_BNSJ.dtype
        grad_scores_BNSJ = torch.ops.aten._softmax_backward_data(grad_BNSJ, weights_BNSJ, -1, dtype)
        # as much more of all logits changes nothing, so the gradients of scores and sink are zero together
        return grad_scores_BNSJ, -grad_scores_BNSJ.sum((0, 2, 3))


def _laid_out(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in a dtype, with its dims in order in memory: a product would copy it otherwise."""
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _causal_mask(scores_BNSS: Tensor) -> Tensor:
    """Return the additive mask that hides what lies after a query, [S, S]."""
    return torch.full_like(scores_BNSS[0, 0], -math.inf).triu_(1)


def _attend_documents(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, documents: Documents) -> Tensor:
    q_TNH, k_TKH, v_TKH = map(joined, (q_BNSH, k_BKSH, v_BKSH))
    starts, row_length, window = documents
    seen = (window - 1, 0)  # tokens before and after a query; -1 is all
    out_TNH: Any = varlen_attn(
        q_TNH, k_TKH, v_TKH, starts, starts, row_length, row_length, window_size=seen, **GROUPED_HEADS
    )
    return divided(out_TNH, len(q_BNSH))


class Attention(nn.Module):
    """Causal self-attention, of which subclasses make queries, keys and values.

    Args:
        spec: the architecture.
        layer: which layer of the model it is in.
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.needs = spec.attention(layer)
        """What it has to compute."""
        self.head_dim = spec.head_dim
        self.query_factor = spec.query_factor
        self.rope_pairs = spec.rope_pairs
        self.use_kernel(kernel_told(self.needs, "none"))
        self.with_earlier: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        """Returns the keys and values of earlier tokens too, [B, K, J, H], given new ones: a cache of generation. None
        if there are no earlier tokens."""
        self.sinks = nn.Parameter(torch.empty(spec.num_heads)) if self.needs.sinks else None

    def use_kernel(self, kernel: Kernel) -> None:
        """Compute attention with a kernel of the table that serves this layer."""
        self.kernel = kernel
        """What serves this layer as it trains. A batch may tell it less: an evaluation may have no documents."""
        self.attend: Callable[..., Tensor] = attend
        """Computes attention from queries, keys, values, the model's mask and, if there are some, sinks."""
        if kernel.holds_scores and (self.needs.soft_cap or self.needs.sinks):
            self.attend = partial(attend_with_own_scores, scale=self.needs.scale, soft_cap=self.needs.soft_cap)
        elif kernel.holds_scores:
            self.attend = attend_with_all_scores
        elif self.needs.sinks:
            self.attend = attend_with_sinks

    def own_sinks(self) -> tuple[Tensor, ...]:
        """Return the sinks of the heads that are here, if there are some."""
        return () if self.sinks is None else (local_part(self.sinks),)


class GroupedQueryAttention(Attention):
    """Attention with query heads that share key/value heads, all made from the residual stream.

    Args:
        spec: the architecture.
        layer: which layer of the model it is in.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention).
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__(spec, layer)
        self.wq = Linear(spec.hidden_size, spec.q_size, bias=spec.qkv_bias)
        self.wk = Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.wv = Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.wo = Linear(spec.q_size, spec.hidden_size, bias=spec.o_bias)
        rotates = spec.rotates(layer)
        self.q_norm = _norm_of_heads(spec, spec.q_norm_size, rotates=rotates)
        self.k_norm = _norm_of_heads(spec, spec.k_norm_size, rotates=rotates)

    def forward(self, x_BSD: Tensor, positions: Positional, mask: Any) -> Tensor:
        """Attend over the tokens that ``mask`` allows; over all earlier ones if it is None."""
        # the number of heads comes from the projection, because tensor parallelism makes it narrower
        q_BSNH = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKH = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKH = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSNH = self.q_norm(q_BSNH)
        k_BSKH = self.k_norm(k_BSKH)
        if self.query_factor != 1.0:
            q_BSNH = q_BSNH * self.query_factor
        # tokens stay first in memory, so that flattening the heads afterwards copies nothing
        q_BNSH, k_BKSH = (x.transpose(1, 2) for x in self.placed(q_BSNH, k_BSKH, positions))
        v_BKSH = v_BSKH.transpose(1, 2)
        if self.with_earlier is not None:
            k_BKSH, v_BKSH = self.with_earlier(k_BKSH, v_BKSH)
        out_BNSH = self.attend(q_BNSH, k_BKSH, v_BKSH, mask, *self.own_sinks())
        out_BSD: Tensor = self.wo(out_BNSH.transpose(1, 2).flatten(2))
        return out_BSD

    def placed(self, q_BSNH: Tensor, k_BSKH: Tensor, positions: Positional) -> tuple[Tensor, Tensor]:
        """Return queries and keys as their positions change them."""
        if isinstance(positions, Rotation):
            return rotate(q_BSNH, positions, self.rope_pairs), rotate(k_BSKH, positions, self.rope_pairs)
        return with_temperature(q_BSNH, positions), k_BSKH


def _norm_of_heads(spec: ModelSpec, size: int, *, rotates: bool) -> nn.Module:
    if not spec.normalises_heads(rotates=rotates):
        return nn.Identity()
    if not spec.qk_norm_weights:
        return PlainNorm(spec.norm_eps)
    return (RMSNorm if spec.qk_norm_width == "head" else NormOfHeads)(size, spec.norm_eps)


def use_kernels(model: nn.Module, told: DocumentAttention = "none", *, asked: str = "auto", cp: int = 1) -> None:
    """Make every block of ``model`` compute attention with the kernel that serves it under a plan.

    Args:
        model: the model, or a part of one.
        told: what batches tell the kernels.
        asked: ``parallel.attention``.
        cp: ranks that divide a row; the ring or the gathering that serves them needs their group, see ``context``.

    Raises:
        PlanError: if no kernel does what a block needs.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.use_kernel(kernel_told(module.needs, told, asked=asked, cp=cp))
