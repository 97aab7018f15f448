"""Output of a flow while it runs: lines on the terminal or in Prefect's log, and artifacts in Prefect's UI."""

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
"""Retries of an artifact, over 14 s, while the server is away; a flow run retries its final state longer."""


@contextmanager
def lines_where_they_are_read() -> Iterator[None]:
    """Send the lines of ``say`` inside the block to Prefect's log if a worker runs the flow."""
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
    """A text stream whose lines go to the log of the current flow or task run."""

    def write(self, text: str) -> int:
        line = text.rstrip()
        if line:
            get_run_logger().info(line)
        return len(text)


@contextmanager
def unless_the_server_is_away() -> Iterator[None]:
    """Continue without the block's artifact if the server does not take it: a missing artifact must not end a run."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: ARTIFACT_RETRIES}), suppress(httpx.HTTPError):
        yield
