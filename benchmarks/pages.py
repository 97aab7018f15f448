"""Tables and pictures in the documentation that a benchmark makes anew."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import plotly.graph_objects as go


def rewrite(page: Path | None, name: str, text: str) -> None:
    """Replace the text of ``page``, if one is named, between ``<!-- name -->`` and ``<!-- end of name -->``."""
    if page is None:
        return
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text.rstrip()}\n{end}{after}", encoding="utf-8")


def keep(folder: Path, name: str, figures: object, text: str) -> None:
    """Write the figures of a benchmark as JSON, and its tables as Markdown, to ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace(" ", "_")
    (folder / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (folder / f"{stem}.md").write_text(text, encoding="utf-8")


def publish(name: str, figures: object, text: str, *, folder: Path, page: Path | None) -> None:
    """Keep a benchmark's figures and tables, print the tables, and write them into a page if one is named."""
    keep(folder, name, figures, text)
    sys.stdout.write(text)
    rewrite(page, name, text)


def draw(figure: go.Figure, picture: Path, *, width: int, height: int) -> None:
    """Draw a figure as PNG, in pixels of a page; it needs Debian's ``chromium``."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit(f"{picture} is not drawn: there is no Chromium; apt install chromium")
    figure.update_layout(width=width, height=height)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "figure.html")
        figure.write_html(page, config={"displayModeBar": False})
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--window-size={width + 16},{height + 16}",
            f"--screenshot={picture.absolute()}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True)
