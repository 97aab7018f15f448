"""What a configuration file of another framework gives, and which of its keys were read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_core.errors import ConfigError, did_you_mean
from llama_core.planning.frameworks.job import Job

MAX_FILE_BYTES = 2**20
"""Larger files are no configuration."""
MAX_SIZE = 2**31
"""Largest number that a file may give for a size: beyond it nothing has been built."""


@dataclass(frozen=True)
class ReadJob:
    """A job as a configuration file of a framework describes it."""

    job: Job
    read: tuple[str, ...]
    """Keys that count."""
    ignored: tuple[str, ...]
    """Keys without an effect on the estimate, or on what it models."""
    assumed: tuple[str, ...]
    """A sentence for each thing that the file leaves open."""


@dataclass
class Given:
    """The values of a file, by key.

    Args:
        file: the file, for messages.
        values: its values; a framework's spelling of a key may have dots or dashes.
    """

    file: Path
    values: Mapping[str, Any]
    assumed: list[str] = field(default_factory=list)
    _read: list[str] = field(default_factory=list)

    @property
    def read(self) -> tuple[str, ...]:
        """The keys that were read, each once."""
        return tuple(dict.fromkeys(self._read))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The keys that were not read."""
        return tuple(key for key in self.values if key not in self._read)

    def job(self, job: Job) -> ReadJob:
        """Return a job that was made of these values.

        Raises:
            ConfigError: if its pipeline has more stages than the model has layers.
        """
        stages = job.pp * job.num_chunks
        layers = job.architecture.num_layers
        if stages > layers:
            raise self.error(f"{stages} pipeline stages are more than the {layers} layers of the model")
        return ReadJob(job, self.read, self.ignored, tuple(self.assumed))

    def value(self, *keys: str) -> Any:
        """Return the value of the first key that the file has, or None. A key may have several spellings."""
        found = [key for key in keys if key in self.values]
        self._read += found
        return self.values[found[0]] if found else None

    def text(self, *keys: str, default: str) -> str:
        """Return a text."""
        value = self.value(*keys)
        return default if value is None else str(value)

    def choice(self, *keys: str, default: str, choices: tuple[str, ...]) -> str:
        """Return a text that is one of some.

        Raises:
            ConfigError: if it is another.
        """
        text = self.text(*keys, default=default)
        if text.lower() not in choices:
            hint = did_you_mean(text.lower(), choices) or f"; known are {', '.join(choices)}"
            raise self.error(f"{self._spelled(keys)} is {text!r}{hint}")
        return text.lower()

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return whether something is switched on.

        Raises:
            ConfigError: if its value is neither true nor false.
        """
        value = self.value(*keys)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if str(value).lower() in {"true", "false"}:
            return str(value).lower() == "true"
        raise self.error(f"{self._spelled(keys)} is {value!r}, which is neither true nor false")

    def count(self, *keys: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """Return a whole number above 0, and not above a maximum.

        Raises:
            ConfigError: if it is something else, or missing without a default.
        """
        value = self.value(*keys)
        if value is None:
            if default is None:
                raise self.error(f"{keys[0]} is missing")
            return default
        try:
            number = int(str(value).replace("_", ""))
        except ValueError:
            number = 0
        if isinstance(value, bool) or number < 1:
            raise self.error(f"{self._spelled(keys)} is {value!r}; a whole number above 0 is wanted")
        if number > maximum:
            raise self.error(f"{self._spelled(keys)} is {number}, more than {maximum:,}")
        return number

    def error(self, problem: str) -> ConfigError:
        """Return an error about the file."""
        return ConfigError(f"{self.file}: {problem}")

    def _spelled(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if key in self.values), keys[0])


def read_text(file: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: if it cannot be read, or is no text.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} has more than {MAX_FILE_BYTES:,} bytes; it is no configuration")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text in UTF-8") from None


def remaining_shards(given: Given, gpus: int | None, others: int, key: str) -> int:
    """Return the data-parallel ranks that are left of ``gpus`` by the other degrees.

    Raises:
        ConfigError: if the number of GPUs is unknown, or no multiple of the others.
    """
    if gpus is None:
        raise given.error(f"{key} takes the ranks that are left, and their number is not in the file; add --gpus")
    if gpus % others:
        raise given.error(f"{gpus} GPUs are no multiple of the {others} ranks of the other degrees")
    return gpus // others
