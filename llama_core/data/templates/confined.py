"""Render templates in a process that has limits of time and memory, and nothing of ours but Jinja."""

import base64
import io
import json
import os
import pickle
import random
import re
import select
import subprocess
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from typing import IO, Any

from llama_core.data.templates import rendering
from llama_core.data.templates.rendering import (
    REMEDY,
    REMEDY_OF_TASKS,
    InvalidTemplateError,
    Message,
    Spans,
    TemplateRefusalError,
    Tools,
)
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import safe_python

_PROGRAM = safe_python(rendering.__file__)
_NEEDED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""Variables without which Python may not start; the process gets no others, such as keys and tokens."""
START_SECONDS = 60
"""Most time that Python may take to start."""
_AT_ONCE = 2**16
_CLASSES = (date, datetime, time_of_day, timedelta, timezone, Decimal, OrderedDict)
"""Types of values which a pickle names."""
_PLAIN = frozenset(
    (type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, *_CLASSES),
)
"""Types of the values that templates are given."""
_DRAWS = re.compile(r"random|lipsum|shuffle")
"""What is in a template that may draw random numbers."""


class _Confined:
    """A process that renders, which is started when it is needed, and again when it ends.

    Args:
        first: what ``rendering.main`` is given first, after the limit of steps.
        remedy: what to do about a template that is refused.
    """

    def __init__(self, first: Sequence[object], remedy: str) -> None:
        self._first = first
        self._remedy = remedy
        self._process: subprocess.Popen[bytes] | None = None

    def _ask(self, *request: object) -> dict[str, Any]:
        process = self._process or self._start()
        ends_at = time.monotonic() + rendering.MAX_SECONDS
        try:
            _send(process, request)
            answer = _receive(process, ends_at)
        except (EOFError, BrokenPipeError):
            self._end()
            raise TemplateRefusalError(f"{rendering.TOO_LARGE}; {self._remedy}") from None
        except TimeoutError:
            self._end()
            raise TemplateRefusalError(f"it takes more than {rendering.MAX_SECONDS} s; {self._remedy}") from None
        except BaseException:  # an interrupt: the answer would be taken for that to the next request
            self._end()
            raise
        for kind in (TemplateRefusalError, InvalidTemplateError):
            if kind.__name__ in answer:
                raise kind(answer[kind.__name__])
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
        pipe = subprocess.PIPE
        process = subprocess.Popen(_PROGRAM, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        self._finalizer = weakref.finalize(self, _end, process)
        try:
            _send(process, (rendering.MAX_STEPS, *self._first))
            _receive(process, time.monotonic() + START_SECONDS)
        except (EOFError, BrokenPipeError, TimeoutError):
            said = (self._finalizer() or b"").decode(errors="replace").strip().rpartition("\n")[2]
            raise EnvironmentMismatchError(
                f"cannot start the process that renders templates ({' '.join(_PROGRAM)}): {said or 'no answer'}"
            ) from None
        self._process = process
        return process

    def _end(self) -> None:
        self._finalizer()
        self._process = None


class ConfinedRenderer(_Confined):
    """Does the same as ``rendering.Renderer``.

    Args:
        source: the Jinja text.
        variables: values that the template sees, by name.
        today: the date that the template sees.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], today: date) -> None:
        super().__init__((source, dict(variables), today.isoformat()), REMEDY)

    def render(self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Return a conversation as text; see ``rendering.Renderer.render``."""
        return str(self._ask(messages, tools, add_generation_prompt, False)["text"])

    def render_with_spans(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Spans]:
        """Return a conversation as text, and the assistant's spans; see ``rendering.Renderer.render_with_spans``."""
        answer = self._ask(messages, tools, False, True)
        return answer["text"], tuple((begin, end) for begin, end in answer["spans"])


class ConfinedTaskRenderer(_Confined):
    """Does the same as ``rendering.TaskRenderer``; documents hold plain values only."""

    def __init__(self) -> None:
        super().__init__((), REMEDY_OF_TASKS)

    def render(self, source: str, document: Mapping[str, Any]) -> str:
        """Return the text that a template makes of a document; see ``rendering.TaskRenderer.render``."""
        draws = _DRAWS.search(source) is not None
        answer = self._ask(source, _pickled(document), random.getstate() if draws else None)
        if draws:  # as if it had been drawn here
            rendering.go_on_drawing(answer["random"])
        return str(answer["text"])


class _PlainPickler(pickle.Pickler):
    """Puts a mark in the place of what is no plain value: the methods of some objects, such as an image's, write files.

    A template that uses such a mark is refused.
    """

    def persistent_id(self, value: object) -> str | None:
        kind = type(value)
        if kind in _PLAIN or any(value is one for one in _CLASSES):
            return None
        return kind.__name__


def _pickled(document: Mapping[str, Any]) -> str:
    """Return a document for the process; JSON has no dates, no bytes and no keys that are numbers."""
    written = io.BytesIO()
    _PlainPickler(written).dump(dict(document))
    return base64.b64encode(written.getvalue()).decode()


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """End the process and return its errors."""
    process.kill()
    return process.communicate()[1]


def _send(process: subprocess.Popen[bytes], request: object) -> None:
    pipe: IO[bytes] = process.stdin  # type: ignore[assignment]
    pipe.write(json.dumps(request, default=str).encode() + b"\n")
    pipe.flush()


def _receive(process: subprocess.Popen[bytes], ends_at: float) -> dict[str, Any]:
    """Return the next answer of the process.

    Raises:
        EOFError: if the process ends, or its answer is too long.
        TimeoutError: if it comes too late.
    """
    descriptor = process.stdout.fileno()  # type: ignore[union-attr]
    received = bytearray()
    while not received.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, ends_at - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(descriptor, _AT_ONCE)
        received += part
        if not part or len(received) > rendering.MAX_ANSWER_BYTES:
            raise EOFError
    answer: dict[str, Any] = json.loads(received)
    return answer
