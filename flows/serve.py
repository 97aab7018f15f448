"""``make serve``: run all that ``prefect deployment run`` needs, a server, the deployments and a worker, until Ctrl-C.

It starts a server only if none is configured. While that server is up, ``prefect.toml`` tells Prefect's commands in
this folder its address and its password; the user's other settings stay as they are.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the imports ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from flows.service import Service, answers, is_own, obeys_everybody, run_once, service
from llama_core.errors import EnvironmentMismatchError, TrainingInfraError
from llama_core.imports import safe_python
from llama_core.runs.console import say

ROOT = Path(__file__).parents[1]
ADDRESS = ROOT / "prefect.toml"
POOL = "training"
EXAMPLE = "train/tiny_llama3_50m"
PREFECT = safe_python("-m", "prefect", "--no-prompt")

POLL_SECONDS = 0.5

_HOW_TO_ASK = "set PREFECT_SERVER_API_AUTH_STRING where it starts, and PREFECT_API_AUTH_STRING here"
_ADDRESS_MARK = "# Written by `make serve`, which removes it when it stops."
_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # the server answers this while its database is away
    "PREFECT_SERVER_API_HOST": "127.0.0.1",
    "PREFECT_SERVER_API_PORT": "4200",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_ROOT_LEVEL": "ERROR",  # a worker that stops warns of every record that it still sends
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
    forget_stale_address()
    # These read the settings on import.
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.check import check_server, refusals_in_a_line

    services: list[Service] = []
    url = PREFECT_API_URL.value()
    if url is None:
        server, url, auth_string = stack.enter_context(_server())
        services.append(server)
        os.environ["PREFECT_API_AUTH_STRING"] = auth_string
        stack.enter_context(temporary_settings({PREFECT_API_AUTH_STRING: auth_string}))
        say("password", f"the page asks for one: it is auth_string in {ADDRESS}, which only you can read")
    else:
        check_server(url)
        if obeys_everybody(url):
            warning = f"whoever reaches {url} can run commands as you, since it asks for no password; {_HOW_TO_ASK}"
            say("warning", warning)
    os.environ["PREFECT_API_URL"] = url
    stack.enter_context(temporary_settings({PREFECT_API_URL: url}))
    with refusals_in_a_line(url):
        _deploy()
    services.append(stack.enter_context(_worker()))
    prefect = Path(sys.executable).with_name("prefect")
    say("serve", f"watch and start runs at {url.removesuffix('/api')}; Ctrl-C stops everything")
    say("next", f"in another terminal, in {ROOT}: {prefect} deployment run {EXAMPLE}")
    return services


def forget_stale_address() -> None:
    """Remove the ``prefect.toml`` of a server that was killed, even if somebody else answers in its place."""
    if ADDRESS.exists() and ADDRESS.read_text().startswith(_ADDRESS_MARK):
        url = tomllib.loads(ADDRESS.read_text())["api"]["url"]
        if not (answers(url) and is_own(url)):
            ADDRESS.unlink()


def written_address(url: str, auth_string: str) -> str:
    """Return the text of ``prefect.toml``."""
    return f"{_ADDRESS_MARK}\n[api]\nurl = {json.dumps(url)}\nauth_string = {json.dumps(auth_string)}\n"


@contextmanager
def _server() -> Iterator[tuple[Service, str, str]]:
    """Run a server for the block, and yield it, the URL of its API and its password.

    Other terminals in this folder find both in ``prefect.toml``.
    """
    from flows.server import password, private_server

    auth_string = password()
    host = os.environ["PREFECT_SERVER_API_HOST"]
    port = int(os.environ["PREFECT_SERVER_API_PORT"])
    with private_server(host, port, auth_string) as (server, url):
        try:
            with open(ADDRESS, "x", opener=partial(os.open, mode=0o600)) as address:
                address.write(written_address(url, auth_string))
        except FileExistsError:
            raise EnvironmentMismatchError(
                f"{ADDRESS} is not from `make serve` and names no server; add [api] url to it, or move it away"
            ) from None
        try:
            yield server, url, auth_string
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
