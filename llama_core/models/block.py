"""A LLaMA block: attention and feed-forward, with norms and residuals around them."""

# Shape suffixes: B batch, S sequence, D model dim

from typing import Any

from torch import Tensor, nn

from llama_core.config.model_spec import ModelSpec
from llama_core.models.attention import GroupedQueryAttention
from llama_core.models.latent_attention import LatentAttention
from llama_core.models.layers import FeedForward, RMSNorm
from llama_core.models.rotation import Positional


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
        self.attention = (LatentAttention if spec.kv_rank else GroupedQueryAttention)(spec, layer)
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
