"""Tokens that travel to experts on other nodes in two hops: between nodes, and inside them.

A token goes once to each node that has some of its experts, whatever their number: to the rank there with this rank's
place in its own node. From there it goes once to each rank that has some of them. Gates travel with it, so that a rank
returns one sum of what its experts made of a token, and a node one sum of what its ranks did. The links between nodes
are the slow ones: with 8 experts of a token on 2 nodes, they carry a quarter of what they would if every expert were
sent a copy.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2.
"""

# Shape suffixes: T tokens of this rank, K experts of a token, P places (nodes, or ranks of a node), S slots of a
# token (its experts, or all places), R rows, one for each slot that is used, D model dim

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from llama_core.config.strategy import MoE
from llama_core.models.moe import Experts
from llama_core.parallel.exchange import exchange
from llama_core.parallel.mesh import Hops
from llama_core.planning.crossings import rows_of_hops

NOWHERE = -1
"""In place of the expert of a slot that is not here."""


class Routed(NamedTuple):
    """Tokens, and where they go."""

    x_TD: Tensor
    gates_TK: Tensor
    """Weight of what each expert makes of a token, in the dtype of ``x_TD``."""
    chosen_TK: Tensor
    """The experts of each token, int32; negative where an expert is elsewhere."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it needs the number of tokens that it gets
def run_experts_over_hops(
    experts: Experts, x_TD: Tensor, gates_TK: Tensor, chosen_TK: Tensor, *, moe: MoE, hops: Hops
) -> Tensor:
    """Return the sum of what the experts of each token make of it, times their gates, [T, D]. All ranks must call it.

    It reads counts back three times, because buffers' sizes depend on them. Fake tokens have no counts: these are
    taken to be balanced.

    Args:
        experts: the experts of this rank.
        x_TD: this rank's tokens.
        gates_TK: the gates, in their dtype.
        chosen_TK: the experts of each token, int64.
        moe: all experts of a layer.
        hops: the ranks that divide them.
    """
    num_nodes, in_node = (dist.get_world_size(group) for group in hops)
    fake = None
    if isinstance(x_TD, FakeTensor):
        fake = rows_of_hops(moe, len(x_TD), num_nodes=num_nodes, num_ranks=num_nodes * in_node)
    routed = Routed(x_TD, gates_TK, chosen_TK.int())
    num_experts = moe.num_experts
    trips: list[Trip] = []
    for group, num_rows in zip(hops, fake[:2] if fake else (None, None), strict=True):
        num_places = dist.get_world_size(group)
        if num_places > 1:
            num_experts //= num_places
            trips.append(Trip.plan(routed, num_experts, group, num_rows))
            routed = trips[-1].there(routed)
    arrived = Arrived.sort(routed, num_experts, fake and fake.to_experts)
    del routed  # its rows have been copied
    gates_R1 = arrived.gates_R1
    if moe.gate_inputs:
        results_RD = experts(arrived.rows_RD * gates_R1, arrived.tokens_per_expert)
    else:
        results_RD = experts(arrived.rows_RD, arrived.tokens_per_expert) * gates_R1
    out = arrived.slots.sum(results_RD)
    for trip in reversed(trips):
        out = trip.back(out)
    return out


@dataclass(frozen=True, eq=False)
class Slots:
    """Slots of tokens, some of which are used: a row for each used one, sorted by its key."""

    used_R: Tensor
    """The slot of each row, counted over all tokens."""
    token_R: Tensor
    """The token of each row."""
    row_TS: Tensor
    """The row of each slot; the number of rows where it is not used."""

    @classmethod
    def of(cls, key_TS: Tensor, num_rows: int) -> Self:
        """Sort slots by key; the first ``num_rows`` are used. Rows with the same key are in the order of tokens."""
        order = key_TS.flatten().argsort(stable=True)
        row_TS = order.argsort().clamp(max=num_rows).view_as(key_TS)
        used_R = order[:num_rows]
        return cls(used_R, used_R // key_TS.shape[1], row_TS)

    def spread(self, x_TD: Tensor) -> Tensor:
        """Return the token of each row, [R, D]."""
        out: Tensor = _Spread.apply(x_TD, self.token_R, self.row_TS)  # type: ignore[no-untyped-call]
        return out

    def sum(self, y_RD: Tensor) -> Tensor:
        """Return the sum of the rows of each token, [T, D]."""
        out: Tensor = _Sum.apply(y_RD, self.token_R, self.row_TS)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True, eq=False)
class Trip:
    """The way of tokens to the places that have their experts, and back."""

    group: dist.ProcessGroup
    slots: Slots
    """A slot for every place."""
    first_R: Tensor
    """The first expert of the place that each row goes to."""
    num_experts: int
    """Experts of a place."""
    num_sent: list[int]
    num_received: list[int]

    @classmethod
    def plan(cls, routed: Routed, num_experts: int, group: dist.ProcessGroup, num_rows: int | None) -> Self:
        """Find out which tokens go where.

        Args:
            routed: the tokens.
            num_experts: experts of each place.
            group: the places.
            num_rows: rows to send in all, as many to each place; None to count them.
        """
        num_places = dist.get_world_size(group)
        place_TK = routed.chosen_TK.long().div(num_experts, rounding_mode="floor")  # -1 stays -1
        # a column more for experts elsewhere
        is_sent = place_TK.new_zeros((len(place_TK), num_places + 1), dtype=torch.bool)
        is_sent_TP = is_sent.scatter(1, place_TK + 1, value=True)[:, 1:]
        sent_P = is_sent_TP.sum(0)
        received_P = torch.empty_like(sent_P)
        dist.all_to_all_single(received_P, sent_P, group=group)
        if num_rows is None:
            num_sent, num_received = torch.stack((sent_P, received_P)).tolist()
        else:
            num_sent = num_received = [len(part) for part in torch.arange(num_rows).tensor_split(num_places)]
        places_P = torch.arange(num_places, device=sent_P.device)
        slots = Slots.of(torch.where(is_sent_TP, places_P, num_places), sum(num_sent))
        return cls(group, slots, slots.used_R % num_places * num_experts, num_experts, num_sent, num_received)

    def there(self, routed: Routed) -> Routed:
        """Return the tokens that reach this rank, by the rank that they come from."""
        chosen_RK = routed.chosen_TK[self.slots.token_R] - self.first_R[:, None].int()
        is_here_RK = (chosen_RK >= 0) & (chosen_RK < self.num_experts)
        chosen_RK = torch.where(is_here_RK, chosen_RK, NOWHERE)
        return Routed(
            self._exchanged(self.slots.spread(routed.x_TD)),
            self._exchanged(self.slots.spread(routed.gates_TK)),
            self._exchanged(chosen_RK),
        )

    def back(self, results_RD: Tensor) -> Tensor:
        """Return, for each token that was sent, the sum of what the ranks that got it have made of it."""
        return self.slots.sum(exchange(results_RD, self.num_sent, self.num_received, self.group))

    def _exchanged(self, rows: Tensor) -> Tensor:
        return exchange(rows, self.num_received, self.num_sent, self.group)


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows for the experts of this rank, sorted by expert."""

    rows_RD: Tensor
    gates_R1: Tensor
    """The weight of what an expert makes of each row."""
    tokens_per_expert: Tensor
    """Number of rows of each expert, int64."""
    slots: Slots
    """A slot for each of the experts that a token has chosen."""

    @classmethod
    def sort(cls, routed: Routed, num_experts: int, num_rows: int | None) -> Self:
        """Copy tokens to their experts.

        Args:
            routed: the tokens that have reached this rank.
            num_experts: experts of this rank.
            num_rows: rows that they get in all; None to count them.
        """
        x_TD, gates_TK, chosen_TK = routed
        key_TK = torch.where(chosen_TK < 0, num_experts, chosen_TK).long()
        keys = key_TK.flatten()
        tokens_per_expert = keys.new_zeros(num_experts + 1).scatter_add(0, keys, torch.ones_like(keys))[:-1]
        slots = Slots.of(key_TK, int(tokens_per_expert.sum()) if num_rows is None else num_rows)
        gates_R1 = gates_TK.flatten().index_select(0, slots.used_R)[:, None]
        return cls(slots.spread(x_TD), gates_R1, tokens_per_expert, slots)


class _Spread(torch.autograd.Function):
    """Gives every row its token. The backward sums rows without atomics, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TS: Tensor) -> Tensor:
        ctx.save_for_backward(row_TS)
        return x_TD[token_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_TS,) = ctx.saved_tensors
        return _sum(grad_RD, row_TS), None, None


class _Sum(torch.autograd.Function):
    """Sums the rows of every token: the transpose of ``_Spread``."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TS: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum(y_RD, row_TS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return grad_TD[token_R], None, None


def _sum(y_RD: Tensor, row_TS: Tensor) -> Tensor:
    """Return the sum of the rows of each token, [T, D], rounded once; slots that are not used add nothing.

    Slot by slot, since a tensor of all slots would mostly be zeros where experts are on many ranks.
    """
    padded = F.pad(y_RD, (0, 0, 0, 1))
    total_TD = padded[row_TS[:, 0]].to(torch.promote_types(y_RD.dtype, torch.float32))
    for row_T in row_TS[:, 1:].unbind(1):
        total_TD += padded[row_T]
    return total_TD.to(y_RD.dtype)
