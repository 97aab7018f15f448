"""Kahneman-Tversky optimisation: good answers are to become more probable and bad ones less, each by itself.

How good a gain over the reference is depends on the divergence from it. That is estimated on mismatched answers, each
after the prompt of another one. So before every step, the engine runs a forward over rows in which the answers have
moved on by one prompt (``PreparingObjective``).
"""

# Shape suffixes: B batch, S sequence, A numbers of answers (0 is none), P pairs of numbers, 2 an answer's label: good,
# bad; V values that are measured of a row

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX, Batch, at_places
from llama_core.models.head import HeadInputs
from llama_core.models.preferences import (
    AnswerLosses,
    Answers,
    PreferenceObjective,
    answer_log_probabilities,
    first_tokens,
)
from llama_core.objectives.preferences import KTO, MISMATCH, REFERENCE

_Places = npt.NDArray[np.int64]


class Kto(PreferenceObjective):
    """A loss of answers, of which two numbers are one place: the odd one if the answer is good, else the even one.

    Args:
        beta: how strongly the model is held to the reference; less lets it go further.
        desirable_weight: factor on the loss of good answers.
        undesirable_weight: factor on that of bad ones.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306. As in TRL, the divergence is the mean over mismatched answers, but
    over those of the whole step.
    """

    kind = KTO
    num_sums = 6
    """Rewards of good and of bad answers, answers on the right side of the divergence, good answers, bad ones, and the
    divergence once for each answer."""
    num_prepared = 2
    """Gains of the mismatched answers over the reference, and how many these are."""

    def __init__(self, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
        super().__init__(beta)
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self._divergence: Tensor | float = 0.0
        """In nats; 0 before anything was measured."""

    def rows_before(self, batch: Batch) -> Batch:
        """Return the rows with mismatched answers."""
        return mismatched(batch)

    def of_rows_before(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the gains of the mismatched answers of each row over the reference, and their number, [B, V]."""
        log_probabilities_B = answer_log_probabilities(head, batch)[:, 1:].sum(1)
        starts_BS = first_tokens(batch)
        references_BS = batch.per_token[REFERENCE].to(log_probabilities_B.dtype)
        gains_B = log_probabilities_B - torch.where(starts_BS, references_BS, 0).sum(1)
        return torch.stack((gains_B, starts_BS.sum(1).to(gains_B.dtype)), dim=1)

    def prepare(self, sums: Tensor) -> None:
        """Take the divergence from the reference: the mean gain of the mismatched answers, at least 0."""
        gain, number = sums.unbind()
        self._divergence = (gain / number.clamp(min=1)).clamp(min=0)

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards of each answer."""
        good_BP, bad_BP = (answers.gains - self._divergence).unbind(-1)
        # 1 - sigmoid(x) is sigmoid(-x), which does not round where it is small
        of_good_BP = self.desirable_weight * torch.sigmoid(-self.beta * good_BP)
        of_bad_BP = self.undesirable_weight * torch.sigmoid(self.beta * bad_BP)
        return AnswerLosses(torch.stack((of_good_BP, of_bad_BP), dim=-1), self.beta * answers.gains)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of answers whose first token is here."""
        return first_tokens(batch).sum()

    def exist(self, starts_BP2: Tensor) -> Tensor:
        """Return which answers there are."""
        return starts_BP2 > 0

    starts = exist

    def measured(self, rewards_BP2: Tensor, gains_BP2: Tensor) -> Tensor:
        """Return what each answer adds to the sums, [num_sums, B, P, 2]."""
        is_good_BP2 = torch.zeros_like(rewards_BP2)
        is_good_BP2[..., 0] = 1
        is_bad_BP2 = 1 - is_good_BP2
        above_BP2 = gains_BP2 - self._divergence
        is_right_BP2 = torch.where(is_good_BP2 > 0, above_BP2 > 0, above_BP2 < 0)
        of_answers = (
            rewards_BP2 * is_good_BP2,
            rewards_BP2 * is_bad_BP2,
            is_right_BP2,
            is_good_BP2,
            is_bad_BP2,
            torch.zeros_like(gains_BP2) + self._divergence,
        )
        return torch.stack(of_answers)

    def of_step(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the fields of a step's record, from the sums over all ranks; a mean over no answer is left out."""
        good, bad, num_right, num_good, num_bad, divergences = sums
        fields = {}
        if num_good:
            fields["reward_chosen"] = good / num_good
        if num_bad:
            fields["reward_rejected"] = bad / num_bad
        if num_good and num_bad:
            fields["reward_margin"] = good / num_good - bad / num_bad
        if num_answers := num_good + num_bad:
            fields["reward_accuracy"] = num_right / num_answers
            fields["kl"] = divergences / num_answers
        return fields


def mismatched(batch: Batch) -> Batch:
    """Return rows of the same tokens, in which each prompt has the answer after its own: [x1 y2 x2 y3 ... xn y1].

    An answer keeps its number, and its reference is that of the mismatch. It does not count where the other prompt is
    equal to its own: it is the only answer of its row, or both answers of a pair are neighbours.

    Args:
        batch: rows of whole documents, in host memory.
    """
    if batch.positions_BS is None:  # every row is one document
        return replace(batch, targets_BS=torch.full_like(batch.targets_BS, IGNORE_INDEX))
    rows = zip(batch.tokens_BS.numpy(), batch.positions_BS.numpy(), first_tokens(batch).numpy(), strict=True)
    orders = [_moved_on(*row) for row in rows]
    inputs_BS, targets_BS, positions_BS, are_other_BS = (
        torch.from_numpy(np.stack(part)) for part in zip(*orders, strict=True)
    )
    moved = batch.each_token(lambda values: at_places(values, targets_BS))
    return replace(
        moved,
        tokens_BS=batch.tokens_BS.gather(1, inputs_BS),
        targets_BS=torch.where(are_other_BS, moved.targets_BS, IGNORE_INDEX),
        positions_BS=positions_BS,
        per_token={**moved.per_token, REFERENCE: moved.per_token[MISMATCH]},
    )


class _Order(NamedTuple):
    """Where the tokens of a mismatched row come from, [S] each."""

    inputs: _Places
    targets: _Places
    """Also of the values of each token, which belong to its target."""
    positions: _Places
    """Inside each document."""
    are_other: npt.NDArray[np.bool_]
    """Whether the answer of the document belongs to another prompt."""


def _moved_on(tokens_S: _Places, positions_S: _Places, are_first_S: npt.NDArray[np.bool_]) -> _Order:
    """Return the order in which each prompt of a row has the answer after its own.

    Args:
        tokens_S: the inputs.
        positions_S: positions inside each document.
        are_first_S: whether the target is the first of an answer, so that the token is the last of its prompt.
    """
    seq_len = len(tokens_S)
    starts = np.union1d(0, np.flatnonzero(positions_S == 0))
    begins: list[int] = starts.tolist()
    ends = [*begins[1:], seq_len]
    firsts = np.flatnonzero(are_first_S)
    with_answer, chosen = np.unique(np.searchsorted(starts, firsts, side="right") - 1, return_index=True)
    first_of: dict[int, int] = dict(zip(with_answer.tolist(), firsts[chosen].tolist(), strict=True))
    next_of: dict[int, int] = dict(zip(with_answer.tolist(), np.roll(with_answer, -1).tolist(), strict=True))
    inputs: list[_Places] = []
    targets: list[_Places] = []
    positions: list[_Places] = []
    are_other: list[npt.NDArray[np.bool_]] = []
    for document, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        first = first_of.get(document, end)  # what has no answer, such as padding, stays as it is
        inputs.append(np.arange(begin, min(first + 1, end)))
        targets.append(np.arange(begin, first))
        length = first - begin
        is_other = False
        if document in first_of:
            other = next_of[document]
            other_first = first_of[other]
            inputs.append(np.arange(other_first + 1, ends[other]))
            targets.append(np.arange(other_first, ends[other]))
            length += ends[other] - other_first
            other_prompt = tokens_S[begins[other] : other_first + 1]
            is_other = not np.array_equal(tokens_S[begin : first + 1], other_prompt)
        positions.append(np.arange(length))
        are_other.append(np.full(length, is_other))
    return _Order(np.concatenate(inputs), np.concatenate(targets), np.concatenate(positions), np.concatenate(are_other))


def build(training: TrainingConfig) -> Kto:
    """Return the objective with its settings."""
    return Kto(training.preference_beta or 0.1, training.desirable_weight, training.undesirable_weight)
