"""Run Prefect's server on sockets that listen already: ``python -P listen.py DESCRIPTOR...``.

The process that made the sockets keeps them. While that process lives, nobody else can answer on the port, not even
while the server starts or has been killed.
"""

import socket
import sys
from collections.abc import Sequence

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings


def main(descriptors: Sequence[int]) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = get_current_settings().server
    config = uvicorn.Config(
        create_app(final=True),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor) for descriptor in descriptors])


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
