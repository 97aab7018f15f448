"""Tell people what happens to a run, by a webhook or a program. It neither holds up the run nor ends it."""

import atexit
import json
import logging
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from threading import Lock, Thread
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from llama_core.config.notify import NotifiedEvent, NotifyConfig
from llama_core.redaction import one_line, redacted, redacted_values

logger = logging.getLogger(__name__)

WEBHOOK_SECONDS = 5.0
"""How long each answer of a webhook may take."""
COMMAND_SECONDS = 10.0
"""How long a program may run."""
END_SECONDS = 12.0
"""How long the end of a process waits for its notices."""

_WORDS: dict[NotifiedEvent, str] = {"end": "ended", "fault": "failed", "requeue": "starts again", "spike": "bad step"}


@dataclass(frozen=True)
class Notice:
    """What is told."""

    event: NotifiedEvent
    run: str
    """The name of the run."""
    step: int
    loss: float | None
    """The loss of the newest step; None if there is none, or it is not finite."""
    cause: str
    """One line: what happened."""
    host: str
    """The machine that tells."""

    def as_json(self) -> bytes:
        """Return it without secrets, with a ``text`` for people, the key that Slack and Mattermost show."""
        loss = self.loss if self.loss is not None and math.isfinite(self.loss) else None
        fields = {**asdict(self), "loss": loss, "cause": one_line(self.cause)}
        at_loss = "" if loss is None else f", loss {loss:.4g}"
        text = f"{self.run} {_WORDS[self.event]} at step {self.step:,}{at_loss} on {self.host}: {fields['cause']}"
        # Slack reads <...> as a link or a call to everybody
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps(redacted_values({"text": escaped, **fields})).encode()


class _NotTakenError(Exception):
    """Why a notice was not taken, without the address."""


_under_way: list[Thread] = []
_failed: set[str] = set()
_lock = Lock()


def notify(config: NotifyConfig, notice: Notice) -> None:
    """Tell whom a configuration asks to tell, from a thread. A failure costs one warning for each process."""
    if not config.is_asked_for or notice.event not in config.on:
        return
    thread = Thread(target=_deliver, args=(config, notice), name=f"notice of {notice.event}", daemon=True)
    with _lock:
        if not _under_way:
            atexit.register(finish_notices)
        _under_way[:] = [other for other in _under_way if other.is_alive()]
        thread.start()
        _under_way.append(thread)


def finish_notices() -> None:
    """Wait a moment for the notices under way; the end of Python does so too, but not that by ``os._exit``."""
    deadline = time.monotonic() + END_SECONDS
    with _lock:
        waiting = list(_under_way)
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))


def problems(config: NotifyConfig) -> Iterator[str]:
    """Yield what notices lack on this machine, a line each with the remedy."""
    if not config.is_asked_for:
        return
    if config.webhook_variable:
        try:
            _address(config.webhook_variable)
        except _NotTakenError as error:
            yield f"notify.webhook_variable={config.webhook_variable}: {error}; export it, or do without it"
    if config.command and shutil.which(config.command[0]) is None:
        yield f"notify.command: {config.command[0]!r} is no program here; install it, or give its path"


def _deliver(config: NotifyConfig, notice: Notice) -> None:
    body = notice.as_json()
    ways: dict[str, Callable[[], None]] = {}
    if config.webhook_variable:
        ways[f"the webhook of {config.webhook_variable}"] = partial(_post, config.webhook_variable, body)
    if config.command:
        ways[config.command[0]] = partial(_run, config.command, body)
    for name, tell in ways.items():
        try:
            tell()
        except Exception as error:  # a thread has nobody else to tell
            _warn(name, str(error) if isinstance(error, _NotTakenError) else type(error).__name__)


def _warn(name: str, why: str) -> None:
    with _lock:
        is_first = name not in _failed
        _failed.add(name)
    if is_first:
        logger.warning("%s did not take a notice: %s; the run goes on", name, redacted(why))


def _address(variable: str) -> str:
    address = os.environ.get(variable, "")
    if not address:
        raise _NotTakenError("no such environment variable is set here")
    if urlsplit(address).scheme not in {"http", "https"}:
        raise _NotTakenError("the variable holds no address that begins with https://")
    return address


class _NoRedirects(HTTPRedirectHandler):
    """Another address would get what is meant for this one."""

    def redirect_request(self, *args: object, **named: object) -> None:
        return None


def _post(variable: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "llama-training-infra"}
    try:
        request = Request(_address(variable), data=body, headers=headers, method="POST")
        build_opener(_NoRedirects).open(request, timeout=WEBHOOK_SECONDS).close()
    except HTTPError as error:
        raise _NotTakenError(f"it answered with status {error.code}") from None
    except TimeoutError:
        raise _NotTakenError(f"no answer within {WEBHOOK_SECONDS:g} s") from None
    except URLError as error:
        raise _NotTakenError(getattr(error.reason, "strerror", None) or type(error.reason).__name__) from None


def _run(command: tuple[str, ...], body: bytes) -> None:
    try:
        ended = subprocess.run(
            command,
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            process_group=0,  # Ctrl-C is meant for the run
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _NotTakenError(f"it was still running after {COMMAND_SECONDS:g} s") from None
    except OSError as error:
        raise _NotTakenError(error.strerror or type(error).__name__) from None
    if ended.returncode:
        raise _NotTakenError(f"it ended with exit code {ended.returncode}")
