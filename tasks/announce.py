"""Output of a flow while it runs: lines on the terminal and in Prefect's log, and artifacts in Prefect's UI."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import httpx
from prefect.exceptions import ObjectNotFound, ParameterTypeError
from prefect.logging.handlers import APILogHandler
from prefect.runtime import deployment
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from llama_core.errors import TrainingInfraError
from llama_core.runs.console import say
from tasks.endings import is_stop

ARTIFACT_RETRIES = 3
"""Retries of an artifact, over 14 s, while the server is away; a flow run retries its final state longer."""

log = logging.getLogger("training-infra")
"""The log of the current flow or task run. Prefect's own loggers report every task; a worker sets them to warnings."""
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(APILogHandler())


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop Prefect's traceback of an error that the user can fix: the log has its line, except for parameters."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ParameterTypeError):
        record.msg = str(error)
        record.exc_info = None
    return not isinstance(error, TrainingInfraError)


logging.getLogger("prefect.flow_runs").addFilter(_without_traceback)


@contextmanager
def lines_where_they_are_read() -> Iterator[None]:
    """Copy the lines of ``say`` inside the block, and the error that ends it, to Prefect's log.

    If a worker runs the flow, they are not printed: nobody sees its terminal.
    """
    with say.silenced(deployment.id is not None), say.copied(log.info):
        try:
            yield
        except TrainingInfraError as error:
            log.log(logging.INFO if is_stop(error) else logging.ERROR, str(error))
            raise


@contextmanager
def unless_the_server_is_away(retries: int = ARTIFACT_RETRIES) -> Iterator[None]:
    """Continue without the block's artifact if the server does not take it: a missing artifact must not end a run."""
    with (
        _interrupt_held(),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries}),
        suppress(httpx.HTTPError, ObjectNotFound),
    ):
        yield


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a second one interrupts at once.

    While Prefect writes its settings, pydantic turns a ``KeyboardInterrupt`` into an error of its own: the run would
    end with a traceback, and its job would go on.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(signal.SIGINT, held[0])
