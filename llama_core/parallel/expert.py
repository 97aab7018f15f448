"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Rank r of a group of n holds the experts r * E / n to (r + 1) * E / n - 1. Each trip is one all-to-all of uneven parts;
the gradients make the same trips in reverse.

Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3.1.
"""

# Shape suffixes: T tokens of this rank (a token with k experts counts k times), R tokens that reached this rank,
# D model dim, E experts

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from llama_core.errors import PlanError


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Tokens at their experts, with all that is needed to send the results back."""

    tokens_RD: Tensor
    """The tokens that reached this rank, in order of its experts."""
    tokens_per_expert: Tensor
    """Number of these tokens for each expert of this rank, int64."""
    group: dist.ProcessGroup
    num_sent: list[int]
    """Tokens that this rank sent to each rank."""
    num_received: list[int]
    """Tokens that this rank received from each rank."""
    order_R: Tensor
    """Place of each of ``tokens_RD`` in the order of arrival."""

    def combine(self, results_RD: Tensor) -> Tensor:
        """Return the results of this rank's own tokens, [T, D], in the order in which ``dispatch`` got them."""
        arrived_RD = torch.empty_like(results_RD).index_copy(0, self.order_R, results_RD)
        return _exchange(arrived_RD, self.num_sent, self.num_received, self.group)


def dispatch(tokens_TD: Tensor, tokens_per_expert: Tensor, group: dist.ProcessGroup) -> Dispatch:
    """Send every token to the rank that holds its expert. All ranks of ``group`` must call it.

    It reads the token counts back once, because the buffers' sizes depend on them.

    Args:
        tokens_TD: this rank's tokens, those of expert 0 first, then those of expert 1 and so on.
        tokens_per_expert: number of these tokens for each of all experts, int64, [E].
        group: the ranks that divide the experts.

    Raises:
        PlanError: if the experts cannot be divided evenly over the ranks.
    """
    num_experts, num_ranks = len(tokens_per_expert), dist.get_world_size(group)
    if num_experts % num_ranks:
        legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise PlanError(
            f"ep={num_ranks} does not divide the {num_experts} experts; use one of {', '.join(map(str, legal))}"
        )
    sent = tokens_per_expert.view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    num_sent, num_received = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived_RD = _exchange(tokens_TD, num_received, num_sent, group)
    # tokens arrive by rank, and within a rank by expert; the stable sort keeps the order within an expert
    expert_R = torch.arange(received.shape[1], device=received.device).repeat(num_ranks)
    order_R = expert_R.repeat_interleave(received.flatten()).argsort(stable=True)
    return Dispatch(arrived_RD[order_R], received.sum(0), group, num_sent, num_received, order_R)


def _exchange(x: Tensor, num_to_receive: list[int], num_to_send: list[int], group: dist.ProcessGroup) -> Tensor:
    exchange = all_to_all_single_autograd if torch.is_grad_enabled() and x.requires_grad else all_to_all_single
    out: Tensor = exchange(x.contiguous(), num_to_receive, num_to_send, group)
    return out
