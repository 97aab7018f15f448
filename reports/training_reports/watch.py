"""Serves the page of a run or a sweep that goes on to browsers: of this machine only, or of others that have a token.

The pages and their two scripts are all that it serves, and reading is all that it does. A browser runs no script in a
page but those two.
"""

import gzip
import ipaddress
import secrets
import socket
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from plotly.offline import get_plotlyjs

from llama_core.errors import EnvironmentMismatchError, TrainingInfraError, safe
from training_reports.layout import TEMPLATES
from training_reports.live import LiveContent, LivePages, refuse_others

LOOPBACK = "127.0.0.1"


_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # an address may hold the token
    "X-Content-Type-Options": "nosniff",
}
_HTML = "text/html; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"


class WatchServer(ThreadingMixIn, TCPServer):
    """Serves the pages of a directory until it is interrupted.

    Args:
        path: the directory of a run or a sweep.
        host: the address to listen on; whoever connects then needs a token. None for this machine alone, without one.
        port: the port; 0 for any free one.

    Raises:
        RunDirectoryError: if the directory is none of a run or a sweep.
        EnvironmentMismatchError: if it cannot listen there.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, path: Path, host: str | None = None, port: int = 0) -> None:
        refuse_others(path)
        self.pages = LivePages(path)
        self.token = "" if host is None else secrets.token_urlsafe(24)
        self.cookie = f"training-infra-{secrets.token_hex(4)}"  # browsers share cookies among the ports of a machine
        address = host or LOOPBACK
        self.hosts = {"localhost", address.lower(), socket.gethostname().lower()}
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            self.address_family = found[0][0]
            listens_on: Any = found[0][4]
            super().__init__(listens_on, WatchHandler)
        except OSError as error:
            remedy = "choose another --port, or 0 for any free one" if host is None else "choose another --host or port"
            raise EnvironmentMismatchError(
                f"cannot listen on {address}, port {port}: {error.strerror or error}; {remedy}"
            ) from None
        shown = socket.gethostname() if address in {"0.0.0.0", "::"} else address
        query = f"?token={self.token}" if self.token else ""
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_address[1]}/{query}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def knows(self, host: str) -> bool:
        """Return whether a browser that was led here by a name of somebody else's would not send this ``Host``."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.hosts or _is_address(name)

    def admits(self, token: str) -> bool:
        """Return whether a browser may read the pages that has sent ``token``."""
        return not self.token or secrets.compare_digest(token.encode(), self.token.encode())


class WatchHandler(BaseHTTPRequestHandler):
    """Answers a request for a page or a script."""

    server: WatchServer
    timeout = 30
    server_version = "training-infra"
    sys_version = ""
    error_content_type = _TEXT
    error_message_format = "%(message)s\n"

    def do_GET(self) -> None:
        """Answer with the content."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer with the headers only."""
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing: an address may hold the token."""

    def _answer(self) -> None:
        address, _, query = self.path.partition("?")
        host = self.headers.get("Host", "")
        if not self.server.knows(host):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "this name is none of the machine's; open it by its IP address")
            return
        given = parse_qs(query).get("token", [""])[0]
        if not self.server.admits(given or self._cookie()):
            self._say(HTTPStatus.FORBIDDEN, "open the address with ?token= that training-infra watch has printed")
            return
        try:
            self._answer_known(address, is_first=given != "")
        except (TrainingInfraError, OSError) as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception as error:  # files that change while they are read: the next look may find them whole
            problem = f"the page cannot be made now ({type(error).__name__}: {error})"
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, problem)

    def _answer_known(self, address: str, *, is_first: bool) -> None:
        """Answer a request that may be answered.

        Args:
            address: what it asks for.
            is_first: whether its address has the token, which is then kept in a cookie.
        """
        if address in _SCRIPTS:
            self._send(_SCRIPTS[address](), _SCRIPT, {"Cache-Control": "private, no-cache"})
            return
        page = self.server.pages.find(address)
        if page is None:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page")
        elif is_first and self.server.token:
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Lax; Path=/"
            self._say(HTTPStatus.SEE_OTHER, "", {"Location": address, "Set-Cookie": cookie})
        else:
            self._send(page.newest(), _HTML, {"Cache-Control": "no-store"})

    def _cookie(self) -> str:
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie:
                return value
        return ""

    def _say(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        """Send a line of text; a browser that shows nothing but a problem of the moment asks again by itself."""
        headers = {"Content-Type": _TEXT, **(headers or {})}
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            headers["Refresh"] = "5"
        self._send_as(status, safe(text).encode(errors="replace"), headers)

    def _send(self, newest: LiveContent, kind: str, headers: Mapping[str, str]) -> None:
        """Send a content, unless the browser has it."""
        headers = {**headers, "Content-Type": kind, "ETag": f'"{newest.tag}"', "Vary": "Accept-Encoding"}
        if newest.tag in self.headers.get("If-None-Match", ""):
            self._send_as(HTTPStatus.NOT_MODIFIED, b"", headers)
        elif "gzip" in self.headers.get("Accept-Encoding", ""):
            self._send_as(HTTPStatus.OK, _packed(newest), {**headers, "Content-Encoding": "gzip"})
        else:
            self._send_as(HTTPStatus.OK, newest.content, headers)

    def _send_as(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@lru_cache(maxsize=8)
def _packed(newest: LiveContent) -> bytes:
    return gzip.compress(newest.content, 5, mtime=0)


@cache
def _plotly() -> LiveContent:
    return LiveContent.of(get_plotlyjs().encode())


@cache
def _script() -> LiveContent:
    return LiveContent.of(TEMPLATES.get_template("live.js").render().encode())


_SCRIPTS = {"/plotly.js": _plotly, "/live.js": _script}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
