"""The pictures at the top of the README: a run on a terminal, and its report.

``REMAKE_PICTURES=1 python -m pytest tests/reports/test_pictures.py`` draws them again, after a longer run. Otherwise a
short run of fewer parameters is held against them: the terminal has to say the same apart from numbers and what depends
on the machine, and the report to have the same headings.
"""

import os
import re
import struct
import subprocess
import sys
import zlib
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser

from llama_core.records.directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "docs" / "images"
REMAKE = "REMAKE_PICTURES" in os.environ
MAX_BYTES = 300_000

COMMAND = ["train", "--model", "tiny_llama3_50m", "--device", "cpu", "--seq-len", "64", "--batch-size", "4"]
LENGTH = ["--steps", "60" if REMAKE else "12", "--set", "training.eval_every=8"]
SMALLER = [
    f"--set=architecture.{size}"
    for size in ("hidden_size=64", "num_layers=2", "ffn_size=128", "head_dim=16", "vocab_size=512")
]
COLUMNS = 116
LETTER_PX, LINE_PX, FRAME_PX, BAR_PX = 7.9, 19, 18, 34
REPORT_PX = 1000
"""Height of the part of the report that the picture shows."""

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("pictures")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the command prints, and the run that it leaves."""
    folder = tmp_path_factory.mktemp("pictures")
    ended = subprocess.run(
        [sys.executable, "-m", "training_infra.cli", *COMMAND, *LENGTH, *([] if REMAKE else SMALLER)],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = (folder / "runs").iterdir()
    return ended.stdout.replace(f"{folder}/", "~/").splitlines(), RunDirectory(run)


def terminal(prompt, lines):
    """Return an SVG of a terminal in which a command has printed these lines."""
    rows = [f"$ {prompt}", *(row for line in lines for row in wrapped(line))]
    width, height = round(2 * FRAME_PX + COLUMNS * LETTER_PX), round(BAR_PX + FRAME_PX + len(rows) * LINE_PX)
    drawn = []
    for number, row in enumerate(rows):
        step, rest = (row[:10], row[10:]) if number and not row.startswith(" ") else ("", row)
        bold = f'<tspan class="step">{escape(step)}</tspan>' if step else ""
        y = BAR_PX + number * LINE_PX + 14
        drawn.append(f'<text x="{FRAME_PX}" y="{y}">{bold}{escape(rest)}</text>')
    lights = "".join(
        f'<circle cx="{FRAME_PX + 18 * place}" cy="17" r="5.5" fill="{color}"/>'
        for place, color in enumerate(("#ec6a5e", "#f4bf4f", "#61c554"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
            ' role="img">',
            "<style>text{font:13px ui-monospace,'SF Mono',Menlo,Consolas,'Liberation Mono',monospace;fill:#d5dae0;"
            "white-space:pre}.step{font-weight:700;fill:#86b3ec}</style>",
            f'<rect width="{width}" height="{height}" rx="9" fill="#171b20"/>',
            lights,
            *drawn,
            "</svg>\n",
        ]
    )


def wrapped(line):
    """Yield a line in pieces as wide as the terminal; all but the first are indented like the text after the step."""
    while len(line) > COLUMNS:
        end = line.rfind(" ", 0, COLUMNS + 1)
        end = end if end > 10 else COLUMNS
        yield line[:end]
        line = " " * 10 + line[end:].lstrip()
    yield line


class Text(HTMLParser):
    """The text of the elements of one kind."""

    def __init__(self, tag, markup):
        super().__init__()
        self.tag, self.depth, self.found = tag, 0, []
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        if tag == self.tag:
            self.depth += 1
            self.found.append("")

    def handle_endtag(self, tag):
        self.depth -= tag == self.tag

    def handle_data(self, data):
        if self.depth:
            self.found[-1] += data


def skeleton(svg):
    """Return the words that a terminal shows, without numbers, repeated lines and what depends on the machine."""
    text = " ".join(" ".join(Text("text", svg).found).split())
    text = re.sub(r" with \w+=[^:]*:", ":", text)
    text = re.sub(r"validate .*? data ", "data ", text)
    text = re.sub(r"(steps on) .*? metrics ", r"\1 metrics ", text)
    text = re.sub(r"runs/[\w.-]+", "RUN", text)
    text = re.sub(r"in the (forward|backward|optimizer)", "in a phase", text)
    text = re.sub(r"\d[\d.,]*( ?([KMGT]i?B|[KMBT]|TFLOP)\b)?", "#", text)
    text = re.sub(r"(# (d|h|min) )+#", "#", text)
    # other programs may have the cores while steps are timed
    text = re.sub(r"# tokens/s in the median of # training steps note .*?; they reached ", "", text)
    step = r"train step #/# loss # (held-out loss # (after step # )?)?# tokens/s peak # (about # (s|min) left )?"
    return re.sub(f"({step})+", "train ... ", text)


def png_with_text(png, text):
    """Return a PNG that carries a text, as the chunk ``tEXt`` before its end."""
    body = b"tEXtHeadings\0" + text.encode("latin-1")
    end = len(png) - 12
    return png[:end] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[end:]


def text_of_png(png):
    return png.split(b"tEXtHeadings\0", 1)[1][: -4 - 12].decode("latin-1")


def test_the_terminal_in_the_readme_says_what_the_command_says(trained):
    lines, _ = trained
    drawn = terminal(" ".join(["training-infra", *COMMAND, *LENGTH[:2]]), lines)
    path = IMAGES / "terminal.svg"
    if REMAKE:
        path.write_text(drawn)
    assert skeleton(path.read_text()) == skeleton(drawn)
    assert path.stat().st_size < MAX_BYTES


def test_the_report_in_the_readme_has_the_headings_of_the_report(trained, tmp_path):
    _, run = trained
    browser = Browser(tmp_path / "profile")
    with browser.open(run.report, width=1180, height=REPORT_PX) as tab:
        headings = tab.evaluate(
            "[...document.querySelectorAll('h2')].filter((one) => one.getBoundingClientRect().bottom < innerHeight)"
            ".map((one) => one.textContent)"
        )
        tab.picture(tmp_path / "report.png")
    browser.close()
    png = (tmp_path / "report.png").read_bytes()
    path = IMAGES / "report.png"
    if REMAKE:
        path.write_bytes(png_with_text(png, "; ".join(headings)))
    assert text_of_png(path.read_bytes()) == "; ".join(headings)
    assert len(headings) > 4
    assert max(len(png), path.stat().st_size) < MAX_BYTES
