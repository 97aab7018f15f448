"""Multi-head latent attention: keys and values of all heads are made from one narrow latent of each token.

To train, keys and values of every head are made from the latent, and values get as wide as keys, so that every kernel,
ring and exchange of heads serves them as it serves others. To generate, the latent alone is kept of each token, with
the rotated part of its key: for a token that is continued, what would make keys and values of the latent multiplies the
query and the result instead, so that all heads attend to one narrow key and value.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.1.
"""

# Shape suffixes: B batch, S sequence (J keys), D model dim, N heads, H head dim (C of it as made from a latent, R
# rotated), V width of a head's values, L latent, W what is kept of a token (L and R)

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial

from llama_core.config.model_spec import ModelSpec
from llama_core.models.attention import Attention, softmax_with_sinks
from llama_core.models.layers import Linear, RMSNorm, local_part, unchanged
from llama_core.models.rotation import Positional, Rotation, rotate, with_temperature

NORM_EPS = 1e-6
"""What norms of latents add to the mean square, whatever other norms do: that of DeepSeek's code and transformers."""


class LatentAttention(Attention):
    """Attention whose keys and values are made from a latent, and perhaps its queries from another one.

    A key is what its head makes of the latent, [C], and a rotated part that all heads share, [R]. A query has the same
    two parts, both of its own head.

    Args:
        spec: the architecture.
        layer: which layer of the model it is in.
    """

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__(spec, layer)
        self.parts_of_head = (spec.head_dim - spec.rope_dim, spec.rope_dim)
        """Numbers of a head that are not rotated, and those that are."""
        self.parts_of_latent = (spec.kv_rank, spec.rope_dim)
        """Of what is made from the stream for keys and values: the latent, and the rotated part of a key."""
        self.value_dim = spec.value_head_dim
        self.gathered: Callable[[Tensor], Tensor] = unchanged
        """Returns whole tokens, for heads of which this rank has some, given those whose stream it has."""
        self._up: tuple[Tensor, Tensor] | None = None
        """What makes keys, [L, N, C], and values, [L, N, V], of a latent, while texts are continued."""
        self.has_query_latent = spec.query_rank > 0
        if self.has_query_latent:
            self.wq_a = Linear(spec.hidden_size, spec.query_rank)
            self.q_a_norm = RMSNorm(spec.query_rank, NORM_EPS)
            self.wq_b = Linear(spec.query_rank, spec.q_size)
        else:
            self.wq = Linear(spec.hidden_size, spec.q_size)
        self.wkv_a = Linear(spec.hidden_size, spec.kv_down_size)
        self.kv_a_norm = RMSNorm(spec.kv_rank, NORM_EPS)
        self.wkv_b = Linear(spec.kv_rank, spec.kv_up_size)
        self.wo = Linear(spec.attended_size, spec.hidden_size, bias=spec.o_bias)

    def forward(self, x_BSD: Tensor, positions: Positional, mask: Any) -> Tensor:
        """Attend over the tokens that ``mask`` allows; over all earlier ones if it is None."""
        q_BNSH = self.queries(x_BSD, positions).transpose(1, 2)
        latent_BSL, k_BS1R = self.latents(x_BSD, positions)
        if self.with_earlier is not None:
            new_BSW = torch.cat((local_part(latent_BSL), k_BS1R[:, :, 0]), dim=-1)
            kept_B1JW, _ = self.with_earlier(new_BSW[:, None], new_BSW[:, None, :, :0])
            if kept_B1JW.shape[2] > new_BSW.shape[1]:
                out_BNSV = self.continued(q_BNSH, kept_B1JW[:, 0], mask)
                continued_BSD: Tensor = self.wo(out_BNSV.transpose(1, 2).flatten(2))
                return continued_BSD
        self._up = None
        k_BNSH, v_BNSH = (x.transpose(1, 2) for x in self.keys_and_values(latent_BSL, k_BS1R))
        out_BNSH = self.attend(q_BNSH, k_BNSH, v_BNSH, mask, *self.own_sinks())
        out_BSNV = out_BNSH.transpose(1, 2)[..., : self.value_dim]
        out_BSD: Tensor = self.wo(out_BSNV.flatten(2))
        return out_BSD

    def queries(self, x_BSD: Tensor, positions: Positional) -> Tensor:
        """Return the queries of the heads that are here, [B, S, N, H], as their positions change them."""
        if self.has_query_latent:
            q_BSE = self.wq_b(self.gathered(self.q_a_norm(self.wq_a(x_BSD))))
        else:
            q_BSE = self.wq(self.gathered(x_BSD))
        # the number of heads comes from the product, because tensor parallelism makes it narrower
        q_BSNH = q_BSE.unflatten(-1, (-1, self.head_dim))
        if self.query_factor != 1.0:
            q_BSNH = q_BSNH * self.query_factor
        if not isinstance(positions, Rotation):
            return with_temperature(q_BSNH, positions)
        q_BSNC, q_BSNR = q_BSNH.split(self.parts_of_head, dim=-1)
        return torch.cat((q_BSNC, rotate(q_BSNR, positions, self.rope_pairs)), dim=-1)

    def latents(self, x_BSD: Tensor, positions: Positional) -> tuple[Tensor, Tensor]:
        """Return the latents of whole tokens, [B, S, L], and the part of their keys that heads share, [B, S, 1, R]."""
        latent_BSL, k_BSR = self.wkv_a(x_BSD).split(self.parts_of_latent, dim=-1)
        latent_BSL = self.gathered(self.kv_a_norm(latent_BSL))
        # the heads that are here give a part of the gradient of what all heads share
        k_BS1R = local_part(self.gathered(k_BSR), Partial())[:, :, None]
        return latent_BSL, rotate(k_BS1R, positions, self.rope_pairs) if isinstance(positions, Rotation) else k_BS1R

    def keys_and_values(self, latent_BSL: Tensor, k_BS1R: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of these heads, [B, S, N, H] each: behind its values, a head has zeros."""
        k_BSNC, v_BSNV = self.made_of(latent_BSL)
        k_BSNH = torch.cat((k_BSNC, k_BS1R.expand(-1, -1, k_BSNC.shape[2], -1)), dim=-1)
        # a copy even where values are as wide as keys, without what is beside them in the product
        return k_BSNH, F.pad(v_BSNV, (0, self.head_dim - self.value_dim))

    def made_of(self, latent_BSL: Tensor) -> tuple[Tensor, Tensor]:
        """Return what these heads make of latents: [B, S, N, C] of their keys, and their values, [B, S, N, V]."""
        made_BSNE = self.wkv_b(latent_BSL).unflatten(-1, (-1, self.parts_of_head[0] + self.value_dim))
        k_BSNC, v_BSNV = torch.split(made_BSNE, [self.parts_of_head[0], self.value_dim], dim=-1)
        return k_BSNC, v_BSNV

    def continued(self, q_BNSH: Tensor, kept_BJW: Tensor, mask: Tensor | None) -> Tensor:
        """Return what tokens of texts that are continued attend to, [B, N, S, V], from what is kept of all tokens."""
        if self._up is None:
            # whatever multiplies by the matrix, an adapter of it included, makes the matrix of the unit vectors
            units_1LL = torch.eye(self.parts_of_latent[0], dtype=q_BNSH.dtype, device=q_BNSH.device)[None]
            self._up = self.made_of(self.gathered(units_1LL))
        k_LNC, v_LNV = (made[0] for made in self._up)
        q_BNSC, q_BNSR = torch.split(q_BNSH, [*self.parts_of_head], dim=-1)
        q_BNSW = torch.cat((torch.einsum("bnsc,lnc->bnsl", q_BNSC, k_LNC), q_BNSR), dim=-1)
        # all heads as rows, since they share the key: a product for each head would copy that
        scores_BNSJ = (q_BNSW.flatten(1, 2) @ kept_BJW.mT).view(*q_BNSW.shape[:3], -1)
        weights_BNSJ = self._weights(scores_BNSJ.to(torch.promote_types(scores_BNSJ.dtype, torch.float32)), mask)
        weights_BTJ = weights_BNSJ.to(q_BNSH.dtype).flatten(1, 2)
        out_BNSL = (weights_BTJ @ kept_BJW[..., : self.parts_of_latent[0]]).view(*q_BNSW.shape[:3], -1)
        return torch.einsum("bnsl,lnv->bnsv", out_BNSL, v_LNV)

    def _weights(self, scores_BNSJ: Tensor, mask: Tensor | None) -> Tensor:
        """Return how much each token counts, as the kernel of this layer would have it."""
        scores_BNSJ = scores_BNSJ * self.needs.scale
        if self.needs.soft_cap:
            scores_BNSJ = torch.tanh(scores_BNSJ / self.needs.soft_cap) * self.needs.soft_cap
        if mask is not None:
            scores_BNSJ = scores_BNSJ + mask
        for sinks_N in self.own_sinks():
            return softmax_with_sinks(scores_BNSJ, sinks_N.to(scores_BNSJ.dtype))
        return scores_BNSJ.softmax(-1)
