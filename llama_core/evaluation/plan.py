"""Where checkpoints are evaluated, and how devices share it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from llama_core.attention import check_cached
from llama_core.config.evaluation import EvaluationConfig, EvaluationDtype
from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, gpu_spec
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.launchers.traits import LauncherType
from llama_core.planning.inference import EvaluationForward, evaluation_bytes, weight_bytes
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.operations import itemsize_of
from llama_core.units import format_bytes

MAX_NODES = 64
"""Most nodes that a refusal proposes."""
_NUMBERS = ("tp", "pp", "gpus", "nodes")
"""The keys of ``evaluation`` that say how devices share it."""


@dataclass(frozen=True)
class EvaluationPlan:
    """How devices share the evaluation of a checkpoint."""

    plan: ParallelPlan
    nodes: int
    """Machines that have them, as many each."""


def evaluating_device(config: RunConfig, *, while_training: bool) -> str:
    """Return where the checkpoints of a run are evaluated: auto, cpu or cuda. ``auto`` takes a GPU if there is one.

    Args:
        config: the run.
        while_training: whether its ranks compute at the same time.
    """
    asked = config.evaluation.device
    if asked != "auto":
        return asked
    if config.launch.kind.runs_tasks:
        return config.launch.device
    return "cpu" if while_training else "auto"


def evaluation_plan(config: RunConfig, device: str) -> EvaluationPlan:
    """Return how devices share the evaluation of a checkpoint, as ``evaluation`` asks.

    By default as few GPUs of a node as hold the model divide its matrices; if there are none, GPUs of a node also
    divide its layers; and if these are too small, whole nodes do, up to as many as the run has.

    Args:
        config: the run, with every default filled in. The GPUs are taken to be those of the run.
        device: cpu or cuda.

    Raises:
        ConfigError, PlanError: if the numbers cannot divide each other or the model.
        DoesNotFitError: if the model does not fit the GPUs, and ``launch.force`` is not set.
    """
    asked = config.evaluation
    launcher = config.launch.kind
    if not launcher.runs_tasks and asked.nodes not in {"auto", 1}:
        raise ConfigError(f"evaluation.nodes={asked.nodes}: {_no_jobs(launcher)}; drop it")
    _check_what_is_asked(config.spec, asked, generates=EvaluationForward.of(config).is_kept)
    if device == "cpu":
        return _on_cpu(config.spec, asked)
    gpu = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE)
    ways = list(_ways(config.spec, asked, gpu.gpus_per_node, config.num_nodes))
    if not ways:
        numbers = [f"evaluation.{key}={getattr(asked, key)}" for key in _NUMBERS if _is_fixed(asked, key)]
        raise ConfigError(
            f"{', '.join(numbers)}: nodes of {gpu.gpus_per_node} GPUs cannot share an evaluation so, as many on each "
            "and a whole number of times evaluation.tp; change one of them"
        )
    fitting = (way for way in ways if _bytes(config, way) <= gpu.usable_bytes)
    best = next(fitting, None)
    if best is not None:
        return best
    smallest = min(ways, key=lambda way: (_bytes(config, way), way.plan.pp))
    if not config.launch.force:
        raise DoesNotFitError(_too_small(config, smallest, gpu))
    return smallest


def evaluating_request(config: RunConfig, shared: EvaluationPlan) -> RunConfig:
    """Return a configuration whose job asks for what an evaluation's does: its nodes, its devices and its limit.

    Args:
        config: the run.
        shared: how devices share the evaluation.
    """
    asked = config.evaluation
    device = evaluating_device(config, while_training=True)
    launch: dict[str, object] = {"device": device, "nodes": shared.nodes, "min_nodes": None, "spare_nodes": 0}
    if section := config.launch.kind.section:
        launch[section] = config.launch.request.of_an_evaluation(
            asked.partition, asked.qos, asked.time_limit_min, with_gpus=device == "cuda"
        )
    return config.model_copy(
        update={
            "launch": config.launch.model_copy(update=launch),
            "parallel": config.parallel.model_copy(update={"gpus": shared.plan.world_size}),
        }
    )


def _no_jobs(launcher: LauncherType) -> str:
    if launcher.is_here:
        return "the run's jobs are processes of this machine"
    return f"{launcher.title} gives no jobs to evaluations, which run beside the first rank"


def _is_fixed(asked: EvaluationConfig, key: str) -> bool:
    return getattr(asked, key) not in {None, "auto"}


def _asked_or_one(asked: EvaluationConfig) -> tuple[int, int, int]:
    """Return tp, pp and nodes, 1 for each that is open."""
    tp, pp, nodes = (1 if number == "auto" else number for number in (asked.tp, asked.pp, asked.nodes))
    return tp, pp, nodes


def _check_what_is_asked(spec: ModelSpec, asked: EvaluationConfig, *, generates: bool) -> None:
    tp, pp, nodes = _asked_or_one(asked)
    num_devices = asked.gpus or tp * pp * nodes
    for key, number in (("tp", tp), ("pp", pp), ("tp x pp", tp * pp), ("nodes", nodes)):
        if num_devices % number:
            raise ConfigError(f"evaluation.{key}={number} does not divide evaluation.gpus={num_devices}; use a divisor")
    try:
        if generates:
            check_cached(spec.attentions)
        shared_plan(spec, tp * pp, tp, pp)
    except PlanError as error:
        raise PlanError(f"evaluation: {error}") from None


def _on_cpu(spec: ModelSpec, asked: EvaluationConfig) -> EvaluationPlan:
    """Return how processes on CPUs share an evaluation: one, unless more are asked for."""
    tp, pp, nodes = _asked_or_one(asked)
    num_processes = asked.gpus or math.lcm(tp * pp, nodes)
    return EvaluationPlan(shared_plan(spec, num_processes, tp, pp), nodes)


def _ways(spec: ModelSpec, asked: EvaluationConfig, in_node: int, most_nodes: int) -> Iterator[EvaluationPlan]:
    """Yield the ways to share an evaluation that ``asked`` allows; of those that hold the model, the first is best.

    While texts are generated, the stages of a pipeline wait for each other, so a pipeline comes last.

    Args:
        spec: the model.
        asked: the numbers that are fixed.
        in_node: GPUs of a node.
        most_nodes: nodes that an evaluation may take by itself.
    """
    tps = dividing(spec, range(1, in_node + 1)) if asked.tp == "auto" else [asked.tp]
    pps = range(1, spec.num_layers + 1) if asked.pp == "auto" else [asked.pp]
    degrees = sorted(product(tps, pps), key=lambda tp_pp: (tp_pp[1] > 1, math.prod(tp_pp), tp_pp[1]))
    for tp, pp in degrees:
        if asked.nodes == "auto":
            num_devices = asked.gpus or tp * pp
            nodes = math.ceil(num_devices / in_node)
        else:
            num_devices = asked.gpus or asked.nodes * in_node
            nodes = asked.nodes
        is_its_choice = asked.nodes == "auto" and asked.gpus is None and len(degrees) > 1
        if is_its_choice and nodes > 1 and (nodes > most_nodes or num_devices % in_node):
            continue  # it takes whole nodes
        divides = num_devices % (tp * pp) == 0 and num_devices % nodes == 0
        of_node = num_devices // nodes
        if divides and of_node <= in_node and (nodes == 1 or of_node % tp == 0):
            yield EvaluationPlan(shared_plan(spec, num_devices, tp, pp), nodes)


def _bytes(config: RunConfig, way: EvaluationPlan, dtype: EvaluationDtype | None = None) -> int:
    itemsize = itemsize_of(dtype or config.evaluation.dtype)
    return evaluation_bytes(config.spec, way.plan, itemsize, EvaluationForward.of(config))


def _too_small(config: RunConfig, way: EvaluationPlan, gpu: DeviceSpec) -> str:
    """Return why a model does not fit the GPUs, and what to set."""
    asked = config.evaluation
    plan = way.plan
    weights = weight_bytes(config.spec, plan, itemsize_of(asked.dtype))
    free = asked.model_copy(update=dict.fromkeys(_NUMBERS, "auto") | {"gpus": None})
    others = _ways(config.spec, free, gpu.gpus_per_node, MAX_NODES)
    larger = next((other for other in others if _bytes(config, other) <= gpu.usable_bytes), None)
    remedies = [] if larger is None else [_what_to_change(asked, larger)]
    if asked.dtype == "fp32" and _bytes(config, way, "bf16") <= gpu.usable_bytes:
        remedies.append("evaluation.dtype=bf16")
    remedies += ["evaluation.device=cpu", "launch.force=true to try it all the same"]
    degrees = f"evaluation.tp={plan.tp}" + (f" x pp={plan.pp}" if plan.pp > 1 else "")
    return (
        f"{degrees}: each GPU holds {format_bytes(weights)} of the weights of {config.spec.name} in "
        f"{asked.dtype}, and with the forward {format_bytes(_bytes(config, way))}, more than the "
        f"{format_bytes(gpu.usable_bytes)} of {gpu.label}; set {', or '.join(remedies)}"
    )


def _what_to_change(asked: EvaluationConfig, wanted: EvaluationPlan) -> str:
    """Return the keys that keep an evaluation from being shared as wanted, with their values."""
    plan = wanted.plan
    values = {"tp": plan.tp, "pp": plan.pp, "gpus": plan.world_size, "nodes": wanted.nodes}
    fixed = {key: value for key, value in values.items() if _is_fixed(asked, key) and getattr(asked, key) != value}
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
    counts = spec.divided_by_tp().values()
    return [tp for tp in numbers if not any(count % tp for count in counts)]
