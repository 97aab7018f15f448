"""The tensors of a layer with adapters over frozen weights.

A frozen matrix is held in the activations' dtype. It needs only itself to pass gradients on, so its input is not kept,
but an adapter beside it needs that input. Norms, attention and the activation keep what their own gradients need, but
nothing before the first adapter, whose input needs no gradient.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.
"""

from collections.abc import Iterable
from typing import Any

from llama_core.config.models import ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.config.strategy import FEED_FORWARD_MATRICES, MATRICES, LoRA
from llama_core.planning.memory.tensors import DIVIDED_INPUT, Tensors, adapter_size
from llama_core.planning.plan import ParallelPlan


class AdaptedTensors(Tensors):
    """The sizes of one layer whose weights are frozen, with adapters beside some of its matrices.

    Args:
        lora: the adapters.
        spec, plan, sizes: as in ``Tensors``.
        follows_adapters: whether there are adapters before the layer, which need the gradient of its input.
    """

    def __init__(
        self, lora: LoRA, spec: ModelSpec, plan: ParallelPlan, *, follows_adapters: bool = True, **sizes: Any
    ) -> None:
        super().__init__(spec, plan, **sizes)
        self.is_tensor_parallel = plan.tp > 1
        self.targets = frozenset(lora.in_layers)
        tokens = self.whole // (spec.hidden_size * self.itemsize)
        self.bottleneck = tokens * lora.lora_rank * self.itemsize  # A's output
        self._adapters = {matrix: adapter_size(spec, matrix, plan.tp) for matrix in lora.in_layers}
        self.norm -= self.wide  # the normalised input, which only the gradient of the norm's weight needs
        self.layer_trained = self._parameters(MATRICES)
        self.layer_parameters += self.layer_trained
        self.layer_divided = self.layer_parameters
        self.ffn_parameters = self._parameters(FEED_FORWARD_MATRICES) // 3
        self.dropped = lora.lora_dropout > 0
        self._unneeded = 0 if follows_adapters else self._before_adapters()
        if self.put_off:  # inputs and gradients of every A and B
            inputs = self._inputs()
            returned = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "o_proj": self.stream}
            returned |= {"gate_proj": self.ffn, "up_proj": self.ffn, "down_proj": self.stream}
            self.put_off = inputs + sum(returned[target] + 2 * self.bottleneck for target in self.targets)

    def _parameters(self, matrices: Iterable[str]) -> int:
        """Return the number of parameters in the adapters of some matrices."""
        return sum(sum(self._adapters[matrix]) for matrix in self.targets.intersection(matrices))

    def _inputs(self, matrices: Iterable[str] = MATRICES) -> int:
        """Return the bytes kept of the inputs of adapted matrices: some share one, unless each has its own dropout."""
        adapted = self.targets.intersection(matrices)
        if self.dropped:  # an input after dropout, and its mask
            return sum(self._input(name) + self._mask(name) for name in adapted)
        shared = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        own = sum(self._input(name) for name in adapted.intersection(DIVIDED_INPUT))
        return own + sum(self.whole for names in shared if adapted.intersection(names))

    def _input(self, matrix: str) -> int:
        """Return the bytes of a matrix's input."""
        return {"o_proj": self.queries, "down_proj": self.ffn}.get(matrix, self.whole)

    def _mask(self, matrix: str) -> int:
        """Return the bytes of the dropout mask of an adapter's input."""
        return self._input(matrix) // self.itemsize if self.dropped else 0

    def _beside(self, matrices: Iterable[str]) -> int:
        """Return the bytes that the adapters of some matrices keep between A and B, and of the cast copies of both."""
        copies = self.itemsize * self._parameters(matrices) if self.casts else 0
        return copies + self.bottleneck * len(self.targets.intersection(matrices))

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return the bytes one layer keeps for its backward."""
        if mode != "none":
            return super().layer(mode)
        # rotated queries, rotated keys and values; gate, silu(gate) and up
        needed = 2 * self.norm + self.queries + 2 * self.keys + self.log_sum_exp + 3 * self.ffn
        if "o_proj" not in self.targets or self.dropped:  # else attention's output is among the inputs
            needed += self.queries
        return needed + self._inputs() + self._beside(MATRICES) - self._unneeded

    def _before_adapters(self) -> int:
        """Return the bytes a layer would keep for gradients that are not needed, if the first adapters are its own."""
        scores = self.queries + 2 * self.keys + self.log_sum_exp
        if "o_proj" not in self.targets or self.dropped:
            scores += self.queries
        unneeded = 0
        for kept, matrices in (
            (self.norm, ("q_proj", "k_proj", "v_proj")),
            (scores, ("o_proj",)),
            (self.norm, ("gate_proj", "up_proj")),
            (3 * self.ffn, ("down_proj",)),
        ):
            first = self.targets.intersection(matrices)
            unneeded += kept
            for name in first:
                divided, whole = self._adapters[name]
                unneeded += self.itemsize * (divided if name in DIVIDED_INPUT else whole) * self.casts  # A's copy
                unneeded += self._mask(name)
            if first:
                # gate and up are each kept for the gradient of the other, and gate for its own too
                return unneeded + {"up_proj": 2 * self.ffn, "gate_proj": self.ffn}.get("".join(first), 0)
        return unneeded

    def leaving(self, mode: RecomputeMode) -> int:
        """Return the most bytes one layer holds at the end of its forward on top of those it keeps."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets
        if mode != "none":
            return max(super().leaving("none"), (3 + up) * self.ffn + self.stream + self.whole)
        parts = self.stream * self.is_divided  # this rank's part of a tensor beside the whole one
        # the stream before and after attention, and the norm's output
        entered = self.stream * (2 if self.narrow else 1) + self._entering + parts
        if down:  # w2's output, its adapter's, their sum and, after dropout, the product that both read
            joined = entered + 3 * self.whole + self.ffn * self.dropped
        else:  # w2's input and its output (of a divided sequence also in the order in which it is sent, and its part)
            joined = entered + self.ffn + self.whole * (1 + self.is_divided) + parts
        # w3's output and its adapter's, before w2's input, which only an adapter keeps
        return max(joined, ((2 - down) * self.ffn + entered) * up)

    @property
    def _entering(self) -> int:
        """Bytes of the normalised input of the feed-forward, if no adapter keeps it."""
        return self.whole if self.dropped or not self.targets.intersection(("gate_proj", "up_proj")) else 0

    @property
    def recomputing(self) -> int:  # type: ignore[override]
        """Bytes one layer holds on top of those it keeps as recomputation ends: before w2, or with down_proj in it."""
        down = "down_proj" in self.targets
        last = max((self.whole + self.ffn * self.dropped) * down, self._inside * self.ffn)
        gradient = self.whole * self.is_tensor_parallel  # of the output, over the whole sequence and all ranks
        return last + self._entering + gradient + self.stream * (self.narrow + self.is_divided)

    @property
    def _inside(self) -> int:
        """Tensors on top of those kept as w3 adds its adapter, or as w2 reads a product that is not kept."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets and not self.dropped
        return max((2 - down) * up, 1 - down)

    @property
    def layer_before_w2(self) -> int:
        """Bytes left of a layer after the backward of its last matrix."""
        if self.put_off:  # the weight gradients of its adapter are still to come
            return self.layer()
        return self.layer() - self._inputs(("down_proj",)) - self._beside(("down_proj",))

    @property
    def layer_before_norm(self) -> int:
        """Bytes left of a layer after the backward of all three matrices of its feed-forward."""
        return self.layer_before_w2 - 3 * self.ffn - self._beside(("gate_proj", "up_proj"))
