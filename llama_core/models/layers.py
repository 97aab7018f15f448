"""The parts of a LLaMA block: matrices, norms, the embedding and the feed-forward.

Mixed precision is explicit: activations keep one dtype from the embedding to the loss, parameters may have a wider
one, and each layer casts its weight to the dtype of its input at use.
"""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary, R rank of an adapter, N query or key heads, H head dim

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.traceback import annotate

from llama_core.config.model_spec import ModelSpec
from llama_core.models.activations import gated
from llama_core.models.cast_weights import cast_linear, takes_wide_gradient

BLOCK_MATRICES = frozenset(("wq", "wk", "wv", "wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3"))
"""The names of a block's matrices; experts have the last three."""
KEPT = "kept"
"""The annotation of operators whose results selective recomputation keeps, in eager and in compiled code."""


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
