"""The errors a user can meet: what is wrong, with which values, and what to do.

One class per kind of remedy. The CLI prints the message on one line and exits with the class's ``exit_code``;
a traceback is for what only a developer can mend.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TrainingInfraError(Exception):
    """The base of every error that is the user's to mend."""

    exit_code = 1


class RequestError(TrainingInfraError):
    """The request cannot be served as it was made; nothing has been started."""

    exit_code = 2


class ConfigError(RequestError, ValueError):
    """A configuration that is wrong in itself: edit the keys it names.

    It is a ``ValueError`` so that Pydantic reports it with a model's other problems.

    Args:
        problems: one sentence for each problem found; all of them are reported at once.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class PlanError(RequestError):
    """A configuration that does not go with the model or the machines: choose other sizes."""


class DoesNotFitError(PlanError):
    """A plan that needs more memory than its device has: take what the message lists, or more devices."""

    exit_code = 3


class DataError(RequestError):
    """Training data or a tokenizer that cannot be used: mend the files it names."""


class WeightsError(RequestError):
    """Weights that cannot be read or written as asked: choose the folder, or the model, that the message says."""


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


class NonFiniteError(TrainingFailedError):
    """The loss or gradient stayed NaN or infinite: lower the learning rate, or look at the data of those steps."""


class StoppedError(TrainingFailedError):
    """Training was asked to stop and saved a checkpoint: resume it."""

    exit_code = 130


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x' or 'y'?"`` for the choices nearest to ``name``, or an empty string."""
    near = get_close_matches(name, list(choices), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(repr(choice) for choice in near)}?" if near else ""
