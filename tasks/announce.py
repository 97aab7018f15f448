"""What a flow shows while it runs: lines on the terminal or in Prefect's log, and artifacts in Prefect's pages."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from prefect import get_run_logger
from prefect.runtime import deployment
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console

from llama_core.chain.console import say

ARTIFACT_RETRIES = 3
"""How often an artifact is offered to a server that is away, over 14 s; what ends a flow run is offered for longer."""


@contextmanager
def lines_where_they_are_read() -> Iterator[None]:
    """Write what ``say`` announces inside the block into Prefect's log if a worker runs the flow."""
    if deployment.id is None:
        yield
        return
    before = say.console
    say.console = Console(file=_RunLog(), highlight=False, soft_wrap=True)
    try:
        yield
    finally:
        say.console = before


class _RunLog(io.StringIO):
    """A text stream whose lines are records of the current flow or task run's log."""

    def write(self, text: str) -> int:
        line = text.rstrip()
        if line:
            get_run_logger().info(line)
        return len(text)


@contextmanager
def unless_the_server_is_away() -> Iterator[None]:
    """Go on without the artifact that the block makes if no server takes it: it is not worth a run."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: ARTIFACT_RETRIES}), suppress(httpx.HTTPError):
        yield
