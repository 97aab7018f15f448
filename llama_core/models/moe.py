"""A mixture of experts in place of a feed-forward: a router sends each token through a few of many feed-forwards.

No token is dropped and nothing is padded: an expert gets as many tokens as chose it. Two losses keep the router
healthy: one is lowest if all experts get equally many tokens, the other if the logits are small. They are means over
the rows of a step, so they do not depend on how the step is divided. Only their gradients enter the training, in the
backward of the gates; the model's loss stays the cross-entropy.

Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1; Fedus et al. 2021, arXiv:2101.03961, section 2.2, for the
balance; Zoph et al. 2022, arXiv:2202.08906, equation 5, for the logits; DeepSeek-AI 2024, arXiv:2412.19437, section
2.1.2, for groups of experts and for biases that balance them, which ``parallel.balance`` moves.
"""

# Shape suffixes: B batch, S sequence, D model dim, E experts, K experts of a token, G groups of experts, M experts of a
# group, T tokens (B * S), R routed tokens (T * K: a token counts once for each of its experts), I columns of a matrix,
# O its rows, L layers with experts

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Replicate
from torch.fx.traceback import annotate

from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.models.activations import gated
from llama_core.models.cast_weights import cast_grouped, takes_wide_gradient
from llama_core.models.grouped import add_to_groups, grouped_product
from llama_core.models.layers import KEPT, FeedForward, Linear, local_part, unchanged
from llama_core.records.measurements import OF_LAYER

NUM_SUMS = 3
"""Sums over tokens in the statistics of a layer, behind the tokens of each expert."""


def feed_forward(spec: ModelSpec, layer: int) -> nn.Module:
    """Return the feed-forward of a layer, or the experts in its place."""
    if spec.moe is None or not spec.has_experts(layer):
        return FeedForward(spec)
    return MixtureOfExperts(spec, spec.moe)


class ExpertLinear(nn.Module):
    """A matrix for every expert, with or without a bias, cast to the dtype of its input at use.

    Args:
        num_experts: number of matrices.
        in_features: columns of each.
        out_features: rows of each.
        bias: whether a trained vector is added to what each makes of a row.
    """

    kept = False
    """Whether selective recomputation keeps the result."""
    cast_weight: Tensor | None = None
    """A copy of this rank's part of the weight in the dtype of activations; None to cast it at every use."""
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    """Multiplies rows by the weight, given its copy and where each expert's rows end."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None
        self.multiply = _multiply
        self.own_bias: Callable[[Tensor], Tensor] = local_part
        """Returns what this rank adds of the biases, or of its part of them."""

    def forward(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        """Return each row times the transposed matrix of its expert, [R, O], plus its bias if there is one."""
        with annotate({KEPT: self.kept}):
            out_RO = self.multiply(x_RI, local_part(self.weight), self.cast_weight, ends_E)
        return out_RO if self.bias is None else add_to_groups(out_RO, self.own_bias(self.bias).to(out_RO.dtype), ends_E)


def _multiply(x_RI: Tensor, weight_EOI: Tensor, cast_EOI: Tensor | None, ends_E: Tensor) -> Tensor:
    if cast_EOI is None:
        if not takes_wide_gradient(weight_EOI, x_RI):
            out_RO: Tensor = grouped_product(x_RI, weight_EOI.to(x_RI.dtype).mT, ends_E)
            return out_RO
        cast_EOI = weight_EOI.detach().to(x_RI.dtype)
    return cast_grouped(x_RI, weight_EOI, cast_EOI, ends_E)


class Experts(nn.Module):
    """A gated feed-forward for every expert; see ``FeedForward``."""

    def __init__(self, spec: ModelSpec, num_experts: int) -> None:
        super().__init__()
        self.activation = spec.activation
        bias = spec.expert_biases
        self.w1 = ExpertLinear(num_experts, spec.hidden_size, spec.expert_size, bias=bias)
        self.w2 = ExpertLinear(num_experts, spec.expert_size, spec.hidden_size, bias=bias)
        self.w3 = ExpertLinear(num_experts, spec.hidden_size, spec.expert_size, bias=bias)

    def forward(self, x_RD: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Return the output of each token's expert, [R, D]; the tokens are sorted by expert."""
        ends_E = tokens_per_expert.cumsum(0, dtype=torch.int32)
        out_RD: Tensor = self.w2(gated(self.w1(x_RD, ends_E), self.w3(x_RD, ends_E), self.activation), ends_E)
        return out_RD


class SharedExpert(FeedForward):
    """The feed-forward beside the experts, which every token goes through."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, spec.shared_size)


class MixtureOfExperts(nn.Module):
    """A router, the experts that it sends each token to, and the one that all tokens share, if there is one.

    Args:
        spec: the architecture.
        moe: the experts.
    """

    auxiliary_scale: Tensor | None = None
    """Factor on the gradients of the auxiliary losses, summed over rows: a scalar. None leaves these losses out."""
    statistics: Tensor | None = None
    """Sums over the tokens of all forwards since ``prepare_routers``: tokens of each expert, and ``token_sums``."""
    balance_bias: Tensor | None
    """A number for each expert that joins its score when experts are chosen: fp32, [E]. None without."""

    def __init__(self, spec: ModelSpec, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.router = Linear(spec.hidden_size, moe.num_experts, bias=moe.biases)
        zeros_E = torch.zeros(moe.num_experts, dtype=torch.float32) if moe.balance_bias else None
        self.register_buffer("balance_bias", zeros_E)
        self.experts = Experts(spec, moe.num_experts)
        self.shared = SharedExpert(spec) if moe.shared_size else None
        self.run_experts: Callable[[Experts, Tensor, Tensor], Tensor] = _run_here
        """Sends tokens, sorted by expert, [R, D], through the experts, given the number of each expert's tokens."""
        self.run_experts_of_tokens: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None
        """Does all of that for tokens, [T, D], given their gates and their experts, [T, K], and returns the weighted
        sums; None to sort copies of tokens by expert here."""
        self.count_rows: Callable[[Tensor], Tensor] = unchanged
        """Returns the tokens of each row and expert, [B, E], over whole sequences, from those of the part held here."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights, but keep the balance biases in fp32, since a step changes them by little."""
        bias_E = self.balance_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias_E is not None and self.balance_bias is not None and self.balance_bias.dtype != torch.float32:
            self.balance_bias = bias_E.to(self.balance_bias.device)
        return self

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the experts' outputs, weighted by the gates, plus that of the shared one, as ``x_BSD`` is.

        A tensor-parallel rank returns its part of a sum.
        """
        routed_BSD = self._routed(local_part(x_BSD, Partial()))
        return routed_BSD if self.shared is None else routed_BSD + local_part(self.shared(x_BSD), Replicate())

    def _routed(self, x_BSD: Tensor) -> Tensor:
        """Return the experts' outputs, weighted by the gates."""
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = self.router(x_BSD.to(wide))
        bias_E = None if self.balance_bias is None else local_part(self.balance_bias)
        gates_BSK, chosen_BSK = choose_experts(logits_BSE, self.moe, bias_E)
        held_BE = _count(chosen_BSK, self.moe.num_experts)
        if self.auxiliary_scale is not None and torch.is_grad_enabled():
            gates_BSK = self._watched(gates_BSK, logits_BSE, held_BE, self.auxiliary_scale)
        gates_TK = gates_BSK.to(x_BSD.dtype).flatten(0, 1)
        if self.run_experts_of_tokens is not None:
            chosen_TK = chosen_BSK.flatten(0, 1)
            return self.run_experts_of_tokens(self.experts, x_BSD.flatten(0, 1), gates_TK, chosen_TK).view_as(x_BSD)
        gates_TK1 = gates_TK[:, :, None]
        order_R = chosen_BSK.flatten().argsort(stable=True)
        place_R = order_R.argsort()
        place_TK = place_R.view(gates_TK1.shape[:2])
        tokens_RD: Tensor = _Spread.apply(x_BSD.flatten(0, 1), order_R, place_TK)  # type: ignore[no-untyped-call]
        if self.moe.gate_inputs:
            tokens_RD = tokens_RD * rearrange(gates_TK1.flatten(0, 1), order_R, place_R)
        results_RD = self.run_experts(self.experts, tokens_RD, held_BE.sum(0))
        results_TKD = rearrange(results_RD, place_R, order_R).view(*place_TK.shape, -1)
        if not self.moe.gate_inputs:
            results_TKD = results_TKD * gates_TK1
        return results_TKD.sum(1).view_as(x_BSD)

    def _watched(self, gates_BSK: Tensor, logits_BSE: Tensor, held_BE: Tensor, scale: Tensor) -> Tensor:
        """Return the gates, whose backward adds the gradients of the auxiliary losses; record the statistics."""
        moe = self.moe
        whole_BE = self.count_rows(held_BE)
        sums = token_sums(logits_BSE, whole_BE, sigmoids=moe.has_sigmoids)
        tokens_B = whole_BE.sum(1) / moe.experts_per_token
        balance_loss, z_loss = ((sums_B / tokens_B).sum() for sums_B in sums[:2])
        loss = moe.balance_loss_coefficient * balance_loss + moe.z_loss_coefficient * z_loss
        if self.statistics is not None:
            totals = torch.stack(sums).detach().sum(1)
            add_once(self.statistics, torch.cat((held_BE.sum(0).to(totals.dtype), totals)))
        gates: Tensor = _WithAuxiliaryLoss.apply(gates_BSK, loss, scale)  # type: ignore[no-untyped-call]
        return gates


def choose_experts(logits_BSE: Tensor, moe: MoE, balance_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gates of each token's experts, [B, S, K], and these experts, int64.

    Args:
        logits_BSE: the router's logits.
        moe: how experts are chosen, and what makes gates.
        balance_bias_E: what joins the score of each expert when experts are chosen.
    """
    if moe.chooses_by_scores:
        chosen_BSK = _best_by_score(logits_BSE.detach(), moe, balance_bias_E)
        best_BSK = logits_BSE.gather(-1, chosen_BSK)
    else:
        best_BSK, chosen_BSK = logits_BSE.topk(moe.experts_per_token, dim=-1)
    match moe.gates:
        case "softmax_chosen":
            gates_BSK = best_BSK.softmax(-1)
        case "softmax_all":
            gates_BSK = logits_BSE.softmax(-1).gather(-1, chosen_BSK)
        case "sigmoid":
            gates_BSK = best_BSK.sigmoid()
        case "sigmoid_chosen":
            # sigmoids over their sum, which may underflow where this does not
            gates_BSK = (-F.softplus(-best_BSK)).softmax(-1)
    return gates_BSK if moe.gate_scale == 1.0 else gates_BSK * moe.gate_scale, chosen_BSK


def _best_by_score(logits_BSE: Tensor, moe: MoE, balance_bias_E: Tensor | None) -> Tensor:
    """Return the experts of each token with the highest scores, int64 [B, S, K], all of them in its best groups."""
    scores_BSE = logits_BSE.sigmoid() if moe.has_sigmoids else logits_BSE.softmax(-1)
    if balance_bias_E is not None:
        scores_BSE = scores_BSE + balance_bias_E
    if moe.expert_groups > 1:
        scores_BSGM = scores_BSE.view(*scores_BSE.shape[:-1], moe.expert_groups, -1)
        best_two = scores_BSGM.topk(min(2, scores_BSGM.shape[-1]), dim=-1).values
        groups_BSG = best_two.sum(-1)
        chosen_groups = groups_BSG.topk(moe.groups_per_token, dim=-1).indices
        is_left_out_BSG = torch.ones_like(groups_BSG, dtype=torch.bool).scatter(-1, chosen_groups, value=False)
        scores_BSE = scores_BSGM.masked_fill(is_left_out_BSG[..., None], -torch.inf).view_as(scores_BSE)
    return scores_BSE.topk(moe.experts_per_token, dim=-1).indices


def token_sums(logits_BSE: Tensor, tokens_BE: Tensor, *, sigmoids: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return three sums over the tokens of each row, [B]: of the balance loss, the z-loss, and the router's entropy.

    The balance loss of a row is ``E * sum(share * mean probability)`` over the experts. It is 1 if all experts get
    equally many tokens, and E if one gets all of them. The z-loss is the mean square of the logits' log-sum-exp.
    Probabilities are a softmax of the logits or, of scores that are sigmoids, all sigmoids over their sum.

    Args:
        logits_BSE: the router's logits, for all tokens of each row or for a part of them.
        tokens_BE: the number of tokens of each expert, in whole rows.
        sigmoids: whether the scores of experts are sigmoids.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, equations 17 to 20, for sigmoids.
    """
    log_sum_exp_BS1 = logits_BSE.logsumexp(-1, keepdim=True)
    if sigmoids:
        log_sigmoids_BSE = -F.softplus(-logits_BSE)
        log_probabilities_BSE = log_sigmoids_BSE - log_sigmoids_BSE.logsumexp(-1, keepdim=True)
    else:
        log_probabilities_BSE = logits_BSE - log_sum_exp_BS1
    probabilities_BSE = log_probabilities_BSE.exp()
    shares_BE = tokens_BE / tokens_BE.sum(1, keepdim=True)
    balance_B = logits_BSE.shape[-1] * (shares_BE * probabilities_BSE.sum(1)).sum(-1)
    with torch.no_grad():
        entropy_B = -(probabilities_BSE * log_probabilities_BSE).sum((1, 2))
    return balance_B, log_sum_exp_BS1.square().sum((1, 2)), entropy_B


def _count(chosen_BSK: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens of each row and expert: int64, [B, E]."""
    chosen_BT = chosen_BSK.flatten(1)
    zeros_BE = chosen_BT.new_zeros((len(chosen_BT), num_experts))
    return zeros_BE.scatter_add(1, chosen_BT, torch.ones_like(chosen_BT))


def _run_here(experts: Experts, tokens_RD: Tensor, tokens_per_expert: Tensor) -> Tensor:
    results_RD: Tensor = experts(tokens_RD, tokens_per_expert)
    return results_RD


class _Spread(torch.autograd.Function):
    """Copies each token to its experts, sorted by expert. The backward adds without atomics, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return x_TD[order_R // place_TK.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return grad_RD[place_TK].sum(1), None, None


class _Rearrange(torch.autograd.Function):
    """Puts rows in another order. Unlike indexing, its backward knows that no row is taken twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def rearrange(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return ``x[order]``; ``order`` is a permutation of the rows, with the inverse ``inverse``."""
    out: Tensor = _Rearrange.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return out


class _WithAuxiliaryLoss(torch.autograd.Function):
    """Passes a tensor through; the backward gives ``loss`` the gradient ``scale`` whatever the tensor's own is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale.to(ctx.dtype), None


@torch.library.custom_op("llama_core::add_once", mutates_args=("total",))
def add_once(total: Tensor, values: Tensor) -> None:
    """Add values to a total, unless a backward is recomputing the forward that has added them."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


@add_once.register_fake
def _(total: Tensor, values: Tensor) -> None:
    pass


def mixtures(model: nn.Module) -> Iterator[MixtureOfExperts]:
    """Yield the mixtures of a model, or of a part of one, from its first layer to its last."""
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def prepare_routers(model: nn.Module, scale: Tensor) -> None:
    """Begin a step: set the factor on the gradients of the auxiliary losses, and set the statistics to zero.

    Args:
        model: a part of a model.
        scale: factor on the gradients, summed over the rows of this rank: a scalar, fp32 or wider.
    """
    for module in mixtures(model):
        module.auxiliary_scale = scale
        module.statistics = scale.new_zeros(module.moe.num_experts + NUM_SUMS)


class Routers:
    """What the routers of a model measure: how evenly they spread tokens over experts.

    Args:
        spec: the architecture of the whole model.
        moe: its experts.
        layers: the number and module of each layer of this rank's part of the model.
    """

    def __init__(self, spec: ModelSpec, moe: MoE, layers: Iterable[tuple[str, nn.Module]]) -> None:
        self._moe = moe
        self._layers = layers
        self._num_layers = spec.num_blocks
        self._sparse = [layer for layer in range(spec.num_blocks) if spec.has_experts(layer)]
        # with balance biases, also the largest, which is equal on all ranks of a layer, times the tokens of each
        self.num_sums = spec.num_blocks * (moe.num_experts + NUM_SUMS + moe.balance_bias)
        kinds = ("expert_load", "router_entropy", *(("balance_bias",) if moe.balance_bias else ()))
        by_layer = [f"{name}{OF_LAYER}{layer}" for name in kinds for layer in self._sparse]
        self.names = ["balance_loss", "router_z_loss", "router_entropy", "expert_load", "unused_experts", *by_layer]
        """What it records: of all layers together, and of each that has experts."""

    def take_measured(self) -> Tensor | None:
        """Return the statistics of each layer, [num_sums]; of layers that are dense or on other ranks, zeros."""
        total: Tensor | None = None
        for name, block in self._layers:
            for mixture in mixtures(block):
                statistics = mixture.statistics
                if statistics is None:
                    continue
                if total is None:
                    total = statistics.new_zeros((self._num_layers, self.num_sums // self._num_layers))
                total[int(name), : len(statistics)] = statistics
                if mixture.balance_bias is not None:
                    tokens = statistics[: self._moe.num_experts].sum()
                    total[int(name), -1] = tokens * local_part(mixture.balance_bias).abs().max()
                statistics.zero_()
        return None if total is None else total.flatten()

    def of_step(self, sums: Sequence[float]) -> dict[str, float]:
        """Return means over all tokens and sparse layers, and some of each layer.

        ``balance_loss`` is 1 if tokens are spread evenly, and the number of experts at worst; it is not multiplied by
        its coefficient. ``router_z_loss`` is the mean square of the log-sum-exp of the logits, ``router_entropy`` the
        entropy of the probabilities, in nats. ``expert_load`` is the number of tokens of a layer's busiest expert over
        the mean of its experts, in the layer where this is highest. ``unused_experts`` is how many experts of all
        layers got no token. ``balance_bias`` is the largest of a layer in size, after the step.
        """
        tokens_LE, sums_LS, of_biases = self._rows(sums)
        if not tokens_LE.any():
            return {}
        tokens_L = tokens_LE.sum(1) / self._moe.experts_per_token
        balance, z_loss, entropy = (sums_LS.sum(0) / tokens_L.sum()).tolist()
        loads = (tokens_LE.max(1) / tokens_LE.mean(1)).tolist()
        entropies = (sums_LS[:, -1] / tokens_L).tolist()
        of_all = (balance, z_loss, entropy, max(loads), float((tokens_LE == 0).sum()))
        biases = (of_biases / tokens_LE.sum(1, keepdims=True)).flatten().tolist()
        return dict(zip(self.names, (*of_all, *loads, *entropies, *biases), strict=True))

    def expert_shares(self, sums: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Return which share of a layer's routed tokens each of its experts got, by the layer's number."""
        tokens_LE, *_ = self._rows(sums)
        if not tokens_LE.any():
            return {}
        shares_LE = tokens_LE / tokens_LE.sum(1, keepdims=True)
        return {str(layer): tuple(row) for layer, row in zip(self._sparse, shares_LE.tolist(), strict=True)}

    def _rows(self, sums: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each sparse layer, the tokens of its experts, the sums over its tokens, and that of biases."""
        rows = np.reshape(sums, (self._num_layers, -1))[self._sparse]
        tokens_LE, sums_LS, of_biases = np.split(rows, np.cumsum((self._moe.num_experts, NUM_SUMS)), axis=1)
        return tokens_LE, sums_LS, of_biases
