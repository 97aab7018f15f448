"""The head: the factors of the logits as a rank holds them, and the logits. An objective makes its loss of the same."""

# Shape suffixes: B batch, S sequence, T tokens (B * S), D model dim, V vocabulary (the rows of the head held here)

from typing import NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llama_core.models.layers import Linear, LowRank, TokenEmbedding


class HeadInputs(NamedTuple):
    """The factors of the logits, ``hidden_TD @ weight_VD.T`` and an adapter's addition, as this rank holds them.

    If ranks divide the vocabulary, all of them hold the same tokens. Their gradients of ``hidden_TD`` and of the
    adapter's inner factor are then partial sums, over their own parts of the vocabulary.
    """

    hidden_TD: Tensor
    """The final hidden states of all tokens of the batch."""
    weight_VD: Tensor
    """The head's rows, of any floating dtype."""
    adapter: LowRank | None = None
    """An adapter's addition, of the same tokens and rows."""
    vocab_mesh: DeviceMesh | None = None
    """The ranks that divide the vocabulary, in the order of their rows; None if this rank holds all of it."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that hold other tokens of the same rows; None if this rank holds them whole."""

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """The process group of ``vocab_mesh``."""
        return None if self.vocab_mesh is None else self.vocab_mesh.get_group()

    def at(self, places: Tensor) -> "HeadInputs":
        """Return the factors of the logits of some tokens, by their places among all, int64."""
        adapter = self.adapter
        if adapter is not None:
            adapter = adapter._replace(inner=adapter.inner[places])
        return self._replace(hidden_TD=self.hidden_TD[places], adapter=adapter)

    def rows(self, num_rows: int) -> "list[HeadInputs]":
        """Return the factors of each row's logits, in order."""
        whole = self._replace(weight_VD=self.weight_VD.to(self.hidden_TD.dtype))  # cast once, not for each row
        hidden = self.hidden_TD.chunk(num_rows)
        if self.adapter is None:
            return [whole._replace(hidden_TD=of_row) for of_row in hidden]
        inner = self.adapter.inner.chunk(num_rows)
        adapters = [self.adapter._replace(inner=of_row) for of_row in inner]
        return [
            whole._replace(hidden_TD=of_row, adapter=adapter) for of_row, adapter in zip(hidden, adapters, strict=True)
        ]


def whole_head(x_BSD: Tensor, table: Linear | TokenEmbedding) -> HeadInputs:
    """Return the factors of a head that this rank holds whole."""
    hidden_TD = x_BSD.flatten(0, 1)
    return HeadInputs(hidden_TD, table.weight, table.low_rank(hidden_TD))


def logits(head: HeadInputs) -> Tensor:
    """Return the logits of all tokens and the whole vocabulary, [T, V], in the dtype of the hidden states."""
    dtype = head.hidden_TD.dtype
    out_TV = F.linear(head.hidden_TD, head.weight_VD.to(dtype))
    if head.adapter is not None:
        out_TV = out_TV + F.linear(head.adapter.inner, head.adapter.rows.to(dtype))
    if head.vocab_mesh is None:
        return out_TV
    return DTensor.from_local(out_TV, head.vocab_mesh, [Shard(1)]).full_tensor()
