"""The ``train`` flow from one terminal: on a Prefect server of its own where no other is configured."""

import signal
from pathlib import Path

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL

from flows.train import train
from llama_core.config.run import RunConfig


def train_here(config: RunConfig, run_dir: Path | None, *, resume: bool) -> Path:
    """Run the flow and return the path of its report; see ``flows.train.train``."""
    if PREFECT_API_URL.value() is None:
        _start_server()
    return train(config, run_dir=run_dir, resume=resume)


def _start_server() -> None:
    """Start the server that the flow would start, but deaf to the terminal's Ctrl-C.

    The interrupt is for the flow, which stops its job and then has to tell the server how the run ended. A blocked
    signal stays blocked in a child.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        SubprocessASGIServer().start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
