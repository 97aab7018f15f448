"""How many tokens reach each of the places that divide experts, if experts are chosen evenly.

A token with several experts in one place needs to get there only once.
"""

from collections.abc import Iterator
from math import comb
from typing import NamedTuple

from llama_core.config.strategy import MoE


class RowsOfHops(NamedTuple):
    """Rows that a rank sends, and gets as many of, if experts are chosen evenly."""

    to_nodes: int
    """Tokens, once for each node with some of their experts."""
    to_ranks: int
    """Once for each rank with some of their experts."""
    to_experts: int
    """Once for each of their experts."""


def rows_of_hops(moe: MoE, tokens: int, *, num_nodes: int, num_ranks: int) -> RowsOfHops:
    """Return the rows of two hops, to nodes and to the ranks in them, and those that experts then get.

    Args:
        moe: the experts.
        tokens: tokens of a rank.
        num_nodes: nodes that divide the experts.
        num_ranks: ranks in all of them.
    """
    to_nodes, to_ranks = (round(tokens * places * share_reached(moe, places)) for places in (num_nodes, num_ranks))
    return RowsOfHops(to_nodes, to_ranks, tokens * moe.experts_per_token)


def share_reached(moe: MoE, num_places: int) -> float:
    """Return the probability that some of a token's experts are among those of one of ``num_places`` equal places.

    Every set of groups that a token may choose is taken to be as likely as any other, and so is every set of experts
    in them.
    """
    in_place = moe.num_experts // num_places
    candidates = moe.experts_to_choose_from
    sets = comb(candidates, moe.experts_per_token)
    missed = 0.0
    for probability, candidates_here in _candidates_in_place(moe, in_place):
        missed += probability * comb(candidates - candidates_here, moe.experts_per_token) / sets
    return 1.0 - missed


def _candidates_in_place(moe: MoE, in_place: int) -> Iterator[tuple[float, int]]:
    """Yield how many experts of a place a token may choose from, and with which probability."""
    of_group = moe.num_experts // moe.expert_groups
    if in_place % of_group and of_group % in_place:
        # groups that places cut apart: the mean
        yield 1.0, in_place * moe.groups_per_token // moe.expert_groups
        return
    # a place has a part of one group, or several whole ones
    here = max(1, in_place // of_group)
    ways = comb(moe.expert_groups, moe.groups_per_token)
    for chosen in range(min(here, moe.groups_per_token) + 1):
        others = comb(moe.expert_groups - here, moe.groups_per_token - chosen)
        yield comb(here, chosen) * others / ways, chosen * min(in_place, of_group)
