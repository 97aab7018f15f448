"""The parts that pages are made of: header, cards, panels with a figure, sections; and the file they end up in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from llama_core.errors import RunDirectoryError
from llama_core.records.files import atomic_write
from training_reports.markup import Markup, element, paragraphs

STATUS_STYLE = {"finished": "good", "preempted": "warn", "timeout": "warn", "cancelled": "warn"}
"""CSS class of an outcome; every other one is ``bad``."""

NOTHING = "—"
"""What stands where there is no value."""


def write_page(path: Path, title: str, body: Sequence[str]) -> Path:
    """Write a page that opens offline, whole or not at all, and return its path.

    Raises:
        RunDirectoryError: if it cannot be written there.
    """
    template = Template(files("training_reports").joinpath("page.html").read_text(encoding="utf-8"))
    page = template.substitute(title=escape(title), body="\n".join(body), plotly=get_plotlyjs())
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {str(path)!r}: {error.strerror or error}; make the directory writable"
        ) from None
    return path


def header(name: str, status: str, style: str, facts: Mapping[str, object]) -> Markup:
    """Return the head of a page: the name, a status with its CSS class, and facts, of which None is not known."""
    listed = (
        element("div", element("dt", fact), element("dd", "not known" if value is None else str(value)))
        for fact, value in facts.items()
    )
    badge = element("span", status, class_=f"status {style}")
    return element(
        "header", element("div", element("h1", name), badge, class_="head"), element("dl", *listed, class_="facts")
    )


def card(title: str, value: str | None, unit: str, lines: Sequence[str]) -> Markup:
    """Return a headline number with a sentence or two below it."""
    number = [NOTHING] if value is None else [f"{value} ", element("small", unit)]
    return element("div", element("h2", title), element("p", *number, class_="value"), paragraphs(lines), class_="card")


@dataclass(frozen=True)
class Panel:
    """One figure and what is said about it."""

    title: str
    figure: go.Figure | None
    summary: str
    """What the figure shows, in numbers, for those who cannot see it."""
    notes: Sequence[str]
    """Sentences below the figure; where there is none, they say why."""
    wide: bool = False
    height_px: int | None = None
    """Height of the figure; None for the page's own."""

    def render(self) -> Markup:
        """Return the panel as HTML."""
        drawn = []
        if self.figure is not None:
            # Plotly writes <, > and / as escapes in its JSON, so that no text in it can end the script element.
            drawn.append(element("script", Markup(self.figure.to_json()), type="application/json"))
            height = f"height: {self.height_px}px" if self.height_px else ""
            label = f"{self.title}. {self.summary}"
            drawn.append(element("div", class_="plot", role="img", aria_label=label, style=height))
        caption = element("figcaption", paragraphs(self.notes))
        style = "panel wide" if self.wide else "panel"
        return element("figure", element("h2", self.title), *drawn, caption, class_=style)


def panels(shown: Sequence[Panel]) -> Markup:
    """Return panels side by side where there is room."""
    return element("section", *(panel.render() for panel in shown), class_="panels", aria_label="Figures")


def section(title: str, *children: str) -> Markup:
    """Return a part of the page under a heading."""
    return element("section", element("h2", title), *children, class_="panel")
