"""HTML elements that escape their text unless it is markup already, so that nothing a user wrote can be forgotten."""

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Markup:
    """Return an HTML element; ``class_`` and ``aria_label`` stand for the attributes ``class`` and ``aria-label``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value
    )
    content = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{written}>{content}</{name}>")


def paragraphs(sentences: Iterable[str]) -> Markup:
    """Return one paragraph for each sentence."""
    return Markup("".join(element("p", sentence) for sentence in sentences))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], emphasised: Iterable[str] = ()) -> Markup:
    """Return a table whose first column names the rows; the rows named in ``emphasised`` stand out."""
    stand_out = set(emphasised)
    head = element("tr", *(element("th", column, scope="col") for column in columns))
    body = (
        element(
            "tr",
            element("th", name, scope="row"),
            *(element("td", cell) for cell in cells),
            class_="emphasised" if name in stand_out else "",
        )
        for name, *cells in rows
    )
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="table")


def details(summary: str, *children: str, note: str = "") -> Markup:
    """Return ``children`` folded away under ``summary``."""
    head = element("summary", summary, *([" ", element("small", note)] if note else []))
    return element("details", head, *children)
