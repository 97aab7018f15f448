"""The tensors of a layer with adapters over frozen weights.

A frozen matrix is held in the activations' dtype. It passes gradients on, for which it needs itself and nothing else,
so that its input is not kept; an adapter beside it does need that. Norms, attention and the activation keep what their
own gradients take; none of them do before the first adapter, whose input no gradient is needed of.

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
        self.targets = frozenset(lora.in_layers)
        tokens = self.whole // (spec.hidden_size * self.itemsize)
        self.bottleneck = tokens * lora.lora_rank * self.itemsize  # what A returns
        self._adapters = {matrix: adapter_size(spec, matrix, plan.tp) for matrix in lora.in_layers}
        self.norm -= self.wide  # the input normalised, which only the gradient of the norm's weight takes
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
        """Return the parameters of the adapters beside some matrices."""
        return sum(sum(self._adapters[matrix]) for matrix in self.targets.intersection(matrices))

    def _inputs(self, matrices: Iterable[str] = MATRICES) -> int:
        """Return what is kept of the inputs of adapted matrices: some have the same, unless each drops its own."""
        adapted = self.targets.intersection(matrices)
        if self.dropped:  # what is left of an input, and which part that is
            return sum(self._input(name) + self._mask(name) for name in adapted)
        shared = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        own = sum(self._input(name) for name in adapted.intersection(DIVIDED_INPUT))
        return own + sum(self.whole for names in shared if adapted.intersection(names))

    def _input(self, matrix: str) -> int:
        """Return what goes into a matrix."""
        return {"o_proj": self.queries, "down_proj": self.ffn}.get(matrix, self.whole)

    def _mask(self, matrix: str) -> int:
        """Return what says which part of a matrix's input its adapter gets."""
        return self._input(matrix) // self.itemsize if self.dropped else 0

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
        if "o_proj" not in self.targets or self.dropped:  # else what attention returns is among the inputs
            needed += self.queries
        return needed + self._inputs() + self._beside(MATRICES) - self._unneeded

    def _before_adapters(self) -> int:
        """Return what a layer keeps for gradients that nobody needs where the first adapters are its own."""
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
                # of gate and up, each is kept for the gradient of the other, and gate for its own too
                return unneeded + {"up_proj": 2 * self.ffn, "gate_proj": self.ffn}.get("".join(first), 0)
        return unneeded

    def leaving(self, mode: RecomputeMode) -> int:
        """Return what one layer holds at its fullest at the end of its forward beside what it keeps."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets
        # beside what a matrix returns: what its adapter does, and that scaled
        joined = super().leaving("none") + 2 * self.whole * down
        inside = {"none": self._inside, "selective": 0, "full": 3 + up}[mode]
        return max(joined, inside * self.ffn + self.stream + self.whole)

    @property
    def recomputing(self) -> int:  # type: ignore[override]
        """What one layer holds beside what it keeps as its recomputation ends: before w2, or with down_proj in it."""
        down = "down_proj" in self.targets
        last = max((self.whole + self.ffn * self.dropped) * down, self._inside * self.ffn)
        entering = self.whole if self.dropped or not self.targets.intersection(("gate_proj", "up_proj")) else 0
        gradient = self.whole * self.is_divided  # of what comes out, of the whole sequence
        return last + entering + gradient + self.stream * (self.narrow + self.is_divided)

    @property
    def _inside(self) -> int:
        """Tensors beside those kept as w3 joins its adapter, or as w2 takes in a product that it does not keep."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets and not self.dropped
        return max((2 - down) * up, 1 - down)

    @property
    def layer_before_w2(self) -> int:
        """What is left of a layer after the backward of its last matrix."""
        if self.put_off:  # the weight gradients of its adapter are still to come
            return self.layer()
        return self.layer() - self._inputs(("down_proj",)) - self._beside(("down_proj",))

    @property
    def layer_before_norm(self) -> int:
        """What is left of a layer after the backward of all three matrices of its feed-forward."""
        return self.layer_before_w2 - 3 * self.ffn - self._beside(("gate_proj", "up_proj"))
