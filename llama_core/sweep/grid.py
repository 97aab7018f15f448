"""``SweepConfig``: one base configuration and a grid over its keys; each combination is a run."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from llama_core.config.names import keys_meant
from llama_core.config.run import RunConfig, config_keys
from llama_core.config.section import Section
from llama_core.config.strict_yaml import parse_yaml
from llama_core.errors import ConfigError, ask_for, did_you_mean
from llama_core.records.files import by_dotted_key

LONGEST_NAME = 120
"""Most characters of an element's name, which is also a directory's."""

MOST_ELEMENTS = 2**12
"""Most elements of a grid, before any is excluded; each has a run directory and a row of the report."""

GridValue = bool | int | float | str | None
Objective = Literal["throughput", "loss"]
DONE: dict[Objective, str] = {"throughput": "timed", "loss": "trained"}
"""What has been done to an element with a result."""
SweepName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$", max_length=LONGEST_NAME)]
Values = Annotated[list[GridValue], Field(min_length=1)]

LEARNING = frozenset(
    f"training.{key}"
    for key in (
        "steps", "epochs", "learning_rate", "lr_schedule", "warmup_steps", "min_lr_ratio", "decay_fraction",
        "weight_decay", "beta1", "beta2", "epsilon", "max_grad_norm", "max_skipped_steps", "on_bad_step",
        "loss_spike_threshold", "grad_norm_spike_threshold", "spike_window", "max_rollbacks", "seed",
    )
)  # fmt: skip
"""Keys that change what a step learns, but not how long it takes."""
CADENCE = frozenset(f"training.{key}" for key in ("eval_every", "checkpoint_every", "keep_checkpoints"))
"""Keys that change neither a timed step nor what is learnt."""
_WORK = ("parallel.", "launch.", "tracking.", "benchmark.")
"""Sections that say how the work is done, not what is learnt."""
_LOSSY = frozenset(("parallel.gradient_compression",))
"""Keys of these sections that change the loss all the same."""
_SIZES = frozenset(f"parallel.{key}" for key in ("gpus", "microbatch_size", "num_microbatches", "dp_replicate"))
"""Keys of these sections that choose the batch if ``training.batch_size`` does not."""
HELD_OUT = frozenset(
    ("data.tokenizer", "data.validation", "data.validation_fraction", "data.text_field", "data.chat_template",
     "data.loss_on", "training.eval_sequences")
)  # fmt: skip
"""Keys that change the tokens which the held-out loss is a mean over."""


@dataclass(frozen=True)
class Element:
    """One combination of a grid's values."""

    name: str
    """Its name and that of its run directory, such as ``tp=2,microbatch_size=4``."""
    settings: Mapping[str, GridValue]
    """Its value for each key of the grid."""

    def config(self, base: RunConfig) -> RunConfig:
        """Return the configuration of the element's run.

        Raises:
            ConfigError: if its values contradict each other or ``base``.
        """
        return base.with_overrides(*(f"{key}={json.dumps(value)}" for key, value in self.settings.items()))


class SweepConfig(Section):
    """Everything that defines one sweep."""

    name: SweepName
    """The sweep's name; its directory is named after it."""
    base: RunConfig = RunConfig()
    """The configuration that all elements share; in a file also the path of one, relative to that file."""
    grid: dict[str, Values] = Field(min_length=1)
    """Values to try for keys of the run configuration, such as {parallel.microbatch_size: [1, 2, 4]}."""
    exclude: list[dict[str, GridValue]] = Field(default_factory=list)
    """Combinations to leave out: each excludes every element that has all its values."""
    include: list[dict[str, GridValue]] = Field(default_factory=list)
    """Elements to add: values for keys of the grid, and the base's for the others. One given again runs again."""
    objective: Objective = "throughput"
    """What ranks the elements: throughput (of timed steps), or loss (each trains, and its held-out loss counts)."""
    tokens: int | None = Field(None, ge=1)
    """With objective=loss, tokens that each element trains on; default: the training.steps of each."""

    @field_validator("base", mode="before")
    @classmethod
    def _explain_base(cls, value: Any) -> Any:
        return RunConfig.from_mapping(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _grid_is_possible(self) -> Self:
        problems = [*_grid_problems(self.grid), *_exclude_problems(self.exclude, self.grid)]
        problems += _include_problems(self.include, self.grid)
        problems += self._problems_of_objective()
        num_elements = math.prod(map(len, self.grid.values())) + len(self.include)
        if num_elements > MOST_ELEMENTS:
            problems.append(f"grid has {num_elements:,} elements, more than {MOST_ELEMENTS:,}; give fewer values")
        if not problems and not self.elements():
            problems.append("exclude leaves no element of the grid")
        if problems:
            raise ConfigError(*problems)
        return self

    def _problems_of_objective(self) -> Iterator[str]:
        added = {
            key for settings in self.include for key, value in settings.items() if value not in self.grid.get(key, ())
        }
        compared = [key for key, values in self.grid.items() if len(values) > 1 or key in added]
        if self.objective == "throughput":
            if self.tokens is not None:
                yield "tokens needs objective=loss: timed steps train nothing"
            if idle := [key for key in compared if key in LEARNING | CADENCE]:
                yield (
                    f"grid: {', '.join(idle)} cannot change the throughput, which ranks the elements; train each "
                    "element and rank the held-out losses with --objective loss (objective: loss), or leave it out"
                )
            return
        if idle := [key for key in compared if self._cannot_change_loss(key)]:
            yield (
                f"grid: {', '.join(idle)} cannot change the held-out loss, which ranks the elements; compare speeds "
                "with --objective throughput (objective: throughput), or leave it out"
            )
        if elsewhere := [key for key in compared if key in HELD_OUT]:
            yield f"grid: with other {', '.join(elsewhere)}, held-out losses cannot be compared; leave it out"
        if "data.source" in compared and self.base.data.validation is None:
            yield "grid: data.source also changes the held-out documents; set data.validation of the base"
        if self.base.data.validation is None and not self.base.data.validation_fraction:
            yield "objective=loss needs held-out documents: set data.validation, or a data.validation_fraction above 0"
        steps = [self.base.training.steps, *self.grid.get("training.steps", ())]
        if (self.tokens is None) == (not any(steps)):
            yield "objective=loss needs the length of training: set either training.steps of the base, or tokens"

    def _cannot_change_loss(self, key: str) -> bool:
        chooses_batch = key in _SIZES and self.base.training.batch_size is None
        return key in CADENCE or (key.startswith(_WORK) and key not in _LOSSY and not chooses_batch)

    def config_of(self, element: Element) -> RunConfig:
        """Return the configuration of an element's run, with the number of steps that ``tokens`` makes.

        Raises:
            ConfigError: if the element's values contradict each other or the base.
        """
        config = element.config(self.base)
        if self.tokens is None:
            return config
        steps = math.ceil(self.tokens / (config.batch_size * config.seq_len))
        return config.with_overrides(f"training.steps={steps}")

    def elements(self) -> list[Element]:
        """Return the combinations that are not excluded (the last key varies fastest), then the included elements."""
        every = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        kept = [one for one in every if not any(unwanted.items() <= one.items() for unwanted in self.exclude)]
        base = by_dotted_key(self.base.model_dump(mode="json")) if self.include else {}
        added = [{key: settings.get(key, base.get(key)) for key in self.grid} for settings in self.include]
        elements: dict[str, Element] = {}
        for settings in (*kept, *added):
            names = (_element_name(settings, time) for time in count(1))
            name = next(name for name in names if name not in elements)
            elements[name] = Element(name, settings)
        return list(elements.values())

    def without(self, names: Container[str]) -> Self:
        """Return the sweep without the elements of these names."""
        elements = self.elements()
        of_grid, added = elements[: len(elements) - len(self.include)], elements[len(elements) - len(self.include) :]
        exclude = [*self.exclude, *(dict(element.settings) for element in of_grid if element.name in names)]
        include = [settings for settings, element in zip(self.include, added, strict=True) if element.name not in names]
        return self.from_mapping(self.model_dump() | {"exclude": exclude, "include": include})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build a sweep from nested keys.

        Raises:
            ConfigError: naming every problem found.
        """
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise ConfigError(*(problem for detail in error.errors() for problem in _describe(detail))) from None

    @classmethod
    def load(cls, path: Path, **settings: object) -> Self:
        """Read a YAML file, and replace some of its settings.

        Raises:
            ConfigError: if the file cannot be read, is not a mapping, or does not describe a sweep.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name of a file
            raise ConfigError(f"cannot read sweep {str(path)!r}: {error}") from None
        mapping = parse_yaml(text, str(path))
        if not isinstance(mapping, dict):
            raise ConfigError(f"sweep {str(path)!r} is not a mapping of keys to values")
        if isinstance(mapping.get("base"), str):
            mapping["base"] = RunConfig.load(path.parent / mapping["base"])
        return cls.from_mapping(mapping | settings)


def _grid_problems(grid: Mapping[str, Sequence[GridValue]]) -> Iterator[str]:
    known = config_keys()
    for key, values in grid.items():
        if key not in known:
            yield f"grid: unknown key {key!r}{ask_for(keys_meant(key, known))}"
            continue
        for value in values:
            yield from _value_problems(key, value)
        times = Counter(map(_text, values))
        yield from (f"grid.{key}: {text} is given twice" for text in times if times[text] > 1)


def _value_problems(key: str, value: GridValue) -> Iterator[str]:
    """Yield what is wrong with a value by itself, whatever the other keys are."""
    section: Any = RunConfig
    *sections, field = key.split(".")
    for name in sections:
        section = section.model_fields[name].annotation
    try:
        section.model_validate({field: value})
    except ValidationError as error:
        for detail in error.errors():
            problems = _describe(detail)
            yield from (f"grid.{key}: {problem.removeprefix(f'{field}=')}" for problem in problems)


def _exclude_problems(
    exclude: Iterable[Mapping[str, GridValue]], grid: Mapping[str, Sequence[GridValue]]
) -> Iterator[str]:
    for unwanted in exclude:
        for key, value in unwanted.items():
            if value not in grid.get(key, ()):
                yield f"exclude: {key}={_text(value)} is not in the grid"
        if not unwanted:
            yield "exclude: an empty combination would leave out every element"


def _include_problems(
    include: Iterable[Mapping[str, GridValue]], grid: Mapping[str, Sequence[GridValue]]
) -> Iterator[str]:
    for settings in include:
        for key, value in settings.items():
            if key not in grid:
                yield f"include: {key!r} is not a key of the grid; add it there with the value of the other elements"
            else:
                yield from (problem.replace("grid.", "include: ", 1) for problem in _value_problems(key, value))


def _describe(detail: ErrorDetails) -> Sequence[str]:
    """Return the sentences for one of Pydantic's error details."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.problems
    key, message = ".".join(map(str, detail["loc"])), detail["msg"]
    if detail["type"] == "extra_forbidden":
        return [f"unknown key {key!r}{did_you_mean(key, SweepConfig.model_fields)}"]
    if detail["type"] == "missing":
        return [f"{key} is missing"]
    return [f"{key}={detail['input']!r}: {message[0].lower()}{message[1:]}"]


def _element_name(settings: Mapping[str, GridValue], time: int) -> str:
    """Return a name that is unique in the grid, and does not change when the grid gets more values.

    Args:
        settings: the element's values.
        time: 1, or 2 for an element that is run a second time.
    """
    endings = Counter(_ending(key) for key in settings)
    written = ",".join(
        f"{_ending(key) if endings[_ending(key)] == 1 else key}={_text(value)}" for key, value in settings.items()
    ) + (f",run={time}" if time > 1 else "")
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "-", written)
    if safe == written and len(safe) <= LONGEST_NAME:
        return safe
    digest = hashlib.sha256(written.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST_NAME - 9]}-{digest}"


def _ending(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: GridValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)
