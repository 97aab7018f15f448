"""Multi-token prediction: modules after the last layer that predict tokens beyond the next one.

Module k reads, in each place, the hidden state of module k - 1 (of the last layer, for the first) and the embedding of
the token k places ahead, and predicts the token after that::

    embedding of token i + k     hidden state of place i
               |                            |
             enorm                        hnorm
               |                            |
               +---------- joined ----------+
                              |
                           eh_proj            2 D to D
                              |
                            block             as the last layer
                              |
                              +---------------> module k + 1
                              |
                          head_norm
                              |
                 the model's head: token i + k + 1

Embedding and head are those of the model. The modules are left out where only the next token is asked for.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2, equations 21 to 25. The order of the two halves is that of
DeepSeek's files.
"""

# Shape suffixes: B batch, S sequence, D model dim, K modules

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llama_core.config.model_spec import ModelSpec
from llama_core.models.block import Block
from llama_core.models.layers import Linear, RMSNorm
from llama_core.models.rotation import Positional


class PredictionModule(Block):
    """A block that predicts one token further ahead than the block before it.

    Args:
        spec: the architecture.
        feed_forward: the feed-forward of the block.
        layer: its number, which follows those of the layers.
    """

    def __init__(self, spec: ModelSpec, feed_forward: nn.Module, layer: int) -> None:
        super().__init__(spec, feed_forward, layer)
        self.enorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.hnorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.eh_proj = Linear(spec.joined_size, spec.hidden_size)
        self.head_norm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(  # type: ignore[override]  # it reads tokens too
        self, x_BSD: Tensor, positions: Positional, mask: Any, embedded_BSD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states for the next module, and those for the head.

        Args:
            x_BSD: the residual stream after the block before.
            positions: as for a block.
            mask: as for a block.
            embedded_BSD: the embedded tokens ahead.
        """
        # without names for what is between, which would hold it while the block runs
        x_BSD = super().forward(
            self.eh_proj(torch.cat((self.enorm(embedded_BSD), self.hnorm(x_BSD)), dim=-1)), positions, mask
        )
        return x_BSD, self.head_norm(x_BSD)


class PredictionLosses:
    """What prediction modules measure: the cross-entropy of each, over the targets that it has.

    Args:
        num_modules: the modules of the model.
    """

    def __init__(self, num_modules: int) -> None:
        self.num_sums = 2 * num_modules
        self.names = ["mtp_loss"] if num_modules == 1 else [f"mtp_loss/{k}" for k in range(1, num_modules + 1)]
        self._sums: Tensor | None = None

    def add(self, losses: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Add the losses of a batch, summed over the targets of each module, and how many these are."""
        values = torch.stack([value.detach().double() for value in (*losses, *counts)])
        self._sums = values if self._sums is None else self._sums + values

    def take_measured(self) -> Tensor | None:
        """Return the sums of losses, then the numbers of targets, fp64 [2 K], and forget them."""
        taken = self._sums
        self._sums = None
        return taken

    def of_step(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean loss of each module; one without a target is left out."""
        num_modules = len(self.names)
        pairs = zip(self.names, sums[:num_modules], sums[num_modules:], strict=True)
        return {name: loss / count for name, loss, count in pairs if count}


def trained_besides(loss: Tensor, added: Tensor) -> Tensor:
    """Return ``loss``, a scalar, whose backward also computes the gradients of ``added``."""
    out: Tensor = _TrainedBesides.apply(loss, added)  # type: ignore[no-untyped-call]
    return out


class _TrainedBesides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, added: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, upstream
