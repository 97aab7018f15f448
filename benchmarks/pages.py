"""Tables in the documentation that a benchmark writes anew."""

from pathlib import Path


def rewrite_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text of ``page`` between two lines, each of which occurs once."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text.rstrip()}\n{end}{after}", encoding="utf-8")
