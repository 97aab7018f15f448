"""Run the ``train`` flow from one terminal, on its own Prefect server if none is configured."""

import signal
from pathlib import Path

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL

from flows.service import answers
from flows.train import train
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError


def train_through_the_flow(config: RunConfig, run_dir: Path | None, *, resume: bool) -> Path:
    """Run the flow and return the path of its report; see ``flows.train.train``.

    Raises:
        TrainingInfraError: if a step fails; EnvironmentMismatchError if the configured server does not answer.
    """
    url = PREFECT_API_URL.value()
    if url is None:
        _start_server()
    elif not answers(url):
        raise EnvironmentMismatchError(
            f"the Prefect server at {url} does not answer; start it, or unset PREFECT_API_URL (it may also be set in "
            "this folder's prefect.toml) to let the run start its own server"
        )
    report = train(config, run_dir=run_dir, resume=resume)
    if not isinstance(report, Path):
        raise TypeError("a flow run that returns a state raises the error it holds")
    return report


def _start_server() -> None:
    """Start the server that the flow would start, but make it ignore the terminal's Ctrl-C.

    Ctrl-C is for the flow, which stops its job and then still reports the ending to the server. A child inherits
    blocked signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        SubprocessASGIServer().start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
