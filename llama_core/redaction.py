"""Text without secrets and without control characters, for files, logs and terminals."""

import html
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
"""Stands for a secret."""

_NAMES = (
    "(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_KEY|AUTH_STRING|CONNECTION_STRING|CREDENTIALS?"
    "|_PAT|_PASS|_PWD|(?:SSH|DB|SQL|PG|REDIS|LDAP|SMTP|MAIL|FTP|SUDO|ROOT|ADMIN|USER)(?:PASS|PWD))"
)
_OF_WHICH = (
    "(?:_(?!(?:FILE|PATH|DIR|FOLDER|NAME|ID|URL|URI|ENDPOINT|TYPE|SIZE|LENGTH|LIMIT|COUNT|TTL|TIMEOUT|LIFETIME|EXPIRY"
    "|HELPER|COMMAND)(?![A-Z0-9]))[A-Z0-9]{1,32}){1,3}"
)
"""Says after such a name which secret it is, as in ``HF_TOKEN_READ`` or ``API_KEY_1``, and not where or how long."""
_SECRET_NAME = re.compile(f"{_NAMES}(?:{_OF_WHICH})?$")
_LOOKS_SECRET = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9]).{8,}|.{20,}", re.DOTALL)
"""Values of such variables that are replaced everywhere; others may be ordinary words and numbers."""
_PATTERNS = (
    (re.compile(r"""(https?://)[^\s:/?#@"'\\]+(?=@)"""), rf"\1{HIDDEN}"),
    (re.compile(r"""(?i)(\bauthorization["']?\s*[:=]\s*["']?(?:bearer|basic|token)\s+)[^\s"',;]+"""), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)(?=\S*\d)[\w.~+/=-]{16,}"), rf"\1{HIDDEN}"),
    (
        re.compile(r"""(?i)(?<!/)(\bx-[a-z-]{0,40}(?:key|token|secret)["']?\s{0,9}[:=]\s{0,9}["']?)[^\s"',;\\]+"""),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"""(?i)(\b(?:api-key|private-token)["']?\s{0,9}[:=]\s{0,9}["']?)(?=[^\s"',;]{0,64}\d)[^\s"',;\\]+"""
        ),
        rf"\1{HIDDEN}",
    ),
    # In JSON, also inside a text of JSON. The tokens of a tokenizer, such as "pad_token", are none.
    (
        re.compile(
            r"""(?i)((?P<quote>\\?["'])(?:[\w.-]{0,40}(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key"""
            r"""|private[_-]?key|account[_-]?key|(?:access|auth|refresh|id|api|hf|session|bearer)[_-]?token))"""
            r"""(?P=quote)\s{0,9}:\s{0,9}(?P<begin>\\?["']))(?:(?!(?P=begin))(?:\\.|[^\\\n]))+"""
        ),
        rf"\1{HIDDEN}",
    ),
    # Of a signed address, in the words of S3, Google, Azure and CloudFront; of an account's connection string.
    (
        re.compile(
            r"(?i)([?&;#](?:amp;)?[\w.-]{0,40}(?:sig|signature|credential|token|key|key-?id|accessid|secret|password|policy"
            r"|jwt)=)[^\s&;\"'\\<>)]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(?i)(\b(?:account_?key|shared_?access_?(?:key|signature)|password|api_?key|client_secret"
            r"|(?:access|refresh|id)_token)=)[^\s;&\"'\\]+"
        ),
        rf"\1{HIDDEN}",
    ),
)
_ADDRESS = re.compile(r"""://[^\s"'\\]+""")
_PASSWORD_BEGINS = re.compile(r"://[^:/?#]*:(?!\d{1,5}[/?#])(?=.)")
"""Before a password in an address, which may hold any character; what looks like a port is none."""
_ASSIGNED = re.compile(
    rf"""\b([A-Z0-9_]*{_NAMES}(?:=|{_OF_WHICH}=(?=["']?[^\s"'\\]{{0,64}}\d)(?=["']?[^\s"'\\]{{8}}))["']?)"""
    r"""(?!["'$])[^\s"'\\]+"""
)
_QUERY = re.compile(r"""(://[^\s?"'\\<>]{0,2000}\?)[^\s"'\\<>]+""")
_CONTROL = re.compile(r"[^\S ]+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def redacted(text: str) -> str:
    """Return ``text`` with ``***`` for secrets: in URLs, headers and JSON, assigned to names, and from the environment.

    A secret of the environment is the value of a variable whose name says so, such as ``WANDB_API_KEY``, ``HF_TOKEN``
    or ``DB_PASSWORD``, also as it is written in a URL, in JSON or on a page.
    """
    return _redacted(text, _secrets())


def _redacted(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, HIDDEN)
    if text.isalnum():  # such as a checksum: every pattern has a sign, such as : or =
        return text
    text = _ADDRESS.sub(_without_password, text)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def without_queries(text: str) -> str:
    """Return ``text``, such as the error of a library, without what comes after ``?`` in its addresses."""
    return _QUERY.sub(rf"\1{HIDDEN}", text)


def redacted_values(value: Any) -> Any:
    """Return a JSON value with every text in it redacted, but not its keys."""
    # A record of all ranks has tens of thousands of texts, most of them the same. The first rank writes it while the
    # others wait, so the environment is searched once and each text too.
    return _with_texts(value, cache(partial(_redacted, secrets=_secrets())))


def _with_texts(value: Any, made_of: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it replaced by what is made of it."""
    if isinstance(value, str):
        return made_of(value)
    if isinstance(value, Mapping):
        return {key: _with_texts(inner, made_of) for key, inner in value.items()}
    return [_with_texts(inner, made_of) for inner in value] if isinstance(value, list | tuple) else value


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


def _without_password(address: re.Match[str]) -> str:
    text = address[0]
    end = text.rfind("@")
    begins = _PASSWORD_BEGINS.search(text, 0, end) if end > 0 else None
    return f"{text[: begins.end()]}{HIDDEN}{text[end:]}" if begins else text


def _secrets() -> list[str]:
    """Return the secrets of the environment in every spelling, the longest first: one may hold another."""
    named = {os.environ.get(name, "") for name in os.environ if _is_of_secret(name)}
    spelt = {text for value in named if _LOOKS_SECRET.fullmatch(value) for text in _spellings(value)}
    return sorted(spelt, key=len, reverse=True)


@cache
def _is_of_secret(name: str) -> bool:
    return _SECRET_NAME.search(name.upper()) is not None


@cache
def _spellings(secret: str) -> frozenset[str]:
    """Return a secret as it is, in URLs, in JSON and on a page."""
    raw = secret.encode(errors="surrogateescape")
    in_json = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return frozenset({secret, quote(raw), quote(raw, safe=""), quote_plus(raw), html.escape(secret)} | in_json)
