"""How rows of packed documents are cut into chunks, so that attention is about the same work on every rank.

A row of a divided sequence is cut into 2 * cp chunks of equal length, and rank r holds chunks r and 2 * cp - 1 - r (see
``context``). If the row is one document, both halves of the work of each pair add up to the same. But a query sees only
its own document: if a long document begins inside the row, whoever holds its end does most of the work. So a long
document is cut by itself, and so are the documents between two long ones, together: each such section of a row has
2 * cp pieces, and chunk j of the row is the j-th piece of every section, in order.

Sections have any length, and a chunk still has row_length / (2 * cp) tokens: piece j of a section has as many tokens as
the section has places p in its row with p mod 2 * cp = j, and the row has as many of each. The pieces of a section
differ by one token at most.

Sources: NVIDIA Transformer Engine, context parallelism with packed sequences (THD), which pads every document to a
multiple of 2 * cp; Wang et al. 2025, WLB-LLM, arXiv:2503.17924 (cutting by document, and what short pieces cost).
"""

# Shape suffixes: B rows, L tokens of a row; a tensor without one has an entry for the start of each document, and one
# for the end of the last

from functools import cached_property

import torch
from torch import Tensor

SHORTEST_PIECE = 64
"""A document is cut by itself if its pieces have this many tokens. Flash attention computes tiles of 128 queries, of
which shorter pieces would leave more empty than they save; ``benchmarks/context_balance.py`` counts the tiles."""


class DocumentChunks:
    """The chunks of some rows of packed documents. Nothing here waits for the device.

    Args:
        starts: where each document begins, and where the last one ends, as in ``Documents``.
        num_rows: number of rows.
        row_length: tokens of a row; a multiple of the number of chunks.
        num_chunks: chunks of a row, two for each context-parallel rank.
    """

    def __init__(self, starts: Tensor, num_rows: int, row_length: int, num_chunks: int) -> None:
        self.starts = starts.long()
        self.num_rows = num_rows
        self.row_length = row_length
        self.num_chunks = num_chunks
        self.row = self.starts // row_length
        """The row of each document."""
        row_start = self.row * row_length
        self._place = self.starts - row_start
        is_long = self.starts.diff() >= num_chunks * SHORTEST_PIECE
        next_to_long = torch.zeros_like(self.starts, dtype=torch.bool)
        next_to_long[:-1] |= is_long
        next_to_long[1:] |= is_long
        begins = next_to_long | (self._place == 0)
        self._sections = torch.where(begins, self.starts, self.starts[-1]).sort().values
        """Where each section begins; then, as often as documents begin none, the end of the last one."""
        following = torch.searchsorted(self._sections, self.starts, right=True)
        self._section_begin = self._sections[following - 1] - row_start
        self._section_end = self._sections[following.clamp(max=len(self.starts) - 1)] - row_start

    def tokens_before(self, chunk: int) -> Tensor:
        """Return how many tokens of the chunks before ``chunk`` lie before each document in its row."""
        before_section = self._places_below(chunk, self._section_begin)
        of_section = self._places_below(chunk, self._section_end) - before_section  # the first tokens of the section
        return before_section + (self._place - self._section_begin).minimum(of_section)

    def _places_below(self, chunk: int, end: Tensor) -> Tensor:
        """Return how many places p of a row before ``end`` have p mod 2 * cp below ``chunk``."""
        return end // self.num_chunks * chunk + (end % self.num_chunks).clamp(max=chunk)

    @cached_property
    def order(self) -> Tensor:
        """The places of a row's tokens in the row, chunk after chunk: int64 [B, L]."""
        place = torch.arange(self.num_rows * self.row_length, device=self.starts.device)
        section = torch.searchsorted(self._sections, place, right=True)
        # sorted, the remainders of a section's places are the chunks of its tokens
        remainders = section * self.num_chunks + place % self.num_chunks
        chunk_BL = remainders.view(self.num_rows, -1).sort(dim=1).values % self.num_chunks
        return chunk_BL.argsort(dim=1, stable=True)

    def laid_out(self, places: Tensor) -> Tensor:
        """Return the place of each token if the documents begin at ``places``: [B, L], in the order of the chunks."""
        place = torch.arange(self.num_rows * self.row_length, device=self.starts.device)
        document = torch.searchsorted(self.starts, place, right=True) - 1
        laid_out = places[document] + place - self.starts[document]
        return laid_out.view(self.num_rows, -1).gather(1, self.order)
