"""``make serve``: run all that ``prefect deployment run`` needs, a server, the deployments and a worker, until Ctrl-C.

It starts a server only if none is configured. While that server is up, ``prefect.toml`` tells Prefect's commands in
this folder its address; the user's other settings stay as they are.
"""

import asyncio
import os
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.service import Service, answers, run_once, service
from llama_core.chain.console import say
from llama_core.errors import EnvironmentMismatchError, TrainingInfraError

ROOT = Path(__file__).parents[1]
ADDRESS = ROOT / "prefect.toml"
POOL = "training"
EXAMPLE = "train/tiny_llama3_50m"
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")

POLL_SECONDS = 0.5

_ADDRESS_MARK = "# Written by `make serve`, which removes it when it stops."
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # the server answers this while its database is away
    "PREFECT_SERVER_API_HOST": "127.0.0.1",
    "PREFECT_SERVER_API_PORT": "4200",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}


def main() -> int:
    """Serve until Ctrl-C or SIGTERM and return the exit code."""
    os.chdir(ROOT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for number in (signal.SIGTERM, signal.SIGINT):  # a script's background commands ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            services = _start(stack)
            while True:
                for started in services:
                    started.revive()
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say("serve", "stopped")
        return 0
    except TrainingInfraError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _start(stack: ExitStack) -> list[Service]:
    """Start everything, to be stopped by ``stack``, and print the next command to type."""
    _forget_stale_address()
    from prefect.settings import PREFECT_API_URL, temporary_settings  # reads the settings on import

    services: list[Service] = []
    url = PREFECT_API_URL.value()
    if url is None:
        url = f"http://127.0.0.1:{os.environ['PREFECT_SERVER_API_PORT']}/api"
        services.append(stack.enter_context(_server(url)))
    elif not answers(url):
        raise EnvironmentMismatchError(f"the Prefect server at {url} (PREFECT_API_URL) does not answer; start it")
    os.environ["PREFECT_API_URL"] = url
    stack.enter_context(temporary_settings({PREFECT_API_URL: url}))
    _deploy()
    services.append(stack.enter_context(_worker()))
    prefect = Path(sys.executable).with_name("prefect")
    say("serve", f"watch and start runs at {url.removesuffix('/api')}; Ctrl-C stops everything")
    say("next", f"in another terminal, in {ROOT}: {prefect} deployment run {EXAMPLE} --watch")
    return services


def _forget_stale_address() -> None:
    """Remove the ``prefect.toml`` of a server that was killed."""
    if ADDRESS.exists() and ADDRESS.read_text().startswith(_ADDRESS_MARK):
        url = tomllib.loads(ADDRESS.read_text())["api"]["url"]
        if not answers(url):
            ADDRESS.unlink()


@contextmanager
def _server(url: str) -> Iterator[Service]:
    """Run a server for the block, and write its address for other terminals in this folder."""
    host, port = os.environ["PREFECT_SERVER_API_HOST"], int(os.environ["PREFECT_SERVER_API_PORT"])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvironmentMismatchError(
                f"cannot serve on {host}:{port}: {error.strerror}; choose another port with "
                "`make serve PREFECT_SERVER_API_PORT=4300`"
            ) from None
    os.environ.setdefault("PREFECT_UI_API_URL", url)
    with service("server", *PREFECT, "server", "start") as server:
        while not answers(url):
            server.revive()
            time.sleep(POLL_SECONDS)
        try:
            with ADDRESS.open("x") as address:
                address.write(f'{_ADDRESS_MARK}\n[api]\nurl = "{url}"\n')
        except FileExistsError:
            raise EnvironmentMismatchError(
                f"{ADDRESS} is not from `make serve` and names no server; add [api] url to it, or move it away"
            ) from None
        try:
            yield server
        finally:
            ADDRESS.unlink(missing_ok=True)


def _deploy() -> None:
    """Create or update the work pool, the automation and every deployment."""
    from flows.automations import install_automations

    try:
        run_once(*PREFECT, "work-pool", "inspect", POOL)
    except EnvironmentMismatchError:
        run_once(*PREFECT, "work-pool", "create", POOL, "--type", "process")
    asyncio.run(install_automations())
    run_once(*PREFECT, "deploy", "--all")


@contextmanager
def _worker() -> Iterator[Service]:
    """Run a worker for the block, and stop its flow runs at the end."""
    from flows.stopping import stop_flow_runs

    command = (*PREFECT, "worker", "start", "--pool", POOL, "--type", "process")
    with service("worker", *command, visible=True) as worker:
        try:
            yield worker
        finally:
            stop_flow_runs()  # before the worker, which kills its flow runs when interrupted


if __name__ == "__main__":
    sys.exit(main())
