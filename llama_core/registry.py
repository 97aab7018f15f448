"""Parts by name: the built-in ones, and those that installed packages bring.

A package brings a part by an entry point of the group ``llama_training_infra.<parts>``, such as ``lion =
"my_package.rows:LION"`` in ``llama_training_infra.optimizers``. It is imported when the name is asked for, and when all
are, as for the kind of adapters in a folder of PEFT's. A configuration only ever gives a name, so it can choose among
the packages that the user has installed, but names no module and no file.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from llama_core.errors import ConfigError, not_one_of
from llama_core.redaction import one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llama_training_infra."
"""How the groups of entry points begin."""


class NamedRow(Protocol):
    """A row of a registry."""

    @property
    def name(self) -> str:
        """The name by which a configuration asks for it."""


Row = TypeVar("Row", bound=NamedRow)


class Registry(dict[str, Row]):
    """The rows that this process knows, by name: the built-in ones, and those of packages that were asked for.

    Args:
        parts: what they are, such as ``optimizers``: the end of the group of their entry points.
        kind: the type of a row.
        setting: the key of a configuration that asks for one.
        *built_in: the built-in rows.
    """

    def __init__(self, parts: str, kind: type[Row], setting: str, *built_in: Row) -> None:
        super().__init__({row.name: row for row in built_in})
        self.parts = parts
        self.setting = setting
        self._kind = kind
        self._built_in = tuple(self)

    def find(self, name: str) -> Row | None:
        """Return the row called ``name``; None if it is neither built in nor of an installed package.

        Raises:
            ConfigError: if the package's row cannot be imported, or is none.
        """
        if name not in self and name in self._installed:
            self[name] = self._load(self._installed[name])
        return self.get(name)

    def named(self, name: str) -> Row:
        """Return the row called ``name``.

        Raises:
            ConfigError: if there is none; the message names the nearest ones.
        """
        row = self.find(name)
        if row is None:
            raise ConfigError(f"{self.setting}={name}{not_one_of(name, self.names())}")
        return row

    def built_in(self) -> tuple[Row, ...]:
        """Return the built-in rows, whatever was asked for of packages."""
        return tuple(self[name] for name in self._built_in)

    def names(self) -> tuple[str, ...]:
        """Return every name that can be asked for."""
        return tuple(dict.fromkeys((*self, *self._installed)))

    def package_of(self, name: str) -> str:
        """Return the package, with its version, that a row that was found is from; empty for any other name."""
        is_installed = name in self and name not in self._built_in and name in self._installed
        return _package(self._installed[name]) if is_installed else ""

    def hidden(self) -> Iterator[str]:
        """Yield a sentence for each row of a package that has the name of a built-in one, or of another package's."""
        for entry in _entry_points(self.parts):
            if entry.name in self._built_in:
                yield f"{_package(entry)} has {self.parts} called {entry.name}, but the built-in one is used"
            elif entry != self._installed[entry.name]:
                other = _package(self._installed[entry.name])
                yield f"{_package(entry)} has {self.parts} called {entry.name}, but that of {other} is used"

    @property
    def _installed(self) -> "dict[str, EntryPoint]":
        """The entry points of packages by name, of several with one name the first."""
        return {entry.name: entry for entry in reversed(_entry_points(self.parts))}

    def _load(self, entry: "EntryPoint") -> Row:
        what = f"{self.parts}: {entry.name} of {_package(entry)} ({entry.value})"
        try:
            row = entry.load()
        except Exception as error:  # of the package's own code
            raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {one_line(str(error))}") from error
        if not isinstance(row, self._kind):
            raise ConfigError(f"{what} is a {type(row).__name__} instead of a {self._kind.__name__}")
        if row.name != entry.name:
            raise ConfigError(f"{what} is called {row.name!r} in its row; give both the same name")
        return row


@lru_cache
def _entry_points(parts: str) -> "tuple[EntryPoint, ...]":
    from importlib.metadata import entry_points  # most processes ask for built-in names only

    return tuple(entry_points(group=f"{GROUP}{parts}"))


def _package(entry: "EntryPoint") -> str:
    return "a package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
