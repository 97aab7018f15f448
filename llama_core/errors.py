"""The errors that users see. Each message says what is wrong, with which values, and what to do.

One class per kind of remedy. The CLI prints the message on one line and exits with the class's ``exit_code``; a
traceback means a bug.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches

from llama_core.redaction import one_line, redacted


class TrainingInfraError(Exception):
    """Base class of every error that the user can fix.

    Its message may quote a file or a value from anywhere, so it is kept to one printable line without secrets.
    """

    exit_code = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(*(safe(part) if isinstance(part, str) else part for part in parts))


class RequestError(TrainingInfraError):
    """The request cannot be served; nothing has been started."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration, in parts, so that whoever shows it can spell it."""

    text: str
    """What is wrong and what to do: a whole sentence, or the rest of one that begins with ``setting=value``."""
    setting: str = ""
    """The setting that the sentence begins with, in the words of the user; empty for a whole sentence."""
    value: str = ""
    """The value of that setting, as Python writes it."""
    keys: tuple[str, ...] = ()
    """Dotted keys of the settings that cause it."""
    file: str = ""
    """The file that it is in."""
    remedy: str = ""
    """What else to do."""

    def __str__(self) -> str:
        """Return the problem in one line, with settings as YAML and ``--set`` spell them."""
        line = f"{self.setting}={self.value}{self.text}" if self.setting else self.text
        if self.remedy:
            line = f"{line}; {self.remedy}"
        return f"{self.file}: {line}" if self.file else line

    def within(self, section: str) -> "Problem":
        """Return the problem with the dotted keys of settings that are inside a section, or '' for none."""
        return replace(self, keys=tuple(f"{section}.{key}" for key in self.keys)) if section else self

    def about(self, *keys: str) -> "Problem":
        """Return the problem with the settings that cause it, unless it names some."""
        return self if self.keys else replace(self, keys=keys)


class ConfigError(RequestError, ValueError):
    """An invalid configuration: edit the keys that the message names.

    It is a ``ValueError`` so that Pydantic reports it together with the other validation errors.

    Args:
        problems: the problems, or a sentence for each; all of them are reported at once.
    """

    def __init__(self, *problems: "Problem | str") -> None:
        self.records = tuple(one if isinstance(one, Problem) else Problem(one) for one in problems)
        """The problems in parts."""
        lines = [str(one) for one in self.records]
        super().__init__("; ".join(lines))
        self.problems = tuple(map(safe, lines))
        """A line for each problem."""


@contextmanager
def blaming(*keys: str) -> Iterator[None]:
    """Make the problems of a block those of some settings, unless they name others."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(one.about(*keys) for one in error.records)) from error


class PlanError(RequestError):
    """A configuration that does not suit the model or the machines: choose other sizes."""


class DoesNotFitError(PlanError):
    """A plan that needs more memory than the device has: use a remedy that the message lists, or more devices."""

    exit_code = 3


class DeadlockError(PlanError):
    """A plan whose ranks would wait for each other forever: use another plan, and report this one."""


class DataError(RequestError):
    """Unusable training data or tokenizer: fix the files that the message names."""


class WeightsError(RequestError):
    """Weights that cannot be read or written: use the folder or model that the message names."""


class HubError(RequestError):
    """Files of the Hugging Face Hub that cannot be had: do what the message says, or name a folder here."""


class StorageError(RequestError):
    """Files of an object store that cannot be had or written: do what the message says, or name a folder here."""


class EnvironmentMismatchError(RequestError):
    """Something this machine lacks: install it, or ask for less."""


class RunDirectoryError(RequestError):
    """A run directory that cannot be used for this request: choose another one."""


class CheckpointError(TrainingInfraError):
    """A checkpoint that cannot be written or read: the newest complete one is still valid."""


class TrainingFailedError(TrainingInfraError):
    """A training job that ended without finishing: its ``outcome.json`` says why."""


class CancelledError(TrainingFailedError):
    """A job that somebody cancelled: resume the run."""


class BadStepError(TrainingFailedError):
    """A step whose loss or gradient ends the run.

    Args:
        problem: what was bad about it, with the values that show it.
        next_action: what to try next; empty for the usual advice.
    """

    def __init__(self, problem: str, next_action: str = "") -> None:
        super().__init__(problem)
        self.next_action = next_action


class NonFiniteError(BadStepError):
    """The loss or gradient was NaN or infinite: lower the learning rate, or check the data of those steps."""


class LossSpikeError(BadStepError):
    """The loss or gradient norm rose far above its usual values: leave out the data of those steps."""


class WrongDeviceError(BadStepError):
    """A device holds other weights or computes other losses than its peers: look at those of the nodes that it names.

    Args:
        problem: which ranks it may be, and in what they differ.
        hosts: their nodes.
    """

    def __init__(self, problem: str, hosts: Sequence[str]) -> None:
        super().__init__(problem)
        self.hosts = tuple(hosts)


class RankFailedError(TrainingInfraError):
    """A rank of an evaluation that ended without saying what is wrong, as if it was killed: evaluate again."""


class RegressionError(TrainingInfraError):
    """A measurement that is slower than earlier ones of the same work: look at what has changed since."""

    exit_code = 4


class StoppedError(TrainingFailedError):
    """Training was asked to stop and saved a checkpoint: resume it."""

    exit_code = 130


def safe(text: str) -> str:
    """Return ``text`` on one line that a terminal can show, without secrets."""
    return one_line(redacted(text))


def why_unreadable(error: Exception) -> str:
    """Return why a text cannot be read. For a number that is too long, Python suggests a setting of its own."""
    text = str(error)
    return "a number has too many digits" if "set_int_max_str_digits" in text else text


def as_clause(sentence: str) -> str:
    """Return a sentence without its capital letter, to follow a colon."""
    return f"{sentence[0].lower()}{sentence[1:]}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x' or 'y'?"`` for the choices nearest to ``name``, or an empty string."""
    return ask_for(get_close_matches(name, list(choices), n=2, cutoff=0.7))


def not_one_of(name: str, choices: Collection[str]) -> str:
    """Return ``" is not one of a, b"`` for an unknown ``name``, with the choices nearest to it."""
    return f" is not one of {', '.join(choices)}{did_you_mean(name, choices)}"


def ask_for(names: Iterable[str]) -> str:
    """Return ``"; did you mean 'x' or 'y'?"`` for ``names``, or an empty string for none."""
    asked = " or ".join(map(repr, names))
    return f"; did you mean {asked}?" if asked else ""
