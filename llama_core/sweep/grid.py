"""``SweepConfig``: one base configuration and a grid over its keys; each combination is a run."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count, product
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from llama_core.config.commands import refuse_commands_of_others
from llama_core.config.files import read_yaml
from llama_core.config.names import keys_meant
from llama_core.config.overrides import Override, parsed_overrides
from llama_core.config.pretrained import with_settings_of_weights
from llama_core.config.run import RunConfig, config_keys
from llama_core.config.section import Section, whole_count
from llama_core.config.validation import message_of
from llama_core.errors import ConfigError, Problem, ask_for, did_you_mean
from llama_core.records.files import by_dotted_key
from llama_core.sweep.objective import (
    HELD_OUT,
    SweepObjective,
    problems_of_part,
    problems_of_throughput,
    problems_of_training,
)

__all__ = ["HELD_OUT", "Element", "GridValue", "SweepConfig", "SweepObjective"]

LONGEST_NAME = 120
"""Most characters of an element's name, which is also a directory's."""

MAX_ELEMENTS = 2**12
"""Most elements of a grid, before any is excluded: each has a run directory and a report's row."""

GridValue = bool | int | float | str | None
SweepName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$", max_length=LONGEST_NAME)]
Values = Annotated[list[GridValue], Field(min_length=1)]


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
        return base.with_overrides(*(Override(key, value) for key, value in self.settings.items()))


def _objective(text: str) -> str:
    try:
        SweepObjective.parse(text)
    except ValueError as error:
        raise PydanticCustomError("objective", str(error)) from None
    return text


class SweepConfig(Section):
    """Everything that defines one sweep."""

    name: SweepName
    """The sweep's name; its directory is named after it."""
    base: RunConfig = RunConfig()
    """The configuration that all elements share; in a file also the path of one, relative to that
    file."""
    grid: dict[str, Values] = Field(min_length=1)
    """Values to try for keys of the run configuration, such as
    {parallel.microbatch_size: [1, 2, 4]}."""
    exclude: list[dict[str, GridValue]] = Field(default_factory=list)
    """Combinations to leave out: each excludes every element that has all its values."""
    include: list[dict[str, GridValue]] = Field(default_factory=list)
    """Elements to add: values for keys of the grid, and the base's for the others. One
    given again runs again."""
    objective: Annotated[str, AfterValidator(_objective)] = "throughput"
    """What ranks the elements: throughput (of timed steps), loss (each trains, and its held-out
    loss counts), eval_loss/NAME (the same, but the loss of this source or named part of the
    held-out documents), or evaluation/TASK/METRIC (each trains, and this score of its last
    checkpoint counts, as evaluation/arc_easy/acc)."""
    tokens: int | None = Field(None, ge=1)
    """If a loss or a score ranks the elements, tokens that each trains on; default: the
    training.steps of each."""

    @field_validator("grid", "exclude", "include")
    @classmethod
    def _read_counts(cls, given: Any) -> Any:
        """Take 4k for 4000 where a run's key is a whole number, so that numbers are compared."""
        counts = {known.name for known in RunConfig.known_keys() if known.is_count}
        if isinstance(given, list):
            return [_with_counts(settings, counts) for settings in given]
        return _with_counts(given, counts)

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
        if num_elements > MAX_ELEMENTS:
            text = f"grid has {num_elements:,} elements, more than {MAX_ELEMENTS:,}"
            problems.append(Problem(f"{text}; give fewer values"))
        if not problems and not self.elements():
            problems.append(Problem("exclude leaves no element of the grid"))
        if problems:
            raise ConfigError(*problems)
        return self

    def _problems_of_objective(self) -> Iterator[Problem]:
        compared = self._compared()
        ranking = self.ranking
        if not ranking.trains:
            if self.tokens is not None:
                needed = "objective=loss, another loss or a score"
                yield Problem(f"tokens needs {needed}: timed steps train nothing")
            yield from problems_of_throughput(compared)
            return
        yield from problems_of_training(ranking, compared, self.base)
        if ranking.part:
            yield from problems_of_part(ranking.part, self.base.data)
        lengths = [self.base.training.steps, *self.grid.get("training.steps", ())]
        has_steps = any(lengths)
        has_tokens = self.tokens is not None
        if has_steps == has_tokens:
            yield Problem(
                f"objective={self.objective} needs the length of training: set either "
                "training.steps of the base, or tokens"
            )

    @property
    def ranking(self) -> SweepObjective:
        """What ranks the elements."""
        return SweepObjective.parse(self.objective)

    def _compared(self) -> list[str]:
        """Return the keys of the run configuration that have several values."""
        compared = []
        for key, values in self.grid.items():
            # an included element that leaves the key out adds no value to it
            included = [settings.get(key, values[0]) for settings in self.include]
            has_others = any(value not in values for value in included)
            if len(values) > 1 or has_others:
                compared.append(key)
        return compared

    def config_of(self, element: Element) -> RunConfig:
        """Return the configuration of an element's run, with as many steps as ``tokens`` makes.

        Raises:
            ConfigError: if the element's values contradict each other or the base.
        """
        config = element.config(self.base)
        if self.tokens is None:
            return config
        steps = math.ceil(self.tokens / (config.batch_size * config.seq_len))
        return config.with_overrides(Override("training.steps", steps))

    def elements(self) -> list[Element]:
        """Return the combinations that are not excluded, then the included elements.

        The last key varies fastest.
        """
        elements: dict[str, Element] = {}
        for settings in (*self._combinations(), *self._included()):
            # one that is given again runs again, under another name
            names = (_element_name(settings, time) for time in count(1))
            name = next(name for name in names if name not in elements)
            elements[name] = Element(name, settings)
        return list(elements.values())

    def _combinations(self) -> Iterator[dict[str, GridValue]]:
        """Yield the combinations of the grid's values that are not excluded."""
        for values in product(*self.grid.values()):
            settings = dict(zip(self.grid, values, strict=True))
            if not any(unwanted.items() <= settings.items() for unwanted in self.exclude):
                yield settings

    def _included(self) -> Iterator[dict[str, GridValue]]:
        """Yield the settings of the included elements; keys that one leaves out are the base's."""
        base = by_dotted_key(self.base.model_dump(mode="json")) if self.include else {}
        for settings in self.include:
            yield {key: settings.get(key, base.get(key)) for key in self.grid}

    def record(self) -> dict[str, Any]:
        """Return the keys to record: those given, and those that the base's initial weights bring.

        The weights may go away.
        """
        base = self.base.given()
        init_from = self.base.training.init_from
        if init_from is not None:
            base = with_settings_of_weights(base, init_from)
        return self.given() | {"base": base}

    def without(self, names: Container[str]) -> Self:
        """Return the sweep without the elements of these names."""
        elements = self.elements()
        num_of_grid = len(elements) - len(self.include)
        of_grid = elements[:num_of_grid]
        exclude = list(self.exclude)
        exclude += [dict(one.settings) for one in of_grid if one.name in names]
        include: list[dict[str, GridValue]] = []
        for settings, element in zip(self.include, elements[num_of_grid:], strict=True):
            if element.name not in names:
                include.append(settings)
        return self.from_mapping(self.given() | {"exclude": exclude, "include": include})

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[str, Any],
        overrides: Iterable[Override | str] = (),
    ) -> Self:
        """Build a sweep from nested keys, then overrides of the base's.

        Raises:
            ConfigError: naming every problem found.
        """
        try:
            return cls.model_validate(_with_overrides(mapping, overrides))
        except ValidationError as error:
            problems = chain.from_iterable(map(_describe, error.errors()))
            raise ConfigError(*problems) from None

    @classmethod
    def load(cls, path: Path, overrides: Iterable[Override | str] = (), **settings: object) -> Self:
        """Read a YAML file, override keys of the base, and replace settings of the sweep itself.

        Raises:
            ConfigError: if the file cannot be read, is not a mapping, or does not describe a sweep.
        """
        file = read_yaml(path, "sweep")
        mapping = file.keys
        if mapping is None:
            raise ConfigError(f"sweep {str(path)!r} is not a mapping of keys to values")
        if isinstance(mapping.get("base"), str):
            mapping["base"] = RunConfig.load(path.parent / mapping["base"], overrides)
        else:
            base = by_dotted_key(_dict(mapping.get("base")))
            refuse_commands_of_others(path, base, file.of_others)
        for element in (mapping.get("grid"), *_list(mapping.get("include"))):
            refuse_commands_of_others(path, _dict(element), file.of_others)
        return cls.from_mapping(mapping | settings, overrides)


def _with_overrides(
    mapping: Mapping[str, Any],
    overrides: Iterable[Override | str],
) -> dict[str, Any]:
    """Return the nested keys of a sweep with overrides of its base.

    Raises:
        ConfigError: if an override is malformed, or the grid would override it in turn.
    """
    parsed, problems = parsed_overrides(overrides)
    grid = _dict(mapping.get("grid"))
    for override in parsed:
        if override.key in grid:
            text = f"{override.key} is a key of the grid, which sets it in each element"
            problems.append(Problem(f"{text}; change it there"))
    if problems:
        raise ConfigError(*problems)
    base = mapping.get("base", {})
    if not parsed:
        return dict(mapping)
    if isinstance(base, RunConfig):
        base = base.with_overrides(*parsed)
    elif isinstance(base, Mapping):  # not validated yet: it may only be valid with the overrides
        base = deepcopy(dict(base))
        for override in parsed:
            override.apply(base)
    return {**mapping, "base": base}


def _with_counts(settings: Mapping[str, Any], counts: Collection[str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in counts:
            read[key] = value
        elif isinstance(value, list):
            read[key] = [whole_count(one) for one in value]
        else:
            read[key] = whole_count(value)
    return read


def _dict(value: object) -> dict[str, Any]:
    return {str(key): inner for key, inner in value.items()} if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _grid_problems(grid: Mapping[str, Sequence[GridValue]]) -> Iterator[Problem]:
    known = config_keys()
    for key, values in grid.items():
        if key not in known:
            yield Problem(f"grid: unknown key {key!r}{ask_for(keys_meant(key, known))}")
            continue
        for value in values:
            for complaint in complaints(key, value):
                yield Problem(f"grid.{key}: {complaint}")
        # by their spelling: 1 and true are equal, but not the same
        for text, times in Counter(map(_text, values)).items():
            if times > 1:
                yield Problem(f"grid.{key}: {text} is given twice")


def complaints(key: str, value: GridValue) -> Iterator[str]:
    """Yield what is wrong with a value by itself, whatever other keys are; its key is not named."""
    section: Any = RunConfig
    *sections, field = key.split(".")
    for name in sections:
        section = section.model_fields[name].annotation
    try:
        section.model_validate({field: value})
    except ValidationError as error:
        for detail in error.errors():
            for problem in _describe(detail):
                yield f"{problem.value}{problem.text}" if problem.setting == field else str(problem)


def _exclude_problems(
    exclude: Iterable[Mapping[str, GridValue]], grid: Mapping[str, Sequence[GridValue]]
) -> Iterator[Problem]:
    for unwanted in exclude:
        for key, value in unwanted.items():
            if value not in grid.get(key, ()):
                yield Problem(f"exclude: {key}={_text(value)} is not in the grid")
        if not unwanted:
            yield Problem("exclude: an empty combination would leave out every element")


def _include_problems(
    include: Iterable[Mapping[str, GridValue]], grid: Mapping[str, Sequence[GridValue]]
) -> Iterator[Problem]:
    for settings in include:
        for key, value in settings.items():
            if key in grid:
                for complaint in complaints(key, value):
                    yield Problem(f"include: {key}: {complaint}")
            else:
                how = "add it there with the value of the other elements"
                yield Problem(f"include: {key!r} is not a key of the grid; {how}")


def _describe(detail: ErrorDetails) -> Iterable[Problem]:
    """Return the problems in one of Pydantic's error details."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.records
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return [Problem(f"unknown key {key!r}{did_you_mean(key, SweepConfig.model_fields)}")]
    if detail["type"] == "missing":
        return [Problem(f"{key} is missing")]
    return [Problem(f": {message_of(detail)}", key, repr(detail["input"]))]


def _element_name(settings: Mapping[str, GridValue], time: int) -> str:
    """Return a name that is unique in the grid, and does not change when the grid gets more values.

    Args:
        settings: the element's values.
        time: 1, or 2 for an element that is run a second time.
    """
    endings = Counter(map(_ending, settings))
    parts: list[str] = []
    for key, value in settings.items():
        # the last word of a key, unless two keys end in it
        word = _ending(key) if endings[_ending(key)] == 1 else key
        parts.append(f"{word}={_text(value)}")
    if time > 1:
        parts.append(f"run={time}")
    written = ",".join(parts)
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "-", written)
    if safe == written and len(safe) <= LONGEST_NAME:
        return safe
    digest = hashlib.sha256(written.encode()).hexdigest()[:8]
    return f"{safe[: LONGEST_NAME - 9]}-{digest}"


def _ending(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: GridValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)
