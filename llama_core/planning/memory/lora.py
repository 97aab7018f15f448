"""The tensors of a layer with adapters over frozen weights, some of which may be trained in full.

A frozen matrix is held in the activations' dtype. It needs only itself to pass gradients on, so its input is not kept,
but an adapter beside it needs that input, as a trained matrix does. Norms, attention and the activation keep what their
own gradients need, but nothing before the first trained weight, whose input needs no gradient.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from llama_core.config.models import ATTENTION_NORM, FFN_NORM, LayerTraits, ModelSpec
from llama_core.config.run import RecomputeMode
from llama_core.config.strategy import FEED_FORWARD_MATRICES, MATRICES, LoRA, MoE
from llama_core.planning.memory.experts import ExpertTensors
from llama_core.planning.memory.tensors import DIVIDED_INPUT, Tensors, adapter_size
from llama_core.planning.plan import ParallelPlan


class AdaptedTensors(Tensors):
    """The sizes of one layer whose weights are frozen but for some, with adapters beside some of its matrices.

    Args:
        spec, plan, sizes: as in ``Tensors``.
        lora: the adapters.
        traits: which matrices have them, and what is trained in full.
        follows_trained: whether weights before the layer are trained, which need the gradient of its input.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        lora: LoRA,
        traits: LayerTraits,
        follows_trained: bool = True,
        **sizes: Any,
    ) -> None:
        super().__init__(spec, plan, **sizes)
        self.is_tensor_parallel = plan.tp > 1
        self.targets, self.traits, self.follows_trained = traits.adapted, traits, follows_trained
        tokens = self.whole // (spec.hidden_size * self.itemsize)
        self.bottleneck = tokens * lora.lora_rank * self.itemsize  # A's output
        self._adapters = {matrix: adapter_size(spec, matrix, plan.tp) for matrix in self.targets}
        self.whole_matrices = traits.trained.intersection(MATRICES)
        self.trained_parameters = {name: sum(adapter) for name, adapter in self._adapters.items()}
        """Of each matrix and its adapter."""
        self.trained_parameters |= {name: prod(spec.matrix_shapes[name]) // plan.tp for name in self.whole_matrices}
        # a norm keeps its normalised input for the gradient of its weight, and a cast copy of a trained weight
        self._trained_norm = self.weight_norm + self.itemsize * self.casts * spec.hidden_size
        self.norm += self._trained_norm * (ATTENTION_NORM in traits.trained) - self.weight_norm
        self.ffn_norm += self._trained_norm * (FFN_NORM in traits.trained) - self.weight_norm
        norms = len(traits.trained.intersection((ATTENTION_NORM, FFN_NORM)))
        self.layer_trained = self._parameters(MATRICES) + norms * spec.hidden_size
        self.layer_parameters += self._parameters(self.targets)
        self.layer_divided = self.layer_parameters
        self.ffn_parameters = self._parameters(FEED_FORWARD_MATRICES) // 3
        self.dropped = lora.lora_dropout > 0
        # matrices whose very input is kept: adapters behind a dropout have their own
        self.reading = self.whole_matrices if self.dropped else self.whole_matrices | self.targets
        if self.put_off:  # inputs and gradients of every A and B
            inputs = self._inputs()
            returned = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "o_proj": self.stream}
            returned |= {"gate_proj": self.ffn, "up_proj": self.ffn, "down_proj": self.stream}
            self.put_off = inputs + sum(returned[name] for name in self.trained_parameters)
            self.put_off += 2 * self.bottleneck * len(self.targets)

    def _parameters(self, matrices: Iterable[str]) -> int:
        """Return the number of trained parameters in some matrices and their adapters."""
        return sum(self.trained_parameters.get(matrix, 0) for matrix in matrices)

    def _inputs(self, matrices: Iterable[str] = MATRICES) -> int:
        """Return the bytes kept of the inputs of trained and adapted matrices: some share one, but after dropout."""
        reading, kept = self.reading.intersection(matrices), 0
        if self.dropped:  # an input after dropout, and its mask
            kept = sum(self._input(name) + self._mask(name) for name in self.targets.intersection(matrices))
        shared = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        own = sum(self._input(name) for name in reading.intersection(DIVIDED_INPUT))
        return kept + own + sum(self.whole for names in shared if reading.intersection(names))

    def _input(self, matrix: str) -> int:
        """Return the bytes of a matrix's input."""
        return {"o_proj": self.queries, "down_proj": self.ffn}.get(matrix, self.whole)

    def _mask(self, matrix: str) -> int:
        """Return the bytes of the dropout mask of an adapter's input."""
        return self._input(matrix) // self.itemsize if self.dropped else 0

    def _beside(self, matrices: Iterable[str]) -> int:
        """Return the bytes of cast copies of trained weights, and of what adapters keep between A and B."""
        copies = self.itemsize * self._parameters(matrices) if self.casts else 0
        return copies + self.bottleneck * len(self.targets.intersection(matrices))

    def layer(self, mode: RecomputeMode = "none") -> int:
        """Return the bytes one layer keeps for its backward."""
        if mode != "none":
            return super().layer(mode)
        # rotated queries, rotated keys and values
        needed = self.norm + self.ffn_norm + self.queries + 2 * self.keys + self.log_sum_exp + self.activation
        if "o_proj" not in self.reading:  # else attention's output is among the inputs
            needed += self.queries
        return needed + self._inputs() + self._beside(MATRICES) - (0 if self.follows_trained else self._unneeded())

    def _unneeded(self) -> int:
        """Return the bytes a layer would keep for gradients that are not needed, if its own weights train first."""
        scores = self.queries + 2 * self.keys + self.log_sum_exp
        if "o_proj" not in self.reading:
            scores += self.queries
        unneeded = 0
        for kept, norm, matrices in (
            (self.norm, ATTENTION_NORM, ("q_proj", "k_proj", "v_proj")),
            (scores, None, ("o_proj",)),
            (self.ffn_norm, FFN_NORM, ("gate_proj", "up_proj")),
            (self.activation, None, ("down_proj",)),
        ):
            if norm in self.traits.trained:  # its weight's gradient needs the normalised input
                return unneeded + (kept - self.weight_norm if self.weight_norm else 0)
            first = self.trained_parameters.keys() & matrices
            unneeded += kept
            for name in first:
                copied = self.trained_parameters[name]
                if name in self.targets:  # A
                    divided, whole = self._adapters[name]
                    copied = divided if name in DIVIDED_INPUT else whole
                    unneeded += self._mask(name)
                unneeded += self.itemsize * copied * self.casts
            if first:
                # gate and up are each kept for the gradient of the other, and gate for its own too
                spared = {"up_proj": self.activation - self.ffn}
                if not self.fuses_activation:
                    spared["gate_proj"] = self.ffn
                return unneeded + spared.get("".join(first), 0)
        return unneeded

    def leaving(self, mode: RecomputeMode) -> int:
        """Return the most bytes one layer holds at the end of its forward on top of those it keeps."""
        up, down = "up_proj" in self.targets, "down_proj" in self.targets
        if mode != "none":
            return max(super().leaving("none"), (3 + up) * self.ffn + self.stream + self.whole)
        parts = self.stream * self.is_divided  # this rank's part of a tensor beside the whole one
        # the stream before and after attention, and the norm's output
        entered = self.stream * (1 + self.widens) + self._entering + parts
        if "down_proj" in self.whole_matrices:
            joined = super().leaving("none") + self._entering
        elif down:  # w2's output, its adapter's, their sum and, after dropout, the product that both read
            joined = entered + 3 * self.whole + self.ffn * self.dropped
        else:  # w2's input and its output (of a divided sequence also in the order in which it is sent, and its part)
            joined = entered + self.ffn + self.whole * (1 + self.is_divided) + parts
        # w3's output and its adapter's, before w2's input, which only an adapter keeps
        return max(joined, ((2 - self._keeps_product) * self.ffn + entered) * up)

    @property
    def _entering(self) -> int:
        """Bytes of the normalised input of the feed-forward, if no weight keeps it."""
        return 0 if self.reading.intersection(("gate_proj", "up_proj")) else self.whole

    @property
    def _keeps_product(self) -> bool:
        """Whether the input of w2 is kept, as it is or after dropout."""
        return "down_proj" in self.trained_parameters

    @property
    def recomputing(self) -> int:  # type: ignore[override]
        """Bytes one layer holds on top of those it keeps as recomputation ends: before w2, or with down_proj in it."""
        down = "down_proj" in self.targets
        last = max((self.whole + self.ffn * self.dropped) * down, self._inside * self.ffn)
        gradient = self.whole * self.is_tensor_parallel  # of the output, over the whole sequence and all ranks
        return last + self._entering + gradient + self.stream * (self.widens + self.is_divided)

    @property
    def _inside(self) -> int:
        """Tensors on top of those kept as w3 adds its adapter, or as w2 reads a product that is not kept."""
        up, down = "up_proj" in self.targets, "down_proj" in self.reading
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
        return self.layer_before_w2 - self.activation - self._beside(("gate_proj", "up_proj"))


class AdaptedExpertTensors(ExpertTensors, AdaptedTensors):
    """The sizes of one layer that has trained experts, and attention that is frozen, with or without adapters.

    Args:
        moe: the experts.
        spec, plan, sizes: as in ``AdaptedTensors``.
    """

    recomputing = 0

    def __init__(self, moe: MoE, spec: ModelSpec, plan: ParallelPlan, **sizes: Any) -> None:
        super().__init__(moe, spec, plan, **sizes)
        for matrix in FEED_FORWARD_MATRICES:
            self.trained_parameters[matrix] *= moe.num_experts // plan.ep
        # the copies that layers keep are those of their matrices, so there is none of the router to take off
        self.routing += self.itemsize * self.casts * spec.hidden_size * moe.num_experts
