"""Base class of all sections of a configuration, and what a key says about itself besides type, bounds and text."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from llama_core.errors import did_you_mean
from llama_core.registry import Registry
from llama_core.units import parse_whole_count

LARGEST = 2**63 - 1
"""The largest number that a setting may be: floats, file formats and libraries hold no larger integer."""

OnResume = Literal["refuse", "extend", "record", "allow"]
Changes = Literal["everything", "learning", "speed", "batch", "held-out", "nothing"]


@dataclass(frozen=True)
class Key:
    """What another value of a key means to a run that is resumed, and to a sweep that compares runs.

    It stands beside the type: ``epsilon: Annotated[float, Key(changes="learning")] = 1e-8``. The defaults are safe for
    a key that nobody has thought about: a run keeps its value, and a sweep may try others.
    """

    on_resume: OnResume = "refuse"
    """Whether a run may be resumed with another value: refuse; extend, only together with a number of steps; record,
    with a record of the step from which it has that value; or allow.

    A key that is not ``allow`` is part of the run's fingerprint, so that runs with other values are other runs.
    """
    changes: Changes = "everything"
    """What another value changes, which decides by what a sweep over the key can rank its elements.

    * everything: what a step learns and how long it takes. A sweep may rank by loss or by throughput.
    * learning: what a step learns, but not how long it takes. A sweep must rank by loss.
    * speed: how the work is done, but not what is learnt. A sweep must rank by throughput.
    * batch: the same, but while ``training.batch_size`` is open, it also chooses the batch.
    * held-out: the tokens that the held-out loss is a mean over, so that losses cannot be compared.
    * nothing: neither a timed step nor what is learnt. A sweep over the key is refused.
    """


class KnownKey(NamedTuple):
    """A key of a configuration."""

    name: str
    """Its dotted name, such as ``training.seq_len``."""
    text: str
    """Its description."""
    key: Key
    is_text: bool
    """Whether its value may be any text."""
    is_count: bool
    """Whether it is a whole number, which may be spelled as 128k."""

    def value_of(self, written: str) -> str | int | float:
        """Return the value that a word of the command line stands for: the word, or else the number that it spells."""
        if not self.is_text:
            for number in (int, float):
                with suppress(ValueError):
                    return number(written)
        return written


class Section(BaseModel):
    """One section of a run configuration: immutable, and strict about types and keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    every_key: ClassVar[Key | None] = None
    """What its keys are that say nothing themselves. By default they are as those of the section around it."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_count(cls, value: Any, info: ValidationInfo) -> Any:
        """Take 128k, or 1e6, where a whole number is asked for, and refuse an endless one."""
        if isinstance(value, str | float) and takes_count(cls.model_fields[str(info.field_name)]):
            value = whole_count(value)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise PydanticCustomError("endless", "input should be between -2**63 and 2**63")
        return value

    def given(self) -> dict[str, Any]:
        """Return the keys that somebody gave, nested: all but the defaults, and also values that equal a default.

        A record of a run has every key, so that each is given when it is read again.
        """
        return self.model_dump(exclude_unset=True)

    def count_as_given(self, asked: Mapping[str, Any]) -> None:
        """Let only these nested keys count as given, of those that the section was made of."""
        self.model_fields_set.intersection_update(asked)
        for name in self.model_fields_set:
            inner, own = getattr(self, name), asked[name]
            if isinstance(inner, Section) and isinstance(own, Mapping):  # else a section that somebody made in Python
                inner.count_as_given(own)

    @classmethod
    def known_keys(cls, prefix: str = "", around: Key = Key()) -> Iterator[KnownKey]:
        """Yield every key of this section and of those inside it.

        Args:
            prefix: what their names begin with.
            around: what the keys of the section around this one are.
        """
        usual = cls.every_key or around
        for name, field in cls.model_fields.items():
            inner = _section(field)
            if inner is None:
                yield KnownKey(
                    f"{prefix}{name}",
                    field.description or "",
                    _own(field) or usual,
                    is_text=_takes(str, field.annotation),
                    is_count=takes_count(field),
                )
            else:
                yield from inner.known_keys(f"{prefix}{name}.", usual)

    @classmethod
    def free_keys(cls, around: Key = Key()) -> dict[str, Any]:
        """Return the keys that a resumed run may change, nested as ``model_dump(exclude=...)`` takes them."""
        usual = cls.every_key or around
        free: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            inner = _section(field)
            if (of_values := _section_of_values(field)) is not None:
                free[name] = {"__all__": of_values.free_keys(_own(field) or usual)}
            elif inner is None:
                if (_own(field) or usual).on_resume == "allow":
                    free[name] = True
            elif all(known.key.on_resume == "allow" for known in inner.known_keys(around=usual)):
                free[name] = True
            else:
                free[name] = inner.free_keys(usual)
        return free


@dataclass(frozen=True, eq=False)
class KnownName:
    """Marks a text as the name of a row in a registry, or as one of some other words."""

    registry: Registry[Any]
    others: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Check the name after its type."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return all names, for a form, those of installed packages among them."""
        return {"type": "string", "enum": list(self._names)}

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.others, *self.registry.names())

    def _checked(self, name: str) -> str:
        if name not in self.others and self.registry.find(name) is None:
            text = f"choose one of {', '.join(self._names)}{did_you_mean(name, self._names)}"
            raise PydanticCustomError("name", text)
        return name


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _section_of_values(field: FieldInfo) -> type[Section] | None:
    """Return the section that each value of a mapping is, if the field is one of sections by name."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is dict else ()
    kind = kinds[-1] if kinds else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _takes(wanted: type, kind: Any) -> bool:
    """Return whether a type, or one of those in it, is the wanted one; a ``Literal`` is a choice and not any text."""
    if get_origin(kind) in {Annotated, Union, UnionType}:
        return any(_takes(wanted, inner) for inner in get_args(kind))
    return kind is wanted


def takes_count(field: FieldInfo) -> bool:
    """Return whether a field is a whole number, and reads no text of its own, such as a time."""
    reads_text = any(isinstance(mark, BeforeValidator) for mark in field.metadata)
    return _takes(int, field.annotation) and not _takes(str, field.annotation) and not reads_text


def whole_count(value: Any) -> Any:
    """Return the whole number that '128k' or 128e3 spells; other values, also digits in quotes, as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and not value.strip("+-0123456789_ "):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_whole_count(value)
    return value


def _own(field: FieldInfo) -> Key | None:
    return next((mark for mark in field.metadata if isinstance(mark, Key)), None)
