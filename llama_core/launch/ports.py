"""Ports where ranks of this machine meet."""

import random
import socket
from contextlib import suppress

from llama_core.errors import EnvironmentMismatchError

_PORTS = range(20000, 32000)


def free_port() -> int:
    """Return a free port below the ephemeral range, because the ranks bind it only some seconds later.

    Raises:
        EnvironmentMismatchError: if none is free.
    """
    for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise EnvironmentMismatchError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free for the ranks to meet at")
