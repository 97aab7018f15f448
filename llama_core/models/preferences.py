"""Objectives of preferences: the better of two answers to a prompt is to become more probable than the other.

A row holds pairs of answers (labelled ones: ``models/kto.py``), each with its prompt, as documents. Only the tokens of
answers have targets, and a number for each token says which answer it belongs to
(``llama_core.objectives.preferences``). The losses are functions of the log-probabilities of whole answers, so what a
token adds to the gradient depends on the whole of its pair.
"""

# Shape suffixes: B batch, S sequence (the tokens held here), T tokens (B * S), N values that are summed over each
# answer, A numbers of answers (0 is none), P pairs of a row, 2 the answers of a pair: the chosen one, the rejected one

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.models.head import HeadInputs
from llama_core.models.loss import linear_cross_entropies
from llama_core.objectives.preferences import ANSWER, DPO, IPO, ORPO, REFERENCE, SIMPO
from llama_core.objectives.traits import ObjectiveType

MAX_PROBABLE = -1e-6
"""Largest mean log-probability of a token for which odds are computed: those of a certain answer are infinite."""


class Answers(NamedTuple):
    """What the losses read of the answers of some pairs, [B, P, 2] each."""

    log_probabilities: Tensor
    """Of each answer, summed over its tokens, in nats."""
    lengths: Tensor
    """Tokens of each answer; at least 1, also of an answer that is not there."""
    references: Tensor
    """Log-probabilities under the reference; 0 for an objective without one."""

    @property
    def means(self) -> Tensor:
        """Log-probabilities for each token of an answer."""
        return self.log_probabilities / self.lengths

    @property
    def gains(self) -> Tensor:
        """Log-probabilities above those of the reference."""
        return self.log_probabilities - self.references


class AnswerLosses(NamedTuple):
    """What an objective makes of some pairs."""

    losses: Tensor
    """Of each pair, [B, P], or of each answer, [B, P, 2]."""
    rewards: Tensor
    """Of each answer, [B, P, 2]."""


class PreferenceObjective:
    """A loss of pairs of answers, summed over pairs. A subclass says what the loss of a pair is.

    Args:
        beta: factor on log-probabilities, or what else the subclass says.
    """

    kind: ClassVar[ObjectiveType]
    """Its row."""
    num_sums = 5
    """Rewards of the chosen answers and of the others, gains of both, pairs in which the chosen one has the higher
    reward, pairs."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it records: of rewards, and with a reference also of the divergence from it."""
        of_rewards = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
        return (*of_rewards, "kl") if REFERENCE in self.kind.per_token else of_rewards

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._measured: Tensor | None = None

    def num_referred(self, seq_len: int) -> int:
        """Return how many numbers of answers a row has."""
        return answers_of_row(seq_len)

    def of_reference(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the log-probability of each answer of each row, [B, A], in nats."""
        return answer_log_probabilities(head, batch)

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards."""
        raise NotImplementedError

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the loss summed over the pairs whose first token is on this rank.

        Its gradient is that of the sum over all pairs, with respect to the tokens of this rank.
        """
        own_BA = answer_log_probabilities(head, batch)
        values_NBA = _summed(batch, torch.stack(_values(batch, own_BA.dtype)), own_BA.shape[1])
        sums_NBA = torch.cat((own_BA.detach()[None], values_NBA))
        starts_here = self.starts(_pairs(values_NBA[0]))
        if head.sequence_group is not None:
            dist.all_reduce(sums_NBA, group=head.sequence_group)
        whole_BA, starts_BA, lengths_BA, references_BA = sums_NBA.unbind()
        # other ranks' tokens are constants here
        whole_BA = own_BA + (whole_BA - own_BA.detach())
        answers = Answers(_pairs(whole_BA), _pairs(lengths_BA).clamp(min=1), _pairs(references_BA))
        outcome = self.of_pairs(answers)
        exists = self.exist(_pairs(starts_BA))
        counts = exists & starts_here
        measured = torch.where(counts, self.measured(outcome.rewards.detach(), answers.gains.detach()), 0)
        measured = measured.flatten(1).sum(1)
        self._measured = measured if self._measured is None else self._measured + measured
        # a pair that begins on another rank is worth nothing here, but has its gradient
        without_gradient = outcome.losses - outcome.losses.detach()
        losses = torch.where(counts, outcome.losses, without_gradient)
        return torch.where(exists, losses, 0).sum()

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs whose first token is here."""
        return (first_tokens(batch) & (batch.per_token[ANSWER] % 2 != 0)).sum()

    def exist(self, starts_BP2: Tensor) -> Tensor:
        """Return which pairs there are, a mask in the shape of the losses, from the first tokens of each answer."""
        return starts_BP2.amin(-1) > 0

    def starts(self, starts_BP2: Tensor) -> Tensor:
        """Return which pairs begin with one of these first tokens, in the shape of the losses."""
        return starts_BP2[..., 0] > 0

    def measured(self, rewards_BP2: Tensor, gains_BP2: Tensor) -> Tensor:
        """Return what each pair adds to the sums, [num_sums, B, P]."""
        chosen_BP, rejected_BP = rewards_BP2.unbind(-1)
        is_right_BP = chosen_BP > rejected_BP
        return torch.stack((chosen_BP, rejected_BP, gains_BP2.sum(-1), is_right_BP, torch.ones_like(chosen_BP)))

    def take_measured(self) -> Tensor | None:
        """Return the sums over the pairs since the last call, [num_sums]; None if there was no batch."""
        measured = self._measured
        self._measured = None
        return measured

    def of_step(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the fields of a step's record, from the sums over all ranks; ``kl`` only with a reference."""
        chosen, rejected, gains, num_right, num_pairs = sums
        if not num_pairs:
            return {}
        fields = {
            "reward_chosen": chosen / num_pairs,
            "reward_rejected": rejected / num_pairs,
            "reward_margin": (chosen - rejected) / num_pairs,
            "reward_accuracy": num_right / num_pairs,
        }
        if REFERENCE in self.kind.per_token:
            fields["kl"] = gains / (2 * num_pairs)
        return fields


class Dpo(PreferenceObjective):
    """Direct preference optimisation: the gain of the chosen answer over the reference is to exceed the other's.

    Args:
        beta: how strongly the model is held to the reference; less lets it go further.
        label_smoothing: the probability that a pair is the wrong way round.

    Sources: Rafailov et al. 2023, arXiv:2305.18290, equation 7; Mitchell 2023, "A note on DPO with noisy preferences &
    relationship to IPO", for the smoothing.
    """

    kind = DPO

    def __init__(self, beta: float, label_smoothing: float) -> None:
        super().__init__(beta)
        self.label_smoothing = label_smoothing

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards."""
        rewards_BP2 = self.beta * answers.gains
        margins_BP = _margins(rewards_BP2)
        right_BP = F.logsigmoid(margins_BP) * (1 - self.label_smoothing)
        wrong_BP = F.logsigmoid(-margins_BP) * self.label_smoothing
        return AnswerLosses(-right_BP - wrong_BP, rewards_BP2)


class Ipo(PreferenceObjective):
    """Identity preference optimisation: the margin is to be 1 / (2 beta), not as large as possible.

    Log-probabilities are means over the tokens of an answer, as its authors have it in later work and TRL does.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17.
    """

    kind = IPO

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards."""
        margins_BP = _margins(answers.gains / answers.lengths)
        return AnswerLosses((margins_BP - 1 / (2 * self.beta)).square(), self.beta * answers.gains)


class Simpo(PreferenceObjective):
    """Simple preference optimisation: log-probabilities for each token, without a reference.

    Args:
        beta: factor on the mean log-probabilities.
        gamma: the margin that is to be exceeded.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """

    kind = SIMPO

    def __init__(self, beta: float, gamma: float) -> None:
        super().__init__(beta)
        self.gamma = gamma

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards."""
        rewards_BP2 = self.beta * answers.means
        return AnswerLosses(-F.logsigmoid(_margins(rewards_BP2) - self.gamma), rewards_BP2)


class Orpo(PreferenceObjective):
    """Odds ratio preference optimisation: fine-tuning on the chosen answers, and a ratio of odds, without a reference.

    Args:
        beta: weight of the odds ratio, which the paper calls lambda.

    Source: Hong et al. 2024, arXiv:2403.07691, equations 5 to 7; probabilities are geometric means over the tokens.
    """

    kind = ORPO

    def of_pairs(self, answers: Answers) -> AnswerLosses:
        """Return losses and rewards."""
        means_BP2 = answers.means
        certain_BP2 = means_BP2.clamp(max=MAX_PROBABLE)
        log_odds_BP2 = means_BP2 - torch.log(-torch.expm1(certain_BP2))
        losses_BP = -means_BP2[..., 0] - self.beta * F.logsigmoid(_margins(log_odds_BP2))
        return AnswerLosses(losses_BP, self.beta * means_BP2)


def answer_log_probabilities(head: HeadInputs, batch: Batch) -> Tensor:
    """Return the log-probability of each answer of each row, summed over its tokens on this rank: [B, A], in nats.

    The first column is of the tokens that belong to no answer.
    """
    losses_T = linear_cross_entropies(
        head.hidden_TD,
        head.weight_VD,
        batch.targets_BS.flatten(),
        vocab_group=head.vocab_group,
        adapter=head.adapter,
    )
    parts = 1 if head.sequence_group is None else dist.get_world_size(head.sequence_group)
    num_answers = answers_of_row(parts * batch.tokens_BS.shape[1])
    return _summed(batch, -losses_T.view(1, *batch.tokens_BS.shape), num_answers)[0]


def answers_of_row(seq_len: int) -> int:
    """Return how many numbers of answers, 0 among them, there are in rows of ``seq_len`` tokens: every one has one."""
    return 1 + 2 * -(-seq_len // 2)


def _summed(batch: Batch, values_NBS: Tensor, num_answers: int) -> Tensor:
    """Return each value summed over the tokens of each answer, [N, B, A]; it does not wait for the device."""
    num_rows = len(batch.tokens_BS)
    numbers_BS = torch.where(_counts(batch), batch.per_token[ANSWER].abs(), 0).long()
    places_B1 = num_answers * torch.arange(num_rows, device=numbers_BS.device)[:, None]
    sums = values_NBS.new_zeros((len(values_NBS), num_rows * num_answers))
    sums = sums.index_add(1, (numbers_BS + places_B1).flatten(), values_NBS.flatten(1))
    return sums.view(len(values_NBS), num_rows, num_answers)


def _values(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """Return what is summed over answers beside log-probabilities, [B, S] each: beginnings, tokens, references."""
    counts_BS = _counts(batch)
    reference_BS = batch.per_token.get(REFERENCE)
    if reference_BS is None:
        reference_BS = torch.zeros_like(batch.per_token[ANSWER])
    return [first_tokens(batch).to(dtype), counts_BS.to(dtype), reference_BS.to(dtype)]


def _counts(batch: Batch) -> Tensor:
    return batch.targets_BS != IGNORE_INDEX


def first_tokens(batch: Batch) -> Tensor:
    """Return which tokens begin an answer, [B, S]."""
    return (batch.per_token[ANSWER] < 0) & _counts(batch)


def _pairs(values_BA: Tensor) -> Tensor:
    """Return values of answers as values of pairs, [B, P, 2]."""
    return values_BA[:, 1:].reshape(len(values_BA), -1, 2)


def _margins(values_BP2: Tensor) -> Tensor:
    """Return by how much the value of the chosen answer exceeds the other's, [B, P]."""
    return values_BP2[..., 0] - values_BP2[..., 1]


def build(training: TrainingConfig) -> PreferenceObjective:
    """Return the objective that ``training`` names, with its settings."""
    beta = training.preference_beta
    match training.objective:
        case DPO.name:
            return Dpo(beta or 0.1, training.label_smoothing)
        case IPO.name:
            return Ipo(beta or 0.1)
        case SIMPO.name:
            return Simpo(beta or 2.0, training.simpo_gamma)
        case ORPO.name:
            return Orpo(beta or 0.1)
    raise ValueError(f"{training.objective} is no objective of preferences")
