"""The sections of a run's configuration, and the limits of their values. The text below a key is its help."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from llama_core.config.hardware import MAX_DEVICES, gpu_spec
from llama_core.config.job_request import JobRequest
from llama_core.config.section import Key, KnownName, Section
from llama_core.config.slurm import SlurmConfig
from llama_core.errors import ConfigError, StorageError, did_you_mean
from llama_core.launchers.registry import DEFAULT_LAUNCHER, LAUNCHERS
from llama_core.launchers.traits import LauncherType
from llama_core.objectives.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from llama_core.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from llama_core.records.retention import Retention
from llama_core.schedules.registry import SCHEDULES
from llama_core.storage.stores import checked_url
from llama_core.trackers.registry import TRACKERS
from llama_core.trackers.tensorboard import TENSORBOARD, TensorBoardSettings
from llama_core.trackers.traits import AskedTracker, TrackerSettings
from llama_core.trackers.wandb import WANDB, WandbSettings

SAMPLE = "sample"
"""The data source that every machine has: the source files of Python's standard library."""
DATALOADER = "dataloader"
"""The data source of a run whose batches come from the caller's own code."""

MAX_SEQUENCES = 2**20
"""Most sequences of a step: far more than any run has used."""
MAX_MICROBATCHES = 2**13
"""Most forward passes of a rank in one step. A rank lists all of them before it begins."""
MAX_LAYERS = 2**8
"""Most layers of a model: about twice those of LLaMA 3 405B."""
MAX_TOKENS = 2**24
"""Most tokens of a sequence."""
MAX_WORKERS = 2**6
"""Most threads of a rank that read data."""

MIN_SHARE = 2.0**-20
"""Smallest share of a mixture that a source may have; a smaller one would hardly ever be read."""
UNNAMED = ""
"""The name of a source that has none, because it is the only one."""

AttentionKernel = Literal["auto", "math", "ulysses"]
Device = Literal["auto", "cpu", "cuda"]
LrSchedule = Literal["cosine", "wsd", "constant"]
OnBadStep = Literal["skip", "rollback", "stop"]
GradientCompression = Literal["none", "bf16", "powersgd"]
ExpertDispatch = Literal["auto", "direct", "two_step"]
LossOn = Literal["assistant", "all"]
Parametrization = Literal["standard", "completep"]
TokenDtype = Literal["uint16", "uint32"]
Moments = Literal["fp32", "bf16"]
Offload = Literal["none", "optimizer", "parameters"]
SlowNodes = Literal["off", "warn", "exclude"]
Precision = Literal["auto", "bf16", "fp16", "fp32", "fp8"]
RecomputeMode = Literal["none", "selective", "full"]
ZeroBackend = Literal["native", "deepspeed"]
ZeroStage = Literal[0, 1, 2, 3]
StrategyName = Literal["standard", "lora", "moe", "hybrid"]
WandbMode = Literal["off", "offline", "online"]


def literal_values(alias: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal`` type, such as ``Precision``."""
    return get_args(alias)


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


ScheduleRequest = Annotated[str, KnownName(SCHEDULES, others=("auto",))]
"""The name of a schedule, or ``auto``."""
OptimizerName = Annotated[str, KnownName(OPTIMIZERS)]
"""The name of an optimizer."""
ObjectiveName = Annotated[str, KnownName(OBJECTIVES)]
"""The name of an objective."""

HOW = Key(on_resume="allow", changes="speed")
"""A key that says how and where the work is done, not what is learnt."""
LEARNING = Key(on_resume="record", changes="learning")
"""A key of the optimizer's steps, which people change when a run does not learn well."""


DataSource = str | tuple[str, ...]
"""Where documents come from: ``SAMPLE``, ``DATALOADER``, a path, or several paths."""
_MAX_NAMED_PATHS = 3


def paths_of(source: DataSource) -> tuple[str, ...]:
    """Return the paths of a source."""
    return (source,) if isinstance(source, str) else source


def with_paths(source: DataSource, change: Callable[[str], str]) -> DataSource:
    """Return a source with each of its paths changed."""
    return change(source) if isinstance(source, str) else tuple(map(change, source))


def name_of(source: DataSource) -> str:
    """Return a name for a source, of its first paths."""
    paths = paths_of(source)
    more = len(paths) - _MAX_NAMED_PATHS
    return ", ".join(paths[:_MAX_NAMED_PATHS]) + (f" and {more:,} more" if more > 0 else "")


def _path_or_paths(value: Any) -> Any:
    """Return a path as it is, a list of one as that path, and a longer one as a tuple."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str) and path for path in paths):
        is_number = isinstance(value, int | float)
        hint = "; put it in quotes" if is_number else ""
        raise PydanticCustomError("paths", f"input should be a path, or a list of paths{hint}")
    alone = {SAMPLE, DATALOADER}.intersection(paths)
    if alone and len(paths) > 1:
        raise PydanticCustomError("paths", f"{alone.pop()!r} cannot be combined with paths; give one or the other")
    return paths[0] if len(paths) == 1 else tuple(paths)


def _paths_or_nothing(value: Any) -> Any:
    return None if value is None else _path_or_paths(value)


def paths_by_name(value: Any) -> Any:
    """Return each of some named paths as a source; anything else as a source or as nothing."""
    if isinstance(value, dict):
        return {name: _path_or_paths(paths) for name, paths in value.items()}
    return _paths_or_nothing(value)


def differ_in_more_than_case(names: Any) -> Any:
    """Return a mapping as it is, unless two of its names differ only in case."""
    if isinstance(names, dict):
        folded = Counter(name.casefold() for name in names)
        same = [name for name in names if folded[name.casefold()] > 1]
        if same:
            raise PydanticCustomError("names", f"{' and '.join(same)} differ only in case; give them other names")
    return names


def _name_of_a_metric(name: str) -> str:
    if not re.fullmatch(r"\w[\w-]{0,39}", name):
        raise PydanticCustomError(
            "name", "a name is up to 40 letters, digits, '_' and '-', and does not begin with '-'"
        )
    return name


SourceName = Annotated[str, AfterValidator(_name_of_a_metric)]
"""The name of a source in a mixture, and of its held-out loss."""


class MixedSource(Section):
    """A source of a mixture."""

    path: Annotated[DataSource, BeforeValidator(_path_or_paths)]
    """Its files, in the forms of `data.source`."""
    weight: float = Field(ge=0)
    """Its part of the training sequences, relative to the weights of the others: any number above 0, or 0 if only a
    stage reads it."""
    max_epochs: Annotated[float | None, Key(on_resume="allow", changes="nothing")] = Field(None, gt=0)
    """Most passes over it; a run that would take more is refused before it begins. Default: any number."""


class DataStage(Section):
    """A stage of a run on a mixture: other weights, or sequences of another length, from some tokens on."""

    from_tokens: int = Field(gt=0)
    """Tokens of the run after which it begins; within a step, it begins after that step."""
    weights: dict[SourceName, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Weights in place of those of the same sources in `data.sources`; 0: the stage does not read it."""
    seq_len: int | None = Field(None, ge=2, le=MAX_TOKENS)
    """Tokens per sequence in place of `training.seq_len`; a step keeps its tokens and has fewer or more sequences."""


class DataConfig(Section):
    """The training data."""

    source: Annotated[DataSource | None, BeforeValidator(_paths_or_nothing)] = SAMPLE
    """'sample' (Python's own standard library), or files (.jsonl, .json, .parquet, .txt, .md; docs/data.md), folders
    of them, wildcards in quotes, or org/name on the Hub: one or several."""
    sources: Annotated[dict[SourceName, MixedSource], AfterValidator(differ_in_more_than_case)] = Field(
        default_factory=dict
    )
    """A mixture of named sources, in place of `data.source`: {wiki: {path: wiki.jsonl, weight: 3, max_epochs: 2}, code:
    {path: code, weight: 1}}."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Other weights, or longer sequences, later in the run: [{from_tokens: 2e9, weights: {code: 3}, seq_len: 8192}].
    What a stage does not name is as in `data.sources` and `training.seq_len`."""
    validation: Annotated[
        DataSource | dict[SourceName, DataSource] | None,
        BeforeValidator(paths_by_name),
        AfterValidator(differ_in_more_than_case),
        Key(changes="held-out"),
    ] = None
    """Held-out documents, in the same forms, or several by name: {wiki: held-out-wiki.jsonl, code: held-out-code};
    default: a fraction of every source."""
    validation_fraction: Annotated[float, Key(changes="held-out")] = Field(0.02, ge=0, lt=1)
    """Fraction of the documents to hold out if no validation source is given."""
    text_field: Annotated[str, Key(changes="held-out")] = "text"
    """Field of each record that holds the text; a record with `messages` is a conversation."""
    fields: Annotated[dict[str, str], Key(changes="held-out")] = Field(default_factory=dict)
    """Your names for the fields of a format of conversations, such as {prompt: question, completion: answer}: see
    docs/data.md. Records with these fields are then of this format, whatever else they hold."""
    tokenizer: Annotated[str, Key(changes="held-out")] = "bytes"
    """'bytes', 'sample' (2,048 words of the sample), a tokenizer.json or tokenizer.model, its folder, or org/name on
    the Hub."""
    # what a run that goes on reads is compared token by token, so another value cannot change it
    add_bos_token: Annotated[bool | None, Key(changes="held-out")] = None
    """Whether each text begins with BOS; default: as the tokenizer's files say. A chat template spells its own."""
    token_dtype: Annotated[TokenDtype | None, Key(changes="held-out")] = None
    """Type of the token ids in files that do not tell it (OLMo's .npy, nanoGPT's .bin): uint16 or uint32; default: the
    smaller one that holds the tokenizer's vocabulary."""
    chat_template: Annotated[str | None, Key(changes="held-out")] = None
    """llama2, llama3, llama4, mistral, chatml, gemma or a Jinja file; default: the tokenizer's, else the family's."""
    loss_on: Annotated[LossOn, Key(changes="held-out")] = "assistant"
    """Tokens of a conversation that count in the loss: assistant (its turns only) or all. Plain texts count in full."""
    document_mask: bool = True
    """Keep attention within each packed document; otherwise a sequence is one causal text."""
    max_bad_lines: Annotated[int, Key(on_resume="allow")] = Field(100, ge=0)
    """Unusable lines (not JSON or UTF-8, no text, no assistant turn, tool calls) tolerated before stopping."""
    cache_dir: Annotated[str | None, Key(on_resume="allow")] = None
    """Folder for token caches; default: $XDG_CACHE_HOME/llama-training-infra. Where others may write, each user has one
    of their own in it."""
    num_workers: Annotated[int | None, Key(on_resume="allow")] = Field(None, ge=0, le=MAX_WORKERS)
    """Threads of each rank that read up to two steps ahead; 0: read when a step needs it. Default: half of the rank's
    cores, at most 4. Your own dataloader has its own workers."""

    @model_validator(mode="before")
    @classmethod
    def _mixture_needs_no_sample(cls, given: Any) -> Any:
        is_mixture = isinstance(given, dict) and bool(given.get("sources"))
        return given | {"source": None} if is_mixture and given.get("source", SAMPLE) == SAMPLE else given

    @property
    def training_sources(self) -> Mapping[str, DataSource]:
        """The sources of the mixture by name, in alphabetical order; or else the only one."""
        if self.source is not None:
            return {UNNAMED: self.source}
        return {name: self.sources[name].path for name in sorted(self.sources)}

    @property
    def validation_sources(self) -> Mapping[str, DataSource]:
        """The sources of held-out documents by name; empty if a fraction of the training sources is held out."""
        if isinstance(self.validation, dict):
            return self.validation
        return {} if self.validation is None else {UNNAMED: self.validation}

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """The names of the held-out losses, in alphabetical order; empty if there is only the one over all tokens."""
        if isinstance(self.validation, dict):
            return tuple(sorted(self.validation))
        return tuple(sorted(self.sources)) if self.validation is None else ()

    def with_each_path(self, change: Callable[[str], str]) -> Self:
        """Return the same data with the path of every source changed."""
        sources = {
            name: mixed.model_copy(update={"path": with_paths(mixed.path, change)})
            for name, mixed in self.sources.items()
        }
        held_out = {name: with_paths(source, change) for name, source in self.validation_sources.items()}
        validation = held_out if isinstance(self.validation, dict) else held_out.get(UNNAMED)
        source = None if self.source is None else with_paths(self.source, change)
        return self.model_copy(update={"source": source, "sources": sources, "validation": validation})

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each source of the mixture, or of the only one."""
        return {name: source.weight for name, source in self.sources.items()} or {UNNAMED: 1.0}

    @property
    def other_lengths(self) -> tuple[int, ...]:
        """The tokens per sequence that stages give."""
        return tuple(stage.seq_len for stage in self.stages if stage.seq_len is not None)

    @property
    def limits(self) -> Mapping[str, float | None]:
        """The most epochs of each source of the mixture."""
        return {name: source.max_epochs for name, source in self.sources.items()}

    @property
    def name(self) -> str:
        """A name for the training data: of the first paths, or of the sources of a mixture."""
        return ", ".join(sorted(self.sources)) if self.source is None else name_of(self.source)


class BatchRampStep(Section):
    """Another size of the global batch, from some tokens on."""

    from_tokens: int = Field(gt=0)
    """Tokens of the run after which steps have it; within a step, after that step."""
    batch_size: int = Field(ge=1, le=MAX_SEQUENCES)
    """Sequences per optimizer step in place of `training.batch_size`."""


class TrainingConfig(Section):
    """How the model is trained."""

    seq_len: int | None = Field(None, ge=2, le=MAX_TOKENS)
    """Tokens per sequence; default: the model's."""
    batch_size: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    """Global batch: sequences per optimizer step over all devices; default: 8, rounded up to full microbatches."""
    batch_ramp: Annotated[tuple[BatchRampStep, ...], Field(strict=False)] = ()
    """Other batch sizes later in the run, while the gradient's noise shrinks: [{from_tokens: 1e9, batch_size: 512}].
    The plan and its estimates are for the largest; smaller ones have fewer microbatches."""
    steps: Annotated[int | None, Key(on_resume="extend", changes="learning")] = Field(None, ge=1)
    """Optimizer steps; default: as many as the epochs need."""
    epochs: Annotated[float, Key(on_resume="extend", changes="learning")] = Field(1.0, gt=0)
    """Passes over the training documents if steps is not given; default: 1, or 2 in fine-tuning."""
    minutes: Annotated[float | None, Key(on_resume="extend", changes="learning")] = Field(None, gt=0)
    """Take as many steps as fit into this time, in place of epochs, if steps is not given: those of the warm-up are
    timed."""
    precision: Precision = "auto"
    """Arithmetic over fp32 weights: bf16, fp16 (with loss scaling), fp32, or fp8 (for the products of the blocks, on an
    L40S, H100 or newer; the rest is bf16); auto: bf16 if the device supports it."""
    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    """Rule that updates the weights from their gradients: a name in `llama_core/optimizers/registry.py`."""
    moments: Annotated[Moments, Key(changes="learning")] = "fp32"
    """Precision in which AdamW's two moments are kept: fp32, or bf16 with stochastic rounding, which takes half the
    memory."""
    muon_lr: Annotated[float | None, LEARNING] = Field(None, gt=0)
    """Peak learning rate of the matrices that Muon updates; default: learning_rate, since the updates are as long as
    AdamW's."""
    muon_momentum: Annotated[float, LEARNING] = Field(0.95, ge=0, lt=1)
    """Muon's decay of the momentum."""
    objective: Annotated[ObjectiveName, Key(changes="held-out")] = DEFAULT_OBJECTIVE
    """What the model is trained for: a name in `llama_core/objectives/registry.py`."""
    z_loss: Annotated[float, Key(changes="learning")] = Field(0.0, ge=0)
    """Coefficient of the square of log Z (the log of the sum of a token's exponentials), which next_token trains for
    besides, so that logits do not drift; usually 1e-4. Losses are told without it."""
    mtp_weight: Annotated[float, Key(changes="learning")] = Field(0.3, ge=0)
    """Factor on the mean loss of the modules of architecture.mtp_layers, which next_token trains for besides; in
    DeepSeek-V3 at first 0.3, then 0.1. With 0, their losses are measured alone."""
    preference_beta: Annotated[float | None, Key(changes="learning")] = Field(None, gt=0)
    """How strongly dpo, ipo and kto hold the model to the one that it begins with (default: 0.1); simpo's factor on
    mean log-probabilities (2); orpo's weight of the odds ratio (0.1)."""
    label_smoothing: Annotated[float, Key(changes="learning")] = Field(0.0, ge=0, lt=0.5)
    """The probability that a pair is the wrong way round, for dpo."""
    simpo_gamma: Annotated[float, Key(changes="learning")] = Field(1.0, ge=0)
    """The margin of rewards that simpo wants exceeded."""
    desirable_weight: Annotated[float, Key(changes="learning")] = Field(1.0, gt=0)
    """Factor on the loss of good answers, for kto."""
    undesirable_weight: Annotated[float, Key(changes="learning")] = Field(1.0, gt=0)
    """Factor on the loss of bad answers, for kto."""
    teacher: Annotated[str | None, Key(changes="held-out")] = None
    """The model that distill learns from: a Hugging Face folder, or a run directory, with the run's own tokenizer."""
    distill_top_k: Annotated[int, Key(changes="held-out")] = Field(32, ge=1)
    """How many of the teacher's most probable tokens distill compares with, for each target."""
    distill_weight: Annotated[float, Key(changes="held-out")] = Field(0.5, ge=0, le=1)
    """How much the divergence from the teacher counts in distill; the next token has the rest."""
    learning_rate: Annotated[float, LEARNING] = Field(3e-4, gt=0)
    """Peak learning rate; default: 3e-4, for adapters 2e-4, for a whole model with init_from 2e-5."""
    parametrization: Annotated[Parametrization, Key(changes="learning")] = "standard"
    """What learning rate and initial values belong to: standard (the model) or completep (one of base_width and
    base_depth; every weight of the model gets what keeps the best rate where it is there)."""
    base_width: Annotated[int | None, Key(changes="learning")] = Field(None, ge=1)
    """hidden_size of the model that the learning rate was found with, for completep."""
    base_depth: Annotated[int | None, Key(changes="learning")] = Field(None, ge=1)
    """num_layers of that model."""
    lr_schedule: Annotated[LrSchedule, LEARNING] = "cosine"
    """cosine, wsd (warm-up, stable, decay) or constant; each after a linear warm-up."""
    warmup_steps: Annotated[int | None, LEARNING] = Field(None, ge=0)
    """Steps of linear warm-up; default: a tenth of the steps, at most 2000."""
    min_lr_ratio: Annotated[float, LEARNING] = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a fraction of the peak."""
    decay_fraction: Annotated[float, LEARNING] = Field(0.2, gt=0, le=1)
    """Fraction of the steps that the wsd schedule spends decaying."""
    weight_decay: Annotated[float, LEARNING] = Field(0.1, ge=0)
    """Decoupled weight decay of the matrices; norm vectors are not decayed. Default: 0.1, for adapters 0."""
    beta1: Annotated[float, LEARNING] = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, LEARNING] = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: Annotated[float, LEARNING] = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, LEARNING] = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""
    max_skipped_steps: Annotated[int, Key(on_resume="allow", changes="learning")] = Field(3, ge=0)
    """Consecutive steps with a non-finite loss or gradient to skip before the run stops."""
    on_bad_step: Annotated[OnBadStep, Key(on_resume="allow", changes="learning")] = "skip"
    """After a non-finite step or a spike: skip (go on; a non-finite step updates no weight), rollback (to the newest
    checkpoint, and leave out the data since then, the bad step's included) or stop."""
    loss_spike_threshold: Annotated[float, Key(on_resume="allow", changes="learning")] = Field(10.0, gt=0)
    """A loss is a spike if it is this many median absolute deviations above the median of the last steps."""
    grad_norm_spike_threshold: Annotated[float | None, Key(on_resume="allow", changes="learning")] = Field(None, gt=0)
    """The same for the gradient norm; default: its spikes are only clipped."""
    spike_window: Annotated[int, Key(on_resume="allow", changes="learning")] = Field(64, ge=2, le=2**16)
    """Last steps that the median is taken over; no spike is found before that many."""
    max_rollbacks: Annotated[int, Key(on_resume="allow", changes="learning")] = Field(3, ge=0)
    """Rollbacks of a run before a bad step stops it."""
    replica_check_every: Annotated[int, Key(on_resume="allow", changes="nothing")] = Field(100, ge=0)
    """Steps between comparisons of the bits of weights and optimizer states that several ranks hold, also before each
    evaluation and checkpoint; 0: never. Where they differ, a device computes wrongly: it is named, and the run goes
    back to the last checkpoint."""
    seed: Annotated[int, Key(changes="learning")] = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the data order."""
    init_from: str | None = None
    """Weights to start from: a Hugging Face or PEFT folder, org/name on the Hub, or a run directory. Also sets the
    model, unless given."""
    deterministic: bool = False
    """Use only deterministic kernels on CUDA (the CPU's always are)."""
    eval_every: Annotated[int, Key(on_resume="allow", changes="nothing")] = Field(0, ge=0)
    """Steps between evaluations on held-out documents; 0: only after the last step."""
    eval_sequences: Annotated[int, Key(on_resume="allow", changes="held-out")] = Field(64, ge=1)
    """Held-out sequences in one evaluation."""
    checkpoint_every: Annotated[StepsOrAuto, Key(on_resume="allow", changes="nothing")] = 100
    """Steps between checkpoints; 0: only after the last step; auto: the interval that loses the least time, given the
    measured time of a save and launch.node_mtbf_hours."""
    keep_checkpoints: Annotated[int, Key(on_resume="allow", changes="nothing")] = Field(2, ge=1)
    """Newest checkpoints kept on disk. The next two keys keep others, too."""
    keep_best: Annotated[int, Key(on_resume="allow", changes="nothing")] = Field(0, ge=0)
    """Checkpoints with the lowest held-out loss that are kept; above 0, every checkpoint's step is evaluated, except
    that of a run that is asked to stop, which is none of the best."""
    keep_every_tokens: Annotated[int, Key(on_resume="allow", changes="nothing")] = Field(0, ge=0)
    """Keep the first checkpoint at or after each multiple of this many tokens for good; 0: none for that."""
    keep_best_by: Annotated[str, Key(on_resume="allow", changes="nothing")] = UNNAMED
    """Name of the held-out loss that says which checkpoint is best, as in `data.validation` or, without it,
    `data.sources`; default: the loss over all held-out tokens."""
    checkpoint_mirror: Annotated[str | None, Key(on_resume="allow", changes="nothing")] = None
    """Address below which checkpoints are copied while the run trains, such as s3://bucket/prefix; the run is at
    prefix/RUN_NAME."""
    patience: Annotated[int, Key(on_resume="allow", changes="learning")] = Field(0, ge=0)
    """Evaluations in a row without a lower held-out loss (`keep_best_by`) after which the run ends; 0: never."""

    @field_validator("checkpoint_mirror")
    @classmethod
    def _address_of_mirror(cls, url: str | None) -> str | None:
        try:
            return None if url is None else checked_url(url)
        except StorageError as error:
            raise ConfigError(f"training.checkpoint_mirror: {error}") from None

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay on disk."""
        return Retention(
            newest=self.keep_checkpoints,
            best=self.keep_best,
            best_by=self.keep_best_by,
            every_tokens=self.keep_every_tokens,
        )

    def total_steps(self, steps_per_epoch: float) -> int | None:
        """Return the optimizer steps of a run, at least one; None: as many as fit into a time."""
        if self.steps is not None:
            return self.steps
        if self.minutes is not None:
            return None
        return max(1, round(self.epochs * steps_per_epoch))


class ParallelConfig(Section):
    """How the work is divided. For ``auto`` (or null), the planner chooses the fastest setting that fits."""

    every_key: ClassVar[Key] = HOW

    gpus: Annotated[int, Key(on_resume="allow", changes="batch")] = Field(1, ge=1, le=MAX_DEVICES)
    """Total devices: GPUs, or processes with --device cpu."""
    tp: Count = "auto"
    """Tensor-parallel ranks, which divide every matrix and the vocabulary."""
    pp: Count = "auto"
    """Pipeline-parallel ranks, which divide the layers."""
    cp: Count = "auto"
    """Context-parallel ranks, which divide every sequence."""
    ep: Count = "auto"
    """Expert-parallel ranks, which divide the experts of a mixture."""
    ep_dispatch: ExpertDispatch = "auto"
    """How tokens reach experts on other nodes: direct, a copy for each expert; two_step, once to each node and from
    there to its ranks; auto: two_step where ep spans whole nodes and a token has several experts."""
    expert_tp: Count = "auto"
    """Tensor-parallel ranks that divide every expert: tp, or 1. With 1 they are expert-parallel ranks: each has whole
    experts, and ep is a multiple of tp."""
    dp_replicate: Annotated[Count, Key(on_resume="allow", changes="batch")] = "auto"
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
    microbatch_size: Annotated[int | None, Key(on_resume="allow", changes="batch")] = Field(
        None, ge=1, le=MAX_SEQUENCES
    )
    """Sequences per forward pass on each rank; default: chosen to fit memory and keep a pipeline busy."""
    num_microbatches: Annotated[int | None, Key(on_resume="allow", changes="batch")] = Field(
        None, ge=1, le=MAX_MICROBATCHES
    )
    """Forward passes per rank in one optimizer step (gradient accumulation); an alternative to microbatch_size.

    With batch_size 32 on 4 data-parallel ranks, 8 microbatches have 1 sequence each.
    """
    recompute: RecomputeRequest = "auto"
    """Activation checkpointing: none, selective, full, or adaptive (same as auto): the least of them that fits."""
    gradient_compression: Annotated[GradientCompression, Key(on_resume="allow", changes="everything")] = "none"
    """Compression of gradients between data-parallel ranks: none, bf16, or powersgd (low-rank factors)."""
    compile: Auto | bool = "auto"
    """Compile every block with torch.compile; auto: on CUDA, where the plan allows it."""
    attention: AttentionKernel = "auto"
    """Attention kernel: auto (chosen by torch and the data), math, which keeps all scores in memory, or ulysses: cp
    ranks exchange heads, and each attends to whole rows."""

    @field_validator(
        *("tp", "pp", "cp", "ep", "expert_tp", "dp_replicate", "zero_stage", "offload", "schedule"),
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

    every_key: ClassVar[Key] = HOW

    launcher: Annotated[str, KnownName(LAUNCHERS)] = DEFAULT_LAUNCHER
    """local (this machine) or slurm."""
    device: Device = "auto"
    """cpu or cuda; auto: cuda if present, else cpu for a run on one device."""
    gpu_type: str | None = None
    """GPU to plan for, such as h100, h200 or A100-SXM4-80GB; default: the one present, else h100."""
    machine_profile: str | None = None
    """Profile of `training-infra calibrate`, or a folder of them, whose measured rates predict times; default: the one
    in the cache if it fits, else the data sheet."""
    dollars_per_gpu_hour: float = Field(2.5, ge=0)
    """Price of one GPU for an hour, for the cost of a plan; set your own: prices differ by a factor of three."""
    nodes: int | None = Field(None, ge=1)
    """Machines the devices are spread over; default: as few as hold that many GPUs, and one for CPU processes."""
    min_nodes: int | None = Field(None, ge=1)
    """Fewest nodes that a job starts with, such as after it has lost one: it takes the free nodes, up to `nodes`, and
    plans anew for them; default: all nodes."""
    spare_nodes: int = Field(0, ge=0)
    """Further nodes that a job asks for, if they are free. They wait, and are paid for; when a node is lost or
    excluded, the job goes on with one of them at once, without the queue."""
    collective_timeout_s: int = Field(600, ge=1)
    """Seconds that ranks wait for each other before the run counts as hung."""
    hang_timeout_s: int = Field(1800, ge=1)
    """Seconds without a step, after the first, before the run counts as hung."""
    save_timeout_s: int = Field(300, ge=1)
    """Seconds to finish a step and save a checkpoint when the run reaches its time limit or is cancelled."""
    preflight: SlowNodes = "warn"
    """Before the first step of each attempt, measure every rank's device, memory, links and disk for a moment: warn
    names those slower than their peers; exclude also lets the job start again without their nodes; off measures
    nothing."""
    stragglers: SlowNodes = "warn"
    """While training, every rank times a product of matrices now and then, in at most 0.2 % of the time: warn names
    those that fall behind their peers; exclude also keeps the job off their nodes when it is next queued again; off
    measures nothing."""
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
    def kind(self) -> LauncherType:
        """The launcher, with its facts."""
        return LAUNCHERS.named(self.launcher)

    @property
    def is_here(self) -> bool:
        """Whether the ranks run on this machine."""
        return self.kind.is_here

    @property
    def request(self) -> JobRequest:
        """What the launcher's job asks for."""
        section = self.kind.section
        request: JobRequest = getattr(self, section) if section else JobRequest()
        return request


def request_sections() -> dict[str, type[JobRequest]]:
    """Return the sections of ``launch`` in which a job says what it asks for, by name."""
    kinds = {name: field.annotation for name, field in LaunchConfig.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, JobRequest)}


KEYS_OF_TRACKERS = {TENSORBOARD.name: "tracking.tensorboard", WANDB.name: "tracking.wandb"}
"""The keys of trackers that were here before ``tracking.trackers``, where all others have a section."""


def _settings_of_trackers(given: Any) -> Any:
    """Check the settings of each tracker by its row, and leave out trackers that have none."""
    if not isinstance(given, dict):
        return given
    checked: dict[str, Any] = {}
    for name, settings in given.items():
        kind = None if name in KEYS_OF_TRACKERS else TRACKERS.find(name)
        if kind is None:
            problem: InitErrorDetails = {"type": _not_a_tracker(name), "loc": (name,), "input": settings}
            raise ValidationError.from_exception_data("trackers", [problem])
        if settings is not None:
            # as a mapping with this name alone, so that the places of problems begin with it
            settings_by_name: TypeAdapter[Any] = TypeAdapter(dict[str, kind.settings])  # type: ignore[name-defined]
            checked |= settings_by_name.validate_python({name: settings})
    return checked


def _not_a_tracker(name: str) -> PydanticCustomError:
    if name in KEYS_OF_TRACKERS:
        return PydanticCustomError("name", f"use {KEYS_OF_TRACKERS[name]}")
    others = [known for known in TRACKERS.names() if known not in KEYS_OF_TRACKERS]
    if not others:
        return PydanticCustomError("name", "no tracker of this name is installed")
    return PydanticCustomError("name", f"choose one of {', '.join(others)}{did_you_mean(name, others)}")


class TrackingConfig(Section):
    """Where metrics go besides the console and the run directory's Parquet files."""

    every_key: ClassVar[Key] = HOW

    run_name: str | None = Field(None, pattern=r"^\w[\w.-]*$", max_length=80)
    """Name of the run; the name of its directory begins with it. Default: the model's name."""
    tensorboard: bool = True
    """Write TensorBoard events to <run>/logs/tensorboard."""
    wandb: WandbMode = "off"
    """Weights & Biases: off, offline (needs no account) or online."""
    wandb_project: str = "llama-training-infra"
    """Weights & Biases project."""
    trackers: Annotated[
        dict[str, SerializeAsAny[TrackerSettings]],
        BeforeValidator(_settings_of_trackers),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "object"}}),
    ] = Field(default_factory=dict)
    """Other trackers by name, each with settings of its own, as {name: {key: value}}; {} are its defaults, and null
    turns it off."""
    prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Texts that the trained model continues on this machine, for the terminal and the report."""

    def asked_trackers(self) -> Iterator[AskedTracker]:
        """Yield the trackers that are on, in the order in which they get values."""
        if self.tensorboard:
            yield AskedTracker(TENSORBOARD, TensorBoardSettings(), "tracking.tensorboard=true")
        if self.wandb != "off":
            settings = WandbSettings(mode=self.wandb, project=self.wandb_project)
            yield AskedTracker(WANDB, settings, f"tracking.wandb={self.wandb}")
        for name, own in self.trackers.items():
            yield AskedTracker(TRACKERS.named(name), own, f"tracking.trackers.{name}")


class BenchmarkConfig(Section):
    """How the speed of a training step is measured."""

    every_key: ClassVar[Key] = HOW

    warmup_steps: int = Field(2, ge=0)
    """Steps run before the clock starts."""
    steps: int = Field(5, ge=0)
    """Steps that are timed; with 0, a run ends with its training."""
    profile: bool = False
    """Watch the timed steps with torch's profiler, which slows them down: traces go to <run>/trace."""
    history: str | None = None
    """Folder, possibly shared, that keeps the results of benchmarks and sweeps for later ones to compare with; default:
    `history` beside the run's or sweep's directory."""
