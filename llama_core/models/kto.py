"""Kahneman-Tversky optimisation: good answers are to become more probable and bad ones less, each by itself.

How good a gain over the reference is depends on the divergence from it. That is estimated on mismatched answers, each
after the prompt of another one. So before every step, the engine runs a forward over rows in which the answers have
moved on by one prompt (``PreparingObjective``).
"""

# Shape suffixes: B batch, S sequence, A numbers of answers (0 is none), P pairs of numbers, 2 an answer's label: good,
# bad; V values that are measured of a row

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.models.head import HeadInputs
from llama_core.models.preferences import Answers, Outcome, PreferenceObjective, answer_log_probabilities, first_tokens
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

    def of_pairs(self, answers: Answers) -> Outcome:
        """Return losses and rewards of each answer."""
        good_BP, bad_BP = (answers.gains - self._divergence).unbind(-1)
        # 1 - sigmoid(x) is sigmoid(-x), which does not round where it is small
        of_good_BP = self.desirable_weight * torch.sigmoid(-self.beta * good_BP)
        of_bad_BP = self.undesirable_weight * torch.sigmoid(self.beta * bad_BP)
        return Outcome(torch.stack((of_good_BP, of_bad_BP), dim=-1), self.beta * answers.gains)

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

    An answer keeps its number, and its reference is that of the mismatch. The only answer of a row does not count.

    Args:
        batch: rows of whole documents, in host memory.
    """
    positions_BS = batch.positions_BS
    if positions_BS is None:  # every row is one document
        return replace(batch, targets_BS=torch.full_like(batch.targets_BS, IGNORE_INDEX))
    firsts_BS = first_tokens(batch).numpy()
    orders = [
        _moved_on(own.numpy(), np.flatnonzero(firsts)) for own, firsts in zip(positions_BS, firsts_BS, strict=True)
    ]
    inputs_BS, targets_BS, new_positions_BS = (torch.from_numpy(np.stack(part)) for part in zip(*orders, strict=True))
    is_mismatched_B1 = torch.from_numpy(firsts_BS.sum(1) > 1)[:, None]
    moved = batch.each_token(lambda values_BS: values_BS.gather(1, targets_BS))
    return replace(
        moved,
        tokens_BS=batch.tokens_BS.gather(1, inputs_BS),
        targets_BS=torch.where(is_mismatched_B1, moved.targets_BS, IGNORE_INDEX),
        positions_BS=new_positions_BS,
        per_token={**moved.per_token, REFERENCE: moved.per_token[MISMATCH]},
    )


def _moved_on(positions_S: npt.NDArray[Any], firsts: _Places) -> tuple[_Places, _Places, _Places]:
    """Return where a row's mismatched inputs, targets and numbers come from, and their positions.

    Args:
        positions_S: positions inside each document.
        firsts: where the first target of each answer is: at the last token of its prompt.
    """
    begins = np.union1d(0, np.flatnonzero(positions_S == 0))
    ends = np.append(begins[1:], len(positions_S))
    documents, chosen = np.unique(np.searchsorted(begins, firsts, side="right") - 1, return_index=True)
    own = firsts[chosen]
    next_first = dict(zip(documents.tolist(), np.roll(own, -1).tolist(), strict=True))
    next_end = dict(zip(documents.tolist(), np.roll(ends[documents], -1).tolist(), strict=True))
    own_first = dict(zip(documents.tolist(), own.tolist(), strict=True))
    inputs: list[_Places] = []
    targets: list[_Places] = []
    positions: list[_Places] = []
    for document, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if document in own_first:
            first = own_first[document]
            other = next_first[document]
            other_end = next_end[document]
            inputs += [np.arange(begin, first + 1), np.arange(other + 1, other_end)]
            targets += [np.arange(begin, first), np.arange(other, other_end)]
            positions.append(np.arange(first - begin + other_end - other))
        else:  # padding
            inputs.append(np.arange(begin, end))
            targets.append(np.arange(begin, end))
            positions.append(np.arange(end - begin))
    return np.concatenate(inputs), np.concatenate(targets), np.concatenate(positions)


def build(training: TrainingConfig) -> Kto:
    """Return the objective with its settings."""
    return Kto(training.preference_beta or 0.1, training.desirable_weight, training.undesirable_weight)
