"""``RunConfig``: everything that defines one run, whether from YAML, the command line, Python or a Prefect form.

Parsing is strict: unknown keys, wrong types and contradictory settings are errors, all reported at once. A key given
twice is an error too.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from llama_core.config.architecture import ArchitectureConfig
from llama_core.config.contradictions import (
    MODEL,
    endless_warmup,
    misdivided_heads,
    misdivisions,
    misfits,
    misfits_of_adapters,
    needless_keys,
    needless_parts,
    uneven_nodes,
    without_deepspeed,
    without_fp8,
    wrong_elasticity,
)
from llama_core.config.files import read_mapping, write_mapping
from llama_core.config.hugging_face import is_folder
from llama_core.config.models import ModelSpec
from llama_core.config.overrides import apply_override, causes, changed_keys
from llama_core.config.pretrained import with_experts_of_folder, with_settings_of_weights
from llama_core.config.section import Section
from llama_core.config.settings import (
    DATALOADER,
    MOST_MICROBATCHES,
    SAMPLE,
    AttentionKernel,
    BenchmarkConfig,
    DataConfig,
    GradientCompression,
    LaunchConfig,
    LauncherName,
    Offload,
    ParallelConfig,
    Precision,
    RecomputeMode,
    StrategyName,
    TrackingConfig,
    TrainingConfig,
    ZeroBackend,
    ZeroStage,
    literal_values,
)
from llama_core.config.slurm import refuse_commands_of_others
from llama_core.config.strategy import PARTS, TUNED, LoRA, MoE, fine_tuning_defaults
from llama_core.config.validation import plain, validate
from llama_core.errors import ConfigError, Problem, blaming
from llama_core.objectives.registry import objective_type
from llama_core.objectives.traits import ObjectiveType
from llama_core.optimizers.registry import optimizer_type
from llama_core.optimizers.traits import OptimizerType
from llama_core.records.files import by_dotted_key

__all__ = [
    "DATALOADER",
    "MOST_MICROBATCHES",
    "RANDOM_BASE",
    "SAMPLE",
    "AttentionKernel",
    "BenchmarkConfig",
    "DataConfig",
    "GradientCompression",
    "LaunchConfig",
    "LauncherName",
    "Offload",
    "ParallelConfig",
    "Precision",
    "RecomputeMode",
    "RunConfig",
    "StrategyName",
    "TrackingConfig",
    "TrainingConfig",
    "ZeroBackend",
    "ZeroStage",
    "config_keys",
    "literal_values",
]

RANDOM_BASE = (
    "base weights are random, so the trained model will be useless; use --init-from PATH to start from trained weights"
)
"""The note on a run for which ``RunConfig.has_random_base`` is true."""


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

    def _contradictions(self) -> Iterator[Problem]:
        try:
            spec = self.spec
        except ConfigError as error:
            yield from error.records
        else:
            yield from misfits(spec, self.training, self.parallel)
            if spec.lora is not None:
                yield from misfits_of_adapters(spec, self.lora, self.trainable)
            yield from misdivided_heads(spec)
        yield from misdivisions(self.parallel, self.batch_size)
        yield from needless_parts(self.strategy, {"lora": self.lora, "moe": self.moe}, self.trainable)
        yield from uneven_nodes(self.parallel, self.launch)
        yield from wrong_elasticity(self.launch, self.parallel)
        yield from without_fp8(self.training, self.launch)
        yield from endless_warmup(self.training)
        yield from needless_keys(self.training, self.fine_tuning_defaults)
        yield from without_deepspeed(self.training, self.parallel)

    @cached_property
    def spec(self) -> ModelSpec:
        """The architecture of the model, with the adapters or experts that the strategy gives it."""
        with blaming(*MODEL):
            spec = self.architecture.spec(self.model)
        parts = PARTS[self.strategy]
        with blaming(*MODEL, "strategy", "moe"):
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
    def optimizer(self) -> OptimizerType:
        """The optimizer, with its traits."""
        return optimizer_type(self.training.optimizer)

    @property
    def objective(self) -> ObjectiveType:
        """What the model is trained for, with its traits."""
        return objective_type(self.training.objective)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the trained weights and the optimizer's states."""
        return self.optimizer.saved_bytes * self.spec.num_trainable_parameters

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: as requested, else the model's default."""
        return self.training.seq_len or self.spec.default_seq_len

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what is trained, as nested keys: model, data and training.

        Keys that a resumed run may change (``Key.on_resume``) are left out.
        """
        whole = self.self_contained()
        identity = whole.model_dump(exclude=self.free_keys())
        for part in {"lora", "moe"}.difference(PARTS[self.strategy]):
            del identity[part]
        if not self.trainable:
            del identity["trainable"]
        identity["architecture"] = whole.architecture.identity()
        identity["training"] |= {"batch_size": self.batch_size, "seq_len": self.seq_len}
        return identity

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly for configurations that train the same thing."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], overrides: Iterable[str] = ()) -> Self:
        """Build a configuration from nested keys, then ``section.key=value`` overrides.

        Raises:
            ConfigError: naming every unknown key (with the nearest known one), wrong type and contradiction.
        """
        return cls._built(mapping, overrides)

    @classmethod
    def _built(cls, mapping: Mapping[str, Any], overrides: Iterable[str], file: str = "") -> Self:
        """Build a configuration; ``file`` is named in the problems that no override has a part in."""
        given = plain(mapping, file)
        merged = plain(given)
        overrides = list(overrides)
        applied = [apply_override(merged, override) for override in overrides]
        problems = [problem for problem in applied if problem is not None]
        asked = plain(merged)
        config, found = validate(cls, merged)
        if file and found:
            changed = changed_keys(overrides, given, asked, cls().model_dump(mode="json"))
            found = [one if causes(changed, one.keys) else replace(one, file=file) for one in found]
        problems.extend(found)
        if config is None or problems:
            raise ConfigError(*problems)
        return config

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = (), *, below: Path | None = None) -> Self:
        """Read a YAML file, then apply ``section.key=value`` overrides.

        Args:
            path: the file.
            overrides: the overrides.
            below: the run that the file is in, below which no link is followed; None if the user names the file.

        Raises:
            ConfigError: if the file cannot be read, is empty or not a mapping, does not describe a run, or may be of
                somebody else and names programs to run; it names the file in every problem that is one of the file.
        """
        mapping = read_mapping(Path(path), "configuration", below)
        if mapping is None:
            raise ConfigError(f"configuration {str(path)!r} is empty; write a key such as 'model: llama3_8b' into it")
        if below is None:  # otherwise it is only looked at
            refuse_commands_of_others(Path(path), by_dotted_key(mapping))
        return cls._built(mapping, overrides, str(path))

    def to_yaml(self) -> str:
        """Return the whole configuration, defaults included, as YAML."""
        return write_mapping(self.model_dump())

    def with_overrides(self, *overrides: str) -> Self:
        """Return a copy with ``section.key=value`` overrides applied; defaults follow the new strategy.

        Raises:
            ConfigError: as ``from_mapping``.
        """
        mapping = self.model_dump()
        for key in TUNED:
            default = self.fine_tuning_defaults.get(key, TrainingConfig.model_fields[key].default)
            if mapping["training"][key] == default:
                del mapping["training"][key]
        return self.from_mapping(mapping, overrides)


def config_keys() -> dict[str, str]:
    """Return every dotted key of a run configuration with its description, without the sections."""
    return {known.name: known.text for known in RunConfig.known_keys()}
