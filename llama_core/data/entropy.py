"""The loss of predictors that know only token frequencies: the marks that a model has to beat."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 2**20


@dataclass(frozen=True)
class Entropies:
    """Entropies in nats per token, comparable with the training loss."""

    unigram: float
    """H(token): the loss of the best predictor that sees no context."""
    bigram: float
    """H(token | previous token): the loss of the best predictor that sees one token of context."""


def token_entropies(
    tokens: npt.NDArray[Any],
    offsets: npt.NDArray[Any],
    documents: npt.NDArray[Any],
    vocab_size: int,
    ignored: npt.NDArray[np.bool_] | None = None,
) -> Entropies:
    """Return the entropies of the target tokens of some documents: all but each document's first.

    Needs ``8 * vocab_size**2`` bytes for counts, and reads ``tokens`` in chunks.

    Args:
        tokens: the ids of all documents, one document after another.
        offsets: where each document begins, and the end of the last, [documents + 1].
        documents: which documents to count, a mask [documents].
        vocab_size: one more than the largest id.
        ignored: tokens that are not targets, a mask [tokens].

    Source: Shannon, "Prediction and Entropy of Printed English", 1951, equation 1 (F_1 and F_2).
    """
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(tokens) - 1)
        window = np.asarray(tokens[start : stop + 1], np.int64)
        pairs = window[:-1] * vocab_size + window[1:]
        targets = _targets(offsets, documents, start, stop)
        if ignored is not None:
            targets &= ~ignored[start + 1 : stop + 1]
        counts += np.bincount(pairs[targets], minlength=counts.size)
    table = counts.reshape(vocab_size, vocab_size)
    joint = _entropy(counts)
    context = _entropy(table.sum(axis=1))
    return Entropies(unigram=_entropy(table.sum(axis=0)), bigram=joint - context)


def _targets(offsets: npt.NDArray[Any], documents: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[Any]:
    """Return a mask [stop - start] of the tokens start + 1 to stop that are targets in the chosen documents."""
    first = int(np.searchsorted(offsets, start + 1, side="right")) - 1
    last = int(np.searchsorted(offsets, stop, side="right"))
    bounds = np.clip(offsets[first : last + 1], start + 1, stop + 1) - (start + 1)
    chosen = np.repeat(documents[first:last], np.diff(bounds))
    begins = offsets[first:last] - (start + 1)
    chosen[begins[begins >= 0]] = False
    return chosen


def _entropy(counts: npt.NDArray[Any]) -> float:
    probabilities = counts[counts > 0] / max(1, counts.sum())
    return float(-(probabilities * np.log(probabilities)).sum())
