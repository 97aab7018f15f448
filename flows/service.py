"""Processes that ``make serve`` keeps running, commands that it runs once, and the check for a server."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from llama_core.errors import EnvironmentMismatchError
from llama_core.runs.console import say

SERVE_VARIABLE = "TRAINING_INFRA_SERVE"
"""Environment variable of every process that ``make serve`` started; its value is the process id of that command."""

STEADY_SECONDS = 20.0
"""Least time that a service must have been up to be restarted when it ends."""
STOP_SECONDS = 40.0
"""Time a service gets to stop by itself."""


class Service:
    """A process in its own session: the terminal's Ctrl-C reaches only ``make serve``, which stops services in order.

    Args:
        name: its name in messages.
        command: its command line.
        log: file for its output; None to show its errors on the terminal, and nothing else.
        settings: variables of its environment besides those of this process.
        umask: permissions that its files do not get; -1 for those of this process.
        sockets: sockets that it inherits.
    """

    def __init__(
        self,
        name: str,
        command: tuple[str, ...],
        log: Path | None,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        umask: int = -1,
        sockets: Sequence[socket] = (),
    ) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.settings = settings
        self.umask = umask
        self.sockets = sockets
        self._start()

    def _start(self) -> None:
        self.started_at = time.monotonic()
        output = self.log.open("ab") if self.log else None
        self.process = subprocess.Popen(
            self.command,
            env=os.environ | self.settings | {SERVE_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
            umask=self.umask,
            pass_fds=[inherited.fileno() for inherited in self.sockets],
        )
        if output:
            output.close()

    def revive(self) -> None:
        """Restart the service if it has ended.

        Raises:
            EnvironmentMismatchError: if it ended soon after its last start, with the last line of its output.
        """
        if self.process.poll() is None:
            return
        if time.monotonic() - self.started_at < STEADY_SECONDS:
            raise EnvironmentMismatchError(f"the {self.name} does not stay up{_last_line(self.log)}")
        say("serve", f"the {self.name} has ended; restarting it")
        self._start()

    def end(self) -> None:
        """Stop the service; kill it if it takes too long or the user interrupts again."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say("stopping", f"the {self.name} did not stop by itself; killing it")
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def service(name: str, *command: str, visible: bool = False, **options: Any) -> Iterator[Service]:
    """Run a service for the block; its errors are shown if ``visible``, else its output is kept for an error message.

    ``options`` are those of ``Service``.
    """
    with TemporaryDirectory() as folder:
        started = Service(name, command, None if visible else Path(folder) / "log", **options)
        try:
            yield started
        finally:
            started.end()


def run_once(*command: str) -> None:
    """Run a command quietly.

    Raises:
        EnvironmentMismatchError: if it fails, with its output.
    """
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise EnvironmentMismatchError(f"'{' '.join(command[1:])}' failed: {said}")


def answers(url: str) -> bool:
    """Return whether a Prefect server answers at ``url``."""
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def is_own(url: str) -> bool:
    """Return whether a process of this user on this machine listens on the port of ``url``."""
    port = httpx.URL(url).port
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            # The system names the process only to its own user, and to root.
            here = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if here and connection.pid:
                return psutil.Process(connection.pid).uids().real == os.getuid()
    return False


def obeys_everybody(url: str) -> bool:
    """Return whether the Prefect server at ``url`` asks for no password."""
    try:
        return httpx.get(f"{url}/version", timeout=5).is_success
    except httpx.HTTPError:
        return False


def _last_line(log: Path | None) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log else []
    return f": {lines[-1].strip()}" if lines else ""
