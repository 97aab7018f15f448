"""Log-likelihoods of given texts: how probable the model finds each, and whether it would write the same.

Only the logits of the tokens that count are computed, and never more of them at once than the loss of training holds.
"""

# Shape suffixes: B batch, S sequence, P places (tokens that count), V vocabulary, C places of one chunk

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from llama_core.errors import WeightsError
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.models.head import HeadInputs, logits
from llama_core.models.llama import Llama
from llama_core.models.loss import default_chunk_tokens
from llama_core.models.objective import Objective
from llama_core.planning.inference import TOKENS_OF_A_FORWARD

NOT_FINITE = (
    "the model's logits are not finite; its training diverged (choose an earlier checkpoint), or its weights are too "
    "large for fp16 (choose another dtype)"
)


class Continuation(NamedTuple):
    """A text to score, after another."""

    context: tuple[int, ...]
    """The tokens before it, at least one."""
    tokens: tuple[int, ...]
    """Its own, at least one."""


class LogLikelihood(NamedTuple):
    """How probable a text is."""

    total: float
    """The natural logarithm of its probability after its context."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one."""


class _TokenScores:
    """Stands for the objective: returns each counted token's log-probability and whether it is the likeliest, [P, 2].

    Args:
        places_P: where the hidden state before each of them is, among all tokens of the batch.
        targets_P: the tokens.
    """

    def __init__(self, places_P: Tensor, targets_P: Tensor) -> None:
        self._places_P = places_P
        self._targets_P = targets_P

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the scores, in fp32 (fp64 if the tensors are)."""
        vocab_rows, hidden_size = head.weight_VD.shape
        most = default_chunk_tokens(vocab_rows, hidden_size, torch.float32)
        chunks = zip(torch.split(self._places_P, most), torch.split(self._targets_P, most), strict=True)
        return torch.cat([self._scores(head.at(places), targets) for places, targets in chunks])

    def _scores(self, head: HeadInputs, targets_C: Tensor) -> Tensor:
        logits_CV = logits(head)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        of_target_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
        is_greedy_C = logits_CV.argmax(1) == targets_C
        return torch.stack((of_target_C - logits_CV.logsumexp(1), is_greedy_C.to(logits_CV.dtype)), dim=1)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of tokens that count."""
        return torch.tensor(len(self._targets_P), device=self._targets_P.device)


@contextmanager
def objective_of(model: Llama, objective: Objective) -> Iterator[None]:
    """Inside the block, a forward with a batch returns what ``objective`` computes."""
    before = model.objective
    model.objective = objective
    try:
        yield
    finally:
        model.objective = before


def log_likelihoods(
    model: Llama,
    continuations: Sequence[Continuation],
    *,
    context_length: int,
    on_progress: Callable[[int], None] = lambda num_scored: None,
) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation, in their order.

    Texts that share everything but their last token are computed once, as in multiple choice between letters.

    Args:
        model: the whole model, which is evaluated without dropout.
        continuations: the texts.
        context_length: most tokens that the model reads; contexts that are too long lose their first tokens.
        on_progress: called with the number of texts that were scored since the last call.

    Raises:
        ValueError: if a continuation alone is longer than ``context_length``.
        WeightsError: if the model computes NaN or infinity.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(continuations):
        if len(one.tokens) > context_length:
            raise ValueError(f"{len(one.tokens):,} tokens to score are more than the {context_length:,} of the context")
        whole = one.context + one.tokens
        rows.setdefault(whole[-(context_length + 1) :][:-1], []).append(index)
    found: dict[int, LogLikelihood] = {}
    model.eval()
    for batch in _batches(sorted(rows, key=len, reverse=True)):
        of_batch = {row: rows[row] for row in batch}
        found |= _score(model, of_batch, continuations)
        on_progress(sum(map(len, of_batch.values())))
    return [found[index] for index in range(len(continuations))]


def _batches(rows: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Yield rows, the longest of which come first, in batches of at most ``TOKENS_OF_A_FORWARD`` or one row."""
    start = 0
    while start < len(rows):
        at_once = max(1, TOKENS_OF_A_FORWARD // len(rows[start]))
        yield rows[start : start + at_once]
        start += at_once


@torch.inference_mode()
def _score(
    model: Llama, rows: Mapping[tuple[int, ...], Sequence[int]], continuations: Sequence[Continuation]
) -> dict[int, LogLikelihood]:
    """Return the log-likelihoods of continuations, by their index; ``rows`` has the indices for each input."""
    device = next(model.parameters()).device
    longest = max(map(len, rows))
    tokens_BS = torch.tensor([row + (0,) * (longest - len(row)) for row in rows], device=device)
    places: list[int] = []
    targets: list[int] = []
    order: list[int] = []
    for place, (row, indices) in enumerate(rows.items()):
        end = place * longest + len(row)
        for index in indices:
            own = continuations[index].tokens
            places += range(end - len(own), end)
            targets += own
            order.append(index)
    scores = _TokenScores(torch.tensor(places, device=device), torch.tensor(targets, device=device))
    batch = Batch(tokens_BS, torch.full_like(tokens_BS, IGNORE_INDEX), None)
    with objective_of(model, scores):
        scores_P2 = model(tokens_BS, batch).double().cpu()
    if not scores_P2.isfinite().all():
        raise WeightsError(NOT_FINITE)
    parts = torch.split(scores_P2, [len(continuations[index].tokens) for index in order])
    return {
        index: LogLikelihood(float(part[:, 0].sum()), bool(part[:, 1].all()))
        for index, part in zip(order, parts, strict=True)
    }
