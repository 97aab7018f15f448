"""The layers of a LLaMA block.

Mixed precision is explicit: activations keep one dtype from the embedding to the loss, parameters may have a wider
one, and each layer casts its weight to the dtype of its input at use.
"""

# Shape suffixes: B batch, S sequence (i queries, j keys), T tokens (B * S), D model dim, N query heads, K key/value
# heads, H head dim, R half of a head (one entry per rotated pair), F feed-forward dim

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.traceback import annotate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from llama_core.attention import CAUSAL, MASKED, DocumentAttention, Kernel, kernel_told
from llama_core.config.model_spec import ModelSpec
from llama_core.config.rope import LinearScaling, QueryTemperature, RopePairs, RotaryEmbedding, YarnScaling
from llama_core.models.activations import gated
from llama_core.models.batch import Documents
from llama_core.models.block_attention import GROUPED_HEADS, divided, joined
from llama_core.models.cast_weights import cast_linear, takes_wide_gradient
from llama_core.models.cpu_attention import cpu_attention, is_faster
from llama_core.models.sinks import attend_with_sinks, kept_by_keys

BLOCK_MATRICES = frozenset(("wq", "wk", "wv", "wo", "w1", "w2", "w3"))
"""The names of a block's matrices; experts have the last three."""
KEPT = "kept"
"""The annotation of operators whose results selective recomputation keeps, in eager and in compiled code."""
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


def local_part(tensor: Tensor, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part of a tensor; ``gradient`` is the placement of its gradient, if that differs."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=None if gradient is None else [gradient])


class LowRank(NamedTuple):
    """The product ``inner @ rows.T``, as its two factors."""

    inner: Tensor
    """[..., R]."""
    rows: Tensor
    """[V, R]."""


class Linear(nn.Linear):
    """A matrix, with or without a bias, cast to the dtype of its input at use.

    Args:
        in_features: columns of the matrix.
        out_features: rows of the matrix.
        bias: whether a trained vector is added to the product.
    """

    kept = False
    """Whether selective recomputation keeps the product."""
    cast_weight: Tensor | None = None
    """A copy of the weight, or of this rank's part of it, in the dtype of activations; None to cast it at every use."""
    scales: Tensor | None
    """What a weight that is held in few bits is read with, in place of a copy; see ``nf4``."""
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Multiplies an input by the weight, given its copy or its scales."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Completes a product of which every tensor-parallel rank has a part, before the bias is added; None if it is
    whole, or without a bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.multiply = _multiply
        self.own_bias: Callable[[Tensor], Tensor] = unchanged
        """Returns the bias as it is added to what this rank has; a gradient comes back from there."""
        self.register_buffer("scales", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``product(x)``, plus the bias if there is one."""
        out = self.product(x)
        if self.sum_over_ranks is not None:
            out = self.sum_over_ranks(out)
        return out if self.bias is None else out + self.own_bias(self.bias).to(out.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` in the dtype of ``x``; an adapter changes it, and leaves the bias as it is."""
        with annotate({KEPT: self.kept}):
            return self.multiply(x, self.weight, self.cast_weight if self.scales is None else self.scales)

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Return ``out + x @ weight.T`` in the dtype of ``x``; where nothing else multiplies, in one kernel."""
        if self.multiply is not _multiply:
            product: Tensor = self(x)
            return out + product
        return add_product(out, x, self.weight)

    def low_rank(self, x: Tensor) -> LowRank | None:
        """Return an adapter's addition to ``x @ weight.T``, as two factors; None without an adapter."""
        return None


def unchanged(x: Tensor) -> Tensor:
    """Return a tensor as it is, where no other rank has to do with it."""
    return x


def _multiply(x: Tensor, weight: Tensor, cast_weight: Tensor | None) -> Tensor:
    if cast_weight is None:
        # an adapter's matrix that every tensor-parallel rank holds whole is small
        is_whole = isinstance(weight, DTensor) and weight.placements[0].is_replicate()
        if is_whole or not takes_wide_gradient(weight, x):
            return F.linear(x, weight.to(x.dtype))
        cast_weight = local_part(weight).detach().to(x.dtype)
    if isinstance(weight, DTensor):
        return multiply_own_part(cast_linear, x, weight, cast_weight)
    return cast_linear(x, weight, cast_weight)


def multiply_own_part(
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: DTensor, cast_weight: Tensor | None
) -> Tensor:
    """Return this rank's part of a product by a divided matrix, which ``multiply`` computes from its own parts."""
    assert isinstance(x, DTensor)
    # divided by rows, a matrix gives part of the output from all of the input; by columns, the other way round
    some = Shard(x.ndim - 1)
    summed = Partial()
    by_rows = weight.placements == (Shard(0),)
    own = multiply(local_part(x, summed if by_rows else some), local_part(weight), cast_weight)
    return DTensor.from_local(own, x.device_mesh, [some if by_rows else summed])


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``out + x @ weight.T`` in the dtype of ``x``, by one kernel."""
    if isinstance(out, DTensor):
        return _add_own_product(out, x, weight)
    rows: Tensor = torch.addmm(out.flatten(0, -2), x.flatten(0, -2), weight.to(x.dtype).t())
    return rows.view(out.shape)


def _add_own_product(out: DTensor, x: Tensor, weight: Tensor) -> Tensor:
    """Do the same to this rank's part of a result; DTensor would first sum a result that is a partial sum."""
    assert isinstance(weight, DTensor)
    if out.placements[0].is_partial():  # x is a partial sum too, of columns that other ranks hold
        own = add_product(local_part(out, Replicate()), local_part(x, Replicate()), local_part(weight, Partial()))
    else:  # a rank's rows give its columns of the result, from all of x
        own = add_product(local_part(out), local_part(x, Partial()), local_part(weight))
    return DTensor.from_local(
        own, out.device_mesh, out.placements, run_check=False, shape=out.shape, stride=out.stride()
    )


def scale_outputs(out: Tensor, scale: Tensor) -> Tensor:
    """Return the product of a matrix with a factor for each of its rows, in the dtype of ``out``.

    Args:
        out: the product, [..., rows]; under tensor parallelism, of a divided matrix.
        scale: a factor for each row, [rows]; under tensor parallelism divided if the rows are, or this rank's part.
    """
    if not isinstance(out, DTensor):
        return out * scale.to(out.dtype)
    if out.placements[0].is_partial():  # a factor of all ranks' sums gets a part of its gradient on each
        own = local_part(out, Replicate()) * local_part(scale, Partial()).to(out.dtype)
    else:
        own = local_part(out) * local_part(scale).to(out.dtype)
    return DTensor.from_local(
        own, out.device_mesh, out.placements, run_check=False, shape=out.shape, stride=out.stride()
    )


class TokenEmbedding(nn.Embedding):
    """The table from token ids to the residual stream, whose dtype is ``out_dtype``."""

    def __init__(self, spec: ModelSpec, out_dtype: torch.dtype) -> None:
        super().__init__(spec.vocab_size, spec.hidden_size)
        self.out_dtype = out_dtype
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        """Returns the rows of tokens in a table, [B, S, columns], or this rank's part of them, of which all are the
        sum."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return [B, S, D] in ``out_dtype``."""
        return self.look_up(tokens_BS, self.weight).to(self.out_dtype)

    def low_rank(self, x: Tensor) -> None:
        """Return None: a table that is also the head has no adapter."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Return ``x`` with root mean square one along its last dim, times ``weight`` of the same dtype if there is one."""
    # F.rms_norm itself widens half precision to fp32
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation, computed in fp32 and returned in the dtype of its input.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; equal to Hugging Face's ``LlamaRMSNorm``.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with root mean square one along its last dim, times the weight."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class PlainNorm(nn.Module):
    """The same without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with root mean square one along its last dim."""
        return rms_norm(x, None, self.eps)


class NormOfHeads(RMSNorm):
    """A norm over all heads of a query or a key, of which tensor-parallel ranks have some each."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sums a tensor of every rank; None if this one has all heads."""

    def forward(self, x_BSNH: Tensor) -> Tensor:
        """Return the heads that are here with root mean square one over those of all ranks, times the weight."""
        x = x_BSNH.flatten(2)
        if self.sum_over_ranks is None:
            return super().forward(x).view_as(x_BSNH)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.sum_over_ranks(wide.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / self.weight.numel() + (self.eps or 0.0))
        out = wide * scale * local_part(self.weight).to(x.dtype)
        return out.to(x.dtype).view_as(x_BSNH)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding, fp32 or wider, broadcastable to [B, S, 1, R]."""

    cos: Tensor
    sin: Tensor


Positional = Rotation | Tensor | None
"""What a layer knows of positions: a rotation; without one, a factor on each query, [B, S, 1, 1], or nothing."""


def rope_frequencies(rope: RotaryEmbedding, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of every rotated pair, in radians: fp32, [R].

    ``rope.scaling``, if set, says how they are stretched.

    Source: Su et al. 2021, arXiv:2104.09864; for the scaling see the classes of ``config/rope.py``.
    """
    exponents_R = torch.arange(0, rope.head_dim, 2, dtype=torch.float32, device=device) / rope.head_dim
    plain_R = 1.0 / rope.theta**exponents_R
    scaling = rope.scaling
    if scaling is None:
        return plain_R
    if isinstance(scaling, LinearScaling):
        return plain_R / scaling.factor
    if isinstance(scaling, YarnScaling):
        first, last = scaling.blend(rope.head_dim, rope.theta)
        slowed_R = (torch.arange(len(plain_R), dtype=torch.float32, device=device) - first) / (last - first)
        return torch.lerp(plain_R, plain_R / scaling.factor, slowed_R.clamp(0.0, 1.0))
    turns_R = plain_R * (scaling.original_context / (2 * math.pi))
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain_R / scaling.factor, plain_R, kept_R.clamp(0.0, 1.0))


def rotation(rope: RotaryEmbedding, positions_BS: Tensor, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return the rotation of every token, computed in fp32; ``positions_BS`` counts from 0 (B may be 1)."""
    angles_BS1R = positions_BS[:, :, None, None].float() * rope_frequencies(rope, positions_BS.device)
    cos_BS1R = angles_BS1R.cos()
    sin_BS1R = angles_BS1R.sin()
    if isinstance(rope.scaling, YarnScaling):
        cos_BS1R *= rope.scaling.amplitude
        sin_BS1R *= rope.scaling.amplitude
    return Rotation(cos_BS1R.to(dtype), sin_BS1R.to(dtype))


def positional(
    kind: RotaryEmbedding | QueryTemperature | None, positions_BS: Tensor, dtype: torch.dtype = torch.float32
) -> Positional:
    """Return what a layer makes of the positions of every token in its document, which count from 0 (B may be 1)."""
    if kind is None:
        return None
    if isinstance(kind, RotaryEmbedding):
        return rotation(kind, positions_BS, dtype)
    steps_BS11 = torch.floor((positions_BS[:, :, None, None].float() + 1) / kind.floor)
    return (1 + kind.scale * steps_BS11.log1p()).to(dtype)


def rotate(x_BSNH: Tensor, rotary: Rotation, pairs: RopePairs = "halves") -> Tensor:
    """Rotate pairs of numbers of every head; computed in the rotation's dtype.

    Args:
        x_BSNH: queries or keys.
        rotary: the rotation of every token.
        pairs: (i, i + H/2), as Hugging Face lays out most models, or (2i, 2i + 1). The results of both have the first
            of each pair in their first half: scores do not show the order, which queries and keys share.
    """
    wide_BSNH = x_BSNH.to(rotary.cos.dtype)
    if pairs == "adjacent":
        first_BSNR, second_BSNR = torch.unflatten(wide_BSNH, -1, (-1, 2)).unbind(-1)
    else:
        first_BSNR, second_BSNR = wide_BSNH.chunk(2, dim=-1)
    rotated_BSNH = torch.cat(
        (
            first_BSNR * rotary.cos - second_BSNR * rotary.sin,
            second_BSNR * rotary.cos + first_BSNR * rotary.sin,
        ),
        dim=-1,
    )
    return rotated_BSNH.to(x_BSNH.dtype)


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
    """Causal self-attention with grouped key/value heads.

    Args:
        spec: the architecture.
        layer: which layer of the model it is in.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention).
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
        self.wq = Linear(spec.hidden_size, spec.q_size, bias=spec.qkv_bias)
        self.wk = Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.wv = Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.wo = Linear(spec.q_size, spec.hidden_size, bias=spec.o_bias)
        rotates = spec.rotates(layer)
        self.q_norm = _norm_of_heads(spec, spec.q_norm_size, rotates=rotates)
        self.k_norm = _norm_of_heads(spec, spec.k_norm_size, rotates=rotates)

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
        sinks = () if self.sinks is None else (local_part(self.sinks),)
        out_BNSH = self.attend(q_BNSH, k_BKSH, v_BKSH, mask, *sinks)
        out_BSD: Tensor = self.wo(out_BNSH.transpose(1, 2).flatten(2))
        return out_BSD

    def placed(self, q_BSNH: Tensor, k_BSKH: Tensor, positions: Positional) -> tuple[Tensor, Tensor]:
        """Return queries and keys as their positions change them."""
        if isinstance(positions, Rotation):
            return rotate(q_BSNH, positions, self.rope_pairs), rotate(k_BSKH, positions, self.rope_pairs)
        if positions is None:
            return q_BSNH, k_BSKH
        return (q_BSNH.to(positions.dtype) * positions).to(q_BSNH.dtype), k_BSKH


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


class FeedForward(nn.Module):
    """SwiGLU or GeGLU: ``w2(activation(w1 x) * w3 x)``, with gate projection w1, up projection w3, down projection w2.

    An activation may also be one of gate and up at once, see ``activations``.

    Args:
        spec: the architecture.
        width: columns of w2; default: ``spec.ffn_size``.

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, spec: ModelSpec, width: int | None = None) -> None:
        super().__init__()
        width = width or spec.ffn_size
        self.activation = spec.activation
        self.w1 = Linear(spec.hidden_size, width)
        self.w2 = Linear(width, spec.hidden_size)  # no backward needs its result
        self.w3 = Linear(spec.hidden_size, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the feed-forward output, in the shape and dtype of ``x_BSD``."""
        out_BSD: Tensor = self.w2(gated(self.w1(x_BSD), self.w3(x_BSD), self.activation))
        return out_BSD


class Block(nn.Module):
    """One transformer layer: attention and feed-forward, each with a residual around it, and norms.

    ``spec.norms`` says which of the four norms there are; the others are identities::

        norms:        pre                        post                       both

                 x ---+------+              x ---+------+              x ---+------+
                      |      |                   |      |                   |      |
                      |  attention_norm          |      |                   |  attention_norm
                      |      |                   |      |                   |      |
                      |  attention               |  attention               |  attention
                      |      |                   |      |                   |      |
                      |      |                   |  attention_post_norm     |  attention_post_norm
                      |      |                   |      |                   |      |
                      + <----+                   + <----+                   + <----+
                      |                          |                          |
                      +------+                   +------+                   +------+
                      |      |                   |      |                   |      |
                      |  ffn_norm                |      |                   |  ffn_norm
                      |      |                   |      |                   |      |
                      |  feed_forward            |  feed_forward            |  feed_forward
                      |      |                   |      |                   |      |
                      |      |                   |  ffn_post_norm           |  ffn_post_norm
                      |      |                   |      |                   |      |
                      + <----+                   + <----+                   + <----+
                      |                          |                          |

    A norm never stands on the residual stream itself, which only ever gets something added to it.

    Args:
        spec: the architecture.
        feed_forward: the feed-forward; default: a dense one.
        layer: which layer of the model it is.
    """

    def __init__(self, spec: ModelSpec, feed_forward: nn.Module | None = None, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = _norm_of_stream(spec, is_there=spec.norms_before)
        self.attention = Attention(spec, layer)
        self.attention_post_norm = _norm_of_stream(spec, is_there=spec.norms_after)
        self.ffn_norm = _norm_of_stream(spec, is_there=spec.norms_before)
        self.feed_forward = FeedForward(spec) if feed_forward is None else feed_forward
        self.ffn_post_norm = _norm_of_stream(spec, is_there=spec.norms_after)

    def forward(self, x_BSD: Tensor, positions: Positional, mask: Any) -> Tensor:
        """Return the residual stream after this layer."""
        x_BSD = x_BSD + self.attention_post_norm(self.attention(self.attention_norm(x_BSD), positions, mask))
        out_BSD: Tensor = x_BSD + self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BSD)))
        return out_BSD


def _norm_of_stream(spec: ModelSpec, *, is_there: bool) -> nn.Module:
    return RMSNorm(spec.hidden_size, spec.norm_eps) if is_there else nn.Identity()
