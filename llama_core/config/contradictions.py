"""What contradicts what: checks across the sections of a configuration that are each valid by themselves.

Each function takes the sections that it compares, and yields a problem for each contradiction. A problem has the keys
of all settings that take part: an error names the file of the configuration unless an override changed one of them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from llama_core.config.hardware import gpu_spec
from llama_core.config.model_weights import matches
from llama_core.config.models import ModelSpec
from llama_core.config.section import Section
from llama_core.config.settings import (
    DATALOADER,
    MAX_LAYERS,
    MIN_SHARE,
    BatchRampStep,
    DataConfig,
    LaunchConfig,
    ParallelConfig,
    StrategyName,
    TrainingConfig,
    paths_of,
)
from llama_core.config.stages import TrainingStage, later_stages
from llama_core.config.strategy import PARTS, LoRA, MoE
from llama_core.errors import Problem, not_one_of
from llama_core.objectives.registry import OBJECTIVES, objective_keys
from llama_core.optimizers.registry import OPTIMIZERS, optimizer_keys
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
    """Yield what a model is too short, too deep or too shallow for, and what is asked of experts without effect."""
    if parallel.expert_tp != "auto" and spec.moe is None:
        text = f" has no effect, because {spec.name} has no experts; leave it out"
        yield _wrong("parallel.expert_tp", parallel.expert_tp, text, "strategy", *_NAMED)
    if spec.moe is not None and not spec.moe.balance_bias:
        rate = spec.moe.balance_bias_rate
        if rate != MoE.model_fields["balance_bias_rate"].default:
            text = " has no effect without moe.balance_bias=true"
            yield _wrong("moe.balance_bias_rate", rate, text, "moe.balance_bias")
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
    top_k = training.distill_top_k
    if top_k >= spec.vocab_size and "distill_top_k" in OBJECTIVES.named(training.objective).keys:
        text = f" leaves no other token of the {spec.vocab_size:,} of {spec.name}; use fewer"
        yield _wrong("training.distill_top_k", top_k, text, *_NAMED)
    if spec.num_layers > MAX_LAYERS:
        yield _wrong("architecture.num_layers", spec.num_layers, f" is above {MAX_LAYERS}", *_LAYERS)
    pp = parallel.pp
    if pp != "auto" and pp > spec.num_layers:
        text = f" is above the {spec.num_layers} layers of {spec.name}; use at most that"
        yield _wrong("parallel.pp", pp, text, *_LAYERS)
    chunks = parallel.num_chunks
    if chunks != "auto" and chunks > spec.num_layers:
        text = f" is above the {spec.num_layers} layers of {spec.name}"
        yield _wrong("parallel.num_chunks", chunks, text, *_LAYERS)


def misfits_of_prediction(spec: ModelSpec, training: TrainingConfig) -> Iterator[Problem]:
    """Yield why a model's prediction modules cannot be trained, or what they lack."""
    key = "training.mtp_weight"
    if not spec.mtp_layers:
        if training.mtp_weight != TrainingConfig.model_fields["mtp_weight"].default:
            text = " has no effect without architecture.mtp_layers; leave it out"
            yield _wrong(key, training.mtp_weight, text, *MODEL)
        return
    setting = "architecture.mtp_layers"
    if spec.lora is not None:
        text = ": adapters train no prediction modules; leave these out with architecture.mtp_layers=0"
        yield _wrong(setting, spec.mtp_layers, text, "strategy", *MODEL)
    if "mtp_weight" not in OBJECTIVES.named(training.objective).keys:
        text = (
            f": training.objective={training.objective} trains no prediction modules; leave these out with "
            "architecture.mtp_layers=0"
        )
        yield _wrong(setting, spec.mtp_layers, text, "training.objective", *MODEL)


def misfits_of_adapters(spec: ModelSpec, lora: LoRA, trainable: Sequence[str]) -> Iterator[Problem]:
    """Yield what a model has no place for: adapters, or weights to train in full beside them."""
    for text in lora.misfits(spec.target_shapes, tied=spec.tied_embeddings):
        yield Problem(text, keys=("lora", *_ADAPTED))
    names = spec.parameter_shapes
    for pattern in trainable:
        if not any(matches(name, pattern, spec.model_type) for name in names):
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


def misdivisions(
    parallel: ParallelConfig,
    batch_sizes: Mapping[str, int],
    num_nodes: int,
    spec: ModelSpec | None,
    seq_len: int,
    *,
    asked_for_each: int = 1,
) -> Iterator[Problem]:
    """Yield which degrees do not divide the devices, or which sizes do not divide the batch.

    Args:
        parallel: how the work is divided.
        batch_sizes: sequences of a step, by the setting that asks for them.
        asked_for_each: how many of those asked for make one of these, which are the longest of all stages.
        num_nodes: the nodes that the devices are spread over.
        spec: the model; None if it is unknown.
        seq_len: tokens per sequence.
    """
    asked = parallel.inner
    inner = math.prod(asked.values())
    if parallel.gpus % inner:
        unsuited = [] if spec is None else list(_unsuited_degrees(parallel, spec, seq_len))
        yield from unsuited
        is_too_deep = spec is not None and parallel.pp != "auto" and parallel.pp > spec.num_layers  # see misfits
        if not unsuited and not is_too_deep:  # otherwise no number of devices helps
            degrees = " x ".join(f"{name} {size}" for name, size in asked.items())
            possible = _next_multiple(parallel.gpus, math.lcm(inner, num_nodes))
            text = f" is not a multiple of {inner} ({degrees}); use {possible}"
            yield _wrong("parallel.gpus", parallel.gpus, text, *_GPUS)
        return
    ranks = parallel.most_data_parallel
    copies = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else 1
    if ranks % copies:
        yield _wrong("parallel.dp_replicate", copies, f" does not divide the {ranks} data-parallel ranks", *_GPUS)
        return
    # with a degree left open, the planner still chooses the number of data-parallel ranks, a multiple of these copies
    ranks, kind = (ranks, "data-parallel ranks") if len(asked) == 3 else (copies, "copies")
    yield from _misdivisions_of_batch(parallel, batch_sizes, ranks, kind, asked_for_each)


def _unsuited_degrees(parallel: ParallelConfig, spec: ModelSpec, seq_len: int) -> Iterator[Problem]:
    """Yield which of the requested degrees cannot divide the model or a sequence, on any number of devices."""
    tp = parallel.tp
    if tp != "auto":
        for what, count in spec.divided_by_tp(whole_experts=parallel.expert_tp == 1).items():
            if count % tp:
                text = f" does not divide the {count} {what} of {spec.name}; use one of {_divisors(count, 2 * tp)}"
                yield _wrong("parallel.tp", tp, text, *MODEL)
                break
    cp = parallel.cp
    if cp != "auto" and cp > 1 and seq_len % (2 * cp):  # each rank holds one piece from either end
        possible = _divisors(seq_len // 2, 2 * cp) if seq_len % 2 == 0 else "1"
        text = f": the {seq_len} tokens of a sequence are not a multiple of {2 * cp} (2 x cp); use one of {possible}"
        yield _wrong("parallel.cp", cp, text, "training.seq_len", *MODEL)


def _divisors(number: int, most: int) -> str:
    return ", ".join(str(divisor) for divisor in divisors(number) if divisor <= most)


def _misdivisions_of_batch(
    parallel: ParallelConfig, batch_sizes: Mapping[str, int], ranks: int, kind: str, asked_for_each: int
) -> Iterator[Problem]:
    sizes = {"microbatch_size": parallel.microbatch_size, "num_microbatches": parallel.num_microbatches}
    factors = {f"{name} {size}": size for name, size in sizes.items() if size}
    if ranks > 1:
        factors[f"{ranks} {kind}"] = ranks
    one_pass = math.prod(factors.values())
    product = " x ".join(factors)
    others = ("parallel.microbatch_size", "parallel.num_microbatches", "parallel.dp_replicate", *_GPUS)
    for setting, batch_size in batch_sizes.items():
        asked = batch_size * asked_for_each
        makes = f" makes {batch_size} of the longest sequences, which" if asked_for_each > 1 else ""
        if batch_size % one_pass:
            enough = _next_multiple(batch_size, one_pass) * asked_for_each
            text = f"{makes} is not a multiple of {one_pass} ({product}); use {enough}"
            yield _wrong(setting, asked, text, *others)
        elif all(sizes.values()) and kind == "data-parallel ranks" and batch_size != one_pass:
            text = f"{makes} is not {one_pass} ({product}); leave one of the three out"
            yield _wrong(setting, asked, text, *others)


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
    if launch.nodes is not None and parallel.gpus % launch.nodes:
        text = f" cannot be spread evenly over launch.nodes={launch.nodes}"
        yield _wrong("parallel.gpus", parallel.gpus, text, "launch.nodes")


def wrong_request(launch: LaunchConfig, parallel: ParallelConfig, num_nodes: int) -> Iterator[Problem]:
    """Yield why the job does not ask for the GPUs of the ranks of a node."""
    if launch.device == "cpu":
        return
    section = launch.kind.prefix
    for wrong in launch.request.wrong_gpus(parallel.gpus // num_nodes):
        key = f"{section}{wrong.key}"
        yield _wrong(key, wrong.value, wrong.text, key.rpartition(".")[0], "parallel.gpus", "launch.nodes")


def wrong_elasticity(launch: LaunchConfig, parallel: ParallelConfig, num_nodes: int) -> Iterator[Problem]:
    """Yield why the job cannot start on fewer nodes than it asks for: ``num_nodes``, and spares."""
    kind = launch.kind
    all_or_none = f": {kind.title} starts a job with all of its nodes or not at all; leave it out"
    if launch.spare_nodes and not kind.takes_fewer_nodes:
        yield _wrong("launch.spare_nodes", launch.spare_nodes, all_or_none, "launch.launcher")
    elif launch.spare_nodes and launch.request.max_starts == 1:
        yield _without_restarts(launch, "launch.spare_nodes", launch.spare_nodes, "leave it out")
    if launch.min_nodes is not None and launch.min_nodes < num_nodes and not kind.takes_fewer_nodes:
        yield _wrong("launch.min_nodes", launch.min_nodes, all_or_none, "launch.launcher")
    if launch.min_nodes is None:
        return
    if launch.min_nodes > num_nodes:
        yield _wrong("launch.min_nodes", launch.min_nodes, f" is above launch.nodes={num_nodes}", "launch.nodes")
    if launch.min_nodes < num_nodes and parallel.zero_backend == "deepspeed":
        text = (
            ": DeepSpeed's checkpoints load on as many ranks as wrote them; leave it out, or use "
            "parallel.zero_backend=native"
        )
        yield _wrong("launch.min_nodes", launch.min_nodes, text, "launch.nodes", "parallel.zero_backend")


def without_exclusion(launch: LaunchConfig) -> Iterator[Problem]:
    """Yield why the job cannot start again without the nodes that fall behind."""
    kind = launch.kind
    for key, chosen in (("launch.preflight", launch.preflight), ("launch.stragglers", launch.stragglers)):
        if chosen != "exclude":
            continue
        if not kind.can_exclude:
            text = f": {kind.title} cannot keep a job off some nodes; use warn"
            yield _wrong(key, chosen, text, "launch.launcher")
        elif launch.request.max_starts == 1:
            yield _without_restarts(launch, key, chosen, "use warn")


def _without_restarts(launch: LaunchConfig, key: str, value: object, remedy: str) -> Problem:
    limits = f"{launch.kind.prefix}requeue", f"{launch.kind.prefix}max_attempts"
    text = f" needs a job that starts again, which {' or '.join(limits)} forbids; {remedy}"
    return _wrong(key, value, text, *limits)


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


def untimed_length(training: TrainingConfig) -> Iterator[Problem]:
    """Yield a problem if the number of steps is to be found by timing a warm-up that has none to time."""
    decides = training.minutes is not None and training.steps is None
    if decides and (training.warmup_steps is None or training.warmup_steps < 2):
        yield _wrong(
            "training.warmup_steps",
            training.warmup_steps,
            ": training.minutes times the steps of the warm-up; give at least 2",
            "training.warmup_steps",
        )


def wrong_mixture(data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yield what is wrong with the sources of a mixture, or with a run that says neither what it reads nor how long."""
    if data.source is None and not data.sources:
        yield _wrong("data.source", "null", ": give a path, or a mixture as data.sources", "data.sources")
    if not data.sources:
        return
    names = ", ".join(sorted(data.sources))
    if data.source is not None:
        text = f": data.sources has {names}; give one or the other (null leaves data.source out)"
        yield _wrong("data.source", data.name, text, "data.sources")
    for name, source in data.sources.items():
        if DATALOADER in paths_of(source.path):
            text = ": your own dataloader cannot be a source of a mixture; give files"
            yield _wrong(f"data.sources.{name}.path", DATALOADER, text)
        if not source.weight and not any(stage.weights.get(name) for stage in data.stages):
            text = f" without a stage that reads {name}; raise it, or leave {name} out"
            yield _wrong(f"data.sources.{name}.weight", source.weight, text, "data.sources", "data.stages")
    yield from _unusable_weights("data.sources.{}.weight", data.weights, "data.sources")
    if training.steps is None:
        yield from _unknown_length(data, training)


def _unusable_weights(setting: str, weights: Mapping[str, float], *others: str) -> Iterator[Problem]:
    """Yield why weights cannot be turned into shares; ``setting`` is that of a weight, with ``{}`` for its name."""
    total = sum(weights.values())
    if not total:
        text = f": all weights are 0 ({', '.join(sorted(weights))}); raise one of them"
        yield _wrong(setting.format(min(weights)), 0, text, *others)
    for name, weight in weights.items():
        if 0 < weight < MIN_SHARE * total:
            text = f" is less than a millionth of all weights ({total:g}); raise it, or leave {name} out"
            yield _wrong(setting.format(name), weight, text, *others)


def wrong_stages(
    data: DataConfig, ramp: Sequence[BatchRampStep], spec: ModelSpec | None, batch_size: int, seq_len: int
) -> Iterator[Problem]:
    """Yield what is wrong with the stages of a mixture, or with where those of a ramp begin.

    Args:
        data: the data.
        ramp: the other sizes of the batch.
        spec: the model; None if it is unknown.
        batch_size: sequences of a step of the first stage.
        seq_len: tokens of such a sequence; 0 if unknown.
    """
    if data.stages and not data.sources:
        yield Problem("data.stages needs a mixture: name the sources as data.sources", keys=("data.stages",))
        return
    for number, stage in enumerate(data.stages):
        if not stage.weights and stage.seq_len is None:
            text = " is a stage with neither weights nor seq_len; give one of them, or leave it out"
            yield _wrong(f"data.stages.{number}.from_tokens", stage.from_tokens, text, "data.stages")
        if stage.seq_len is not None:
            sizes = (batch_size, *(step.batch_size for step in ramp))
            yield from _wrong_length(f"data.stages.{number}.seq_len", stage.seq_len, spec, sizes, seq_len)
        setting = f"data.stages.{number}.weights"
        unknown = [name for name in stage.weights if name not in data.sources]
        for name in unknown:
            text = f": {name}{not_one_of(name, sorted(data.sources))}"
            yield _wrong(f"{setting}.{name}", stage.weights[name], text, "data.stages", "data.sources")
        if not unknown:
            yield from _unusable_weights(f"{setting}.{{}}", {**data.weights, **stage.weights}, "data.stages")
    stages = later_stages(data, ramp, batch_size, seq_len) if seq_len else ()
    for setting, asked in (("data.stages", data.stages), ("training.batch_ramp", ramp)):
        yield from _disordered(setting, [step.from_tokens for step in asked], stages)


def _wrong_length(
    setting: str, length: int, spec: ModelSpec | None, batch_sizes: Sequence[int], seq_len: int
) -> Iterator[Problem]:
    """Yield why sequences of a stage cannot have a length."""
    others = ("data.stages", "training.seq_len", "training.batch_size", "training.batch_ramp", *_NAMED)
    undivided = [size for size in batch_sizes if size * seq_len % length]
    if spec is not None and length > spec.max_context:
        text = f" is above the context of {spec.name}; use at most {spec.max_context}, or see architecture.max_context"
        yield _wrong(setting, length, text, *others)
    elif undivided:
        size = undivided[0]
        batch = "training.batch_size" if size == batch_sizes[0] else "training.batch_ramp"
        text = (
            f" does not divide the {size * seq_len:,} tokens of a step ({size} sequences of {seq_len}); "
            f"change it, or {batch}"
        )
        yield _wrong(setting, length, text, *others)


def uneven_lengths(data: DataConfig, parallel: ParallelConfig, lengths: Sequence[int]) -> Iterator[Problem]:
    """Yield why forwards cannot have as many tokens in every stage.

    Args:
        data: the data.
        parallel: how the work is divided.
        lengths: the tokens of a sequence in all stages.
    """
    if not data.other_lengths or not lengths:
        return
    longest = max(lengths)
    keys = ("data.stages", "training.seq_len")
    for length in lengths:
        if longest % length:
            text = f"sequences of {length:,} tokens and of {longest:,} cannot fill the same forwards; the longest must"
            yield Problem(f"data.stages: {text} be a multiple of every other length", keys=keys)
    if parallel.zero_backend == "deepspeed":
        text = "DeepSpeed is told the size of a microbatch once; use parallel.zero_backend=native"
        yield Problem(f"data.stages: sequences change their length, and {text}", keys=(*keys, "parallel.zero_backend"))


def _disordered(setting: str, asked: Sequence[int], stages: Sequence[TrainingStage]) -> Iterator[Problem]:
    """Yield which stages of one setting do not follow the one before.

    Args:
        setting: the setting.
        asked: the tokens from which its stages should begin.
        stages: the stages of the run, of all settings; empty if they are unknown.
    """
    begins = {stage.asked_tokens: stage.num_steps for stage in stages}
    for number, (before, after) in enumerate(pairwise(asked), start=1):
        key = f"{setting}.{number}.from_tokens"
        if after <= before:
            text = f" is not above that of the stage before it ({before:,}); give stages in their order"
            yield _wrong(key, after, text, setting)
        elif begins and begins[after] == begins[before]:
            text = f": this stage and the one before it both begin after step {begins[after]:,}; leave one out"
            yield _wrong(key, after, text, setting)


def without_ramp(data: DataConfig, training: TrainingConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Yield why a run that asks for a batch ramp cannot have one."""
    if not training.batch_ramp:
        return
    setting = "training.batch_ramp"
    if data.source == DATALOADER:
        yield Problem(f"{setting}: your dataloader decides the size of a batch; leave it out", keys=(setting,))
    if training.steps is None:
        text = "steps become longer, so their number has to be known: give training.steps"
        yield Problem(f"{setting}: {text}", keys=(setting, "training.steps", "training.epochs", "training.minutes"))
    if parallel.zero_backend == "deepspeed":
        text = "DeepSpeed is told the number of microbatches once; use parallel.zero_backend=native"
        yield Problem(f"{setting}: {text}", keys=(setting, "parallel.zero_backend"))
    if parallel.num_microbatches:
        text = f" is for one batch size, and {setting} gives several; give parallel.microbatch_size"
        yield _wrong("parallel.num_microbatches", parallel.num_microbatches, text, setting)


def _unknown_length(data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yield why a mixture needs a number of steps."""
    if training.minutes is None:
        text = f": the mixture of {', '.join(sorted(data.sources))} has no epochs, because each source has its own"
        yield _wrong("training.steps", "null", f"{text}; give training.steps or training.minutes", "data.sources")
    for name, source in data.sources.items():
        if training.minutes is not None and source.max_epochs is not None:
            text = ": training.minutes decides only later how much is read; give training.steps, or leave this out"
            key = f"data.sources.{name}.max_epochs"
            yield _wrong(key, source.max_epochs, text, "training.minutes", "training.steps")


def needless_keys(training: TrainingConfig, tuned: Collection[str]) -> Iterator[Problem]:
    """Yield which settings belong to another optimizer or objective than the run's, and which the objective lacks.

    Args:
        training: the settings.
        tuned: those of them with a default of fine-tuning, which nobody has asked for.
    """
    of_optimizer = OPTIMIZERS.named(training.optimizer).keys
    of_objective = OBJECTIVES.named(training.objective).keys
    for setting, taken, keys in (
        ("optimizer", of_optimizer, optimizer_keys()),
        ("objective", of_objective, objective_keys()),
    ):
        for key in keys:
            value = getattr(training, key)
            if key not in taken and key not in tuned and value != TrainingConfig.model_fields[key].default:
                takes = f"takes {', '.join(taken)}" if taken else "takes no settings of its own"
                chosen = f"training.{setting}={getattr(training, setting)}"
                yield _wrong(
                    f"training.{key}",
                    value,
                    f" has no effect, because {chosen} {takes}; leave it out",
                    f"training.{setting}",
                )
    for key in OBJECTIVES.named(training.objective).required:
        if getattr(training, key) is None:
            yield _wrong("training.objective", training.objective, f" needs training.{key}", f"training.{key}")


def unfit_for_pairs(data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yield which settings of the data do not go with an objective that reads answers."""
    if not OBJECTIVES.named(training.objective).records.holds_answers:
        return
    both = f"training.objective={training.objective}"
    if not data.document_mask:
        text = f": {both} has several answers in one row; leave it out"
        yield _wrong("data.document_mask", "false", text, "training.objective")
    if data.loss_on == "all":
        text = f" has no effect: {both} counts the tokens of answers alone; leave it out"
        yield _wrong("data.loss_on", data.loss_on, text, "training.objective")


def wrong_parametrization(training: TrainingConfig, spec: ModelSpec | None) -> Iterator[Problem]:
    """Yield what a learning rate for all widths and depths lacks, or what it is not known for.

    Args:
        training: the settings.
        spec: the model; None if it is unknown.
    """
    key = "training.parametrization"
    sizes = {"training.base_width": training.base_width, "training.base_depth": training.base_depth}
    if training.parametrization == "standard":
        for setting, size in sizes.items():
            if size is not None:
                yield _wrong(setting, size, f" has no effect with {key}=standard; use completep, or leave it out", key)
        return
    value = training.parametrization
    lacking = [setting for setting, size in sizes.items() if size is None]
    if lacking:
        text = f" needs {' and '.join(lacking)}: the sizes of the model that the learning rate was found with"
        yield _wrong(key, value, text, *sizes)
    if not OPTIMIZERS.named(training.optimizer).scales:
        text = f" is not known for training.optimizer={training.optimizer}; use adamw"
        yield _wrong(key, value, text, "training.optimizer")
    if spec is not None and (spec.moe or spec.lora):
        text = f" is for dense models that are trained whole, not for {'experts' if spec.moe else 'adapters'}"
        yield _wrong(key, value, f"{text}; leave it out", "strategy", *MODEL)


def without_deepspeed(training: TrainingConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Yield a problem if DeepSpeed cannot run the optimizer."""
    if parallel.zero_backend != "deepspeed":
        return
    kind = OPTIMIZERS.named(training.optimizer)
    if not kind.runs_in_deepspeed:
        text = f" cannot run training.optimizer={training.optimizer}; use native"
        yield _wrong("parallel.zero_backend", parallel.zero_backend, text, "training.optimizer")
    elif not kind.with_moments(training.moments).runs_in_deepspeed:
        text = f" cannot keep training.moments={training.moments}; use native, or fp32"
        yield _wrong("parallel.zero_backend", parallel.zero_backend, text, "training.moments")


def unknown_best(data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    """Yield why the best step cannot be told: no held-out loss, none of the name that is asked for, or only one."""
    holds_out = data.validation is not None or data.validation_fraction > 0 or data.source == DATALOADER
    for key in ("keep_best", "patience"):
        value = getattr(training, key)
        if value and not holds_out:
            text = ": nothing is held out; set data.validation, or a data.validation_fraction above 0"
            yield _wrong(f"training.{key}", value, text, "data.validation", "data.validation_fraction")
    evaluates = training.eval_every or (training.keep_best and training.checkpoint_every)
    if training.patience and holds_out and not evaluates:
        text = ": the run is evaluated only after its last step; set training.eval_every"
        others = ("training.eval_every", "training.keep_best", "training.checkpoint_every")
        yield _wrong("training.patience", training.patience, text, *others)
    by = training.keep_best_by
    names = data.held_out_names
    if by and by not in names:
        text = not_one_of(by, names) if names else ": the held-out loss has no names; leave it out"
        yield _wrong("training.keep_best_by", by, text, "data.validation", "data.sources")


def _wrong(setting: str, value: object, text: str, *others: str) -> Problem:
    """Return a problem: a setting, its value, the rest of the sentence, and the other settings that take part."""
    return Problem(text, setting, str(value), (setting, *others))
