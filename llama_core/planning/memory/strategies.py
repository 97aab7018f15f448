"""The tensors of layers that are not trained as a dense layer is: with adapters over frozen weights, or with experts.

A frozen matrix is held in the activations' dtype. It passes gradients on, for which it needs itself and nothing else,
so that its input is not kept; an adapter beside it does need that. Norms, attention and the activation keep what their
own gradients take. The first layer's input is taken to need a gradient as any other's does.

A token goes to its experts as so many copies, and every expert is taken to have the same number of them. Nothing is
dropped and nothing padded. The router keeps what goes into it, and what the experts return, by which it is graded.

Sources: Hu et al. 2021, arXiv:2106.09685, section 4; Jiang et al. 2024, arXiv:2401.04088, section 2.1.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.config.strategy import FEED_FORWARD_MATRICES, MATRICES, LoRA, MoE
from llama_core.planning.memory.tensors import FP32_BYTES, INT64_BYTES, Tensors
from llama_core.planning.plan import DocumentAttention, ParallelPlan

_DIVIDED_BY_ROWS = ("o_proj", "down_proj")
"""The matrices whose input tensor-parallel ranks divide between them; of the others it is the output."""


def tensors_by_layer(
    spec: ModelSpec, plan: ParallelPlan, *, seq_len: int, itemsize: int, documents: DocumentAttention
) -> list[Tensors]:
    """Return the sizes of every layer's tensors, from the arguments of ``Tensors``; layers that are alike share one."""

    def sizes(kind: Callable[..., Tensors]) -> Tensors:
        return kind(spec, plan, seq_len=seq_len, itemsize=itemsize, documents=documents)

    if spec.lora:
        return [sizes(partial(AdaptedTensors, spec.lora))] * spec.num_layers
    dense = sizes(Tensors)
    if not spec.moe:
        return [dense] * spec.num_layers
    sparse = sizes(partial(ExpertTensors, spec.moe))
    return [sparse if spec.moe.is_sparse(layer) else dense for layer in range(spec.num_layers)]


class AdaptedTensors(Tensors):
    """The sizes of one layer whose weights are frozen, with adapters beside some of its matrices.

    Args:
        lora: the adapters.
        spec, plan, sizes: as in ``Tensors``.
    """

    def __init__(self, lora: LoRA, spec: ModelSpec, plan: ParallelPlan, **sizes: Any) -> None:
        super().__init__(spec, plan, **sizes)
        self.targets = frozenset(lora.targets)
        tokens = self.whole // (spec.hidden_size * self.itemsize)
        self.bottleneck = tokens * lora.rank * self.itemsize  # what A returns
        self._adapters = {
            target: _adapter(spec.matrix_shapes[target], target, lora.rank, plan.tp) for target in MATRICES
        }
        self.norm -= self.wide  # the input normalised, which only the gradient of the norm's weight takes
        self.layer_trained = self._parameters(MATRICES)
        self.layer_parameters += self.layer_trained
        self.layer_divided = self.layer_parameters
        self.ffn_parameters = self._parameters(FEED_FORWARD_MATRICES) // 3
        if self.put_off:  # inputs and gradients of every A and B
            inputs = self._inputs()
            returned = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "o_proj": self.stream}
            returned |= {"gate_proj": self.ffn, "up_proj": self.ffn, "down_proj": self.stream}
            self.put_off = inputs + sum(returned[target] + 2 * self.bottleneck for target in self.targets)

    def _parameters(self, matrices: Iterable[str]) -> int:
        """Return the parameters of the adapters beside some matrices."""
        return sum(self._adapters[matrix] for matrix in self.targets.intersection(matrices))

    def _inputs(self) -> int:
        """Return the inputs of adapted matrices, of which some have the same."""
        shared = (("q_proj", "k_proj", "v_proj"), self.whole), (("gate_proj", "up_proj"), self.whole)
        own = (("o_proj",), self.queries), (("down_proj",), self.ffn)
        return sum(size for matrices, size in (*shared, *own) if self.targets.intersection(matrices))

    def _beside(self, matrices: Iterable[str]) -> int:
        """Return what the adapters beside some matrices keep between A and B, and the copies that both are cast to."""
        copies = self.itemsize * self._parameters(matrices) if self.casts else 0
        return copies + self.bottleneck * len(self.targets.intersection(matrices))

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return what one layer keeps for its backward."""
        if mode != "none":
            return super().layer(mode)
        # rotated queries, rotated keys and values; gate, silu(gate) and up
        needed = 2 * self.norm + self.queries + 2 * self.keys + self.log_sum_exp + 3 * self.ffn
        if "o_proj" not in self.targets:  # else what attention returns is among the inputs
            needed += self.queries
        return needed + self._inputs() + self._beside(MATRICES)

    def leaving(self, mode: RecomputeMode) -> int:
        """Return what one layer holds at its fullest at the end of its forward beside what it keeps."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets
        # beside what a matrix returns: what its adapter does, and that scaled
        joined = super().leaving("none") + 2 * self.whole * down
        # tensors beside those kept, as w3 joins its adapter or as w2 takes in a product that it does not keep
        inside = {"none": max((2 - down) * up, 1 - down), "selective": 0, "full": 3 + up}[mode]
        return max(joined, inside * self.ffn + self.stream + self.whole)

    @property
    def layer_before_w2(self) -> int:
        """What is left of a layer after the backward of its last matrix."""
        return self.layer() - self.ffn * ("down_proj" in self.targets) - self._beside(("down_proj",))

    @property
    def layer_before_norm(self) -> int:
        """What is left of a layer after the backward of all three matrices of its feed-forward."""
        return self.layer() - self.ffn * (3 + ("down_proj" in self.targets)) - self._beside(FEED_FORWARD_MATRICES)


def _adapter(shape: tuple[int, int], matrix: str, rank: int, tp: int) -> int:
    """Return the parameters that one of ``tp`` ranks has of the adapter beside a matrix."""
    columns, rows = shape
    return rank * (columns // tp + rows if matrix in _DIVIDED_BY_ROWS else columns + rows // tp)


class ExpertTensors(Tensors):
    """The sizes of one layer that has experts in place of its feed-forward.

    Args:
        moe: the experts.
        spec, plan, sizes: as in ``Tensors``.
    """

    def __init__(self, moe: MoE, spec: ModelSpec, plan: ParallelPlan, **sizes: Any) -> None:
        super().__init__(spec, plan, **sizes)
        copies, tokens = moe.experts_per_token, self.whole // (spec.hidden_size * self.itemsize)
        dense_ffn = self.ffn
        self.ffn *= copies
        self.entering = copies * self.whole
        # probabilities of all experts; of the chosen ones their sum, their gates, and these once more in the
        # activations' dtype; who they are, and the order of their tokens, there and back
        routing = FP32_BYTES * (moe.num_experts + 1) + copies * (FP32_BYTES + self.itemsize + 3 * INT64_BYTES)
        self.routing = tokens * routing
        self.exchanged = 2 * self.entering if plan.ep > 1 else 0  # what is sent, and what arrives before it is sorted
        if self.put_off:  # inputs and gradients of router and experts
            self.put_off += 3 * (self.ffn - dense_ffn) + 2 * self.entering

        experts = moe.num_experts // plan.ep
        self.ffn_parameters *= experts  # w1, w2 and w3 of all experts are a tensor each
        feed_forward = spec.expert_parameters // plan.tp
        self.layer_parameters += spec.hidden_size * moe.num_experts + (experts - 1) * feed_forward
        self.layer_trained = self.layer_parameters
        # an expert is on fewer ranks than the rest, where expert-parallel ones are among those that shard
        apart = math.gcd(plan.ep, plan.dp_shard)
        self.layer_divided = self.layer_parameters + (apart - 1) * experts * feed_forward

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return what one layer keeps for its backward."""
        kept = super().layer(mode)
        if mode == "full":
            return kept
        if mode == "selective":  # w1's product in place of the dense one's, and what is not sent a second time
            return kept + self.exchanged
        return kept + self.routing + 2 * self.entering  # the experts' inputs and what they return

    def leaving(self, mode: RecomputeMode) -> int:
        """Return what one layer holds at its fullest at the end of its forward beside what it keeps."""
        # what the experts returned, times their gates
        joined = super().leaving("none") + self.exchanged + self.entering * (2 if mode == "full" else 1)
        if mode != "full":
            return joined
        return max(joined, 3 * self.ffn + self.entering + self.stream + self.whole)

    @property
    def layer_before_w2(self) -> int:
        """What is left of a layer after the backward of the experts' last matrices."""
        return super().layer_before_w2 - self.entering

    @property
    def layer_before_norm(self) -> int:
        """What is left of a layer after the backward of all matrices of its experts."""
        return super().layer_before_norm - 2 * self.entering
