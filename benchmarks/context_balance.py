"""How evenly context-parallel ranks share attention to packed documents: ``python -m benchmarks.context_balance``.

Rows are packed from the documents of the built-in sample, or from documents of log-normal lengths, laid end to end. All
ranks of a row wait for the one with the most work, so the measure is the most work of a rank, added up over rows, over
the mean of all ranks. Work is counted twice: in pairs of a query and a key that it sees, and in tiles of 128 queries by
128 keys, which flash attention computes whole. Each is given with rows cut regardless of documents and as they are cut;
the last column is the most tiles of a rank, cut over uncut. No kernel runs. ``--page FILE`` rewrites the table there.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.pages import rewrite
from llama_core.config.models import model_spec
from llama_core.config.settings import DataConfig
from llama_core.data.datasets import load_datasets
from llama_core.models.batch import Documents
from llama_core.parallel import document_chunks
from llama_core.parallel.gathered_attention import held_documents
from llama_core.rehearsal.byte_counter import replaced

TILE = 128
"""Queries, and keys, of a tile."""
MAX_TOKENS = 2**22
"""Tokens of the rows that are packed from one kind of documents."""
MEDIAN = 1000
SPREAD = 1.5
"""Median of the log-normal lengths in tokens, and the standard deviation of their logarithm."""


class Balance(NamedTuple):
    """The most work of a rank over the mean, and the most work itself, all over rows."""

    pairs: float
    tiles: float
    most_tiles: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it into a page if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[2**13, 2**15, 2**17], help="tokens of a row")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8], help="ranks that divide a row")
    parser.add_argument("--page", type=Path, help="the page whose table is rewritten")
    options = parser.parse_args(arguments)
    lines = list(table(options.seq_len, options.cp))
    sys.stdout.write("\n".join(lines) + "\n")
    rewrite(options.page, "context balance", "\n".join(lines))
    return 0


def table(seq_lens: Sequence[int], cp_sizes: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table."""
    columns = ("documents", "sequence", "cp", "pairs, uncut", "pairs, cut", "tiles, uncut", "tiles, cut", "most tiles")
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * len(columns) + "|"
    kinds = {"the sample's": sample_lengths(), f"log-normal, median {MEDIAN:,}": log_normal_lengths()}
    for kind, lengths in kinds.items():
        for seq_len in seq_lens:
            starts = packed(lengths, seq_len)
            for cp_size in cp_sizes:
                with replaced(document_chunks, "SHORTEST_PIECE", seq_len):  # no document is cut by itself
                    uncut = balance(starts, seq_len, cp_size)
                cut = balance(starts, seq_len, cp_size)
                figures = (uncut.pairs, cut.pairs, uncut.tiles, cut.tiles, cut.most_tiles / uncut.most_tiles)
                yield f"| {kind} | {seq_len:,} | {cp_size} | " + " | ".join(f"{x:.2f}" for x in figures) + " |"


def sample_lengths() -> npt.NDArray[np.int64]:
    """Return the lengths in tokens of the built-in sample's documents, in the order in which a run packs them."""
    data = DataConfig(source="sample", tokenizer="sample", validation_fraction=0)
    (rows,) = load_datasets(data, model_spec("tiny_llama3_50m"), seq_len=2048).train.sources
    return np.concatenate([np.diff(part.shard.offsets) for part in rows.selection.parts])


def log_normal_lengths() -> npt.NDArray[np.int64]:
    """Return drawn lengths, a few of which are long."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, size=MAX_TOKENS // MEDIAN)
    return np.ceil(drawn).astype(np.int64)


def packed(lengths: npt.NDArray[np.int64], seq_len: int) -> Tensor:
    """Return where documents begin in rows that are laid end to end, and where the last row ends: int32.

    A document that crosses the end of a row is cut there.
    """
    num_tokens = min(int(lengths.sum()), MAX_TOKENS) // seq_len * seq_len
    starts = np.concatenate([[0], np.cumsum(lengths), np.arange(0, num_tokens + 1, seq_len)])
    return torch.from_numpy(np.unique(starts[starts <= num_tokens])).int()


def balance(starts: Tensor, seq_len: int, cp_size: int) -> Balance:
    """Return how evenly ``cp_size`` ranks share the attention to packed documents."""
    num_rows = int(starts[-1]) // seq_len
    documents = Documents(starts, seq_len)
    pairs = torch.zeros((cp_size, num_rows), dtype=torch.int64)
    tiles = torch.zeros_like(pairs)
    for cp_rank in range(cp_size):
        own_length = seq_len // cp_size
        held = held_documents(documents, num_rows, own_length, cp_rank=cp_rank, cp_size=cp_size)
        num_queries = held.query_starts.long().diff()
        some = num_queries > 0
        row = held.query_starts[:-1][some].long() // own_length
        num_queries = num_queries[some]
        num_keys = held.key_starts.long().diff()[some]
        pairs[cp_rank].index_add_(0, row, num_queries * num_keys - num_queries * (num_queries - 1) // 2)
        tiles[cp_rank].index_add_(0, row, tiles_of(num_queries, num_keys))
    most_pairs, most_tiles = (int(work.amax(0).sum()) for work in (pairs, tiles))
    return Balance(most_pairs / float(pairs.sum() / cp_size), most_tiles / float(tiles.sum() / cp_size), most_tiles)


def tiles_of(num_queries: Tensor, num_keys: Tensor) -> Tensor:
    """Return the tiles of each document: those of its last queries reach the last key."""
    rows_of_tiles = (num_queries + TILE - 1) // TILE
    document = torch.repeat_interleave(rows_of_tiles)
    number = torch.arange(len(document)) - (rows_of_tiles.cumsum(0) - rows_of_tiles)[document]
    last_query = ((number + 1) * TILE).minimum(num_queries[document])
    seen = (num_keys - num_queries)[document] + last_query
    return torch.zeros_like(num_queries).index_add_(0, document, (seen + TILE - 1) // TILE)


if __name__ == "__main__":
    sys.exit(main())
