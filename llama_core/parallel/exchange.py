"""All-to-all of uneven parts."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd


def exchange(x: Tensor, num_to_receive: list[int], num_to_send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that the ranks of a group send to this one, by rank; the backward sends their gradients back.

    Args:
        x: rows for every rank, those for the first one first.
        num_to_receive: rows from each rank.
        num_to_send: rows for each rank.
        group: the ranks, all of which must call it.
    """
    of_tensors = all_to_all_single_autograd if torch.is_grad_enabled() and x.requires_grad else all_to_all_single
    out: Tensor = of_tensors(x.contiguous(), num_to_receive, num_to_send, group)
    return out
