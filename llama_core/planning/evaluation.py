"""Where checkpoints are evaluated, how the devices of a node share it, and what memory it takes.

An evaluation holds no gradients, and the activations of one layer at a time:

* weights: tensor-parallel ranks hold a part of every matrix and of the vocabulary.
* forward: of each token, the residual stream and the widest tensors inside a block.
* logits: after the last block, a chunk of them in fp32, and what the log-softmax makes of it.
* cache: while texts are generated, the keys and values of each token in every layer.

The mask of padded prompts is left out. A test counts the bytes of real evaluations.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from llama_core.config.evaluation import EvaluationDtype
from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, gpu_spec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import loss_chunk_tokens
from llama_core.planning.program.operations import FP32_BYTES, itemsize_of
from llama_core.units import divisors, format_bytes

TOKENS_OF_A_FORWARD = 8192
"""Most tokens of a forward that has several rows."""
TOKENS_OF_A_GENERATION = 32768
"""Most tokens of a batch that is generated: of its prompts, and of what follows."""
_STREAMS = 4
"""The residual stream before and after a block, its norm, and the sum of the parts that ranks make."""
_COPIES_OF_LOGITS = 2


@dataclass(frozen=True)
class Forward:
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


def evaluation_bytes(spec: ModelSpec, tp: int, itemsize: int, forward: Forward) -> int:
    """Return the bytes of one of ``tp`` devices that evaluate a model together.

    Args:
        spec: the model.
        tp: devices that divide it.
        itemsize: bytes of a weight and of an activation.
        forward: its largest forward.
    """
    stream = forward.tokens * itemsize * _STREAMS * spec.hidden_size
    block = forward.tokens * itemsize * _widest(spec) // tp
    vocab_rows = spec.vocab_size // tp
    tokens_of_chunk = min(forward.tokens, loss_chunk_tokens(vocab_rows, spec.hidden_size, FP32_BYTES))
    logits = _COPIES_OF_LOGITS * vocab_rows * FP32_BYTES * tokens_of_chunk
    passing = stream + max(block, logits)
    cache = 0
    if forward.is_kept:
        cache = forward.tokens * itemsize * spec.num_layers * 2 * spec.kv_size // tp
        passing = max(passing, cache // 2)  # later, when half of the rows have ended and the others are copied
    return weight_bytes(spec, tp, itemsize) + passing + cache


def _widest(spec: ModelSpec) -> int:
    """Return the most numbers that a block holds of a token: in attention, or in the feed-forward network."""
    attention = 4 * spec.q_size + 2 * spec.kv_size  # with keys and values repeated for every query head
    if spec.moe is None:
        return max(attention, 4 * spec.ffn_size)
    of_expert = 4 * spec.ffn_size + 2 * spec.hidden_size  # and its input and output
    return max(attention, spec.moe.experts_per_token * of_expert)


def weight_bytes(spec: ModelSpec, tp: int, itemsize: int) -> int:
    """Return the bytes of the weights on one of ``tp`` devices that divide them."""
    return spec.num_parameters * itemsize // tp


def evaluating_device(config: RunConfig, *, beside_ranks: bool) -> str:
    """Return where the checkpoints of a run are evaluated: auto, cpu or cuda. ``auto`` takes a GPU if there is one.

    Args:
        config: the run.
        beside_ranks: whether its ranks compute at the same time.
    """
    asked = config.evaluation.device
    if asked != "auto":
        return asked
    if config.launch.is_here:
        return "cpu" if beside_ranks else "auto"
    return config.launch.device


def evaluation_plan(config: RunConfig, device: str) -> ParallelPlan:
    """Return how devices of one node share the evaluation of a checkpoint, as ``evaluation`` asks.

    Args:
        config: the run, with every default filled in. The GPUs are taken to be those of the run.
        device: cpu or cuda.

    Raises:
        ConfigError, PlanError: if the numbers cannot divide each other or the model.
        DoesNotFitError: if the model does not fit the GPUs, and ``launch.force`` is not set.
    """
    asked = config.evaluation
    must_fit = not config.launch.force
    gpu = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE) if device == "cuda" else None
    if asked.tp != "auto":
        plan = _plan(config, asked.tp)
        if gpu is not None and must_fit and not _fits(config, plan.tp, gpu):
            raise DoesNotFitError(_too_small(config, plan.tp, gpu))
        return plan
    if gpu is None:
        return _plan(config, 1)
    fewest = _fewest(config, gpu)
    if fewest is not None:
        return _plan(config, fewest)
    most = _candidates(config, gpu)[-1]
    if must_fit:
        raise DoesNotFitError(_too_small(config, most, gpu))
    return _plan(config, most)


def _plan(config: RunConfig, tp: int) -> ParallelPlan:
    num_devices = config.evaluation.gpus or tp
    if num_devices % tp:
        raise ConfigError(f"evaluation.tp={tp} does not divide evaluation.gpus={num_devices}; use a divisor")
    try:
        return shared_plan(config.spec, num_devices, tp)
    except PlanError as error:
        raise PlanError(f"evaluation: {error}") from None


def shared_plan(spec: ModelSpec, num_devices: int, tp: int) -> ParallelPlan:
    """Return how devices share an evaluation, ``tp`` of which, a divisor of their number, divide each copy of a model.

    Raises:
        PlanError: if they cannot divide it.
    """
    plan = ParallelPlan(tp=tp, dp_replicate=num_devices // tp, sequence_parallel=False)
    plan.check(spec, seq_len=spec.max_context, precision="fp32")
    return plan


def dividing(spec: ModelSpec, numbers: Iterable[int]) -> list[int]:
    """Return those numbers of devices that can divide a model, in their order; 1 always can."""
    counts = spec.divided_by_tp.values()
    return [tp for tp in numbers if not any(count % tp for count in counts)]


def _candidates(config: RunConfig, gpu: DeviceSpec) -> list[int]:
    """Return the numbers of devices of a node that can divide the model, ascending; 1 is always one."""
    of_devices = divisors(config.evaluation.gpus) if config.evaluation.gpus else range(1, gpu.gpus_per_node + 1)
    return dividing(config.spec, (tp for tp in of_devices if tp <= gpu.gpus_per_node))


def _fewest(config: RunConfig, gpu: DeviceSpec) -> int | None:
    return next((tp for tp in _candidates(config, gpu) if _fits(config, tp, gpu)), None)


def _fits(config: RunConfig, tp: int, gpu: DeviceSpec, dtype: EvaluationDtype | None = None) -> bool:
    return _bytes(config, tp, dtype) <= gpu.usable_bytes


def _bytes(config: RunConfig, tp: int, dtype: EvaluationDtype | None = None) -> int:
    asked = config.evaluation
    return evaluation_bytes(config.spec, tp, itemsize_of(dtype or asked.dtype), Forward.of(config))


def _too_small(config: RunConfig, tp: int, gpu: DeviceSpec) -> str:
    """Return why a model does not fit ``tp`` GPUs, and what to set."""
    asked = config.evaluation
    weights = weight_bytes(config.spec, tp, itemsize_of(asked.dtype))
    fewest = _fewest(config, gpu)
    remedies = []
    if fewest is not None:
        remedies.append(f"evaluation.tp={fewest}")
    elif asked.gpus is not None and asked.gpus < gpu.gpus_per_node:
        remedies.append(f"evaluation.gpus={gpu.gpus_per_node}")
    if asked.dtype == "fp32" and _fits(config, tp, gpu, "bf16"):
        remedies.append("evaluation.dtype=bf16")
    remedies += ["evaluation.device=cpu", "launch.force=true to try it all the same"]
    return (
        f"evaluation.tp={tp}: each GPU holds {format_bytes(weights)} of the weights of {config.spec.name} in "
        f"{asked.dtype}, and with the forward {format_bytes(_bytes(config, tp))}, more than the "
        f"{format_bytes(gpu.usable_bytes)} of {gpu.label}; set {', or '.join(remedies)}"
    )
