"""Who is told what happens to a run: a real server on this machine, and real programs."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from threading import Event, Thread

import pytest
from step_record import record

from llama_core import notifications
from llama_core.chain.environment import validate_environment
from llama_core.config.notify import NotifyConfig
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.launch.attempts import Attempt, RankExit, exit_path
from llama_core.launch.outcome import conclude, record_outcome, record_refusal, record_requeue, tell_final_ending
from llama_core.launch.rank import requeue
from llama_core.launch.rank.surroundings import Surroundings
from llama_core.launch.verdict import Verdict
from llama_core.notifications import Notice, finish_notices, notify
from llama_core.records.directory import RunDirectory
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord

VARIABLE = "TEST_OF_NOTICES"
SECONDS = 60.0


class Webhook:
    """A server on this machine that keeps what it gets."""

    def __init__(self, status=200, location=""):
        self.got = Queue()
        self.may_answer = Event()
        self.may_answer.set()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.got.put((self.path, self.headers["Content-Type"], json.loads(body)))
                webhook.may_answer.wait(SECONDS)
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/services/T0/a-secret-path"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def all(self):
        finish_notices()
        return [self.got.get_nowait()[2] for _ in range(self.got.qsize())]

    def close(self):
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(notifications, "_failed", set())


@pytest.fixture
def webhook(monkeypatch):
    server = Webhook()
    monkeypatch.setenv(VARIABLE, server.address)
    yield server
    server.close()


@pytest.fixture
def run(tmp_path):
    return made(tmp_path, webhook_variable=VARIABLE)


def made(tmp_path, **asked):
    run = RunDirectory(tmp_path / "mine")
    run.create()
    run.config.write_text(RunConfig.from_mapping({"notify": asked}).to_yaml())
    write_json(run.heartbeat, record(7, loss=2.5))
    return run


def job_of(run):
    job = JobRecord("local", "4711", "here", timestamp())
    write_json(run.job, job)
    return job


NOTICE = Notice("fault", "mine", 7, 2.5, "oom: rank 3 ran out of memory", "node17")
ASKED = NotifyConfig(webhook_variable=VARIABLE)


def test_a_webhook_gets_our_fields_and_a_text_for_people(webhook):
    notify(ASKED, NOTICE)
    finish_notices()
    path, kind, body = webhook.got.get_nowait()
    assert path == "/services/T0/a-secret-path"
    assert kind == "application/json"
    assert body == {
        "text": "mine failed at step 7, loss 2.5 on node17: oom: rank 3 ran out of memory",
        "event": "fault",
        "run": "mine",
        "step": 7,
        "loss": 2.5,
        "cause": "oom: rank 3 ran out of memory",
        "host": "node17",
    }


def test_a_program_gets_the_same_on_its_standard_input(tmp_path):
    got = tmp_path / "got.json"
    script = f"import pathlib, sys; pathlib.Path({str(got)!r}).write_text(sys.stdin.read())"
    notify(NotifyConfig(command=(sys.executable, "-c", script)), NOTICE)
    finish_notices()
    assert json.loads(got.read_text()) == json.loads(NOTICE.as_json())


def test_only_the_events_that_are_asked_for_are_told(webhook):
    for event in ("end", "fault", "requeue", "spike"):
        notify(NotifyConfig(webhook_variable=VARIABLE, on=("fault", "requeue")), Notice(event, "a", 1, None, "", "b"))
    assert {body["event"] for body in webhook.all()} == {"fault", "requeue"}


def test_a_text_calls_nobody_commands_no_terminal_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "a-secret-0123456789")
    notice = Notice("fault", "<!channel>", 1, float("nan"), "first a-secret-0123456789\nsecond \x1b[2J & more", "b")
    body = json.loads(notice.as_json())
    assert body["text"] == "&lt;!channel&gt; failed at step 1 on b: first *** second \\x1b[2J &amp; more"
    assert body["loss"] is None
    assert "a-secret" not in str(body)


@pytest.mark.parametrize(
    ("asked", "warning"),
    [
        (
            {"webhook_variable": VARIABLE},
            f"the webhook of {VARIABLE} did not take a notice: it answered with status 500",
        ),
        ({"command": ("false",)}, "false did not take a notice: it ended with exit code 1"),
        ({"command": ("/no/such/program",)}, "/no/such/program did not take a notice: No such file or directory"),
    ],
)
def test_whoever_takes_no_notice_costs_one_warning(asked, warning, monkeypatch, caplog):
    broken = Webhook(status=500)
    monkeypatch.setenv(VARIABLE, broken.address)
    for _ in range(3):
        notify(NotifyConfig(**asked), NOTICE)
        finish_notices()
    broken.close()
    assert caplog.messages == [f"{warning}; the run goes on"]
    assert "secret" not in caplog.text


def test_nobody_at_an_address_costs_a_warning_without_the_address(monkeypatch, caplog):
    gone = Webhook()
    monkeypatch.setenv(VARIABLE, gone.address)
    gone.close()
    notify(ASKED, NOTICE)
    finish_notices()
    assert caplog.messages == [f"the webhook of {VARIABLE} did not take a notice: Connection refused; the run goes on"]


def test_another_address_does_not_get_what_is_meant_for_this_one(webhook, monkeypatch, caplog):
    moved = Webhook(status=307, location=webhook.address)
    monkeypatch.setenv(VARIABLE, moved.address)
    notify(ASKED, NOTICE)
    finish_notices()
    moved.close()
    assert webhook.all() == []
    assert "it answered with status 307" in caplog.text


def test_a_run_does_not_wait_for_a_webhook_that_does_not_answer(webhook, monkeypatch, caplog):
    monkeypatch.setattr(notifications, "WEBHOOK_SECONDS", 0.2)
    webhook.may_answer.clear()
    notify(ASKED, NOTICE)  # would not return before the server answers
    assert webhook.got.get(timeout=SECONDS)
    assert caplog.messages == []
    finish_notices()
    assert caplog.messages == [
        f"the webhook of {VARIABLE} did not take a notice: no answer within 0.2 s; the run goes on"
    ]


def test_a_program_that_does_not_end_is_ended(monkeypatch, caplog):
    monkeypatch.setattr(notifications, "COMMAND_SECONDS", 0.2)
    notify(NotifyConfig(command=("sleep", "600")), NOTICE)
    finish_notices()
    assert caplog.messages == ["sleep did not take a notice: it was still running after 0.2 s; the run goes on"]


def test_the_end_of_a_process_waits_for_its_notices(webhook, tmp_path):
    import subprocess

    script = (
        "from llama_core.config.notify import NotifyConfig\n"
        "from llama_core.notifications import Notice, notify\n"
        f"notify(NotifyConfig(webhook_variable={VARIABLE!r}), Notice('end', 'mine', 1, None, 'finished', 'here'))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS)
    assert [body["event"] for body in webhook.all()] == ["end"]


def test_every_end_of_a_job_is_told_once_whoever_records_it(webhook, run):
    job = job_of(run)
    conclude(run, job, Verdict("node-failure", "node17 has failed", ""))
    conclude(run, job, Verdict("node-failure", "node17 has failed", ""))
    tell_final_ending(run, job, 0, 0)
    (body,) = webhook.all()
    assert body["event"] == "fault"
    assert body["cause"] == "node-failure: node17 has failed"
    assert (body["run"], body["step"], body["loss"]) == ("mine", 7, 2.5)


def test_a_job_that_is_queued_again_and_then_finishes_is_told_as_both(webhook, run, monkeypatch):
    job = job_of(run)
    record_requeue(run, job, Attempt(job.job_id, job.submitted_at, 0, "", timestamp()), Verdict("preempted", "why", ""))
    monkeypatch.setenv("TRAINING_INFRA_JOB_ID", job.job_id)
    monkeypatch.setenv("TRAINING_INFRA_RESTART", "1")
    record_outcome(run, "finished", reason="7 steps", next_action="")
    told = sorted((body["event"], body["cause"]) for body in webhook.all())
    assert told == [("end", "finished: 7 steps"), ("requeue", "preempted: why")]


def test_a_scheduler_that_ends_the_process_is_asked_once_no_notice_is_under_way(webhook, run, monkeypatch):
    under_way = []

    class Scheduler(Surroundings):
        def take_place(self):
            raise NotImplementedError

        def queue_again(self, job):
            under_way.append([thread for thread in notifications._under_way if thread.is_alive()])
            return True

    monkeypatch.setattr(notifications, "WEBHOOK_SECONDS", 0.2)
    webhook.may_answer.clear()  # so that the notice is under way until it is given up
    job = job_of(run)
    attempt = Attempt(job.job_id, job.submitted_at, 0, "", timestamp())
    assert requeue._queued_again(run, job, attempt, Verdict("timeout", "why", ""), Scheduler())
    assert under_way == [[]]
    assert webhook.got.get_nowait()[2]["event"] == "requeue"


def test_a_stop_is_told_once_it_is_final(webhook, run, monkeypatch):
    job = job_of(run)
    monkeypatch.setenv("TRAINING_INFRA_JOB_ID", job.job_id)
    record_outcome(run, "cancelled", reason="asked to stop", next_action="")
    assert webhook.all() == [], "the scheduler may start it again"
    tell_final_ending(run, job, 0, 0)
    assert [(body["event"], body["cause"]) for body in webhook.all()] == [("end", "cancelled: asked to stop")]


def test_ranks_that_were_killed_and_recorded_nothing_are_told(webhook, run):
    job = job_of(run)
    killed = RankExit(0, None, 9, oom_killed=True, stopped=False, num_ranks=1, ended_at=1.0)
    write_json(exit_path(run, job, 0, 0), killed)
    tell_final_ending(run, job, 0, 1)
    (body,) = webhook.all()
    assert (body["event"], body["cause"]) == ("fault", "oom: the kernel ran out of memory and killed rank 0")


def test_a_run_that_was_refused_before_it_began_tells_nobody(webhook, run):
    record_refusal(run, "no such file", "")
    assert webhook.all() == []


def test_an_outcome_is_recorded_whatever_the_configuration_has_become(run, caplog):
    run.config.write_text("notify: {webhook_variable: 3}")
    assert record_outcome(run, "finished", reason="7 steps", next_action="").status == "finished"
    assert any(message.startswith("nobody is told how the run ended: ") for message in caplog.messages)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"webhook_variable": "https://hooks.example/a-secret-path"},
            "notify.webhook_variable='***': give the name of an environment variable that holds the address, not the "
            "address, which is a secret",
        ),
        ({"on": ["ends"]}, "notify.on.0='ends': input should be 'end', 'fault', 'requeue' or 'spike'"),
        ({"command": "mail me"}, "notify.command='mail me': input should be a valid tuple"),
    ],
)
def test_a_wrong_setting_is_one_line_without_the_address(given, problem):
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping({"notify": given})
    assert refused.value.problems == (problem,)


def test_settings_may_be_given_as_people_write_them():
    config = RunConfig.from_mapping({}, ["notify.on=fault", "notify.command=[mail, me]"])
    assert config.notify == NotifyConfig(on=("fault",), command=("mail", "me"))
    assert config.fingerprint() == RunConfig().fingerprint()


def test_what_notices_lack_is_an_error_before_any_job(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    config = RunConfig.from_mapping({"notify": {"webhook_variable": VARIABLE, "command": ["/no/such/program"]}})
    errors = validate_environment(config).errors
    assert (
        f"notify.webhook_variable={VARIABLE}: no such environment variable is set here; export it, or do without it"
        in errors
    )
    assert "notify.command: '/no/such/program' is no program here; install it, or give its path" in errors
    monkeypatch.setenv(VARIABLE, "file:///etc/passwd")
    (error,) = [error for error in validate_environment(config).errors if "webhook" in error]
    assert "the variable holds no address that begins with https://" in error
