"""Batches of tokens. Importing this module needs no torch, so that data can be inspected without it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""The target of a token that does not count in the loss."""
PLACE = "place"
"""A value of each token: its place in its row, while rows are measured before the run."""


class Documents(NamedTuple):
    """The documents of some rows laid end to end; no document crosses the end of its row."""

    starts: "Tensor"
    """Where each document begins, and where the last one ends: int32 [documents + 1], ascending."""
    row_length: int
    """Tokens of a row, the most that a document can have. A kernel sizes its grid by it. The longest document would do,
    but its length changes from batch to batch, and blocks would be compiled anew."""
    window: int = 0
    """Tokens that a query sees, itself included; 0 for all from the beginning of its document."""

    @classmethod
    def of_positions(cls, positions_BS: "Tensor") -> "Documents":
        """Return the documents of rows whose positions restart at 0 with each document. Waits for the rows' device."""
        import torch

        is_start_BS = positions_BS == 0
        is_start_BS[:, 0] = True
        starts = torch.nonzero(is_start_BS.flatten()).flatten()
        starts = torch.nn.functional.pad(starts, (0, 1), value=positions_BS.numel())
        return cls(starts.to(torch.int32), positions_BS.shape[1])

    def in_chunks(self, size: int, positions_BS: "Tensor") -> "Documents":
        """Return the chunks of these documents, each a document, and empty ones at the end. Waits for no device.

        Args:
            size: tokens of a chunk; the last one of a document may have fewer.
            positions_BS: the positions of all tokens of the rows; that of the first need not be 0.
        """
        import torch

        num_rows, row_length = positions_BS.shape
        positions_T = positions_BS.flatten()
        place_T = torch.arange(len(positions_T), device=positions_T.device)
        begins_T = (positions_T % size == 0) & (positions_T > 0)
        # how many begin within documents, only the device knows; here is room for the most that can
        most = num_rows * ((row_length - 1) // size + 1)
        more = torch.where(begins_T, place_T, len(place_T)).sort().values[:most]
        starts = torch.cat((self.starts, more)).sort().values
        return self._replace(starts=starts.to(torch.int32), row_length=min(self.row_length, size))


class LaterTokens(NamedTuple):
    """What a module of multi-token prediction reads and predicts in each place of some rows."""

    tokens_BS: "Tensor"
    """The tokens some places ahead, int64; 0 past the end of the row."""
    targets_BS: "Tensor"
    """Their targets, int64; -100 where they have none, or belong to another document."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of tokens, with each token's target and its position in its document."""

    tokens_BS: "Tensor"
    """Token ids, int64."""
    targets_BS: "Tensor"
    """Next tokens, int64; -100 for a token without a target."""
    positions_BS: "Tensor | None"
    """Positions inside each document, int64, 0 at its first token; None if every row is one text."""
    documents: Documents | None = None
    """The same documents for kernels that take them instead of a mask; None if a mask is used."""
    per_token: "Mapping[str, Tensor]" = field(default_factory=dict)
    """What the objective reads beside targets, by name: one fp32 number for each token, [B, S], or some, [B, S, N]."""
    later: "tuple[LaterTokens, ...]" = ()
    """What prediction modules read and predict, the first one's first; empty if they do not run."""
    before: "Batch | None" = None
    """Other rows, which a ``PreparingObjective`` measures before it trains on these: as many, and as long."""

    def tensors(self) -> "list[Tensor]":
        """Return all tensors of the batch."""
        starts = self.documents and self.documents.starts
        before = self.before.tensors() if self.before else ()
        later = [tensor for one in self.later for tensor in one]
        always = (self.tokens_BS, self.targets_BS, *self.per_token.values(), *later, *before)
        return [*always, *(tensor for tensor in (self.positions_BS, starts) if tensor is not None)]

    def num_targets(self) -> "Tensor":
        """Return the number of targets that are not -100: an int64 scalar on the batch's device."""
        return (self.targets_BS != IGNORE_INDEX).sum()

    def split(self, microbatch_size: int) -> list["Batch"]:
        """Return the rows in order as batches of ``microbatch_size``; the last one may be smaller."""
        starts = range(0, len(self.tokens_BS), microbatch_size)
        return [self._rows(slice(start, start + microbatch_size)) for start in starts]

    def to(self, device: "torch.device | str", *, non_blocking: bool = False) -> "Batch":
        """Return the batch on ``device``.

        Args:
            device: where the tensors go.
            non_blocking: from pinned memory, only start the copies, on the current stream.
        """
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> "Batch":
        """Return the batch in pinned host memory, from which a GPU copies while the process goes on.

        Tensors that are not in host memory stay where they are.
        """
        return self._each(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def with_positions(self) -> "Batch":
        """Return the batch with every row as a document, unless it has documents."""
        if self.positions_BS is not None:
            return self
        import torch

        places_S = torch.arange(self.tokens_BS.shape[1], device=self.tokens_BS.device)
        return replace(self, positions_BS=places_S.expand_as(self.tokens_BS))

    def with_documents(self, *, whole_rows_apart: bool = False) -> "Batch":
        """Return the batch with documents found from its positions; cheapest while the batch is in host memory.

        Args:
            whole_rows_apart: if every row is one document, drop the positions instead: attention is then causal over
                whole rows, for which there are faster kernels.
        """
        if self.positions_BS is None:
            return self
        documents = Documents.of_positions(self.positions_BS)
        each_row_is_one = len(documents.starts) == len(self.tokens_BS) + 1
        if whole_rows_apart and each_row_is_one and not self.positions_BS[:, 0].any():
            return replace(self, positions_BS=None)
        return replace(self, documents=documents)

    def each_token(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        """Return the batch with ``function`` applied to its tensors [B, S], and [B, S, N] if a value is of N numbers.

        The documents stay those of whole rows, and the rows before it stay as they are.
        """
        return replace(
            self,
            tokens_BS=function(self.tokens_BS),
            targets_BS=function(self.targets_BS),
            positions_BS=None if self.positions_BS is None else function(self.positions_BS),
            per_token={name: function(value_BS) for name, value_BS in self.per_token.items()},
            later=tuple(LaterTokens(*map(function, one)) for one in self.later),
        )

    def _each(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        documents = self.documents and self.documents._replace(starts=function(self.documents.starts))
        before = self.before and self.before._each(function)
        return replace(self.each_token(function), documents=documents, before=before)

    def _rows(self, rows: slice) -> "Batch":
        before = self.before and self.before._rows(rows)
        return replace(self.each_token(lambda tensor: tensor[rows]), documents=None, before=before)


def at_places(values: "Tensor", places_BS: "Tensor") -> "Tensor":
    """Return the values in some places of each row, [B, S] or [B, S, N], of those of all its tokens."""
    import torch

    return torch.take_along_dim(values, places_BS.view(*places_BS.shape, *[1] * (values.ndim - 2)), dim=1)


def looking_ahead(batch: Batch, num_modules: int) -> Batch:
    """Return the batch with what as many prediction modules read and predict; its rows must be whole.

    A place that looks beyond its document has no target there. What it reads reaches no place that has one: attention
    looks back, and every later place of the document looks beyond it too.
    """
    if not num_modules:
        return batch
    import torch

    seq_len = batch.tokens_BS.shape[1]
    positions_BS = batch.positions_BS
    if positions_BS is None:
        positions_BS = torch.arange(seq_len, device=batch.tokens_BS.device).expand_as(batch.tokens_BS)
    later = []
    for distance in range(1, num_modules + 1):

        def ahead(values_BS: "Tensor", fill: int, by: int = min(distance, seq_len)) -> "Tensor":
            return torch.nn.functional.pad(values_BS[:, by:], (0, by), value=fill)

        is_same_document_BS = ahead(positions_BS, -1) == positions_BS + distance
        targets_BS = ahead(batch.targets_BS, IGNORE_INDEX).masked_fill(~is_same_document_BS, IGNORE_INDEX)
        later.append(LaterTokens(ahead(batch.tokens_BS, 0), targets_BS))
    return replace(batch, later=tuple(later))


def with_places(batch: Batch) -> Batch:
    """Return the batch with each token's place in its row, under ``PLACE``."""
    import torch

    places_S = torch.arange(batch.tokens_BS.shape[1], dtype=torch.float32, device=batch.tokens_BS.device)
    return replace(batch, per_token={**batch.per_token, PLACE: places_S.expand_as(batch.tokens_BS)})


def ones_per_token(tokens_BS: "Tensor", sizes: "Mapping[str, int]") -> "dict[str, Tensor]":
    """Return ones for each token under each name, as many as it has numbers: a batch of the sizes of those to come."""
    return {name: _ones(tokens_BS, size) for name, size in sizes.items()}


def _ones(tokens_BS: "Tensor", size: int) -> "Tensor":
    import torch

    shape = tokens_BS.shape if size == 1 else (*tokens_BS.shape, size)
    return torch.ones(shape, dtype=torch.float32, device=tokens_BS.device)
