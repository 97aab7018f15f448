"""The check of a configured Prefect server for all that a flow needs of it: an API, the password, the version."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import prefect
from packaging.version import Version
from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from llama_core.errors import EnvironmentMismatchError
from llama_core.redaction import redacted
from llama_core.runs.console import say

TIMEOUT_SECONDS = 5
_DENIED = {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}


def check_server(url: str, otherwise: str = "") -> None:
    """Ask the Prefect server at ``url`` for its version, once, with the credentials that a flow run has.

    Args:
        url: the address of its API, from ``PREFECT_API_URL``.
        otherwise: what else than starting it could be done about a server that does not answer.

    Raises:
        EnvironmentMismatchError: with what is wrong and what to do, if a flow could not use the server.
    """
    server = _named(url)
    try:
        found = _version(url)
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in _DENIED:
            raise EnvironmentMismatchError(f"{server} {_denied()}") from None
        if code < httpx.codes.INTERNAL_SERVER_ERROR:
            raise EnvironmentMismatchError(_no_api(url)) from None
        raise EnvironmentMismatchError(f"{server} answers with status {code}; see its log") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = redacted(str(error)) or type(error).__name__
        raise EnvironmentMismatchError(f"{server} does not answer ({why}); start it{otherwise}") from None
    except ValueError:
        raise EnvironmentMismatchError(_no_api(url)) from None
    if found is not None:
        _check_version(server, Version(found))


@contextmanager
def refusals_in_a_line(url: str) -> Iterator[None]:
    """Make an error of a request in the block, such as one that an older server does not know, a line about the server.

    Raises:
        EnvironmentMismatchError: if the server at ``url`` refuses a request.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        answer = f"status {error.response.status_code} for {error.request.url.path}"
        raise EnvironmentMismatchError(
            f"{_named(url)} refuses a request of Prefect {prefect.__version__} ({answer}); upgrade the server if it is "
            "older, and see its log"
        ) from error


def _named(url: str) -> str:
    return f"the Prefect server at {redacted(url)} (PREFECT_API_URL)"


def _version(url: str) -> str | None:
    """Return the version of the server at ``url``; None for Prefect Cloud, which has all.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: if it does not answer, or answers with an error.
        ValueError: if it answers with something else than a version.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        client = SyncPrefectClient(
            url,
            auth_string=PREFECT_API_AUTH_STRING.value(),
            api_key=PREFECT_API_KEY.value(),
            httpx_settings={"timeout": TIMEOUT_SECONDS},
        )
        if client.server_type == ServerType.CLOUD:
            client.read_flows(limit=1)
            return None
        return str(Version(client.api_version()))


def _check_version(server: str, found: Version) -> None:
    """Refuse a server of another major version; name an older one, which Prefect does not promise to work."""
    here = Version(prefect.__version__)
    if found.major != here.major:
        raise EnvironmentMismatchError(
            f"{server} is Prefect {found}, and this is Prefect {here}; use a server of version {here.major}"
        )
    if found < here:
        say("warning", f"{server} is Prefect {found}, older than {here} here, and may refuse requests; upgrade it")


def _denied() -> str:
    """Return that the server refuses the credentials there are, and which it wants."""
    if PREFECT_API_AUTH_STRING.value():
        given = "refuses the password of PREFECT_API_AUTH_STRING"
    elif PREFECT_API_KEY.value():
        given = "refuses the key of PREFECT_API_KEY"
    else:
        given = "asks for a password"
    return f"{given}; set PREFECT_API_AUTH_STRING to name:password, as PREFECT_SERVER_API_AUTH_STRING is on the server"


def _no_api(url: str) -> str:
    """Return that there is no API at ``url``, and where it is."""
    inside = f"{url.rstrip('/')}/api"
    try:
        _version(inside)
        is_there = True
    except httpx.HTTPStatusError as error:
        is_there = error.response.status_code in _DENIED
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        is_there = False
    if is_there:
        return f"PREFECT_API_URL={redacted(url)} is not the API of the Prefect server there; use {redacted(inside)}"
    return (
        f"PREFECT_API_URL={redacted(url)} answers, but is no API of a Prefect server; the address of one ends in /api, "
        "such as http://127.0.0.1:4200/api"
    )
