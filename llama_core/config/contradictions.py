"""What contradicts what: checks across the sections of a configuration that are each valid by themselves.

Each function takes the sections that it compares, and yields a problem for each contradiction. A problem has the keys
of all settings that take part: an error names the file of the configuration unless an override changed one of them.
"""

import math
from collections.abc import Collection, Iterator, Sequence

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import ModelSpec, matches
from llama_core.config.section import Section
from llama_core.config.settings import MOST_LAYERS, LaunchConfig, ParallelConfig, StrategyName, TrainingConfig
from llama_core.config.strategy import PARTS, LoRA
from llama_core.errors import Problem
from llama_core.optimizers.registry import optimizer_keys, optimizer_type
from llama_core.units import divisors

_NAMED = ("model", "training.init_from")
"""The settings that choose a model."""
MODEL = (*_NAMED, "architecture")
"""The settings that choose a model and its sizes."""
_LAYERS = (*_NAMED, "architecture.num_layers")
_ADAPTED = ("strategy", "moe", *MODEL)
"""The settings that say which weights there are to adapt."""
_GPUS = ("parallel.gpus", "parallel.tp", "parallel.pp", "parallel.cp")
"""The settings that leave some number of data-parallel ranks."""


def misfits(spec: ModelSpec, training: TrainingConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Yield what a model is too short, too deep or too shallow for."""
    seq_len = training.seq_len
    longest = spec.max_context
    if seq_len and seq_len > longest:
        factor = math.ceil(seq_len / longest) * (spec.rope_scaling.factor if spec.rope_scaling else 1)
        yield _wrong(
            "training.seq_len",
            seq_len,
            f" is above the context of {spec.name}; use at most {longest}, or stretch its positions with "
            f"architecture.rope_scaling.factor={factor:g}, or keep them as they are with "
            f"architecture.max_context={seq_len}",
            *_NAMED,
            "architecture.max_context",
            "architecture.rope_scaling",
        )
    if spec.num_layers > MOST_LAYERS:
        yield _wrong("architecture.num_layers", spec.num_layers, f" is above {MOST_LAYERS}", *_LAYERS)
    pp = parallel.pp
    if pp != "auto" and pp > spec.num_layers:
        text = f" is above the {spec.num_layers} layers of {spec.name}; use at most that"
        yield _wrong("parallel.pp", pp, text, *_LAYERS)
    chunks = parallel.num_chunks
    if chunks != "auto" and chunks > spec.num_layers:
        text = f" is above the {spec.num_layers} layers of {spec.name}"
        yield _wrong("parallel.num_chunks", chunks, text, *_LAYERS)


def misfits_of_adapters(spec: ModelSpec, lora: LoRA, trainable: Sequence[str]) -> Iterator[Problem]:
    """Yield what a model has no place for: adapters, or weights to train in full beside them."""
    for text in lora.misfits(spec.target_shapes, tied=spec.tied_embeddings):
        yield Problem(text, keys=("lora", *_ADAPTED))
    names = spec.parameter_shapes
    for pattern in trainable:
        if not any(matches(name, pattern) for name in names):
            examples = [name for name in names if name.startswith("layers.0.") or not name.startswith("layers.")]
            text = f" matches no weight of {spec.name}; weights are {', '.join(examples)}"
            yield _wrong("trainable", repr(pattern), text, *_ADAPTED)
    if not spec.num_adapter_parameters:
        yield _wrong(
            "lora.target_modules",
            list(lora.target_modules),
            f" leaves no matrix for adapters: experts replace it, or trainable={list(trainable)} trains it in full; "
            f"choose others, or strategy={'moe' if spec.moe else 'standard'}",
            "trainable",
            *_ADAPTED,
        )


def misdivided_heads(spec: ModelSpec) -> Iterator[Problem]:
    """Yield a problem if the key/value heads do not divide the query heads."""
    if spec.num_heads % spec.num_kv_heads:
        possible = ", ".join(map(str, divisors(spec.num_heads)))
        text = f" does not divide the {spec.num_heads} query heads; use one of {possible}"
        yield _wrong("architecture.num_kv_heads", spec.num_kv_heads, text, *_NAMED, "architecture.num_heads")


def misdivisions(parallel: ParallelConfig, batch_size: int) -> Iterator[Problem]:
    """Yield which degrees do not divide the devices, or which sizes do not divide the batch."""
    asked = parallel.inner
    inner = math.prod(asked.values())
    if parallel.gpus % inner:
        degrees = " x ".join(f"{name} {size}" for name, size in asked.items())
        text = f" is not a multiple of {inner} ({degrees}); use {_next_multiple(parallel.gpus, inner)}"
        yield _wrong("parallel.gpus", parallel.gpus, text, *_GPUS)
        return
    ranks = parallel.most_data_parallel
    copies = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else 1
    if ranks % copies:
        yield _wrong("parallel.dp_replicate", copies, f" does not divide the {ranks} data-parallel ranks", *_GPUS)
    elif len(asked) == 3:
        yield from _misdivisions_of_batch(parallel, batch_size, ranks, "data-parallel ranks")
    else:  # the planner still chooses the data-parallel degree, a multiple of these copies
        yield from _misdivisions_of_batch(parallel, batch_size, copies, "copies")


def _misdivisions_of_batch(parallel: ParallelConfig, batch_size: int, ranks: int, kind: str) -> Iterator[Problem]:
    sizes = {"microbatch_size": parallel.microbatch_size, "num_microbatches": parallel.num_microbatches}
    factors = {f"{name} {size}": size for name, size in sizes.items() if size}
    if ranks > 1:
        factors[f"{ranks} {kind}"] = ranks
    one_pass = math.prod(factors.values())
    product = " x ".join(factors)
    others = ("parallel.microbatch_size", "parallel.num_microbatches", "parallel.dp_replicate", *_GPUS)
    if batch_size % one_pass:
        text = f" is not a multiple of {one_pass} ({product}); use {_next_multiple(batch_size, one_pass)}"
        yield _wrong("training.batch_size", batch_size, text, *others)
    elif all(sizes.values()) and kind == "data-parallel ranks" and batch_size != one_pass:
        text = f" is not {one_pass} ({product}); leave one of the three out"
        yield _wrong("training.batch_size", batch_size, text, *others)


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def needless_parts(strategy: StrategyName, parts: dict[str, Section], trainable: Sequence[str]) -> Iterator[Problem]:
    """Yield which settings belong to another strategy than the run's.

    Args:
        strategy: the run's strategy.
        parts: the settings of adapters and experts, by the name of their section.
        trainable: patterns of weights to train in full.
    """
    for name, section in parts.items():
        if name not in PARTS[strategy]:
            for key, value in section.model_dump(exclude_defaults=True).items():
                text = f" needs strategy={name} or hybrid, not {strategy}"
                yield _wrong(f"{name}.{key}", value, text, "strategy")
    if trainable and "trainable" not in PARTS[strategy]:
        text = f" needs strategy=lora or hybrid; {strategy} trains every weight"
        yield _wrong("trainable", list(trainable), text, "strategy")


def uneven_nodes(parallel: ParallelConfig, launch: LaunchConfig) -> Iterator[Problem]:
    """Yield a problem if the nodes cannot have the same number of devices."""
    if parallel.gpus % launch.nodes:
        text = f" cannot be spread evenly over launch.nodes={launch.nodes}"
        yield _wrong("parallel.gpus", parallel.gpus, text, "launch.nodes")


def wrong_elasticity(launch: LaunchConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Yield why the run cannot start on ``launch.min_nodes``."""
    if launch.fewest_nodes > launch.nodes:
        yield _wrong("launch.min_nodes", launch.min_nodes, f" is above launch.nodes={launch.nodes}", "launch.nodes")
    if launch.is_elastic and parallel.zero_backend == "deepspeed":
        text = (
            ": DeepSpeed's checkpoints load on as many ranks as wrote them; leave it out, or use "
            "parallel.zero_backend=native"
        )
        yield _wrong("launch.min_nodes", launch.min_nodes, text, "launch.nodes", "parallel.zero_backend")


def without_fp8(training: TrainingConfig, launch: LaunchConfig) -> Iterator[Problem]:
    """Yield a problem if fp8 is asked for on a device that has none."""
    if training.precision != "fp8":
        return
    gpu = None if launch.gpu_type is None else gpu_spec(launch.gpu_type)
    needs = " needs an NVIDIA GPU of the Ada, Hopper or Blackwell generation"
    where = ("launch.device", "launch.gpu_type")
    if launch.device == "cpu":
        text = f"{needs}, and launch.device=cpu has none; use bf16 or fp32"
        yield _wrong("training.precision", "fp8", text, *where)
    elif gpu is not None and not gpu.fp8_flops:
        text = f"{needs}, and launch.gpu_type={gpu.name} is none; use bf16"
        yield _wrong("training.precision", "fp8", text, *where)


def endless_warmup(training: TrainingConfig) -> Iterator[Problem]:
    """Yield a problem if the warm-up is longer than the training."""
    warmup = training.warmup_steps
    steps = training.steps
    if warmup is not None and steps is not None and warmup > steps:
        yield _wrong("training.warmup_steps", warmup, f" is above training.steps={steps}", "training.steps")


def needless_keys(training: TrainingConfig, tuned: Collection[str]) -> Iterator[Problem]:
    """Yield which settings belong to another optimizer than the run's.

    Args:
        training: the settings.
        tuned: those of them with a default of fine-tuning, which nobody has asked for.
    """
    taken = optimizer_type(training.optimizer).keys
    for key in optimizer_keys():
        value = getattr(training, key)
        if key not in taken and key not in tuned and value != TrainingConfig.model_fields[key].default:
            takes = f"takes {', '.join(taken)}" if taken else "takes no settings of its own"
            text = f" has no effect, because training.optimizer={training.optimizer} {takes}; leave it out"
            yield _wrong(f"training.{key}", value, text, "training.optimizer")


def without_deepspeed(training: TrainingConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Yield a problem if DeepSpeed cannot run the optimizer."""
    if parallel.zero_backend == "deepspeed" and not optimizer_type(training.optimizer).runs_in_deepspeed:
        text = f" cannot run training.optimizer={training.optimizer}; use native"
        yield _wrong("parallel.zero_backend", parallel.zero_backend, text, "training.optimizer")


def _wrong(setting: str, value: object, text: str, *others: str) -> Problem:
    """Return a problem: a setting, its value, the rest of the sentence, and the other settings that take part."""
    return Problem(text, setting, str(value), (setting, *others))
