"""Text without secrets and without control characters, for files, logs and terminals."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
"""Stands for a secret."""

_SECRET_NAME = re.compile(r"(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|ACCESS_KEY|PRIVATE_KEY)$")
_LOOKS_SECRET = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9]).{8,}|.{20,}", re.DOTALL)
"""Values of such variables that are replaced everywhere; others may be ordinary words and numbers."""
_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@\"'\\]*):[^\s/@\"'\\]+@")
_ASSIGNED = re.compile(
    r"\b([A-Z0-9_]*(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|ACCESS_KEY)=[\"']?)(?![\"'$])[^\s\"'\\]+"
)
_CONTROL = re.compile(r"[^\S ]+")


def redacted(text: str) -> str:
    """Return ``text`` with ``***`` for passwords in URLs, values assigned to secrets, and secrets of the environment.

    A secret of the environment is the value of a variable whose name says so, such as ``WANDB_API_KEY``, ``HF_TOKEN``
    or ``DB_PASSWORD``.
    """
    for value in _secrets():
        text = text.replace(value, HIDDEN)
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redacted_values(value: Any) -> Any:
    """Return a JSON value with every text in it redacted, but not its keys."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: redacted_values(inner) for key, inner in value.items()}
    return [redacted_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def assigns_secret(line: str) -> bool:
    """Return whether a line of shell gives a secret a literal value, as in ``export HF_TOKEN=hf_...``."""
    return _ASSIGNED.search(line) is not None


def one_line(text: str) -> str:
    """Return ``text`` on one line, with escapes for characters that a terminal would obey or cannot show."""
    joined = _CONTROL.sub(" ", text).strip()
    if joined.isprintable():
        return joined
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in joined)


def _secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name.upper()) and _LOOKS_SECRET.fullmatch(value):
            yield value
