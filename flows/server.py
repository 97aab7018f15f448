"""A Prefect server that only its user commands.

Every user of the machine and every page in a browser reaches its port, and whoever commands it runs programs as its
user. So it asks for a password.
"""

import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_HOME, PREFECT_SERVER_API_AUTH_STRING

from flows.service import Service, answers, service
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import safe_python

POLL_SECONDS = 0.5

_LISTEN = Path(__file__).with_name("listen.py")
_PRIVATE = 0o700
_OTHERS = 0o077
_TEMPORARY = {"PREFECT_SERVER_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}
"""Settings of a server for one process: without pages, and without the services that deployments need."""


def password() -> str:
    """Return what Prefect calls its auth string: the user's own if they have set one, else a new one."""
    for setting in (PREFECT_SERVER_API_AUTH_STRING, PREFECT_API_AUTH_STRING):
        if chosen := setting.value():
            return str(chosen)
    return f"admin:{secrets.token_urlsafe(32)}"


@contextmanager
def private_server(
    host: str, port: int, auth_string: str, *, is_temporary: bool = False
) -> Iterator[tuple[Service, str]]:
    """Run a server for the block, and yield it and the URL of its API once it answers.

    Args:
        host: the address to listen on.
        port: the port; 0 for any free one.
        auth_string: its password.
        is_temporary: whether it serves only this process.

    Raises:
        EnvironmentMismatchError: if it cannot listen there or does not start, or Prefect's files are somebody else's.
    """
    _close_to_others(PREFECT_HOME.value())
    _bypass_proxy()
    with _listening(host, port) as listeners:
        port = listeners[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/api"
        settings = {
            "PREFECT_SERVER_API_AUTH_STRING": auth_string,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        }
        command = safe_python(str(_LISTEN), *(str(listener.fileno()) for listener in listeners))
        settings |= _TEMPORARY if is_temporary else {"PREFECT_UI_API_URL": os.getenv("PREFECT_UI_API_URL", url)}
        with service("server", *command, settings=settings, umask=_OTHERS, sockets=listeners) as server:
            while not answers(url):
                server.revive()
                time.sleep(POLL_SECONDS)
            yield server, url


def _close_to_others(home: Path) -> None:
    """Make Prefect's folder private: its database holds what every flow run was asked and has said."""
    home.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    found = home.stat()
    if found.st_uid != os.getuid():
        raise EnvironmentMismatchError(
            f"Prefect's folder {home} belongs to another user; set PREFECT_HOME to a folder of your own"
        )
    home.chmod(found.st_mode & ~_OTHERS)


def _bypass_proxy() -> None:
    """Let no request to the server go to an HTTP proxy, which would hear the password."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{others},127.0.0.1" if others else "127.0.0.1"


@contextmanager
def _listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Yield a socket that listens on a port of the host and, if there is IPv6, one on the same port of ``::1``.

    A browser goes there for ``localhost``. A page of somebody else there could read what ours has stored.
    """
    try:
        listeners = _listeners(host, port)
    except OSError as error:
        raise EnvironmentMismatchError(
            f"cannot serve on {host}:{port}: {error.strerror}; choose another port with "
            "`make serve PREFECT_SERVER_API_PORT=4300`"
        ) from None
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def _listeners(host: str, port: int) -> list[socket.socket]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    while True:
        listener = socket.create_server(address, family=family)
        if family == socket.AF_INET6:
            return [listener]
        try:
            return [listener, socket.create_server(("::1", listener.getsockname()[1]), family=socket.AF_INET6)]
        except OSError as error:
            if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                return [listener]
            listener.close()
            if port or error.errno != errno.EADDRINUSE:
                raise
