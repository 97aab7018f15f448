"""Text without secrets and without control characters, for files, logs and terminals."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
"""Stands for a secret."""

_NAMES = (
    "(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_KEY|AUTH_STRING|CONNECTION_STRING|CREDENTIALS?"
    "|_PAT|_PASS|_PWD)"
)
_SECRET_NAME = re.compile(f"{_NAMES}$")
_LOOKS_SECRET = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9]).{8,}|.{20,}", re.DOTALL)
"""Values of such variables that are replaced everywhere; others may be ordinary words and numbers."""
_PATTERNS = (
    # A password in an address may hold any character; what looks like a port is none. The bounds keep it linear.
    (re.compile(r"""(://[^\s:/?#"'\\]{0,256}:)(?!\d{1,5}[/?#])[^\s"'\\]{1,256}(?=@)"""), rf"\1{HIDDEN}"),
    (re.compile(r"""(https?://)[^\s:/?#@"'\\]{1,256}(?=@)"""), rf"\1{HIDDEN}"),
    (re.compile(r"""(?i)(\bauthorization["']?\s*[:=]\s*["']?(?:bearer|basic|token)\s+)[^\s"',;]+"""), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)(?=\S*\d)[\w.~+/=-]{16,}"), rf"\1{HIDDEN}"),
    # Of a signed address, in the words of S3, Google, Azure and CloudFront; of an account's connection string.
    (
        re.compile(
            r"(?i)([?&;](?:amp;)?[\w.-]{0,40}(?:sig|signature|credential|token|key|key-?id|accessid|secret|password|policy"
            r"|jwt)=)[^\s&;\"'\\<>)]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(\b(?:account_?key|shared_?access_?(?:key|signature)|password)=)[^\s;&\"'\\]+"), rf"\1{HIDDEN}"),
)
_ASSIGNED = re.compile(rf"""\b([A-Z0-9_]*{_NAMES}=["']?)(?!["'$])[^\s"'\\]+""")
_QUERY = re.compile(r"""(://[^\s?"'\\<>]{0,2000}\?)[^\s"'\\<>]+""")
_CONTROL = re.compile(r"[^\S ]+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def redacted(text: str) -> str:
    """Return ``text`` with ``***`` for secrets: in URLs, in headers, assigned to names, and from the environment.

    A secret of the environment is the value of a variable whose name says so, such as ``WANDB_API_KEY``, ``HF_TOKEN``
    or ``DB_PASSWORD``.
    """
    for value in _secrets():
        text = text.replace(value, HIDDEN)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def without_queries(text: str) -> str:
    """Return ``text``, such as the error of a library, without what comes after ``?`` in its addresses."""
    return _QUERY.sub(rf"\1{HIDDEN}", text)


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
    """Return ``text`` on one line, as ``indented_line``, without spaces around it."""
    return indented_line(text).strip()


def indented_line(text: str) -> str:
    """Return ``text`` on one line, as ``printable``."""
    return printable(_CONTROL.sub(" ", text))


def printable(text: str) -> str:
    """Return ``text`` without colours, and with escapes for other characters that a terminal obeys or cannot show.

    Those that change the order of the characters after them are escaped too.
    """
    if text.isprintable():
        return text
    plain = _COLOUR.sub("", text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


def shell_word(text: object) -> str:
    """Return ``text``, such as a path, as one word of a command that people copy into a shell.

    A word with characters that a terminal cannot show is written as ``$'...'``, which holds their bytes as numbers.
    """
    word = str(text)
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_in_ansi_c, word))}'"


def _in_ansi_c(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


def _secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name.upper()) and _LOOKS_SECRET.fullmatch(value):
            yield value
