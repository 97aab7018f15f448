"""A configured Prefect server that a flow cannot use, against real servers."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import prefect
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL, PREFECT_HOME, temporary_settings

from flows.check import check_server, refusals_in_a_line
from flows.server import private_server
from flows.terminal import train_through_the_flow
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.launch.ports import free_port

pytestmark = pytest.mark.xdist_group("flow")

AUTH_STRING = "someone:opensesame"
wide = pytest.mark.wide  # starts a server


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The API of a server that asks for a password."""
    home = tmp_path_factory.mktemp("prefect")
    with temporary_settings({PREFECT_HOME: home}), pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_HOME", str(home))
        with private_server("127.0.0.1", 0, AUTH_STRING, is_temporary=True) as (_, address):
            yield address


def refusal(url, **credentials):
    """Return the line that refuses a server."""
    settings = {PREFECT_API_AUTH_STRING: credentials.get("auth_string"), PREFECT_API_KEY: credentials.get("key")}
    with temporary_settings(settings), pytest.raises(EnvironmentMismatchError) as refused:
        check_server(url)
    (line,) = str(refused.value).splitlines()
    return line


@wide
@pytest.mark.parametrize(
    ("credentials", "told"),
    [
        ({}, "asks for a password"),
        ({"auth_string": "someone:else"}, "refuses the password of PREFECT_API_AUTH_STRING"),
        ({"auth_string": "opensesame"}, "refuses the password of PREFECT_API_AUTH_STRING"),
        ({"key": "pnu_opensesame"}, "refuses the key of PREFECT_API_KEY"),
    ],
)
def test_a_password_that_is_missing_or_wrong_is_named_with_the_variable_for_it(url, credentials, told):
    line = refusal(url, **credentials)
    assert line.startswith(f"the Prefect server at {url} (PREFECT_API_URL) {told}; set PREFECT_API_AUTH_STRING to ")
    assert "opensesame" not in line


@wide
@pytest.mark.parametrize("end", ["", "/"])
def test_a_server_that_a_flow_can_use_is_accepted_in_silence(url, end, capsys):
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH_STRING}):
        check_server(url + end)
    assert capsys.readouterr().out == ""


@wide
@pytest.mark.parametrize("auth_string", [AUTH_STRING, None])
@pytest.mark.parametrize("end", ["", "/"])
def test_an_address_without_api_is_corrected_with_and_without_the_password(url, auth_string, end):
    base = url.removesuffix("/api") + end
    assert refusal(base, auth_string=auth_string).endswith(f"is not the API of the Prefect server there; use {url}")


@wide
def test_another_page_of_the_server_is_not_taken_for_its_api(url):
    assert "the address of one ends in /api" in refusal(f"{url}/flows", auth_string=AUTH_STRING)


@wide
@pytest.mark.parametrize("here", ["2.19.0", "4.0.1"])
def test_a_server_of_another_major_version_is_refused_with_both_versions(url, here, monkeypatch):
    there = prefect.__version__
    monkeypatch.setattr(prefect, "__version__", here)
    line = refusal(url, auth_string=AUTH_STRING)
    assert line.endswith(f"is Prefect {there}, and this is Prefect {here}; use a server of version {here[0]}")


@wide
def test_an_older_server_is_named_before_the_run(url, monkeypatch, capsys):
    there = prefect.__version__
    monkeypatch.setattr(prefect, "__version__", "3.999.0")
    with temporary_settings({PREFECT_API_AUTH_STRING: AUTH_STRING}):
        check_server(url)
    told = " ".join(capsys.readouterr().out.split())
    assert f"is Prefect {there}, older than 3.999.0 here, and may refuse requests; upgrade it" in told


@wide
def test_a_request_that_the_server_refuses_is_one_line(url):
    mine = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: AUTH_STRING}
    refused = pytest.raises(EnvironmentMismatchError, match=r"\(status 422 for /api/flows/\); upgrade the server if")
    with temporary_settings(mine), get_client(sync_client=True) as client, refused, refusals_in_a_line(url):
        client.request("POST", "/flows/", json={"name": "x", "of_a_later_version": 1})


@wide
def test_nothing_is_made_for_a_server_that_cannot_be_used(url, tmp_path):
    run_dir = tmp_path / "run"
    refused = pytest.raises(EnvironmentMismatchError, match="asks for a password")
    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: None}), refused:
        train_through_the_flow(RunConfig(), run_dir, resume=False)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:{}/api", "Connection refused"),
        ("http://127.0.0.1:{}", "Connection refused"),
        ("127.0.0.1:{}/api", "missing an 'http://' or 'https://' protocol"),
        ("http://me:secret-7@127.0.0.1:{}/api", "Connection refused"),
    ],
)
def test_a_server_that_does_not_answer_is_refused_with_the_reason(address, why):
    line = refusal(address.format(free_port()))
    assert re.search(rf"does not answer \(.*{re.escape(why)}.*\); start it$", line)
    assert "secret-7" not in line


class Other(BaseHTTPRequestHandler):
    """A server of something else: answers everything with one status and a page."""

    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *told):
        """Say nothing."""


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (200, "answers, but is no API of a Prefect server; the address of one ends in /api"),
        (404, "answers, but is no API of a Prefect server; the address of one ends in /api"),
        (503, "answers with status 503; see its log"),
    ],
)
def test_a_server_of_something_else_or_in_trouble_is_told_apart(status, told):
    handler = type("Handler", (Other,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as answering:
        Thread(target=answering.serve_forever, daemon=True).start()
        line = refusal(f"http://127.0.0.1:{answering.server_port}/api")
        answering.shutdown()
    assert told in line
