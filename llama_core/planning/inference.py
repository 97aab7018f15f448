"""What memory an evaluation takes.

It holds no gradients, and the activations of one layer at a time:

* weights: tensor-parallel ranks hold a part of every matrix and of the vocabulary, pipeline-parallel ones some layers.
* forward: of each token, the residual stream and the widest tensors inside a block.
* logits: after the last block, a chunk of them in fp32, and what the log-softmax makes of it.
* cache: while texts are generated, the keys and values of each token in every layer, or the latents that they are
  made from.

The mask of padded prompts is left out. A test counts the bytes of real evaluations.
"""

from dataclasses import dataclass
from typing import Self

from llama_core.config.models import ModelSpec
from llama_core.config.parameter_counts import num_parameters_of
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import loss_chunk_tokens
from llama_core.planning.program.operations import FP32_BYTES

TOKENS_OF_A_FORWARD = 8192
"""Most tokens of a forward that has several rows."""
TOKENS_OF_A_GENERATION = 32768
"""Most tokens of a batch that is generated: of its prompts, and of what follows."""
_STREAMS = 4
"""The residual stream before and after a block, its norm, and the sum of the parts that ranks make."""
_COPIES_OF_LOGITS = 2


@dataclass(frozen=True)
class EvaluationForward:
    """The largest forward of an evaluation."""

    tokens: int
    """Those of all of its rows."""
    is_kept: bool
    """Whether the keys and values of every layer are kept, for the tokens that follow."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the largest one of the evaluations of a run; tasks may generate, and then read prompts at once."""
        if config.evaluation.tasks:
            return cls(TOKENS_OF_A_GENERATION, is_kept=True)
        return cls(max(TOKENS_OF_A_FORWARD, config.first_seq_len), is_kept=False)


def evaluation_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int, forward: EvaluationForward) -> int:
    """Return the bytes of the fullest of the devices that evaluate a model together.

    Args:
        spec: the model.
        plan: how they divide it.
        itemsize: bytes of a weight and of an activation.
        forward: its largest forward.
    """
    stages = plan.stage_layers(spec)
    return max(_bytes_of_stage(spec, plan.tp, layers, itemsize, forward) for layers in stages)


def _bytes_of_stage(spec: ModelSpec, tp: int, layers: range, itemsize: int, forward: EvaluationForward) -> int:
    stream = forward.tokens * itemsize * _STREAMS * spec.hidden_size
    block = forward.tokens * itemsize * _widest(spec) // tp
    logits = 0
    if layers.stop == spec.num_blocks:
        vocab_rows = spec.vocab_size // tp
        tokens_of_chunk = min(forward.tokens, loss_chunk_tokens(vocab_rows, spec.hidden_size, FP32_BYTES))
        logits = _COPIES_OF_LOGITS * vocab_rows * FP32_BYTES * tokens_of_chunk
    passing = stream + max(block, logits)
    cache = 0
    if forward.is_kept:
        cache = forward.tokens * itemsize * len(layers) * _kept_width(spec, tp)
        passing = max(passing, cache // 2)  # later, when half of the rows have ended and the others are copied
    return _weight_bytes(spec, tp, layers, itemsize) + passing + cache


def _kept_width(spec: ModelSpec, tp: int) -> int:
    """Return the numbers that a rank keeps of each token in a layer: keys and values, or what they are made from."""
    return spec.kv_down_size if spec.kv_rank else 2 * spec.kv_size // tp


def passing_width(spec: ModelSpec, tp: int) -> int:
    """Return the most numbers that a forward which keeps nothing holds of a token, inside a block."""
    return _STREAMS * spec.hidden_size + _widest(spec) // tp


def _widest(spec: ModelSpec) -> int:
    """Return the most numbers that a block holds of a token: in attention, or in the feed-forward network."""
    attention = 4 * spec.q_size + 2 * spec.kv_size  # with keys and values repeated for every query head
    widest = max(attention, 4 * max(spec.dense_widths.values(), default=0))
    if spec.moe is None:
        return widest
    of_expert = 4 * spec.expert_size + 2 * spec.hidden_size  # and its input and output
    return max(widest, spec.moe.experts_per_token * of_expert)


def weight_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int) -> int:
    """Return the bytes of the weights on the fullest of the devices that divide a model."""
    return max(_weight_bytes(spec, plan.tp, layers, itemsize) for layers in plan.stage_layers(spec))


def _weight_bytes(spec: ModelSpec, tp: int, layers: range, itemsize: int) -> int:
    return num_parameters_of(spec, layers) * itemsize // tp
