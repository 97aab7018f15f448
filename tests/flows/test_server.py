"""Somebody else on the machine, or a page in a browser, against the Prefect server of one user."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
import urllib.request
from contextlib import ExitStack, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import prefect
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from waiting import PATIENCE_SECONDS
from websockets import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from flows import serve
from flows.server import _listening, password, private_server
from flows.service import answers, obeys_everybody
from llama_core.errors import EnvironmentMismatchError

pytestmark = pytest.mark.xdist_group("flow")

ELSEWHERE = ("http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example")
SOCKETS = ("events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled", "work_pools/x/workers/connect")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefect")
    folder.chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def server(home):
    """A server of a user whose new files everybody may read and write, and whose requests go to a proxy."""
    before = os.umask(0)
    try:
        with temporary_settings({PREFECT_HOME: home}), pytest.MonkeyPatch.context() as environment:
            environment.setenv("PREFECT_HOME", str(home))
            environment.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
            environment.setenv("http_proxy", "http://127.0.0.1:1")
            environment.setenv("NO_PROXY", "intranet.example")
            environment.delenv("no_proxy", raising=False)
            auth_string = password()
            with private_server("127.0.0.1", 0, auth_string) as (service, url):
                yield service, url, auth_string
    finally:
        os.umask(before)


def routes(url):
    """Return every path of the API with its methods."""
    found = httpx.get(f"{url.removesuffix('/api')}/openapi.json", timeout=60).json()["paths"]
    return [
        (method.upper(), re.sub(r"\{[^}]*\}", "00000000-0000-0000-0000-000000000000", path))
        for path, methods in found.items()
        for method in methods
    ]


@pytest.mark.wide
def test_every_route_of_the_api_asks_for_the_password(server):
    _, url, auth_string = server
    with httpx.Client(base_url=url) as stranger:
        answered = {route: stranger.request(*route).status_code for route in routes(url)}
    assert len(answered) > 150
    assert {route for route, code in answered.items() if code != 401} <= {("GET", "/health"), ("GET", "/ready")}
    assert answers(url)
    assert not obeys_everybody(url)
    assert httpx.get(f"{url}/version", auth=tuple(auth_string.split(":"))).is_success


@pytest.mark.wide
@pytest.mark.parametrize("origin", ELSEWHERE)
def test_a_page_from_elsewhere_may_not_read_an_answer(server, origin):
    _, url, auth_string = server
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{url}/flow_runs/filter", headers=asked)
    answer = httpx.get(f"{url}/version", headers={"Origin": origin}, auth=tuple(auth_string.split(":")))
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.wide
def test_a_page_whose_name_now_leads_here_has_no_password(server):
    """DNS rebinding: the browser then takes the server for the page's own."""
    _, url, _ = server
    told = httpx.post(f"{url}/deployments/filter", json={}, headers={"Host": "evil.example"})
    assert told.status_code == 401


@pytest.mark.wide
@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("protocols", [None, ["prefect"]])
def test_every_websocket_asks_for_the_password(server, path, protocols):
    _, url, _ = server
    address = f"{url.replace('http', 'ws', 1)}/{path}"
    with suppress(InvalidStatus, ConnectionClosed), connect(address, subprotocols=protocols) as stranger:
        stranger.send(json.dumps({"type": "auth", "token": "admin:"}))
        pytest.fail(f"it has answered {stranger.recv(timeout=PATIENCE_SECONDS)}")


@pytest.mark.wide
def test_the_page_asks_for_the_password(server):
    _, url, _ = server
    settings = httpx.get(f"{url.removesuffix('/api')}/ui-settings").json()
    assert (settings["auth"], settings["api_url"]) == ("BASIC", url)


@pytest.mark.wide
def test_no_other_user_may_read_the_files_of_the_server(server, home):
    assert (home / "prefect.db").exists()
    assert [path for path in (home, *home.rglob("*")) if path.stat().st_mode & 0o077] == []


has_ipv6 = pytest.mark.skipif(
    all(one.address != "::1" for one in psutil.net_if_addrs().get("lo", ())), reason="this machine has no IPv6"
)


@pytest.mark.wide
def test_requests_to_the_server_go_through_no_proxy(server):
    """Which would hear the password."""
    _, url, _ = server
    assert urllib.request.getproxies()["http"] == "http://127.0.0.1:1"
    assert urllib.request.proxy_bypass(httpx.URL(url).host)
    assert urllib.request.proxy_bypass("intranet.example")


@pytest.mark.wide
@has_ipv6
def test_localhost_leads_to_the_server_by_ipv6_too(server):
    """Otherwise somebody else answers there, with a page that may read what the server's own page has stored."""
    _, url, _ = server
    assert httpx.get(f"http://[::1]:{httpx.URL(url).port}/api/health", trust_env=False).is_success


@has_ipv6
def test_a_port_that_somebody_else_has_by_ipv6_is_not_used():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as theirs:
        taken = theirs.getsockname()[1]
        refused = pytest.raises(EnvironmentMismatchError, match=rf"127\.0\.0\.1:{taken}: Address already in use")
        with refused, private_server("127.0.0.1", taken, password()):
            pass


@pytest.mark.parametrize(("problem", "num_sockets"), [(errno.EADDRINUSE, 2), (errno.EADDRNOTAVAIL, 1)])
def test_another_free_port_is_chosen_if_one_is_taken_by_ipv6_and_none_is_held_without_ipv6(
    monkeypatch, problem, num_sockets
):
    really, problems = socket.create_server, [problem]

    def create_server(address, *, family):
        if family == socket.AF_INET6 and problems:
            raise OSError(problems.pop(), "it does not work")
        return really(("127.0.0.1", 0))

    monkeypatch.setattr(socket, "create_server", create_server)
    with _listening("127.0.0.1", 0) as listeners:
        assert len(listeners) == num_sockets


@pytest.mark.wide
def test_nobody_can_take_the_place_of_a_server_that_was_killed(server):
    """The last test here, since it kills the server that the others ask."""
    service, url, _ = server
    service.process.kill()
    service.process.wait()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", httpx.URL(url).port))
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{url}/health", timeout=0.2)


@pytest.mark.nightly
def test_the_server_of_a_flow_from_one_terminal_asks_for_a_password_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))  # for the server's process
    with temporary_settings({PREFECT_HOME: tmp_path}), private_server("127.0.0.1", 0, "a:b", is_temporary=True) as it:
        _, url = it
        assert httpx.post(f"{url}/deployments/filter", json={}).status_code == 401
        assert httpx.post(f"{url}/deployments/filter", json={}, auth=("a", "b")).is_success


def test_a_password_is_new_each_time():
    assert len({password() for _ in range(10)}) == 10


class Obedient(BaseHTTPRequestHandler):
    """Answers everything with success, and with the version."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(prefect.__version__).encode())

    def log_message(self, *told):
        """Say nothing."""


@pytest.fixture
def obedient():
    """The URL of a server that asks for no password."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Obedient) as answering:
        Thread(target=answering.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{answering.server_port}/api"
        answering.shutdown()


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ADDRESS", tmp_path / "prefect.toml")
    return tmp_path / "prefect.toml"


def test_a_server_that_obeys_everybody_is_known(obedient):
    assert obeys_everybody(obedient)


def test_make_serve_warns_of_a_server_that_obeys_everybody(obedient, address, monkeypatch, capsys):
    monkeypatch.setattr(serve, "_deploy", lambda: None)
    monkeypatch.setattr(serve, "_worker", nullcontext)
    monkeypatch.setenv("PREFECT_API_URL", obedient)
    with temporary_settings({PREFECT_API_URL: obedient}), ExitStack() as stack:
        serve._start(stack)
    told = " ".join(capsys.readouterr().out.split())
    assert f"whoever reaches {obedient} can run commands as you, since it asks for no password" in told


def test_an_own_server_outlives_the_make_serve_that_started_it(obedient, address):
    address.write_text(serve.written_address(obedient, 'admin:"quoted'))
    serve.forget_stale_address()
    assert tomllib.loads(address.read_text())["api"] == {"url": obedient, "auth_string": 'admin:"quoted'}


SQUATTER = """
import os, socket

listener = socket.create_server(("127.0.0.1", 0))
os.setuid(65534)
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nConnection: close\\r\\n\\r\\ntrue")
    connection.close()
"""


@pytest.mark.root
def test_somebody_who_took_the_port_of_a_killed_server_is_not_believed(address):
    with subprocess.Popen([sys.executable, "-I", "-c", SQUATTER], stdout=subprocess.PIPE, text=True) as squatter:
        url = f"http://127.0.0.1:{squatter.stdout.readline().strip()}/api"
        address.write_text(serve.written_address(url, "admin:x"))
        serve.forget_stale_address()
        assert answers(url)
        squatter.kill()
    assert not address.exists()


@pytest.mark.root
def test_a_folder_of_somebody_else_is_not_used(tmp_path):
    os.chown(tmp_path, 65534, -1)
    refused = pytest.raises(EnvironmentMismatchError, match="belongs to another user; set PREFECT_HOME")
    with temporary_settings({PREFECT_HOME: tmp_path}), refused, private_server("127.0.0.1", 0, password()):
        pytest.fail("it has started")
