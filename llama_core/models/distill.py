"""Distillation from a teacher's most probable tokens, whose log-probabilities were computed before the run.

The loss of a target is ``(1 - w) * cross-entropy + w * KL(teacher || model)``. The divergence is that of k + 1
outcomes: each of the teacher's k most probable tokens, and any other one. It is at most the divergence over the
vocabulary (log-sum inequality).
"""

# Shape suffixes: B batch, S sequence, T tokens (B * S), C tokens of one chunk, R rows of one block, V vocabulary (the
# rows of the head held here), K the teacher's tokens, N numbers of a token's statistics, G ranks that divide the
# vocabulary

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import IGNORE_INDEX, PLACE, Batch
from llama_core.models.head import HeadInputs
from llama_core.models.loss import (
    block_rows,
    blocks,
    dividing,
    even_chunk,
    gradient_scale,
    linear_loss,
    logits_in_chunks,
)
from llama_core.objectives.distill import LOGS, REST, TOKENS


class Distill:
    """Cross-entropy of the targets, and the divergence of the model from the teacher.

    Args:
        top_k: how many tokens of the teacher are known for each target.
        weight: how much the divergence counts, from 0 to 1; the cross-entropy has the rest.

    Source: Hinton et al. 2015, arXiv:1503.02531, at temperature 1; with the tokens beyond k as one outcome, the rest
    of the teacher's probability is neither dropped nor scaled away.
    """

    num_sums = 3
    """Divergences, cross-entropies, and targets."""
    names = ("teacher_kl", "cross_entropy")

    def __init__(self, top_k: int, weight: float) -> None:
        self.top_k = top_k
        self.weight = weight
        self._measured: Tensor | None = None

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the loss summed over the targets."""
        toward = _TowardTeacher(head, batch, self.weight)
        loss = linear_loss(head.hidden_TD, head.weight_VD, toward, toward.chunk_tokens, adapter=head.adapter)
        measured = torch.stack((toward.divergences_T.sum(), toward.entropies_T.sum(), batch.num_targets()))
        self._measured = measured if self._measured is None else self._measured + measured
        return loss

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets."""
        return batch.num_targets()

    def num_referred(self, seq_len: int) -> int:
        """Return how many numbers the teacher gives for a row."""
        return seq_len * (2 * self.top_k + 1)

    def of_reference(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return what the teacher says of each token of each row, [B, num_referred]; zeros for those of other ranks."""
        values_TN = top_log_probabilities(head, self.top_k)
        num_rows, num_tokens = batch.tokens_BS.shape
        parts = 1 if head.sequence_group is None else dist.get_world_size(head.sequence_group)
        rows_BSN = values_TN.new_zeros((num_rows, parts * num_tokens, values_TN.shape[1]))
        places_BSN = batch.per_token[PLACE].long()[..., None].expand(-1, -1, values_TN.shape[1])
        rows_BSN.scatter_(1, places_BSN, values_TN.view(num_rows, num_tokens, -1))
        return rows_BSN.flatten(1)

    def take_measured(self) -> Tensor | None:
        """Return the sums over the targets since the last call, [num_sums]; None if there was no batch."""
        measured = self._measured
        self._measured = None
        return measured

    def of_step(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the fields of a step's record, in nats per target, from the sums over all ranks."""
        divergence, entropy, num_targets = sums
        return {"teacher_kl": divergence / num_targets, "cross_entropy": entropy / num_targets} if num_targets else {}


class _TowardTeacher:
    """The losses of all tokens, made chunk by chunk, and the gradients of their logits; see ``linear_loss``.

    With q the model's probabilities, p the teacher's of its k tokens and r that of the rest, of which the model has Q,
    the gradient of logit j is ``q_j (1 - w + w (sum p + r)) - w p_j`` for one of the k tokens, and
    ``q_j (1 - w + w (sum p + r) - w r / Q)`` for another one, less ``1 - w`` for the target.
    """

    def __init__(self, head: HeadInputs, batch: Batch, weight: float) -> None:
        targets_T = batch.targets_BS.flatten()
        self._weight = weight
        self._group = dividing(head.vocab_group)
        self.chunk_tokens = even_chunk(head.hidden_TD, head.weight_VD)
        self._block_RV = block_rows(head.hidden_TD, len(head.weight_VD), self.chunk_tokens)
        self._tokens_TK = _of_each(batch, TOKENS)
        self._logs_TK = _of_each(batch, LOGS)
        self._rest_T1 = _of_each(batch, REST)
        self.ignored_T1 = (targets_T == IGNORE_INDEX)[:, None]
        self._answers_T1 = targets_T[:, None].masked_fill(self.ignored_T1, 0)
        self.entropies_T = torch.empty_like(targets_T, dtype=self._block_RV.dtype)
        self.divergences_T = torch.empty_like(self.entropies_T)
        self.losses_T = torch.empty_like(self.entropies_T)

    def differentiate_(self, logits_CV: Tensor, chunk: slice) -> None:
        """Set the losses of a chunk, and replace its logits by their scaled gradients."""
        wide = self._block_RV.dtype
        ignored_C = self.ignored_T1[chunk, 0]
        held = _Held(self._tokens_TK[chunk].long(), logits_CV.shape[1], self._group)
        answers = _Held(self._answers_T1[chunk], logits_CV.shape[1], self._group)
        parts_CN = logits_CV.new_empty((len(logits_CV), held.columns.shape[1] + 3), dtype=wide)
        for rows in blocks(logits_CV, self._block_RV):
            wide_RV = self._block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
            parts_CN[rows, 3:] = held.values(wide_RV, rows)
            parts_CN[rows, 2:3] = answers.values(wide_RV, rows)
            peaks_R1 = wide_RV.amax(-1, keepdim=True)
            parts_CN[rows, 0:1] = peaks_R1
            wide_RV.sub_(peaks_R1).exp_().masked_fill_(held.mask(rows), 0)
            parts_CN[rows, 1:2] = wide_RV.sum(-1, keepdim=True)
        peaks_C1, others_C1, answer_C1, tops_CK = _over_the_vocabulary(parts_CN, self._group)

        # relative to the largest logit
        tops_CK = tops_CK - peaks_C1
        others_C1 = others_C1.clamp(min=torch.finfo(wide).tiny)
        totals_C1 = others_C1 + tops_CK.exp().sum(-1, keepdim=True)
        log_z_C1 = totals_C1.log()
        entropies_C = (log_z_C1 - (answer_C1 - peaks_C1)).squeeze(1)
        logs_CK = self._logs_TK[chunk].to(wide)
        rest_C1 = self._rest_T1[chunk].to(wide)
        shares_CK = logs_CK.exp()
        share_C1 = rest_C1.exp()
        divergences_C = (shares_CK * (logs_CK - tops_CK + log_z_C1)).sum(-1)
        divergences_C += (share_C1 * (rest_C1 - others_C1.log() + log_z_C1)).squeeze(1)
        self.entropies_T[chunk] = entropies_C.masked_fill_(ignored_C, 0)
        self.divergences_T[chunk] = divergences_C.masked_fill_(ignored_C, 0)
        self.losses_T[chunk] = (1 - self._weight) * entropies_C + self._weight * divergences_C

        scale = gradient_scale(logits_CV.dtype)
        factors_C1 = 1 - self._weight + self._weight * (shares_CK.sum(-1, keepdim=True) + share_C1)
        of_tops_CK = scale * (tops_CK.exp() * factors_C1 / totals_C1 - self._weight * shares_CK)
        of_others_C1 = scale * (factors_C1 / totals_C1 - self._weight * share_C1 / others_C1)
        of_answers_C1 = torch.full_like(peaks_C1, -scale * (1 - self._weight))
        for rows in blocks(logits_CV, self._block_RV):
            wide_RV = self._block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
            wide_RV.sub_(peaks_C1[rows]).exp_().masked_fill_(held.mask(rows), 0).mul_(of_others_C1[rows])
            held.add_(wide_RV, of_tops_CK[rows], rows)
            answers.add_(wide_RV, of_answers_C1[rows], rows)
            logits_CV[rows] = wide_RV


class _Held:
    """Some tokens of each row of a chunk, and which of them are in the part of the vocabulary that this rank holds."""

    def __init__(self, tokens_CK: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> None:
        self.columns = tokens_CK % vocab_size
        self._vocab_size = vocab_size
        self._are_here = None if group is None else tokens_CK // vocab_size == dist.get_rank(group)

    def values(self, wide_RV: Tensor, rows: slice) -> Tensor:
        """Return the values of the tokens, -inf for one of another rank."""
        values_RK = wide_RV.gather(-1, self.columns[rows])
        return values_RK if self._are_here is None else values_RK.masked_fill_(~self._are_here[rows], -torch.inf)

    def mask(self, rows: slice) -> Tensor:
        """Return which columns are tokens, [R, V]."""
        columns_RK = self.columns[rows]
        if self._are_here is not None:  # one more column takes those of other ranks
            columns_RK = columns_RK.masked_fill(~self._are_here[rows], self._vocab_size)
        mask_RV = columns_RK.new_zeros((len(columns_RK), self._vocab_size + 1), dtype=torch.bool)
        return mask_RV.scatter_(-1, columns_RK, True)[:, : self._vocab_size]

    def add_(self, wide_RV: Tensor, values_RK: Tensor, rows: slice) -> None:
        """Add a value to each token's column."""
        if self._are_here is not None:
            values_RK = values_RK.masked_fill(~self._are_here[rows], 0)
        wide_RV.scatter_add_(-1, self.columns[rows], values_RK)


def _of_each(batch: Batch, name: str) -> Tensor:
    """Return a value of each token, [T, N]."""
    return batch.per_token[name].view(batch.tokens_BS.numel(), -1)


def _over_the_vocabulary(parts_CN: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logit, the others' sum of exponentials, the answer's logit, and those of the teacher's tokens.

    All ranks gather the same numbers and combine them in the same order, so they agree bit for bit.
    """
    if group is None:
        return parts_CN[:, :1], parts_CN[:, 1:2], parts_CN[:, 2:3], parts_CN[:, 3:]
    parts_GCN = parts_CN.new_empty((dist.get_world_size(group), *parts_CN.shape))
    dist.all_gather(list(parts_GCN.unbind()), parts_CN, group=group)
    peaks_GC1 = parts_GCN[..., :1]
    peaks_C1 = peaks_GC1.amax(0)
    others_C1 = (parts_GCN[..., 1:2] * (peaks_GC1 - peaks_C1).exp()).sum(0)
    return peaks_C1, others_C1, parts_GCN[..., 2:3].amax(0), parts_GCN[..., 3:].amax(0)


@torch.no_grad()
def top_log_probabilities(head: HeadInputs, top_k: int) -> Tensor:
    """Return the most probable tokens of each token's target, their log-probabilities, and that of all others.

    Returns:
        The three of each token, [T, 2 K + 1], in fp32, or in fp64 if the hidden states are.
    """
    group = dividing(head.vocab_group)
    vocab_size = len(head.weight_VD)
    first = 0 if group is None else dist.get_rank(group) * vocab_size
    num_tokens = len(head.hidden_TD)
    wide = torch.promote_types(head.hidden_TD.dtype, torch.float32)
    values_TN = head.hidden_TD.new_empty((num_tokens, 2 * top_k + 1), dtype=wide)
    chunk_tokens = even_chunk(head.hidden_TD, head.weight_VD)
    block_RV = block_rows(head.hidden_TD, len(head.weight_VD), chunk_tokens)
    for chunk, logits_CV in logits_in_chunks(head.hidden_TD, head.weight_VD, chunk_tokens, adapter=head.adapter):
        for rows in blocks(logits_CV, block_RV):
            wide_RV = block_RV[: rows.stop - rows.start].copy_(logits_CV[rows])
            tops_RK, tokens_RK = wide_RV.topk(min(top_k, vocab_size))
            tokens_RK = tokens_RK + first
            if group is not None:
                every = _gathered(torch.cat((tops_RK, tokens_RK.to(wide)), dim=-1), group)
                tops_RM = torch.cat([part.chunk(2, -1)[0] for part in every], dim=-1)
                tokens_RM = torch.cat([part.chunk(2, -1)[1] for part in every], dim=-1)
                tops_RK, best_RK = tops_RM.topk(top_k)
                tokens_RK = tokens_RM.gather(-1, best_RK).long()
            held = _Held(tokens_RK, vocab_size, group)
            wide_RV.masked_fill_(held.mask(slice(None)), -torch.inf)
            others_R = wide_RV.logsumexp(-1)
            if group is not None:
                others_R = torch.stack(_gathered(others_R, group)).logsumexp(0)
            log_z_R1 = torch.logaddexp(tops_RK.logsumexp(-1), others_R)[:, None]
            of_rows = (tokens_RK.to(wide), tops_RK - log_z_R1, others_R[:, None] - log_z_R1)
            values_TN[chunk][rows] = torch.cat(of_rows, dim=-1)
    return values_TN


def _gathered(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the parts of all ranks, in their order."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def build(training: TrainingConfig) -> Distill:
    """Return the objective with its settings."""
    return Distill(training.distill_top_k, training.distill_weight)
