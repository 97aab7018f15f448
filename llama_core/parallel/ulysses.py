"""Attention over a divided sequence by exchanged heads: each rank has some heads of whole rows while it attends.

Before attention, a rank sends its tokens' queries, keys and values to the ranks that get their heads, and gets the
other tokens of its own heads; afterwards the results go back. A rank holds one piece of each row, in the rows' order,
so that what arrives from the ranks, one after the other, is whole rows. Any kernel of whole rows attends to them.

Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses), section 3.1.
"""

# Shape suffixes: B batch, S tokens that this rank holds, L tokens of whole rows (P * S), N heads, P ranks, M heads of a
# rank (N / P), H head dim

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the fake kernels of torch.ops._c10d_functional
from torch import Tensor
from torch.distributed import ProcessGroup

c10d = torch.ops._c10d_functional


def ulysses_attention(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Any,
    sinks_N: Tensor | None = None,
    *,
    attend: Callable[..., Tensor],
    group: ProcessGroup,
) -> Tensor:
    """Return the attention of this rank's queries over whole rows, [B, N, S, H]. All ranks of ``group`` must call it.

    Args:
        q_BNSH: queries, already rotated; the ranks divide N.
        k_BKSH: keys, already rotated; the ranks divide K.
        v_BKSH: values.
        mask: what a kernel of whole rows is told.
        sinks_N: the logits of all heads' sinks; None without sinks.
        attend: that kernel.
        group: the ranks that divide every row.
    """
    q_BMLH, k_BMLH, v_BMLH = (_to_heads(x, group) for x in (q_BNSH, k_BKSH, v_BKSH))
    own = () if sinks_N is None else (sinks_N.chunk(dist.get_world_size(group))[dist.get_rank(group)],)
    return _to_tokens(attend(q_BMLH, k_BMLH, v_BMLH, mask, *own), group)


def _to_heads(x_BNSH: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's heads of all tokens, [B, M, L, H], with tokens first in memory."""
    x_BSNH: Any = x_BNSH.transpose(1, 2)
    sent_PBSMH = x_BSNH.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0)
    arrived_PBSMH = _exchange(sent_PBSMH, group)
    return arrived_PBSMH.movedim(0, 1).flatten(1, 2).transpose(1, 2)


def _to_tokens(x_BMLH: Tensor, group: ProcessGroup) -> Tensor:
    """Return all heads of this rank's tokens, [B, N, S, H], with tokens first in memory."""
    x_BLMH: Any = x_BMLH.transpose(1, 2)
    sent_PBSMH = x_BLMH.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    arrived_PBSMH = _exchange(sent_PBSMH, group)
    return arrived_PBSMH.movedim(0, 2).flatten(2, 3).transpose(1, 2)


class _Exchange(torch.autograd.Function):
    """Sends part r of the first dim to rank r of a group, and returns what the ranks send here, in their order.

    With torch's own differentiable exchange, a step on real ranks holds 1.5 % more than its rehearsal.
    """

    @staticmethod
    def forward(ctx: Any, sent_PBSMH: Tensor, num_ranks: int, group_name: str) -> Tensor:
        ctx.num_ranks = num_ranks
        ctx.group_name = group_name
        parts = [1] * num_ranks
        arrived: Tensor = c10d.wait_tensor(c10d.all_to_all_single(sent_PBSMH, parts, parts, group_name))
        return arrived

    @staticmethod
    def backward(ctx: Any, grad_PBSMH: Tensor) -> tuple[Tensor, None, None]:
        parts = [1] * ctx.num_ranks
        arriving = c10d.all_to_all_single(grad_PBSMH.contiguous(), parts, parts, ctx.group_name)
        return c10d.wait_tensor(arriving), None, None


def _exchange(sent_PBSMH: Tensor, group: ProcessGroup) -> Tensor:
    arrived: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        sent_PBSMH.contiguous(), dist.get_world_size(group), group.group_name
    )
    return arrived
