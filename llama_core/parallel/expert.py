"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Rank r of a group of n holds the experts r * E / n to (r + 1) * E / n - 1. Each trip is one all-to-all of uneven parts,
or two where the group spans nodes (``hops``); the gradients make the same trips in reverse. Tensor-parallel ranks
divide every expert, as they divide a feed-forward, or they are ranks of such groups themselves and have whole experts.

Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3.1; Liu et al. 2025, arXiv:2504.14960, for groups that
attention and experts have each their own way.
"""

# Shape suffixes: T tokens of this rank (a token with k experts counts k times), R tokens that reached this rank,
# D model dim, B rows, E experts

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from llama_core.config.model_weights import weight_of
from llama_core.errors import PlanError
from llama_core.models.llama import Llama
from llama_core.models.moe import ExpertLinear, Experts, mixtures, rearrange
from llama_core.parallel.exchange import exchange
from llama_core.parallel.hops import run_experts_over_hops
from llama_core.parallel.mesh import Hops
from llama_core.units import divisors
from llama_core.weight_rows import Division

_OVER_TP: dict[Division, Placement] = {"outputs": Shard(1), "inputs": Shard(2), "share": Replicate()}
"""How tensor-parallel ranks divide a weight of experts."""


def divide_experts(model: Llama, mesh: DeviceMesh, hops: Hops | None = None) -> None:
    """Divide the experts of ``model`` over the axes ep and tp of a mesh, and send tokens to the ranks that hold them.

    Their parameters become DTensors if one of these axes has several ranks.

    Args:
        model: the model, or a part of it, on the meta device or with the same values on every rank.
        mesh: the ranks; it may lack the axis ep.
        hops: the groups through which tokens reach other nodes; None if they go straight to their experts.
    """
    axes = [axis for axis in ("ep", "tp") if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1]
    if not axes:
        return
    for path, matrix in model.named_modules():
        if isinstance(matrix, ExpertLinear):
            for name, parameter in list(matrix.named_parameters()):
                divided = weight_of(f"{path}.{name}").divided
                places = [Shard(0) if axis == "ep" else _OVER_TP[divided] for axis in axes]
                part = distribute_tensor(parameter, mesh[tuple(axes)], places, src_data_rank=None)
                matrix.register_parameter(name, nn.Parameter(part))
                if divided == "share" and "tp" in axes:
                    matrix.own_bias = partial(_share_of, mesh["tp"].size())
    if "ep" in axes:
        for mixture in mixtures(model):
            if hops is not None:
                mixture.run_experts_of_tokens = partial(run_experts_over_hops, moe=mixture.moe, hops=hops)
            mixture.run_experts = partial(run_experts_on_other_ranks, group=mesh.get_group("ep"))


def _share_of(num_ranks: int, bias: Tensor) -> Tensor:
    """Return what one of the ranks that sum up results adds of a bias, of which each has a part of the gradient."""
    assert isinstance(bias, DTensor)
    *over_ep, _ = bias.placements
    return bias.to_local(grad_placements=[*over_ep, Partial()]) / num_ranks


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it needs the number of tokens that it gets
def run_experts_on_other_ranks(
    experts: Experts, tokens_TD: Tensor, tokens_per_expert: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Return the results of this rank's tokens, [T, D], from the ranks that hold their experts."""
    sent = dispatch(tokens_TD, tokens_per_expert, group)
    return sent.combine(experts(sent.tokens_RD, sent.tokens_per_expert))


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
    place_R: Tensor
    """The inverse: place of each arrival in ``tokens_RD``."""

    def combine(self, results_RD: Tensor) -> Tensor:
        """Return the results of this rank's own tokens, [T, D], in the order in which ``dispatch`` got them."""
        return exchange(rearrange(results_RD, self.place_R, self.order_R), self.num_sent, self.num_received, self.group)


def dispatch(tokens_TD: Tensor, tokens_per_expert: Tensor, group: dist.ProcessGroup) -> Dispatch:
    """Send every token to the rank that holds its expert. All ranks of ``group`` must call it.

    It reads the token counts back once, because the buffers' sizes depend on them. Fake tokens have no counts: they are
    taken to be balanced.

    Args:
        tokens_TD: this rank's tokens, those of expert 0 first, then those of expert 1 and so on.
        tokens_per_expert: number of these tokens for each of all experts, int64, [E].
        group: the ranks that divide the experts.

    Raises:
        PlanError: if the experts cannot be divided evenly over the ranks.
    """
    num_experts = len(tokens_per_expert)
    num_ranks = dist.get_world_size(group)
    if num_experts % num_ranks:
        legal = divisors(num_experts)
        raise PlanError(
            f"ep={num_ranks} does not divide the {num_experts} experts; use one of {', '.join(map(str, legal))}"
        )
    sent = tokens_per_expert.view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    if isinstance(tokens_TD, FakeTensor):
        num_sent = num_received = [len(part) for part in torch.tensor_split(tokens_TD, num_ranks)]
    else:
        num_sent = sent.sum(1).tolist()
        num_received = received.sum(1).tolist()
    arrived_RD = exchange(tokens_TD, num_received, num_sent, group)
    # tokens arrive by rank, and within a rank by expert; the stable sort keeps the order within an expert
    expert_R = torch.arange(received.shape[1], device=received.device).repeat(num_ranks)
    expert_R = expert_R.repeat_interleave(received.flatten(), output_size=len(arrived_RD))
    order_R = expert_R.argsort(stable=True)
    place_R = order_R.argsort()
    tokens_RD = rearrange(arrived_RD, order_R, place_R)
    return Dispatch(tokens_RD, received.sum(0), group, num_sent, num_received, order_R, place_R)
