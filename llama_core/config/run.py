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

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError

from llama_core.config.architecture import ArchitectureConfig
from llama_core.config.commands import refuse_commands_of_others
from llama_core.config.config_json.reading import is_folder
from llama_core.config.contradictions import (
    MODEL,
    endless_warmup,
    misdivided_heads,
    misdivisions,
    misfits,
    misfits_of_adapters,
    misfits_of_prediction,
    needless_keys,
    needless_parts,
    uneven_lengths,
    uneven_nodes,
    unfit_for_pairs,
    unknown_best,
    untimed_length,
    without_deepspeed,
    without_exclusion,
    without_fp8,
    without_ramp,
    wrong_elasticity,
    wrong_mixture,
    wrong_parametrization,
    wrong_request,
    wrong_stages,
)
from llama_core.config.evaluation import EvaluationConfig
from llama_core.config.files import read_yaml
from llama_core.config.hardware import DEFAULT_GPU_TYPE, fewest_nodes, gpu_spec
from llama_core.config.model_spec import BaseShape
from llama_core.config.models import ModelSpec
from llama_core.config.notify import NotifyConfig
from llama_core.config.overrides import Override, causes, changed_keys, parsed_overrides
from llama_core.config.parameter_counts import trained_parameters
from llama_core.config.pretrained import with_experts_of_model, with_settings_of_weights
from llama_core.config.section import Section
from llama_core.config.settings import (
    DATALOADER,
    MAX_LAYERS,
    MAX_MICROBATCHES,
    SAMPLE,
    AttentionKernel,
    BenchmarkConfig,
    DataConfig,
    GradientCompression,
    LaunchConfig,
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
from llama_core.config.stages import TrainingStage, later_stages, rows_before, tokens_before
from llama_core.config.strategy import PARTS, LoRA, MoE, fine_tuning_defaults, not_a_strategy
from llama_core.config.strict_yaml import write_yaml
from llama_core.config.validation import plain, validate
from llama_core.errors import ConfigError, Problem, blaming
from llama_core.hub import repository_in_cache
from llama_core.objectives.registry import OBJECTIVES
from llama_core.objectives.traits import ObjectiveType
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.optimizers.traits import OptimizerType
from llama_core.records.files import by_dotted_key
from llama_core.records.retention import Retention

__all__ = [
    "DATALOADER",
    "MAX_LAYERS",
    "MAX_MICROBATCHES",
    "RANDOM_BASE",
    "SAMPLE",
    "AttentionKernel",
    "BenchmarkConfig",
    "DataConfig",
    "GradientCompression",
    "LaunchConfig",
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
    """A variant that `training-infra models` lists, a Llama's Hugging Face folder, or org/name on the Hugging Face
    Hub."""
    strategy: StrategyName = "standard"
    """What is trained: every weight (standard), adapters over a frozen model (lora), experts (moe), or adapters beside
    experts (hybrid)."""
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
    evaluation: EvaluationConfig = EvaluationConfig()
    """What checkpoints are evaluated on while the run trains."""
    notify: NotifyConfig = NotifyConfig()
    """Who is told what happens to the run."""

    @field_validator("strategy", mode="before")
    @classmethod
    def _refuse_preferences(cls, value: Any) -> Any:
        if why := not_a_strategy(value):
            raise PydanticCustomError("strategy", why)
        return value

    @field_validator("trainable", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="wrap")
    @classmethod
    def _with_dependent_defaults(cls, given: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in what weights bring, and defaults that depend on other settings: none of it counts as given."""
        training = given.get("training", {}) if isinstance(given, dict) else None
        if isinstance(training, TrainingConfig):
            training = training.given()
        if not isinstance(training, dict):
            return validated(given)  # which reports it
        init_from = training.get("init_from")
        filled = with_settings_of_weights(given, init_from) if isinstance(init_from, str) else given
        filled = with_experts_of_model(filled)
        defaults = fine_tuning_defaults(
            adapters=filled.get("strategy") == "lora",
            trained_before=init_from is not None,
            objective=training.get("objective"),
        )
        config = validated(filled | {"training": defaults | training})
        config.count_as_given(given | {"training": training} if "training" in given else given)
        return config

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(*problems)
        return self

    def _contradictions(self) -> Iterator[Problem]:
        spec = None
        try:
            spec = self.spec
        except ConfigError as error:
            yield from error.records
        else:
            yield from misfits(spec, self.training, self.parallel)
            yield from misfits_of_prediction(spec, self.training)
            if spec.lora is not None:
                yield from misfits_of_adapters(spec, self.lora, self.trainable)
            yield from misdivided_heads(spec)
        seq_len = self.seq_len if spec else 0
        yield from misdivisions(
            self.parallel,
            self._batch_sizes if spec else {"training.batch_size": self.first_batch_size},
            self.num_nodes,
            spec,
            seq_len,
            asked_for_each=max(1, self.seq_len // self.first_seq_len) if spec else 1,
        )
        yield from needless_parts(self.strategy, {"lora": self.lora, "moe": self.moe}, self.trainable)
        yield from uneven_nodes(self.parallel, self.launch)
        yield from wrong_request(self.launch, self.parallel, self.num_nodes)
        yield from wrong_elasticity(self.launch, self.parallel, self.num_nodes)
        yield from without_exclusion(self.launch)
        yield from without_fp8(self.training, self.launch)
        yield from endless_warmup(self.training)
        yield from untimed_length(self.training)
        yield from wrong_mixture(self.data, self.training)
        ramp = self.training.batch_ramp
        yield from wrong_stages(self.data, ramp, spec, self.first_batch_size, self.first_seq_len if spec else 0)
        yield from without_ramp(self.data, self.training, self.parallel)
        yield from uneven_lengths(self.data, self.parallel, self.seq_lens if spec else ())
        yield from needless_keys(self.training, self.fine_tuning_defaults)
        yield from wrong_parametrization(self.training, spec)
        yield from without_deepspeed(self.training, self.parallel)
        yield from unknown_best(self.data, self.training)
        yield from unfit_for_pairs(self.data, self.training)

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
                base=self._base,
            )

    @property
    def _base(self) -> BaseShape | None:
        training = self.training
        if training.parametrization == "standard" or training.base_width is None or training.base_depth is None:
            return None
        return BaseShape(training.base_width, training.base_depth)

    @property
    def model_in_words(self) -> str:
        """The model's name, its repository in place of a folder of the Hub's cache, and what ``architecture`` changes.

        A run that has recorded every trait of a folder no longer tells which of them were changed.
        """
        model = repository_in_cache(Path(self.model)) or self.model
        if self.architecture.recorded_from is not None:
            return model
        changes = by_dotted_key(self.architecture.identity())
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in changes.items())
        return f"{model} with {said}" if said else model

    @property
    def has_random_base(self) -> bool:
        """Whether the run fine-tunes (adapters or an instruct model) from random weights."""
        return self.training.init_from is None and ("lora" in PARTS[self.strategy] or self.spec.instruct)

    @property
    def fine_tuning_defaults(self) -> dict[str, float]:
        """The settings of ``training`` that have their fine-tuning default, given or not: a record has every key."""
        defaults = fine_tuning_defaults(
            adapters=self.strategy == "lora",
            trained_before=self.training.init_from is not None,
            objective=self.training.objective,
        )
        return {key: value for key, value in defaults.items() if getattr(self.training, key) == value}

    def self_contained(self) -> Self:
        """Return the same run with the model folder's absolute path and traits, so that the folder is no longer needed.

        A run records this, so that it keeps its model even if the folder changes or disappears.
        """
        if not is_folder(self.model):
            return self
        record = ArchitectureConfig.record(self.model, self.spec)
        update: dict[str, Any] = {"model": record.recorded_from, "architecture": record}
        if self.spec.moe is not None:  # the folder may have brought its experts
            update |= {"strategy": self.strategy, "moe": MoE.model_validate(self.moe.model_dump())}
        return self.model_copy(update=update)

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step, in the stage with the longest and the largest steps: what a plan divides."""
        return max(self.batch_sizes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch size at first and those of the ramp, each in sequences of the longest stage."""
        return tuple(self._batch_sizes.values())

    @property
    def _batch_sizes(self) -> Mapping[str, int]:
        """The batch sizes in sequences of the longest stage, by the setting that asks for them."""
        asked = {"training.batch_size": self.first_batch_size}
        for number, step in enumerate(self.training.batch_ramp):
            asked[f"training.batch_ramp.{number}.batch_size"] = step.batch_size
        if not self.data.other_lengths:
            return asked
        return {setting: max(1, size * self.first_seq_len // self.seq_len) for setting, size in asked.items()}

    @property
    def first_batch_size(self) -> int:
        """Sequences per optimizer step at first: as requested, else the smallest multiple of one pass of at least 8.

        It is exactly one pass if both ``microbatch_size`` and ``num_microbatches`` are set.
        """
        if self.training.batch_size:
            return self.training.batch_size
        parallel = self.parallel
        one_pass = parallel.most_data_parallel * (parallel.microbatch_size or 1) * (parallel.num_microbatches or 1)
        if self.data.other_lengths:  # a pass counts the longest sequences
            one_pass *= max(1, self.seq_len // self.first_seq_len)
        return one_pass if parallel.num_microbatches and parallel.microbatch_size else -(-8 // one_pass) * one_pass

    @property
    def num_sequences(self) -> int | None:
        """Sequences that the run reads; None unless its number of steps is given."""
        num_steps = self.training.steps
        return None if num_steps is None else rows_before(num_steps, self.first_batch_size, self.stages)

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the run reads; None unless its number of steps is given."""
        return None if self.training.steps is None else self.tokens_before(self.training.steps)

    def tokens_before(self, num_steps: int) -> int:
        """Return how many tokens are read in the first steps of the run."""
        return tokens_before(num_steps, self.first_batch_size, self.first_seq_len, self.stages)

    @property
    def stages(self) -> tuple[TrainingStage, ...]:
        """The stages of the run after the first."""
        if not self.data.stages and not self.training.batch_ramp:
            return ()
        return later_stages(self.data, self.training.batch_ramp, self.first_batch_size, self.first_seq_len)

    @property
    def timed_stage(self) -> TrainingStage | None:
        """The stage whose steps are timed: of those with the longest sequences, the first with the largest steps.

        None if that is the first stage of the run.
        """
        longest = [stage for stage in self.stages if (stage.other_len or self.first_seq_len) == self.seq_len]
        most = max((stage.batch_size for stage in longest), default=0)
        if self.first_seq_len == self.seq_len and self.first_batch_size >= most:
            return None
        return next(stage for stage in longest if stage.batch_size == most)

    @property
    def num_nodes(self) -> int:
        """Machines the devices are spread over: as requested, else as few as hold the GPUs, as many on each.

        A node has as many GPUs as the job asks for, else as the machines usually have.
        """
        launch, gpus = self.launch, self.parallel.gpus
        if launch.nodes is not None:
            return launch.nodes
        if launch.device == "cpu":
            return 1
        of_a_node = launch.request.gpus_of_a_node
        if of_a_node and gpus % of_a_node == 0:
            return gpus // of_a_node
        return fewest_nodes(gpus, gpu_spec(launch.gpu_type or DEFAULT_GPU_TYPE))

    @property
    def fewest_nodes(self) -> int:
        """Fewest nodes that the job starts with."""
        return self.launch.min_nodes or self.num_nodes

    @property
    def most_nodes(self) -> int:
        """Most nodes that the job asks for, spares included."""
        return self.num_nodes + self.launch.spare_nodes

    @property
    def is_elastic(self) -> bool:
        """Whether the job may start with fewer nodes than it asks for."""
        return self.fewest_nodes < self.most_nodes

    @property
    def optimizer(self) -> OptimizerType:
        """The optimizer, with its traits."""
        return OPTIMIZERS.named(self.training.optimizer).with_moments(self.training.moments)

    @property
    def objective(self) -> ObjectiveType:
        """What the model is trained for, with its traits."""
        return OBJECTIVES.named(self.training.objective).with_settings(self.training)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the trained weights and the optimizer's states."""
        return round(self.optimizer.saved_for(trained_parameters(self.spec)))

    @property
    def most_checkpoints(self) -> int:
        """Most checkpoints on disk at once; those kept by their tokens count only if the number of steps is given."""
        num_steps = self.training.steps or 0
        every = 1 if self.training.checkpoint_every == "auto" else self.training.checkpoint_every
        num_saves = num_steps // every + 1 if every else 1
        # one that is being copied to the mirror stays until it has been
        held = 0 if self.training.checkpoint_mirror is None else 1
        return self.retention.most(self.num_tokens or 0, num_saves) + held

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay on disk."""
        rules = self.training.retention
        if not self.evaluation.is_asked_for:
            return rules
        asked = self.evaluation
        return replace(rules, waiting=asked.keep_waiting, waiting_every_tokens=asked.every_tokens)

    @property
    def seq_len(self) -> int:
        """Tokens per sequence, in the stage with the longest: what a plan has to fit."""
        return max(self.seq_lens)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens per sequence in all stages, each number once."""
        return tuple(dict.fromkeys((self.first_seq_len, *self.data.other_lengths)))

    @property
    def first_seq_len(self) -> int:
        """Tokens per sequence at first: as requested, else the model's default."""
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
        identity["training"] |= {"batch_size": self.first_batch_size, "seq_len": self.first_seq_len}
        return identity

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly for configurations that train the same thing."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], overrides: Iterable[Override | str] = ()) -> Self:
        """Build a configuration from nested keys, then overrides, of which some may be ``section.key=value`` in YAML.

        Raises:
            ConfigError: naming every unknown key (with the nearest known one), wrong type and contradiction.
        """
        return cls._built(mapping, overrides)

    @classmethod
    def _built(cls, mapping: Mapping[str, Any], overrides: Iterable[Override | str], file: str = "") -> Self:
        """Build a configuration; ``file`` is named in the problems that no override has a part in."""
        given = plain(mapping, file)
        merged = plain(given)
        parsed, problems = parsed_overrides(overrides)
        for override in parsed:
            override.apply(merged)
        asked = plain(merged)
        config, found = validate(cls, merged)
        if file and found:
            changed = changed_keys(parsed, given, asked, cls().model_dump(mode="json"))
            found = [one if causes(changed, one.keys) else replace(one, file=file) for one in found]
        problems.extend(found)
        if config is None or problems:
            raise ConfigError(*problems)
        return config

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[Override | str] = (), *, below: Path | None = None) -> Self:
        """Read a YAML file, then apply overrides, as ``from_mapping`` does.

        Args:
            path: the file.
            overrides: the overrides.
            below: the run that the file is in, below which no link is followed; None if the user names the file.

        Raises:
            ConfigError: if the file cannot be read, is empty or not a mapping, does not describe a run, or may be of
                somebody else and names programs to run; it names the file in every problem that is one of the file.
        """
        file = read_yaml(Path(path), "configuration", below)
        if file.keys is None:
            raise ConfigError(f"configuration {str(path)!r} is empty; write a key such as 'model: llama3_8b' into it")
        if below is None:  # otherwise it is only looked at
            refuse_commands_of_others(file.path, by_dotted_key(file.keys), file.of_others)
        return cls._built(file.keys, overrides, str(path))

    def to_yaml(self) -> str:
        """Return the whole configuration, defaults included, as YAML."""
        return write_yaml(self.model_dump())

    def with_overrides(self, *overrides: Override | str) -> Self:
        """Return a copy with overrides applied, as ``from_mapping`` does; what nobody gave follows the new strategy.

        Raises:
            ConfigError: as ``from_mapping``.
        """
        return self.from_mapping(self.given(), overrides)


def config_keys() -> dict[str, str]:
    """Return every dotted key of a run configuration with its description, without the sections."""
    return {known.name: known.text for known in RunConfig.known_keys()}
