"""The loss of predictors that know only token frequencies: the marks that a model has to beat."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.data.selection import Selection
from llama_core.data.shards.shard import Shard

CHUNK_TOKENS = 2**20


@dataclass(frozen=True)
class Entropies:
    """Entropies in nats per token, comparable with the training loss."""

    unigram: float
    """H(token): the loss of the best predictor that sees no context."""
    bigram: float
    """H(token | previous token): the loss of the best predictor that sees one token of context."""


def token_entropies(selection: Selection, vocab_size: int) -> Entropies:
    """Return the entropies of the target tokens of some documents: all but each document's first.

    Needs ``8 * vocab_size**2`` bytes for counts, and reads all tokens in chunks.

    Args:
        selection: the documents.
        vocab_size: one more than the largest id.

    Source: Shannon, "Prediction and Entropy of Printed English", 1951, equation 1 (F_1 and F_2).
    """
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    for part in selection.parts:
        for span in part.spans:
            for begin in range(span.begin, span.end - 1, CHUNK_TOKENS):
                end = min(begin + CHUNK_TOKENS, span.end - 1)
                counts += np.bincount(_pairs(part.shard, begin, end, vocab_size), minlength=counts.size)
    table = counts.reshape(vocab_size, vocab_size)
    joint = _entropy(counts)
    context = _entropy(table.sum(axis=1))
    return Entropies(unigram=_entropy(table.sum(axis=0)), bigram=joint - context)


def _pairs(shard: Shard, begin: int, end: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the pairs of some tokens and their targets, as numbers below ``vocab_size**2``."""
    window = np.asarray(shard.tokens[begin : end + 1], np.int64)
    counts = np.ones(end - begin, np.bool_)
    first, last = np.searchsorted(shard.offsets, [begin + 1, end + 1])
    counts[np.asarray(shard.offsets[first:last]) - begin - 1] = False
    if shard.ignored is not None:
        counts &= ~shard.ignored[begin + 1 : end + 1]
    return (window[:-1] * vocab_size + window[1:])[counts]


def _entropy(counts: npt.NDArray[Any]) -> float:
    probabilities = counts[counts > 0] / max(1, counts.sum())
    return float(-(probabilities * np.log(probabilities)).sum())
