"""``RunConfig``: everything that defines one run, whether from YAML, the command line, Python or a Prefect form.

Parsing is strict: unknown keys, wrong types and contradictory settings are errors, all reported at once. A key given
twice is an error too.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from llama_core.config.architecture import ArchitectureConfig
from llama_core.config.hardware import gpu_spec
from llama_core.config.hugging_face import is_folder
from llama_core.config.models import ModelSpec
from llama_core.config.names import keys_meant
from llama_core.config.parameters import matches, parameter_shapes
from llama_core.config.pretrained import with_experts_of_folder, with_settings_of_weights
from llama_core.config.section import Section
from llama_core.config.slurm import SlurmConfig
from llama_core.config.strategy import PARTS, LoRA, MoE, fine_tuning_defaults
from llama_core.config.strict_yaml import parse_yaml
from llama_core.errors import ConfigError, ask_for, did_you_mean
from llama_core.schedules.registry import schedule_names
from llama_core.units import divisors

SAMPLE = "sample"
"""The data source that every machine has: the source files of Python's standard library."""
DATALOADER = "dataloader"
"""The data source of a run whose batches come from the caller's own code."""
RANDOM_BASE = (
    "base weights are random, so the trained model will be useless; use --init-from PATH to start from trained weights"
)
"""The note on a run for which ``RunConfig.has_random_base`` is true."""

MOST_DEVICES = MOST_SEQUENCES = 2**20
"""Most devices of a run, and most sequences of one of its steps: far more than any run has used."""
MOST_MICROBATCHES = 2**13
"""Most forward passes of a rank in one step. A rank lists all of them before it begins."""
MOST_LAYERS = 2**8
"""Most layers of a model: about twice those of LLaMA 3 405B."""
MOST_TOKENS = 2**24
"""Most tokens of a sequence."""
MOST_WORKERS = 2**6
"""Most threads of a rank that read data."""

AttentionKernel = Literal["auto", "math"]
Device = Literal["auto", "cpu", "cuda"]
LauncherName = Literal["local", "slurm"]
LrSchedule = Literal["cosine", "wsd", "constant"]
OnBadStep = Literal["skip", "rollback", "stop"]
GradientCompression = Literal["none", "bf16", "powersgd"]
LossOn = Literal["assistant", "all"]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["auto", "bf16", "fp16", "fp32", "fp8"]
RecomputeMode = Literal["none", "selective", "full"]
ZeroBackend = Literal["native", "deepspeed"]
ZeroStage = Literal[0, 1, 2, 3]
StrategyName = Literal["standard", "lora", "moe", "hybrid"]
WandbMode = Literal["off", "offline", "online"]

Auto = Literal["auto"]
"""A choice left to the planner."""
OffloadRequest = Literal["auto", Offload]
RecomputeRequest = Literal["auto", "adaptive", RecomputeMode]
ZeroStageRequest = Literal["auto", ZeroStage]


def _count_or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a number that may be ``auto``, and report a wrong one in one line."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("count", "input should be 'auto' or an integer of at least 1") from None


def _steps_or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("steps", "input should be 'auto' or an integer of at least 0") from None


StepsOrAuto = Annotated[Annotated[int, Field(ge=0)] | Auto, WrapValidator(_steps_or_auto)]
"""A number of steps, or ``auto``."""

Count = Annotated[Annotated[int, Field(ge=1)] | Auto, WrapValidator(_count_or_auto)]
"""A number of at least 1, or ``auto``."""


def _known_schedule(name: str) -> str:
    known = ("auto", *schedule_names())
    if name not in known:
        raise PydanticCustomError("schedule", f"choose one of {', '.join(known)}{did_you_mean(name, known)}")
    return name


ScheduleRequest = Annotated[
    str, AfterValidator(_known_schedule), WithJsonSchema({"type": "string", "enum": ["auto", *schedule_names()]})
]
"""The name of a schedule, or ``auto``."""


class DataConfig(Section):
    """The training data."""

    source: str = SAMPLE
    """'sample' (Python's own standard library), or a .jsonl, .jsonl.gz or .parquet file, or a folder of them."""
    validation: str | None = None
    """Held-out documents, in the same formats; default: a fraction of the source."""
    validation_fraction: float = Field(0.02, ge=0, lt=1)
    """Fraction of the documents to hold out if no validation source is given."""
    text_field: str = "text"
    """Field of each record that holds the text; a record with `messages` is a conversation."""
    tokenizer: str = "bytes"
    """'bytes' (built in), or the path of a Hugging Face tokenizer.json or its folder."""
    chat_template: str | None = None
    """Chat template: 'llama2', 'llama3' or a Jinja file; default: the tokenizer's, else the family's."""
    loss_on: LossOn = "assistant"
    """Tokens of a conversation that count in the loss: assistant (its turns only) or all. Plain texts count in full."""
    document_mask: bool = True
    """Keep attention within each packed document; otherwise a sequence is one causal text."""
    max_bad_lines: int = Field(100, ge=0)
    """Unusable lines (not JSON or UTF-8, no text, no assistant turn, wrong type) tolerated before stopping."""
    cache_dir: str | None = None
    """Folder for token caches; default: $XDG_CACHE_HOME/llama-training-infra."""
    num_workers: int | None = Field(None, ge=0, le=MOST_WORKERS)
    """Threads of each rank that read up to two steps ahead; 0: read when a step needs it. Default: half of the rank's
    cores, at most 4. Your own dataloader has its own workers."""


class TrainingConfig(Section):
    """How the model is trained."""

    seq_len: int | None = Field(None, ge=2, le=MOST_TOKENS)
    """Tokens per sequence; default: the model's."""
    batch_size: int | None = Field(None, ge=1, le=MOST_SEQUENCES)
    """Global batch: sequences per optimizer step over all devices; default: 8, rounded up to full microbatches."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; default: as many as the epochs need."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the training documents if steps is not given; default: 1, or 2 in fine-tuning."""
    precision: Precision = "auto"
    """Arithmetic over fp32 weights: bf16, fp16 (with loss scaling), fp32, or fp8 (for the products of the blocks, on an
    L40S, H100 or newer; the rest is bf16); auto: bf16 if the device supports it."""
    learning_rate: float = Field(3e-4, gt=0)
    """Peak learning rate; default: 3e-4, for adapters 2e-4, for a whole model with init_from 2e-5."""
    lr_schedule: LrSchedule = "cosine"
    """cosine, wsd (warm-up, stable, decay) or constant; each after a linear warm-up."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; default: a tenth of the steps, at most 2000."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a fraction of the peak."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Fraction of the steps that the wsd schedule spends decaying."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of the matrices; norm vectors are not decayed. Default: 0.1, for adapters 0."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""
    max_skipped_steps: int = Field(3, ge=0)
    """Consecutive steps with a non-finite loss or gradient to skip before the run stops."""
    on_bad_step: OnBadStep = "skip"
    """After a non-finite step or a spike: skip (go on; a non-finite step updates no weight), rollback (to the newest
    checkpoint, and leave out the data since then, the bad step's included) or stop."""
    loss_spike_threshold: float = Field(10.0, gt=0)
    """A loss is a spike if it is this many median absolute deviations above the median of the last steps."""
    grad_norm_spike_threshold: float | None = Field(None, gt=0)
    """The same for the gradient norm; default: its spikes are only clipped."""
    spike_window: int = Field(64, ge=2, le=2**16)
    """Last steps that the median is taken over; no spike is found before that many."""
    max_rollbacks: int = Field(3, ge=0)
    """Rollbacks of a run before a bad step stops it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the data order."""
    init_from: str | None = None
    """Weights to start from: a Hugging Face or PEFT folder, or a run directory. Also sets the model, unless given."""
    deterministic: bool = False
    """Use only deterministic kernels on CUDA (the CPU's always are)."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out documents; 0: only after the last step."""
    eval_sequences: int = Field(64, ge=1)
    """Held-out sequences in one evaluation."""
    checkpoint_every: StepsOrAuto = 100
    """Steps between checkpoints; 0: only after the last step; auto: the interval that loses the least time, given the
    measured time of a save and launch.node_mtbf_hours."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept on disk."""


class ParallelConfig(Section):
    """How the work is divided. For ``auto`` (or null), the planner chooses the fastest setting that fits."""

    gpus: int = Field(1, ge=1, le=MOST_DEVICES)
    """Total devices: GPUs, or processes with --device cpu."""
    tp: Count = "auto"
    """Tensor-parallel ranks, which divide every matrix and the vocabulary."""
    pp: Count = "auto"
    """Pipeline-parallel ranks, which divide the layers."""
    cp: Count = "auto"
    """Context-parallel ranks, which divide every sequence."""
    ep: Count = "auto"
    """Expert-parallel ranks, which divide the experts of a mixture."""
    dp_replicate: Count = "auto"
    """Replicas of the sharding group (hybrid sharding); with zero_stage=0 every data-parallel rank is a replica."""
    sequence_parallel: bool = True
    """Divide the sequence over tensor-parallel ranks outside the matrix products; no effect with tp=1."""
    zero_stage: ZeroStageRequest = "auto"
    """What data-parallel ranks shard: 1 optimizer states, 2 also gradients, 3 also weights; no effect on one device."""
    zero_backend: ZeroBackend = "native"
    """Sharding implementation: native (torch's fully_shard) or deepspeed."""
    offload: OffloadRequest = "auto"
    """What DeepSpeed keeps in host memory: none, optimizer, or parameters (and the optimizer)."""
    schedule: ScheduleRequest = "auto"
    """Pipeline schedule; chimera becomes doubling or halving if memory allows. No effect with pp=1."""
    num_chunks: Count = "auto"
    """Stages per pipeline rank with the interleaved schedule."""
    microbatch_size: int | None = Field(None, ge=1, le=MOST_SEQUENCES)
    """Sequences per forward pass on each rank; default: chosen to fit memory and keep a pipeline busy."""
    num_microbatches: int | None = Field(None, ge=1, le=MOST_MICROBATCHES)
    """Forward passes per rank in one optimizer step (gradient accumulation); an alternative to microbatch_size.

    With batch_size 32 on 4 data-parallel ranks, 8 microbatches have 1 sequence each.
    """
    recompute: RecomputeRequest = "auto"
    """Activation checkpointing: none, selective, full, or adaptive (same as auto): the least of them that fits."""
    gradient_compression: GradientCompression = "none"
    """Compression of gradients between data-parallel ranks: none, bf16, or powersgd (low-rank factors)."""
    compile: Auto | bool = "auto"
    """Compile every block with torch.compile; auto: on CUDA, where the plan allows it."""
    attention: AttentionKernel = "auto"
    """Attention kernel: auto (chosen by torch and the data) or math, which keeps all scores in memory."""

    @field_validator(
        *("tp", "pp", "cp", "ep", "dp_replicate", "zero_stage", "offload", "schedule"),
        *("num_chunks", "recompute", "compile"),
        mode="before",
    )
    @classmethod
    def _null_is_auto(cls, value: Any) -> Any:
        return "auto" if value is None else value

    @property
    def inner(self) -> dict[str, int]:
        """The requested tensor-, pipeline- and context-parallel degrees, without those left to the planner."""
        degrees = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        return {name: size for name, size in degrees.items() if isinstance(size, int)}

    @property
    def most_data_parallel(self) -> int:
        """Most data-parallel ranks that the requested degrees leave."""
        return max(1, self.gpus // math.prod(self.inner.values()))


class LaunchConfig(Section):
    """Where the run happens."""

    launcher: LauncherName = "local"
    """local (this machine) or slurm."""
    device: Device = "auto"
    """cpu or cuda; auto: cuda if present, else cpu for a run on one device."""
    gpu_type: str | None = None
    """GPU to plan for, such as h100, h200 or A100-SXM4-80GB; default: the one present, else h100."""
    dollars_per_gpu_hour: float = Field(2.5, ge=0)
    """Price of one GPU for an hour, for the cost of a plan; set your own: prices differ by a factor of three."""
    nodes: int = Field(1, ge=1)
    """Machines the devices are spread over."""
    min_nodes: int | None = Field(None, ge=1)
    """Fewest nodes that a Slurm job starts with, such as after it has lost one: it takes the free nodes, up to
    `nodes`, and plans anew for them; default: all nodes."""
    collective_timeout_s: int = Field(600, ge=1)
    """Seconds that ranks wait for each other before the run counts as hung."""
    hang_timeout_s: int = Field(1800, ge=1)
    """Seconds without a step, after the first, before the run counts as hung."""
    save_timeout_s: int = Field(300, ge=1)
    """Seconds to finish a step and save a checkpoint when the run reaches its time limit or is cancelled."""
    node_mtbf_hours: float = Field(6300.0, gt=0)
    """Mean hours between failures of one node, for training.checkpoint_every=auto; default: that of the 2,048 nodes
    that trained Llama 3 405B, with 419 unexpected interruptions in 54 days (arXiv:2407.21783, section 3.3.4)."""
    force: bool = False
    """Submit the run even if it does not fit in device or host memory, or its checkpoints on the disk."""
    slurm: SlurmConfig = SlurmConfig()
    """Settings of the Slurm job."""

    @field_validator("gpu_type")
    @classmethod
    def _known_gpu(cls, name: str | None) -> str | None:
        return None if name is None else gpu_spec(name).name

    @property
    def is_here(self) -> bool:
        """Whether the ranks run on this machine."""
        return self.launcher == "local"

    @property
    def fewest_nodes(self) -> int:
        """Fewest nodes that the job starts with."""
        return self.min_nodes or self.nodes

    @property
    def is_elastic(self) -> bool:
        """Whether the job may start with fewer nodes than it asks for."""
        return self.fewest_nodes < self.nodes

    @property
    def memory_gb_per_node(self) -> int | None:
        """Memory requested on each node, in GiB; None for ranks on this machine, or if the job leaves it open."""
        return None if self.is_here else self.slurm.memory_gb_per_node


class TrackingConfig(Section):
    """Where metrics go besides the console and the run directory's Parquet files."""

    run_name: str | None = Field(None, pattern=r"^\w[\w.-]*$", max_length=80)
    """Name of the run; the name of its directory begins with it. Default: the model's name."""
    tensorboard: bool = True
    """Write TensorBoard events to <run>/logs/tensorboard."""
    wandb: WandbMode = "off"
    """Weights & Biases: off, offline (needs no account) or online."""
    wandb_project: str = "llama-training-infra"
    """Weights & Biases project."""


class BenchmarkConfig(Section):
    """How the speed of a training step is measured."""

    warmup_steps: int = Field(2, ge=0)
    """Steps run before the clock starts."""
    steps: int = Field(5, ge=0)
    """Steps that are timed; with 0, a run ends with its training."""
    profile: bool = False
    """Watch the timed steps with torch's profiler, which slows them down: traces go to <run>/trace."""
    history: str | None = None
    """Folder, possibly shared, that keeps the results of benchmarks and sweeps for later ones to compare with; default:
    `history` beside the run's or sweep's directory."""


class RunConfig(Section):
    """Everything that defines one run."""

    model: str = "tiny_llama3_50m"
    """A variant that `training-infra models` lists, or the path of a Llama's Hugging Face folder."""
    strategy: StrategyName = "standard"
    """What is trained: every weight (standard), adapters over a frozen model (lora), layers with experts (moe), or
    adapters beside experts (hybrid)."""
    lora: LoRA = LoRA()
    """The adapters that strategy=lora or hybrid trains."""
    moe: MoE = MoE()
    """The experts that strategy=moe or hybrid trains."""
    trainable: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Glob patterns of weights to train in full beside adapters, by name here or in Hugging Face, such as '*norm*'."""
    architecture: ArchitectureConfig = ArchitectureConfig()
    """Sizes and traits that differ from the model's own."""
    data: DataConfig = DataConfig()
    """The training data."""
    training: TrainingConfig = TrainingConfig()
    """How the model is trained."""
    parallel: ParallelConfig = ParallelConfig()
    """How the work is divided over devices."""
    launch: LaunchConfig = LaunchConfig()
    """Where the run happens."""
    tracking: TrackingConfig = TrackingConfig()
    """Where metrics go besides the run directory."""
    benchmark: BenchmarkConfig = BenchmarkConfig()
    """How the speed of a step is measured."""

    @field_validator("trainable", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _with_dependent_defaults(cls, given: Any) -> Any:
        """Fill in the defaults that depend on other settings."""
        training = given.get("training", {}) if isinstance(given, dict) else None
        if not isinstance(training, dict):
            return given  # validation reports it
        init_from = training.get("init_from")
        if isinstance(init_from, str):
            given = with_settings_of_weights(given, init_from)
        given = with_experts_of_folder(given)
        adapters = given.get("strategy") == "lora"
        defaults = fine_tuning_defaults(adapters=adapters, trained_before=init_from is not None)
        return given | {"training": defaults | training} if defaults else given

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(*problems)
        return self

    def _contradictions(self) -> Iterator[str]:
        try:
            spec = self.spec
        except ConfigError as error:
            yield from error.problems
        else:
            yield from self._misfits(spec)
        yield from self._misdivisions()
        for name in ("lora", "moe"):
            if name not in PARTS[self.strategy]:
                for key, value in getattr(self, name).model_dump(exclude_defaults=True).items():
                    yield f"{name}.{key}={value} needs strategy={name} or hybrid, not {self.strategy}"
        if self.trainable and "trainable" not in PARTS[self.strategy]:
            yield f"trainable={list(self.trainable)} needs strategy=lora or hybrid; {self.strategy} trains every weight"
        gpus = self.parallel.gpus
        if gpus % self.launch.nodes:
            yield f"parallel.gpus={gpus} cannot be spread evenly over launch.nodes={self.launch.nodes}"
        yield from self._wrong_elasticity()
        if self.training.precision == "fp8":
            yield from self._without_fp8()
        warmup, steps = self.training.warmup_steps, self.training.steps
        if warmup is not None and steps is not None and warmup > steps:
            yield f"training.warmup_steps={warmup} is above training.steps={steps}"

    def _wrong_elasticity(self) -> Iterator[str]:
        launch = self.launch
        if launch.fewest_nodes > launch.nodes:
            yield f"launch.min_nodes={launch.min_nodes} is above launch.nodes={launch.nodes}"
        if launch.is_elastic and self.parallel.zero_backend == "deepspeed":
            yield (
                f"launch.min_nodes={launch.min_nodes}: DeepSpeed's checkpoints load on as many ranks as wrote them; "
                "leave it out, or use parallel.zero_backend=native"
            )

    def _without_fp8(self) -> Iterator[str]:
        gpu = None if self.launch.gpu_type is None else gpu_spec(self.launch.gpu_type)
        needs = "training.precision=fp8 needs an NVIDIA GPU of the Ada, Hopper or Blackwell generation"
        if self.launch.device == "cpu":
            yield f"{needs}, and launch.device=cpu has none; use bf16 or fp32"
        elif gpu is not None and not gpu.fp8_flops:
            yield f"{needs}, and launch.gpu_type={gpu.name} is none; use bf16"

    def _misdivisions(self) -> Iterator[str]:
        parallel, asked = self.parallel, self.parallel.inner
        inner = math.prod(asked.values())
        if parallel.gpus % inner:
            degrees = " x ".join(f"{name} {size}" for name, size in asked.items())
            yield (
                f"parallel.gpus={parallel.gpus} is not a multiple of {inner} ({degrees}); "
                f"use {-(-parallel.gpus // inner) * inner}"
            )
            return
        copies = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else 1
        if parallel.most_data_parallel % copies:
            yield (
                f"parallel.dp_replicate={copies} does not divide the {parallel.most_data_parallel} data-parallel ranks"
            )
        elif len(asked) == 3:
            yield from self._misdivisions_of_batch(parallel.most_data_parallel, "data-parallel ranks")
        else:  # the planner still chooses the data-parallel degree, a multiple of these copies
            yield from self._misdivisions_of_batch(copies, "copies")

    def _misdivisions_of_batch(self, ranks: int, kind: str) -> Iterator[str]:
        parallel, batch = self.parallel, self.batch_size
        sizes = {"microbatch_size": parallel.microbatch_size, "num_microbatches": parallel.num_microbatches}
        factors = {f"{name} {size}": size for name, size in sizes.items() if size}
        factors |= {f"{ranks} {kind}": ranks} if ranks > 1 else {}
        one_pass, product = math.prod(factors.values()), " x ".join(factors)
        if batch % one_pass:
            nearest = -(-batch // one_pass) * one_pass
            yield f"training.batch_size={batch} is not a multiple of {one_pass} ({product}); use {nearest}"
        elif all(sizes.values()) and kind == "data-parallel ranks" and batch != one_pass:
            yield f"training.batch_size={batch} is not {one_pass} ({product}); leave one of the three out"

    def _misfits(self, spec: ModelSpec) -> Iterator[str]:
        seq_len, longest, scaling = self.training.seq_len, spec.max_context, spec.rope_scaling
        if seq_len and seq_len > longest:
            factor = math.ceil(seq_len / longest) * (scaling.factor if scaling else 1)
            yield (
                f"training.seq_len={seq_len} is above the context of {spec.name}; use at most {longest}, or stretch "
                f"its positions with architecture.rope_scaling.factor={factor:g}, or keep them as they are with "
                f"architecture.max_context={seq_len}"
            )
        if spec.num_layers > MOST_LAYERS:
            yield f"architecture.num_layers={spec.num_layers} is above {MOST_LAYERS}"
        pp, chunks = self.parallel.pp, self.parallel.num_chunks
        if pp != "auto" and pp > spec.num_layers:
            yield f"parallel.pp={pp} is above the {spec.num_layers} layers of {spec.name}; use at most that"
        if chunks != "auto" and chunks > spec.num_layers:
            yield f"parallel.num_chunks={chunks} is above the {spec.num_layers} layers of {spec.name}"
        if spec.lora is not None:
            yield from spec.lora.misfits(spec.target_shapes, tied=spec.tied_embeddings)
            yield from self._misfits_of_trainable(spec)
        if spec.num_heads % spec.num_kv_heads:
            yield (
                f"architecture.num_kv_heads={spec.num_kv_heads} does not divide the {spec.num_heads} query heads; "
                f"use one of {', '.join(map(str, divisors(spec.num_heads)))}"
            )

    def _misfits_of_trainable(self, spec: ModelSpec) -> Iterator[str]:
        names = parameter_shapes(spec)
        for pattern in self.trainable:
            if not any(matches(name, pattern) for name in names):
                examples = [name for name in names if name.startswith("layers.0.") or not name.startswith("layers.")]
                yield f"trainable={pattern!r} matches no weight of {spec.name}; weights are {', '.join(examples)}"
        if not spec.num_adapter_parameters:
            yield (
                f"lora.target_modules={list(self.lora.target_modules)} leaves no matrix for adapters: experts replace "
                f"it, or trainable={list(self.trainable)} trains it in full; choose others, or strategy="
                f"{'moe' if spec.moe else 'standard'}"
            )

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture of the model, with the adapters or experts that the strategy gives it."""
        spec = self.architecture.spec(self.model)
        parts = PARTS[self.strategy]
        if spec.moe is not None and "moe" not in parts:
            raise ConfigError(
                f"strategy={self.strategy}: {spec.name} is a mixture of experts; use strategy=moe or hybrid"
            )
        return replace(
            spec,
            lora=self.lora if "lora" in parts else None,
            moe=self.moe if "moe" in parts else None,
            trainable=self.trainable,
        )

    @property
    def has_random_base(self) -> bool:
        """Whether the run fine-tunes (adapters or an instruct model) from random weights."""
        return self.training.init_from is None and ("lora" in PARTS[self.strategy] or self.spec.instruct)

    @property
    def fine_tuning_defaults(self) -> dict[str, float]:
        """The settings of ``training`` that have their fine-tuning default."""
        defaults = fine_tuning_defaults(
            adapters=self.strategy == "lora", trained_before=self.training.init_from is not None
        )
        return {key: value for key, value in defaults.items() if getattr(self.training, key) == value}

    def self_contained(self) -> Self:
        """Return the same run with the model folder's absolute path and traits, so that the folder is no longer needed.

        A run records this, so that it keeps its model even if the folder changes or disappears.
        """
        if not is_folder(self.model):
            return self
        record = ArchitectureConfig.record(self.model, self.spec)
        return self.model_copy(update={"model": record.recorded_from, "architecture": record})

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step: as requested, else the smallest multiple of one pass that is at least 8.

        It is exactly one pass if both ``microbatch_size`` and ``num_microbatches`` are set.
        """
        if self.training.batch_size:
            return self.training.batch_size
        parallel = self.parallel
        one_pass = parallel.most_data_parallel * (parallel.microbatch_size or 1) * (parallel.num_microbatches or 1)
        return one_pass if parallel.num_microbatches and parallel.microbatch_size else -(-8 // one_pass) * one_pass

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: as requested, else the model's default."""
        return self.training.seq_len or self.spec.default_seq_len

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what is trained, as nested keys: model, data and training.

        Where it runs, how it is divided, how often it evaluates or saves, and its handling of bad steps are left out.
        """
        whole = self.self_contained()
        return {
            "model": whole.model,
            "architecture": whole.architecture.identity(),
            "strategy": self.strategy,
            **{name: getattr(self, name).model_dump() for name in ("lora", "moe") if name in PARTS[self.strategy]},
            **({"trainable": self.trainable} if self.trainable else {}),
            "data": self.data.model_dump(exclude={"cache_dir", "max_bad_lines", "num_workers"}),
            "training": self.training.model_dump(exclude=set(_CADENCE))
            | {"batch_size": self.batch_size, "seq_len": self.seq_len},
        }

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly for configurations that train the same thing."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], overrides: Iterable[str] = ()) -> Self:
        """Build a configuration from nested keys, then ``section.key=value`` overrides.

        Raises:
            ConfigError: naming every unknown key (with the nearest known one), wrong type and contradiction.
        """
        try:
            merged = json.loads(json.dumps(dict(mapping), default=str))  # Python callers may pass paths
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the configuration is not a mapping of names to plain values: {error}") from None
        problems: list[str] = []
        for override in overrides:
            problems.extend(_apply_override(merged, override))
        # Each round drops the keys already reported, so that the settings they hid are checked as well.
        while True:
            try:
                config = cls.model_validate(merged)
            except ValidationError as error:
                before = json.dumps(merged)
                for detail in error.errors():
                    problems.extend(_describe(detail))
                    _drop(merged, detail["loc"])
                # a problem of the whole, or of settings that the weights brought
                if any(detail["loc"] == () for detail in error.errors()) or json.dumps(merged) == before:
                    raise ConfigError(*problems) from None
            else:
                break
        if problems:
            raise ConfigError(*problems)
        return config

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML file, then apply ``section.key=value`` overrides.

        Raises:
            ConfigError: if the file cannot be read, is empty or not a mapping, or does not describe a run.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name of a file
            raise ConfigError(f"cannot read configuration {str(path)!r}: {error}") from None
        mapping = parse_yaml(text, str(path))
        if mapping is None:
            raise ConfigError(f"configuration {str(path)!r} is empty; write a key such as 'model: llama3_8b' into it")
        if not isinstance(mapping, dict):
            raise ConfigError(f"configuration {str(path)!r} is not a mapping of keys to values")
        return cls.from_mapping(mapping, overrides)

    def to_yaml(self) -> str:
        """Return the whole configuration, defaults included, as YAML."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)

    def with_overrides(self, *overrides: str) -> Self:
        """Return a copy with ``section.key=value`` overrides applied; defaults follow the new strategy.

        Raises:
            ConfigError: as ``from_mapping``.
        """
        mapping = self.model_dump()
        for key in _TUNED:
            default = self.fine_tuning_defaults.get(key, TrainingConfig.model_fields[key].default)
            if mapping["training"][key] == default:
                del mapping["training"][key]
        return self.from_mapping(mapping, overrides)


_TUNED = ("learning_rate", "weight_decay", "epochs")
"""Settings with other defaults in fine-tuning."""
_NULLS = ("null", "Null", "NULL", "~")
_CADENCE = (
    *("eval_every", "eval_sequences", "checkpoint_every", "keep_checkpoints", "max_skipped_steps", "on_bad_step"),
    *("loss_spike_threshold", "grad_norm_spike_threshold", "spike_window", "max_rollbacks"),
)


def _apply_override(mapping: dict[str, Any], override: str) -> list[str]:
    key, separator, text = override.partition("=")
    if not separator:
        return [f"override {override!r} is not of the form section.key=value"]
    *sections, last = key.strip().split(".")
    target = mapping
    for section in sections:
        if not isinstance(target.get(section), dict):
            target[section] = {}
        target = target[section]
    value = parse_yaml(text, f"override {key!r}")
    if value is None and text.strip() not in _NULLS:
        return [f"{key.strip()}={text} has no value; write one, or null for the default"]
    target[last] = value
    return []


LONGEST_SHOWN = 100
"""Characters of a wrong value that an error repeats."""


def _describe(detail: ErrorDetails) -> Iterable[str]:
    """Return the problems in one of Pydantic's error details."""
    key = ".".join(str(part) for part in detail["loc"])
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.problems
    if detail["type"] == "extra_forbidden":
        return [f"unknown key {key!r}{ask_for(keys_meant(key, config_keys()))}"]
    if detail["type"] == "model_type":
        return [f"{key}={_shown(detail['input'])}: this is a section of keys, not a value"]
    message = detail["msg"]
    if detail["loc"][-1:] == ("[key]",):
        return [f"{key.removesuffix('.[key]')}: {message[0].lower()}{message[1:]}"]
    return [f"{key}={_shown(detail['input'])}: {message[0].lower()}{message[1:]}"]


def _shown(value: object) -> str:
    given = repr(value)
    return given if len(given) <= LONGEST_SHOWN else f"{given[:LONGEST_SHOWN]}..."


def _drop(mapping: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the setting that a problem was reported for; for an item of a list, remove the whole list."""
    match location:
        case (str() as key,):
            mapping.pop(key, None)
        case (str() as section, str() as key, *_) if isinstance(mapping.get(section), dict):
            mapping[section].pop(key, None)
        case (str() as section, *_):
            mapping.pop(section, None)


def config_keys() -> dict[str, str]:
    """Return every dotted key of a run configuration with its description, without the sections."""
    return dict(_keys(RunConfig, ""))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""


def literal_values(alias: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal`` type, such as ``Precision``."""
    return get_args(alias)
