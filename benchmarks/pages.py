"""Tables and pictures in the documentation that a benchmark makes anew."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import plotly.graph_objects as go


def rewrite_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text of ``page`` between two lines, each of which occurs once."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text.rstrip()}\n{end}{after}", encoding="utf-8")


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
