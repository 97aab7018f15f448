"""Run the ``train`` flow from one terminal, on its own Prefect server if none is configured."""

import atexit
import logging
import signal
from contextlib import ExitStack
from pathlib import Path

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.check import check_server, refusals_in_a_line
from flows.server import password, private_server
from flows.train import train
from llama_core.config.run import RunConfig

_OWN_SERVER = (
    ", or unset PREFECT_API_URL (it may also be set in this folder's prefect.toml) to let the run start its own server"
)


def train_through_the_flow(
    config: RunConfig, run_dir: Path | None, *, resume: bool, allow_data_change: bool = False
) -> Path:
    """Run the flow and return the path of its report; see ``flows.train.train``.

    Raises:
        TrainingInfraError: if a step fails; EnvironmentMismatchError if the configured server cannot be used.
    """
    url = PREFECT_API_URL.value()
    if url is None:
        url = _start_server()
    else:
        check_server(url, _OWN_SERVER)
    _quieten_senders()
    try:
        with refusals_in_a_line(url):
            report = train(config, run_dir=run_dir, resume=resume, allow_data_change=allow_data_change)
    finally:
        # The first exit handler to run: Ctrl-C would only interrupt the seconds in which Prefect and the server end.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if not isinstance(report, Path):
        raise TypeError("a flow run that returns a state raises the error it holds")
    return report


def _quieten_senders() -> None:
    """Print nothing if records reach the server late or not at all: the run goes on, and its lines are printed here."""
    logging.raiseExceptions = False  # else the sender of log records writes its errors to stderr
    for sender in ("APILogWorker", "EventsWorker"):
        logging.getLogger(sender).setLevel(logging.ERROR)


def _start_server() -> str:
    """Start a server that lives as long as this process, point this process at it, and return its URL."""
    until_exit = ExitStack()
    auth_string = password()
    atexit.register(until_exit.close)  # runs after Prefect has sent its last records, since Prefect registers later
    _, url = until_exit.enter_context(private_server("127.0.0.1", 0, auth_string, is_temporary=True))
    until_exit.enter_context(temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth_string}))
    return url
