"""Seeded mutations of valid files and values, and the law that whatever reads them must keep."""

import copy
import json
import math
import os
import random
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from llama_core.data.templates import rendering
from llama_core.errors import TrainingInfraError

CASES = int(os.environ.get("FUZZ_CASES", "12"))
"""Cases of each area; `make fuzz` runs thousands."""
SECONDS = 60
"""Processor time after which an action counts as hanging."""

WORDS = (
    "", " ", "\0", "\n", "a\nb", "x" * 300, "x" * 5000, "../../etc/passwd", "/etc/passwd", "/dev/null", "~",
    "~nobody-here", "~/x", ".", "..", "*", "**", "[", "漢字", "e\u0301", "\ud800", "\u202e", "\x1b[31m",
    "<script>alert(1)</script>", "{{ 7 * 7 }}", "%s%s%n", "null", "true", "1e999", "-1", "NaN", "auto", "step-x",
    "9" * 400,
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 0.0, -0.5, 1e-300, 1e300, math.inf, math.nan)


def junk(rng, depth=2):
    """Return any JSON value."""
    makers = [
        lambda: rng.choice(WORDS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice((None, True, False, [], {})),
        lambda: rng.choice(WORDS) + str(rng.randrange(100)),
        lambda: rng.randrange(-5, 100),
    ]
    if depth:
        makers += [
            lambda: [junk(rng, depth - 1) for _ in range(rng.randrange(4))],
            lambda: {rng.choice(WORDS): junk(rng, depth - 1) for _ in range(rng.randrange(4))},
        ]
    return rng.choice(makers)()


def changed(rng, value):
    """Return a JSON value with a part replaced, dropped, added or doubled."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not places or rng.random() < 0.05:
            return junk(rng)
        owner, key = rng.choice(places)
        action = rng.randrange(6)
        if action == 0 and isinstance(owner, dict):
            owner.pop(key, None)
        elif action == 1 and isinstance(owner, dict):
            owner[rng.choice(WORDS)] = junk(rng)
        elif action == 2 and isinstance(owner, dict) and key in owner:
            owner[key] = [owner[key]] * rng.randrange(3)
        elif isinstance(owner, dict) or key < len(owner):
            owner[key] = junk(rng)
    return value


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def damaged(rng, content):
    """Return bytes that are cut short, flipped, repeated or replaced."""
    action = rng.randrange(8)
    if action == 0:
        return content[: rng.randrange(len(content) + 1)]
    if action == 1:
        return b""
    if action == 2:
        return rng.randbytes(rng.randrange(200))
    if action == 3:
        return content + rng.choice((content, b"\0" * 9, b"\xff\xfe", b"}"))
    if action == 4:
        return rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]", b"{}", b"0", b'"x"', b"\xef\xbb\xbf{}"))
    flipped = bytearray(content)
    for _ in range(rng.choice((1, 3, 20))):
        if flipped:
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped)


def damaged_json(rng, value):
    """Return a file's content: a changed value as JSON, or damaged bytes."""
    if rng.random() < 0.7:
        return json.dumps(changed(rng, value)).encode()
    return damaged(rng, json.dumps(value).encode())


def write(path, content):
    """Write bytes; None makes a folder instead of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


_WRITES = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "shutil.rmtree",
}
_PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}
_watching = []
"""The list of the writes and starts of processes that are seen, while somebody looks."""


def _audit(event, arguments):
    if not _watching:
        return
    (seen,) = _watching
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen.append((event, os.fsdecode(path)))
    elif event in {"os.remove", "os.rmdir"} and arguments[1] != -1:
        return  # below a folder whose shutil.rmtree was seen
    elif event in _WRITES:
        seen.append((event, os.fsdecode(arguments[0])))
    elif event in _PROCESSES or event == "pickle.find_class":
        seen.append((event, repr(arguments)))


sys.addaudithook(_audit)


@contextmanager
def _ends():
    def hangs(number, frame):
        pytest.fail(f"it computes for more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGALRM is pytest-timeout's, which ends a case that waits
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def keep_the_law(actions, writable, *, names=None, processes=False):
    """Call each action: it returns, or raises one printable line that holds ``names``, if given.

    It writes only below ``writable``. It starts no process unless ``processes`` allows it, except that in which chat
    templates are rendered.
    """
    for action in actions:
        seen = []
        _watching[:] = [seen]
        try:
            with _ends():
                action()
        except TrainingInfraError as error:
            _watching.clear()
            text = str(error)
            assert text.isprintable() and text, repr(text)
            assert names is None or any(name in text for name in names), text
        finally:
            _watching.clear()
        allowed = (str(writable), "/dev/", "/proc/")
        wrong = [one for one in seen if not _is_allowed(*one, allowed, processes=processes)]
        assert not wrong, wrong


def _is_allowed(event, what, allowed, *, processes):
    if event in _PROCESSES:
        return processes or rendering.__file__ in what
    return event in _WRITES and (os.path.normpath(Path(what).absolute()).startswith(allowed) or "__pycache__" in what)


def cases(area, share=1.0):
    """Yield the seed's name and generator of every case of an area."""
    for number in range(max(1, round(CASES * share))):
        yield number, random.Random(f"{area} {number}")


@contextmanager
def naming(number):
    """Tell the number of the case that fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {number}; the area's name and this number give the same case again")
        raise
