"""How flow and task runs end: an expected error is a state with one line, not a traceback."""

from typing import Any, TypeVar

from prefect import State
from prefect.states import Cancelled, Failed

from llama_core.errors import CancelledError, StoppedError, TrainingInfraError

Result = TypeVar("Result")


class BeingCancelledError(CancelledError):
    """The flow run is being cancelled. Its worker stops the job, and only then sets the state to Cancelled."""


def is_stop(error: TrainingInfraError) -> bool:
    """Return whether somebody has stopped the run, rather than that it has failed."""
    return isinstance(error, CancelledError | StoppedError)


def ended_by(error: TrainingInfraError) -> State[Any]:
    """Return the state of a flow or task run that an error ends: Cancelled if somebody has stopped it, else Failed."""
    state = Cancelled if is_stop(error) else Failed
    return state(message=str(error), data=error)


def result_of(ended: Result | State[Any]) -> Result:
    """Return what a task has returned. If that is a state, raise its error, which Prefect does for flows only.

    Raises:
        TrainingInfraError: the one that was given to ``ended_by``.
    """
    if isinstance(ended, State):
        raised: Result = ended.result()
        return raised
    return ended
