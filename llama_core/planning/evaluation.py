"""Where checkpoints are evaluated, how devices share it, and what memory it takes.

An evaluation holds no gradients, and the activations of one layer at a time:

* weights: tensor-parallel ranks hold a part of every matrix and of the vocabulary, pipeline-parallel ones some layers.
* forward: of each token, the residual stream and the widest tensors inside a block.
* logits: after the last block, a chunk of them in fp32, and what the log-softmax makes of it.
* cache: while texts are generated, the keys and values of each token in every layer.

The mask of padded prompts is left out. A test counts the bytes of real evaluations.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

from llama_core.config.evaluation import EvaluationConfig, EvaluationDtype
from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, gpu_spec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import loss_chunk_tokens
from llama_core.planning.program.operations import FP32_BYTES, itemsize_of
from llama_core.units import format_bytes

TOKENS_OF_A_FORWARD = 8192
"""Most tokens of a forward that has several rows."""
TOKENS_OF_A_GENERATION = 32768
"""Most tokens of a batch that is generated: of its prompts, and of what follows."""
_STREAMS = 4
"""The residual stream before and after a block, its norm, and the sum of the parts that ranks make."""
_COPIES_OF_LOGITS = 2
MOST_NODES = 64
"""Nodes of an evaluation that is proposed."""


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


def evaluation_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int, forward: Forward) -> int:
    """Return the bytes of the fullest of the devices that evaluate a model together.

    Args:
        spec: the model.
        plan: how they divide it.
        itemsize: bytes of a weight and of an activation.
        forward: its largest forward.
    """
    stages = plan.stage_layers(spec)
    return max(_bytes_of_stage(spec, plan.tp, layers, itemsize, forward) for layers in stages)


def _bytes_of_stage(spec: ModelSpec, tp: int, layers: range, itemsize: int, forward: Forward) -> int:
    stream = forward.tokens * itemsize * _STREAMS * spec.hidden_size
    block = forward.tokens * itemsize * _widest(spec) // tp
    logits = 0
    if layers.stop == spec.num_layers:
        vocab_rows = spec.vocab_size // tp
        tokens_of_chunk = min(forward.tokens, loss_chunk_tokens(vocab_rows, spec.hidden_size, FP32_BYTES))
        logits = _COPIES_OF_LOGITS * vocab_rows * FP32_BYTES * tokens_of_chunk
    passing = stream + max(block, logits)
    cache = 0
    if forward.is_kept:
        cache = forward.tokens * itemsize * len(layers) * 2 * spec.kv_size // tp
        passing = max(passing, cache // 2)  # later, when half of the rows have ended and the others are copied
    return _weight_bytes(spec, tp, layers, itemsize) + passing + cache


def _widest(spec: ModelSpec) -> int:
    """Return the most numbers that a block holds of a token: in attention, or in the feed-forward network."""
    attention = 4 * spec.q_size + 2 * spec.kv_size  # with keys and values repeated for every query head
    if spec.moe is None:
        return max(attention, 4 * spec.ffn_size)
    of_expert = 4 * spec.ffn_size + 2 * spec.hidden_size  # and its input and output
    return max(attention, spec.moe.experts_per_token * of_expert)


def weight_bytes(spec: ModelSpec, plan: ParallelPlan, itemsize: int) -> int:
    """Return the bytes of the weights on the fullest of the devices that divide a model."""
    return max(_weight_bytes(spec, plan.tp, layers, itemsize) for layers in plan.stage_layers(spec))


def _weight_bytes(spec: ModelSpec, tp: int, layers: range, itemsize: int) -> int:
    return spec.num_parameters_of(layers) * itemsize // tp


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


@dataclass(frozen=True)
class EvaluationPlan:
    """How devices share the evaluation of a checkpoint."""

    plan: ParallelPlan
    nodes: int
    """Machines that have them, as many each."""


def evaluation_plan(config: RunConfig, device: str) -> EvaluationPlan:
    """Return how devices share the evaluation of a checkpoint, as ``evaluation`` asks.

    By default the fewest GPUs of a node that can divide the matrices and hold the model do; if there are none, GPUs of
    a node also divide its layers; and if these are too small, whole nodes, up to as many as the run has.

    Args:
        config: the run, with every default filled in. The GPUs are taken to be those of the run.
        device: cpu or cuda.

    Raises:
        ConfigError, PlanError: if the numbers cannot divide each other or the model.
        DoesNotFitError: if the model does not fit the GPUs, and ``launch.force`` is not set.
    """
    asked = config.evaluation
    if config.launch.is_here and asked.nodes not in {"auto", 1}:
        raise ConfigError(f"evaluation.nodes={asked.nodes}: the run's jobs are processes of this machine; drop it")
    gpu = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE) if device == "cuda" else None
    candidates = _candidates(config.spec, asked, gpu, config.launch.nodes)
    if gpu is None:
        return candidates[0]
    best = _first_that_fits(config, candidates, gpu)
    if best is not None:
        return best
    leanest = min(candidates, key=lambda one: (_bytes(config, one.plan), one.plan.pp))
    if not config.launch.force:
        raise DoesNotFitError(_too_small(config, leanest, gpu))
    return leanest


def _candidates(
    spec: ModelSpec, asked: EvaluationConfig, gpu: DeviceSpec | None, most_nodes: int
) -> list[EvaluationPlan]:
    """Return the ways to share an evaluation that ``asked`` allows; of those that hold the model, the first is best.

    Args:
        spec: the model.
        asked: the numbers that are fixed.
        gpu: the type of the GPUs; None for CPU processes.
        most_nodes: nodes that an evaluation may take by itself.

    Raises:
        ConfigError, PlanError: if there is none.
    """
    _check_what_is_asked(spec, asked)
    in_node = gpu.gpus_per_node if gpu is not None else None
    degrees = _degrees(spec, asked, in_node)
    grows = asked.gpus is None and asked.nodes == "auto" and len(degrees) > 1
    found = []
    for tp, pp in degrees:
        num_devices, nodes = _devices_and_nodes(asked, tp * pp, in_node)
        if grows and in_node is not None and nodes > 1 and (nodes > most_nodes or num_devices % in_node):
            continue  # it takes whole nodes
        if _can_be_shared(num_devices, nodes, tp, pp) and (in_node is None or num_devices <= nodes * in_node):
            found.append(EvaluationPlan(shared_plan(spec, num_devices, tp, pp), nodes))
    if not found:
        raise ConfigError(_no_equal_shares(asked, in_node))
    return found


def _degrees(spec: ModelSpec, asked: EvaluationConfig, in_node: int | None) -> list[tuple[int, int]]:
    """Return tp and pp of a copy of the model, the best first.

    While texts are generated, the stages of a pipeline wait for each other, so a pipeline comes last.
    """
    tps = dividing(spec, range(1, (in_node or 1) + 1)) if asked.tp == "auto" else [asked.tp]
    most_stages = 1 if in_node is None else spec.num_layers
    pps = range(1, most_stages + 1) if asked.pp == "auto" else [asked.pp]
    return sorted(product(tps, pps), key=lambda degrees: (degrees[1] > 1, math.prod(degrees), degrees[1]))


def _devices_and_nodes(asked: EvaluationConfig, of_copy: int, in_node: int | None) -> tuple[int, int]:
    """Return the numbers of devices and of nodes of an evaluation with so many devices for a copy of the model."""
    if asked.nodes != "auto":
        whole_nodes = of_copy if in_node is None else asked.nodes * in_node
        return asked.gpus or whole_nodes, asked.nodes
    num_devices = asked.gpus or of_copy
    return num_devices, 1 if in_node is None else math.ceil(num_devices / in_node)


def _can_be_shared(num_devices: int, nodes: int, tp: int, pp: int) -> bool:
    """Return whether nodes have as many devices each, and each part of the layers is on one of them."""
    if num_devices % nodes or num_devices % (tp * pp):
        return False
    return nodes == 1 or num_devices // nodes % tp == 0


def _check_what_is_asked(spec: ModelSpec, asked: EvaluationConfig) -> None:
    tp = 1 if asked.tp == "auto" else asked.tp
    pp = 1 if asked.pp == "auto" else asked.pp
    for key, number in (("tp", tp), ("pp", pp), ("tp x pp", tp * pp), ("nodes", asked.nodes)):
        if number != "auto" and asked.gpus is not None and asked.gpus % number:
            raise ConfigError(f"evaluation.{key}={number} does not divide evaluation.gpus={asked.gpus}; use a divisor")
    try:
        shared_plan(spec, tp * pp, tp, pp)
    except PlanError as error:
        raise PlanError(f"evaluation: {error}") from None


def _no_equal_shares(asked: EvaluationConfig, in_node: int | None) -> str:
    named = ("gpus", "nodes", "tp", "pp")
    numbers = [f"evaluation.{key}={value}" for key in named if (value := getattr(asked, key)) not in {None, "auto"}]
    return (
        f"{', '.join(numbers)}: nodes{'' if in_node is None else f' of {in_node} GPUs'} cannot share an evaluation so, as many on each and a "
        "whole number of times evaluation.tp; change one of them"
    )


def _first_that_fits(config: RunConfig, candidates: Sequence[EvaluationPlan], gpu: DeviceSpec) -> EvaluationPlan | None:
    return next((one for one in candidates if _bytes(config, one.plan) <= gpu.usable_bytes), None)


def _bytes(config: RunConfig, plan: ParallelPlan, dtype: EvaluationDtype | None = None) -> int:
    asked = config.evaluation
    return evaluation_bytes(config.spec, plan, itemsize_of(dtype or asked.dtype), Forward.of(config))


def _too_small(config: RunConfig, one: EvaluationPlan, gpu: DeviceSpec) -> str:
    """Return why a model does not fit a plan's GPUs, and what to set."""
    asked = config.evaluation
    weights = weight_bytes(config.spec, one.plan, itemsize_of(asked.dtype))
    remedies = []
    any_number = asked.model_copy(update={"tp": "auto", "pp": "auto", "gpus": None, "nodes": "auto"})
    larger = _first_that_fits(config, _candidates(config.spec, any_number, gpu, MOST_NODES), gpu)
    if larger is not None:
        remedies.append(_what_to_change(asked, larger))
    if asked.dtype == "fp32" and _bytes(config, one.plan, "bf16") <= gpu.usable_bytes:
        remedies.append("evaluation.dtype=bf16")
    remedies += ["evaluation.device=cpu", "launch.force=true to try it all the same"]
    degrees = f"evaluation.tp={one.plan.tp}" + (f" x pp={one.plan.pp}" if one.plan.pp > 1 else "")
    return (
        f"{degrees}: each GPU holds {format_bytes(weights)} of the weights of {config.spec.name} in "
        f"{asked.dtype}, and with the forward {format_bytes(_bytes(config, one.plan))}, more than the "
        f"{format_bytes(gpu.usable_bytes)} of {gpu.label}; set {', or '.join(remedies)}"
    )


def _what_to_change(asked: EvaluationConfig, wanted: EvaluationPlan) -> str:
    """Return the keys that keep an evaluation from being divided as wanted, with their values."""
    plan = wanted.plan
    values = {"tp": plan.tp, "pp": plan.pp, "gpus": plan.world_size, "nodes": wanted.nodes}
    fixed = {key: value for key, value in values.items() if getattr(asked, key) not in {None, "auto", value}}
    return " and ".join(f"evaluation.{key}={value}" for key, value in (fixed or {"nodes": wanted.nodes}).items())


def shared_plan(spec: ModelSpec, num_devices: int, tp: int, pp: int = 1) -> ParallelPlan:
    """Return how devices share an evaluation; ``tp * pp``, a divisor of their number, divide each copy of a model.

    Raises:
        PlanError: if they cannot divide it.
    """
    plan = ParallelPlan(tp=tp, pp=pp, dp_replicate=num_devices // (tp * pp), sequence_parallel=False)
    plan.check(spec, seq_len=spec.max_context, precision="fp32")
    return plan


def dividing(spec: ModelSpec, numbers: Iterable[int]) -> list[int]:
    """Return those numbers of devices that can divide a model, in their order; 1 always can."""
    counts = spec.divided_by_tp.values()
    return [tp for tp in numbers if not any(count % tp for count in counts)]
