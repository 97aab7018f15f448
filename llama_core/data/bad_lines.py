"""Records that give no document: why, how many of each kind, and where the first ones are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Self

from llama_core.errors import DataError

MAX_EXAMPLES = 5

BadLineKind = Literal[
    "invalid JSON",
    "missing field",
    "empty",
    "wrong type",
    "invalid UTF-8",
    "no assistant turn",
    "not supported",
    "equal answers",
]


class UnusableRecordError(ValueError):
    """A record that gives no document, with the kind of problem and the reason in a few words."""

    def __init__(self, kind: BadLineKind, reason: str) -> None:
        super().__init__(f"{kind} ({reason})")
        self.kind = kind


class MalformedRecordError(ValueError):
    """A record that ends the reading, because others are likely to be like it."""


@dataclass
class SameProblem:
    """The lines that have one problem."""

    problem: str
    """Its kind and the reason."""
    locations: list[str]
    """Where the first of the lines are, as ``file:line``."""
    num_lines: int = 1

    def __str__(self) -> str:
        """Return the lines and the problem: ``a.jsonl:2, 7 and 31 more: invalid JSON (...)``."""
        more = self.num_lines - len(self.locations)
        return f"{_listed(self.locations)}{f' and {more:,} more' if more else ''}: {self.problem}"


@dataclass
class BadLines:
    """The unusable lines of a corpus: how many of each kind, and the first few."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[SameProblem] = field(default_factory=list)
    """The first few problems, with their lines."""

    @property
    def total(self) -> int:
        """Lines of all kinds."""
        return sum(self.counts.values())

    def add(self, location: str, problem: UnusableRecordError, limit: int, num_usable: int) -> None:
        """Count one line.

        Args:
            location: where it is.
            problem: why it is unusable.
            limit: how many lines may be.
            num_usable: how many others were usable so far.

        Raises:
            DataError: if there are now more than ``limit``.
        """
        self.counts[problem.kind] = self.counts.get(problem.kind, 0) + 1
        same = next((known for known in self.examples if known.problem == str(problem)), None)
        if same is not None:
            same.num_lines += 1
            if len(same.locations) < MAX_EXAMPLES:
                same.locations.append(location)
        elif len(self.examples) < MAX_EXAMPLES:
            self.examples.append(SameProblem(str(problem), [location]))
        self.check(limit, num_usable)

    def check(self, limit: int, num_usable: int) -> None:
        """Refuse more than ``limit`` unusable lines beside a number of usable ones.

        Raises:
            DataError: naming the first ones.
        """
        if self.total > max(limit, MAX_EXAMPLES) and not num_usable:  # a higher limit would not help
            raise DataError(f"none of the first {self.total:,} records can be trained on: {self}")
        if self.total > limit:
            raise DataError(f"more than data.max_bad_lines={limit} {self}; fix them or raise the limit")

    def __add__(self, other: Self) -> Self:
        """Return the lines of both."""
        counts = {kind: self.counts.get(kind, 0) + other.counts.get(kind, 0) for kind in self.counts | other.counts}
        joined = type(self)(counts, [replace(one, locations=list(one.locations)) for one in self.examples])
        for one in other.examples:
            same = next((known for known in joined.examples if known.problem == one.problem), None)
            if same is not None:
                same.num_lines += one.num_lines
                same.locations = [*same.locations, *one.locations][:MAX_EXAMPLES]
            elif len(joined.examples) < MAX_EXAMPLES:
                joined.examples.append(replace(one, locations=list(one.locations)))
        return joined

    def at(self, places: Mapping[str, str]) -> Self:
        """Return the same lines in files that have moved.

        Args:
            places: where each file is now, by where it was.
        """
        moved = [replace(one, locations=[_moved(place, places) for place in one.locations]) for one in self.examples]
        return type(self)(self.counts, moved)

    def __str__(self) -> str:
        """Return the counts and the first lines as text, for a message."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"unusable lines ({counts}); the first: {'; '.join(map(str, self.examples))}"


def json_type(value: object) -> str:
    """Return JSON's name for the type of ``value``, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def checked_text(text: str) -> str:
    """Return ``text``.

    Raises:
        UnusableRecordError: if it cannot be written as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is not a character
        raise UnusableRecordError("invalid UTF-8", f"lone surrogate at character {error.start + 1}") from None
    return text


def _moved(location: str, places: Mapping[str, str]) -> str:
    if location in places:  # a text file, which is one document
        return places[location]
    file, colon, place = location.rpartition(":")
    return f"{places.get(file, file)}{colon}{place}"


def _listed(locations: Sequence[str]) -> str:
    """Return locations with the name of their file only where it changes."""
    listed = locations[:1]
    for before, location in pairwise(locations):
        file, colon, place = location.rpartition(":")
        in_same_file = colon and before.startswith(f"{file}:")
        listed = [*listed, place if in_same_file else location]
    return ", ".join(listed)
