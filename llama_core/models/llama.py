"""LLaMA 1, 2, 3 and Code LLaMA: one architecture, whose sizes are a ``ModelSpec``."""

# Shape suffixes: B batch, S sequence, D model dim, V vocabulary, T tokens (B * S)

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core.config.models import ModelSpec
from llama_core.models.layers import Block, Linear, RMSNorm, document_mask, rotation
from llama_core.models.loss import linear_cross_entropy

INIT_STD = 0.02
INIT_CUTOFF = 3.0
"""Initial weights further from zero than this many standard deviations are not drawn."""


class Llama(nn.Module):
    """A LLaMA model: token embedding, blocks, final norm and language-model head.

    The parameters are made in torch's default dtype and device; activations are in ``compute_dtype``.

    Args:
        spec: the architecture.
        compute_dtype: the dtype of the residual stream and of every matrix product.
    """

    def __init__(self, spec: ModelSpec, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        self.compute_dtype = compute_dtype
        self.tok_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        # a dict, so that a part of the model keeps the parameter names of the whole
        self.layers = nn.ModuleDict({str(index): Block(spec) for index in range(spec.num_layers)})
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.output = None if spec.tied_embeddings else Linear(spec.hidden_size, spec.vocab_size)

    @property
    def head_weight(self) -> Tensor:
        """The matrix from hidden states to logits, [V, D]: the token embedding where the two are tied."""
        return self.tok_embeddings.weight if self.output is None else self.output.weight

    def hidden_states(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the final hidden states, [B, S, D] in ``compute_dtype``.

        Args:
            tokens_BS: token ids.
            positions_BS: each token's position in its document where rows hold several documents: it restarts at 0
                with each, and no token attends across a restart. None means that every row is one document.
        """
        mask_B1SS = None
        if positions_BS is None:
            rotary = rotation(self.spec, torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None])
        else:
            rotary = rotation(self.spec, positions_BS)
            mask_B1SS = document_mask(positions_BS, self.compute_dtype)
        x_BSD = self.tok_embeddings(tokens_BS).to(self.compute_dtype)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, rotary, mask_B1SS)
        out_BSD: Tensor = self.norm(x_BSD)
        return out_BSD

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the logits of every token, [B, S, V] in ``compute_dtype``; see ``hidden_states``."""
        x_BSD = self.hidden_states(tokens_BS, positions_BS)
        return F.linear(x_BSD, self.head_weight.to(x_BSD.dtype))

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Return the cross-entropy summed over the targets that are not -100: an fp32 scalar.

        The logits of all tokens are never held at once; see ``hidden_states`` for the arguments.
        """
        x_TD = self.hidden_states(tokens_BS, positions_BS).flatten(0, 1)
        return linear_cross_entropy(x_TD, self.head_weight, targets_BS.flatten())


@torch.no_grad()
def initialize_weights(model: Llama, seed: int) -> None:
    """Draw the initial weights of ``model`` in place.

    Matrices and the embedding are drawn from a normal distribution of standard deviation 0.02, cut off at three
    standard deviations. In the two matrices that write to the residual stream (``wo`` and ``w2``) it is scaled by
    ``1 / sqrt(2 * num_layers)``, so that the stream's variance does not grow with depth. Norms are one.

    Every parameter has a generator of its own, seeded by ``seed`` and the parameter's name: its values depend neither
    on the order in which a model is built nor on which other parts of it a rank holds. A CPU and a GPU draw different
    values from one seed.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the scale by depth.
    """
    residual_scale = 1 / math.sqrt(2 * model.spec.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        std = INIT_STD * (residual_scale if name.endswith(("wo.weight", "w2.weight")) else 1.0)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest))
        _draw_truncated_normal_(parameter, std, generator)


def _draw_truncated_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    # By the inverse of the distribution function: nn.init.trunc_normal_ draws again until all values are inside,
    # which fake tensors cannot decide, and its draws change between versions of torch.
    limit = math.erf(INIT_CUTOFF / math.sqrt(2))
    parameter.uniform_(-limit, limit, generator=generator).erfinv_().mul_(math.sqrt(2) * std)
    parameter.clamp_(-INIT_CUTOFF * std, INIT_CUTOFF * std)


def build_llama(
    spec: ModelSpec,
    *,
    device: torch.device | str,
    compute_dtype: torch.dtype = torch.float32,
    seed: int,
) -> Llama:
    """Return a model on ``device`` with initial weights drawn from ``seed``; its memory is taken once."""
    with torch.device("meta"):
        model = Llama(spec, compute_dtype=compute_dtype)
    model.to_empty(device=device)
    initialize_weights(model, seed)
    return model
