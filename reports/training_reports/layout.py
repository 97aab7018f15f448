"""The parts of a page, the templates that turn them into HTML, and writing the file."""

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import plotly.graph_objects as go
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from llama_core.errors import RunDirectoryError
from llama_core.records.files import atomic_write, is_disk_full, no_room, now
from llama_core.redaction import redacted

STATUS_STYLE = {"finished": "good", "preempted": "warn", "timeout": "warn", "cancelled": "warn"}
"""CSS class of each outcome; all others are ``bad``."""

REFUSED = "bad-config"
"""The outcome that a page shows as "refused"."""

NOTHING = "—"
"""Shown in place of a missing value."""


@dataclass(frozen=True)
class Card:
    """A headline number with a sentence or two below it."""

    title: str
    value: str | None
    unit: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Panel:
    """One figure and its text."""

    title: str
    figure: go.Figure | None
    summary: str
    """The figure's numbers in words, for screen readers."""
    notes: Sequence[str]
    """Sentences below the figure; without a figure, they say why."""
    wide: bool = False
    height_px: int | None = None
    """Height of the figure; None for the page's default."""


class ReportPage:
    """A page of HTML.

    Args:
        template: name of the template, which extends ``page.html``.
        values: the variables of both templates.
    """

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values

    def write(self, path: Path) -> Path:
        """Write the page, which opens offline, atomically, and return its path.

        Raises:
            RunDirectoryError: if the file cannot be written.
        """
        content = self._rendered(live=False, plotly=packed_plotly())
        try:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            if is_disk_full(error):
                cause = no_room(path.parent, len(content))
                remedy = "free some space there"
            else:
                cause = error.strerror or str(error)
                remedy = "make the directory writable"
            raise RunDirectoryError(f"cannot write {str(path)!r}: {cause}; {remedy}") from None
        return path

    def live(self) -> bytes:
        """Return the page for a server that has the page's scripts beside it: it links to them, and to no files."""
        return self._rendered(live=True)

    def _rendered(self, **how: object) -> bytes:
        page = TEMPLATES.get_template(self._template).render(self._values, written=now(), **how)
        return page.encode(errors="backslashreplace")  # a path may hold bytes that are not text


@cache
def packed_plotly() -> str:
    """Return Plotly's script as the page holds it: compressed by zlib, in base64. It is 2 MB instead of 5."""
    return b64encode(zlib.compress(get_plotlyjs().encode())).decode()


def moment(seconds: float) -> str:
    """Return a time in seconds since the epoch as the pages show it, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OSError, OverflowError, ValueError):
        return "an unknown time"


def _shown(value: object) -> object:
    """Return a value as the page shows it, without secrets."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return redacted(", ".join(map(str, value))) or NOTHING
    if isinstance(value, str | dict | Path) and not hasattr(value, "__html__"):  # else it is a part of the page
        return redacted(str(value))
    return NOTHING if value is None else value


TEMPLATES = Environment(
    loader=PackageLoader("training_reports"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates of all pages and pictures. Every value is escaped, and a missing variable is an error."""
_FOREIGN = re.compile(r"<(?!/?(?:b|br|extra)>)")
"""The beginning of a tag that none of our figures has."""


def figure_json(figure: go.Figure) -> str:
    """Return a figure for Plotly's script, without secrets. It takes texts for HTML: also links, but for those here.

    Names are escaped where a figure gets them, so that they are shown as they are. This is for those that are not.
    """
    return json.dumps(_harmless(json.loads(figure.to_json()))).replace("<", "\\u003c")


def _harmless(value: object) -> object:
    if isinstance(value, str):
        return _FOREIGN.sub("&lt;", redacted(value))
    if isinstance(value, dict):
        return {key: _harmless(inner) for key, inner in value.items()}
    return [_harmless(inner) for inner in value] if isinstance(value, list) else value


TEMPLATES.filters["figure"] = figure_json
TEMPLATES.filters["yaml"] = lambda mapping: yaml.safe_dump(mapping, sort_keys=False)
