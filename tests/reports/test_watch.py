"""``training-infra watch``: who may read the page of a living run, what is served, and how it follows the run."""

import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest
import test_pages_escape
from browser import Browser
from synthetic_run import step_record, write_run
from synthetic_sweep import write_sweep
from test_pages_escape import ATTACK, attack_run
from waiting import eventually

from llama_core.errors import EnvironmentMismatchError, RunDirectoryError
from llama_core.launch.attempts import log_path
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import Sample, Samples
from llama_core.records.metrics import append_metrics
from training_infra.cli import main
from training_reports import live
from training_reports.watch import WatchServer

SMALL = [
    *("--model=tiny_llama3_50m", "--device=cpu", "--seq-len=32", "--batch-size=2"),
    *(f"--set=architecture.{size}" for size in ("hidden_size=64", "num_layers=2", "ffn_size=128", "head_dim=16")),
    *("--set=architecture.vocab_size=512", "--set=training.eval_sequences=2", "--set=benchmark.steps=0"),
]
"""A run of a few hundred steps in seconds."""


@contextmanager
def served(path, **options):
    with WatchServer(path, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _every_look_counts(monkeypatch):
    monkeypatch.setattr(live, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)


class Answer:
    """What a server has answered."""

    def __init__(self, server, address="/", method="GET", **headers):
        connection = HTTPConnection("127.0.0.1", server.server_address[1])
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, address, headers={"Host": "127.0.0.1"} | headers)
        got = connection.getresponse()
        self.status, self.headers, self.content = got.status, got.headers, got.read()
        connection.close()

    @property
    def text(self):
        return self.content.decode()


def take_step(run, step, **changes):
    record = step_record(step, **changes)
    append_metrics(run, record)
    write_json(run.heartbeat, record)


@pytest.fixture
def living(tmp_path):
    """A run that has taken 12 of its 40 steps."""
    run = write_run(tmp_path / "mine", records=[step_record(step) for step in range(1, 13)])
    for ended in (run.outcome, run.benchmark, run.training, run.job):
        ended.unlink()
    write_json(run.heartbeat, step_record(12))
    return run


def test_the_page_follows_the_files_and_is_sent_again_only_if_they_have_changed(living):
    with served(living.path) as server:
        first = Answer(server)
        assert first.status == 200
        assert "<dd>12 of 40</dd>" in first.text
        again = Answer(server, If_None_Match=first.headers["ETag"])
        assert (again.status, again.content) == (304, b"")
        take_step(living, 13)
        newer = Answer(server, If_None_Match=first.headers["ETag"])
        assert newer.status == 200
        assert "<dd>13 of 40</dd>" in newer.text
        assert newer.headers["ETag"] != first.headers["ETag"]


def test_no_script_is_in_the_page_and_the_policy_allows_none_but_the_servers(living):
    with served(living.path) as server:
        page = Answer(server)
        assert "script-src 'self';" in page.headers["Content-Security-Policy"]
        assert "default-src 'none';" in page.headers["Content-Security-Policy"]
        scripts = set(re.findall(r"<script[^>]*>", page.text))
        assert scripts == {
            '<script src="/plotly.js">',
            '<script src="/live.js">',
            '<script type="application/json">',
        }
        for address in ("/plotly.js", "/live.js"):
            script = Answer(server, address, Accept_Encoding="gzip")
            assert script.headers["Content-Type"].startswith("text/javascript")
            assert gzip.decompress(script.content) == Answer(server, address).content


def test_nothing_is_served_but_the_page_and_nothing_but_reading_is_done(living):
    files = sorted(str(path.relative_to(living.path)) for path in living.path.rglob("*"))
    with served(living.path) as server:
        for address in [f"/{name}" for name in files] + ["/../mine/config.yaml", "/runs/", "/%2e%2e/", "*"]:
            assert Answer(server, address).status == 404, address
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert Answer(server, method=method).status == 501
        head = Answer(server, method="HEAD")
        assert (head.status, head.content) == (200, b"")
    assert sorted(str(path.relative_to(living.path)) for path in living.path.rglob("*")) == files


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "localhost.evil.example", "", "[", "127.0.0.1.evil"]
)
def test_a_name_that_leads_here_is_refused(living, host):
    with served(living.path) as server:
        answer = Answer(server, Host=host)
        assert answer.status == 421
        assert "mine" not in answer.text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:8642", socket.gethostname()])
def test_names_of_this_machine_are_known_whatever_port_is_forwarded(living, host):
    with served(living.path) as server:
        assert Answer(server, Host=host).status == 200


def test_with_a_host_only_a_browser_with_the_token_reads_the_page(living):
    with served(living.path, host="127.0.0.1") as server:
        address, _, query = server.url.partition("?")
        token = query.removeprefix("token=")
        assert address == f"http://127.0.0.1:{server.server_address[1]}/"
        assert len(token) >= 32
        for wrong in ("/", "/?token=", "/?token=x", f"/?token={token}x", "/plotly.js", "/live.js"):
            refused = Answer(server, wrong)
            assert refused.status == 403
            assert "mine" not in refused.text
        welcome = Answer(server, f"/?{query}")
        assert (welcome.status, welcome.headers["Location"]) == (303, "/")
        cookie, *attributes = welcome.headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Lax"} <= set(attributes)
        assert Answer(server, Cookie=f"other=1; {cookie}").status == 200
        assert Answer(server, Cookie=f"{cookie}x").status == 403
        assert Answer(server, Cookie=cookie, Host="evil.example").status == 421


def test_two_servers_do_not_share_a_token_or_a_cookie(living):
    with served(living.path, host="127.0.0.1") as one, served(living.path, host="127.0.0.1") as other:
        assert one.token != other.token
        assert one.cookie != other.cookie


def test_a_run_that_has_not_begun_is_shown_and_one_that_is_deleted_is_a_line(tmp_path):
    run = RunDirectory(tmp_path / "mine")
    run.path.mkdir()
    with served(run.path) as server:
        assert "No metrics yet" in Answer(server).text
        run.create()
        take_step(run, 1)
        assert "<dd>1 of 40</dd>" in Answer(server).text
        shutil.rmtree(run.path)
        gone = Answer(server)
        assert gone.status == 503
        assert gone.text == f"'{run.path}' is gone: it has been deleted or moved"
        assert gone.headers["Refresh"] == "5"
        run.create()
        take_step(run, 7)
        assert "<dd>7 of 40</dd>" in Answer(server).text


@pytest.mark.parametrize("damage", [b"", b"\xff\x00 half"])
def test_half_written_files_never_prevent_the_page(living, damage):
    with served(living.path) as server:
        for path in sorted(living.path.rglob("*")):
            if path.is_file():
                path.write_bytes(damage)
                assert Answer(server).status == 200, path


def test_an_error_of_ours_is_a_line_in_the_browser_and_the_next_look_goes_on(living, monkeypatch, capfd):
    with served(living.path) as server:
        with monkeypatch.context() as broken:
            broken.setattr(live.page, "page_of", lambda *_, **__: {}["<b>"])
            answer = Answer(server)
        assert answer.status == 500
        assert answer.text == "the page cannot be made now (KeyError: '<b>')"
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert Answer(server).status == 200
    assert capfd.readouterr().err == ""


def test_a_sweep_has_a_page_for_each_of_its_elements_and_for_nothing_else(tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    with served(sweep.path) as server:
        page = Answer(server)
        elements = re.findall(r'<a href="(runs/[^"]+/)">', page.text)
        assert len(elements) == 6
        shown = Answer(server, f"/{elements[0]}")
        assert shown.status == 200
        assert "training report" in shown.text
        (tmp_path / "sweep" / "runs" / "other").mkdir()
        for address in ("/runs/other/", "/runs/../", "/runs/%2e%2e/", f"/{elements[0]}config.yaml"):
            assert Answer(server, address).status == 404, address


def test_a_directory_of_something_else_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a directory; give the directory of a run or a sweep"):
        WatchServer(tmp_path / "absent")
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match="holds neither a run nor a sweep"):
        WatchServer(tmp_path)


def test_an_address_in_an_object_store_is_refused_in_a_line(capsys):
    assert main(["watch", "s3://bucket/runs/mine"]) == 2
    told = capsys.readouterr().err
    assert told == "error: watch takes the directory of a run here, not an address such as s3://bucket/runs/mine\n"


def test_a_taken_port_and_an_address_of_another_machine_are_a_line(living, capsys):
    with served(living.path) as server:
        port = server.server_address[1]
        assert main(["watch", str(living.path), "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"error: cannot listen on 127.0.0.1, port {port}: Address already in use; choose another --port, or 0 for any "
        "free one\n"
    )
    with pytest.raises(EnvironmentMismatchError, match=r"192\.0\.2\.1, port 0: .*; choose another --host"):
        WatchServer(living.path, host="192.0.2.1")


def test_the_command_prints_its_address_and_ends_with_an_interrupt(living):
    command = [sys.executable, "-m", "training_infra", "watch", str(living.path), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as watching:
        line = watching.stdout.readline()
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/ shows {re.escape(str(living.path))} until Ctrl-C\n", line)
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130
        assert watching.stderr.read() == "interrupted\n"


def attack_living(run):
    """Put an attack into all that a run says: records, output, samples, names of held-out losses."""
    write_json(run.samples, Samples(12, (Sample("Once", "upon"),)))
    take_step(run, 13, eval_loss=2.5, eval_losses={f"code{test_pages_escape.ATTACK}": 2.5})
    log_path(run, 0).write_text("=== job 1\nstarting\n")
    attack_run(run)


def test_what_a_run_says_is_text_on_its_live_page(living):
    hostile = RunDirectory(living.path.rename(living.path.with_name(f"a {ATTACK.replace('/', '')}")))
    attack_living(hostile)
    with served(hostile.path) as server:
        page = Answer(server).text
        assert page.count("&lt;img src=x") >= 10
        assert "<img" not in page
        assert "<script>" not in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


one_browser = pytest.mark.xdist_group("live page in a browser")
FACTS = "[...document.querySelectorAll('dt')]"


@pytest.mark.browser
@one_browser
def test_a_browser_sees_a_step_while_the_run_goes_on_and_keeps_what_its_reader_has_done(living, browser):
    log_path(living, 0).write_text("=== job 1\nfirst line\n")
    with served(living.path) as server, browser.open(server.url) as tab:
        steps = f"{FACTS}.find((one) => one.textContent === 'Steps').nextSibling.textContent"
        last = "document.querySelector('.plot').calcdata[0].at(-1).x"
        settings = "[...document.querySelectorAll('details')].find((one) => one.textContent.includes('Settings'))"
        assert tab.evaluate(steps) == "12 of 40"
        assert tab.evaluate(last) == 12
        tab.evaluate(f"{settings}.open = true")
        tab.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [2, 5]}).then(() => 0)")
        tab.evaluate("window.mark = 'the page was not loaded again'; scrollTo(0, 300)")
        take_step(living, 13, spike=True)
        log_path(living, 0).write_text("=== job 1\nfirst line\nsecond line\n")
        eventually(lambda: tab.evaluate(steps) == "13 of 40")
        assert tab.evaluate("window.mark")
        assert tab.evaluate(last) == 13
        assert tab.evaluate("document.querySelector('.plot').layout.xaxis.range") == [2, 5]
        assert tab.evaluate(f"{settings}.open")
        assert tab.evaluate("scrollY") == 300
        assert "second line" in tab.evaluate("document.body.innerText")
        assert "far above the steps before" in tab.evaluate("document.body.innerText")


@pytest.mark.browser
@one_browser
def test_a_browser_says_when_the_run_is_deleted_and_goes_on_when_it_is_back(living, browser):
    told = "document.querySelector('.live').textContent"
    with served(living.path) as server, browser.open(server.url) as tab:
        eventually(lambda: tab.evaluate(told).startswith("Live."))
        away = living.path.rename(living.path.with_name("away"))
        eventually(lambda: "is gone: it has been deleted or moved" in tab.evaluate(told))
        assert tab.evaluate("document.querySelectorAll('.main-svg').length") > 0
        away.rename(living.path)
        eventually(lambda: tab.evaluate(told).startswith("Live."))
        browser.events.clear()  # the console names the answers without a page


@pytest.mark.browser
@one_browser
def test_nothing_of_a_run_is_executed_or_becomes_a_link_while_it_is_watched(living, browser, monkeypatch):
    attack = '<img src=x onerror="window.attacked = 1"><script>window.attacked = 1</script>'
    attack += '<a href="https://evil.example">'
    monkeypatch.setattr(test_pages_escape, "ATTACK", attack)
    attack_living(living)
    with served(living.path) as server, browser.open(server.url) as tab:
        take_step(living, 14, eval_loss=2.4, eval_losses={f"code{attack}": 2.4})
        log_path(living, 0).write_text(f"=== job 1\n{attack}\nnewest line\n")
        eventually(lambda: "newest line" in tab.evaluate("document.body.innerText"))
        assert tab.evaluate("document.body.innerText").count("window.attacked = 1") >= 10
        assert tab.evaluate("window.attacked") is None
        assert tab.evaluate("document.querySelectorAll('img, iframe, object, form').length") == 0
        assert tab.evaluate("[...document.querySelectorAll('a')].filter((one) => /evil/.test(one.href)).length") == 0


@pytest.mark.browser
@one_browser
def test_a_reader_of_a_sweep_keeps_the_order_and_the_filter_of_its_table(tmp_path, browser):
    sweep = write_sweep(tmp_path / "sweep", 5)
    (timed,) = (path for path in sorted(sweep.path.glob("runs/*")) if "4" in path.name and "none" in path.name)
    shown = "[...document.querySelectorAll('.elements tbody tr')].filter((row) => !row.hidden)"
    names = f"{shown}.map((row) => row.cells[0].textContent)"
    with served(sweep.path) as server, browser.open(server.url) as tab:
        tab.evaluate("document.querySelector('.choose input').focus()")
        tab.type("recompute none")
        tab.click(".elements th:nth-child(1) button")
        tab.evaluate("document.querySelector('.choose input').focus()")
        before = tab.evaluate(names)
        (timed / "benchmark.json").unlink()
        eventually(lambda: "finished" in tab.evaluate("document.querySelector('.elements').textContent"))
        assert tab.evaluate(names) == before
        assert tab.evaluate("document.querySelector('.choose input').value") == "recompute none"
        assert tab.evaluate("document.activeElement === document.querySelector('.choose input')")


@pytest.mark.wide
def test_a_real_run_is_shown_at_work_and_then_as_finished(tmp_path):
    command = [sys.executable, "-m", "training_infra", "train", *SMALL, "--steps=300", "--run-dir=mine"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    path = tmp_path / "mine"
    path.mkdir()

    def step_shown():
        page = Answer(server).text
        found = re.search(r'class="status idle">running, step (\d+) of 300<', page)
        return int(found[1]) if found and "<h2>Progress</h2>" in page else 0

    with served(path) as server:
        training = subprocess.Popen(command, cwd=tmp_path, env=os.environ | own, stdout=subprocess.DEVNULL)
        try:
            first = eventually(step_shown)
            assert eventually(lambda: step_shown() > first)
            assert training.wait() == 0
        finally:
            training.kill()
            training.wait()
        page = Answer(server).text
    assert 'class="status good">finished<' in page
    assert "<h2>Progress</h2>" not in page
    assert "attempt 1 ended as finished: 300 steps" in page
