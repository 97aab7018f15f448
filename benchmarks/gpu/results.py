"""The three files that a measurement leaves."""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

LARGEST_LOG_BYTES = 20 * 2**20
"""Larger files stay out of the archive."""
LEFT_OUT = "checkpoints"
"""Folders with this name stay out too."""
PARTS = "Milliseconds of a compiled step of 1B over one row of packed documents. The planner made the predictions."


@dataclass
class Results:
    """What was found so far."""

    out: Path
    """The folder of the three files."""
    logs: Path
    """The folder that becomes the archive."""
    device: str
    allowed_seconds: float
    seconds: float = 0.0
    preflight: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    """How each stage ended, its seconds and its rows."""
    problems: list[str] = field(default_factory=list)
    """What went wrong outside of the stages."""
    ended_by: str = ""
    """The signal that ended the measurement, if one did."""
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        """Write the three files anew; none of them is ever seen half written."""
        record = {
            "began": self.began.isoformat(timespec="seconds"),
            "device": self.device,
            "seconds": self.seconds,
            "ended_by": self.ended_by,
            "problems": self.problems,
            "preflight": self.preflight,
            "stages": self.stages,
        }
        self._replace("gpu.json", json.dumps(record, indent=1).encode())
        self._replace("gpu.md", as_markdown(self).encode())
        try:
            self._archive_logs()
        except OSError as error:  # a process that cannot be killed may still write there
            self.problems.append(f"the logs could not be archived: {error}")

    def _archive_logs(self) -> None:
        unfinished = self.out / ".logs.tar.gz"
        try:
            with tarfile.open(unfinished, "w:gz") as archive:
                archive.add(self.logs, "logs", filter=_for_archive)
            unfinished.replace(self.out / "logs.tar.gz")
        finally:
            unfinished.unlink(missing_ok=True)

    def _replace(self, name: str, content: bytes) -> None:
        unfinished = self.out / f".{name}"
        unfinished.write_bytes(content)
        unfinished.replace(self.out / name)


def _for_archive(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    is_large = member.size > LARGEST_LOG_BYTES
    return None if is_large or os.path.basename(member.name) == LEFT_OUT else member  # noqa: PTH119 (a name, no path)


def as_markdown(results: Results) -> str:
    """Return the tables, those that people act on first."""
    lines = [f"# Measured on {_device_name(results)}", "", _headline(results), ""]
    parts = [row for row in _all_rows(results) if "part" in row]
    if parts:
        lines += ["## Where the time of a step goes", "", PARTS, "", *tables(parts)]
    if problems := list(_problems(results)):
        lines += ["## Missing or failed", "", *(f"- {problem}" for problem in problems), ""]
    if results.stages:
        lines += ["## Stages", "", *tables([_ending(result) for result in results.stages])]
    if results.preflight.get("rows"):
        lines += ["## Machine", "", *tables(results.preflight["rows"])]
    for result in results.stages:
        if rows := [row for row in result["rows"] if "part" not in row]:
            lines += [f"## {result['stage']}", "", *tables(rows)]
    return "\n".join(lines)


def _device_name(results: Results) -> str:
    if results.device == "cpu":
        return "a CPU, with tiny sizes: this tests the stages and measures nothing"
    return str(_facts(results).get("device", "an unknown device"))


def _facts(results: Results) -> dict[str, Any]:
    return {row["what"]: row["value"] for row in results.preflight.get("rows", ())}


def _headline(results: Results) -> str:
    facts = _facts(results)
    done = sum(result["ended"] == "done" for result in results.stages)
    torch = f"torch {facts['torch']}, " if "torch" in facts else ""
    taken = f"in {results.seconds:.0f} s of {results.allowed_seconds:.0f} s" if results.seconds else "so far"
    return f"{torch}{results.began:%Y-%m-%d %H:%M} UTC: {done} of {len(results.stages)} stages done {taken}."


def _problems(results: Results) -> Iterator[str]:
    if results.ended_by:
        yield f"{results.ended_by} ended the measurement"
    yield from results.problems
    yield from results.preflight.get("problems", ())
    hopeless = results.preflight.get("hopeless", "")
    if hopeless and not hopeless.startswith("missing"):
        yield f"no stage can run: {hopeless}"
    for result in results.stages:
        if result["ended"] != "done" and not hopeless:
            yield f"stage {result['stage']}: {_escaped(result['ended'])}"
        for error, rows in _by_error(result["rows"]).items():
            yield f"{result['stage']}: {_escaped('; '.join(map(_first_cells, rows)))}: {_escaped(error)}"


def _by_error(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows that failed, by their error: some fail for the same reason."""
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if "error" in row:
            failed.setdefault(row["error"], []).append(row)
    return failed


def _first_cells(row: Row) -> str:
    return ", ".join(str(value) for name, value in row.items() if name != "error")


def _all_rows(results: Results) -> Iterator[Row]:
    for result in results.stages:
        yield from result["rows"]


def _ending(result: Row) -> Row:
    errors = sum("error" in row for row in result["rows"])
    seconds = f"{result['seconds']:.0f}"
    return {
        "stage": result["stage"],
        "s": seconds,
        "rows": len(result["rows"]),
        "errors": errors,
        "ended": result["ended"],
    }


def tables(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines of Markdown: a table for each run of rows with the same columns.

    A row with an error has no other results, and joins the table of its neighbours.
    """
    lines: list[str] = []
    for columns, members in _grouped(rows):
        shown = [*columns, "error"] if any("error" in row for row in members) else columns
        lines += [_line(shown), _line(["---"] * len(shown))]
        lines += [_line([_cell(row.get(column, "")) for column in shown]) for row in members]
        lines.append("")
    return lines


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[Row]]]:
    columns: list[str] = []
    members: list[Row] = []
    for row in rows:
        own = [name for name in row if name != "error"]
        is_measured = any("error" not in member for member in members)
        if members and "error" in row and own == columns[: len(own)]:
            pass
        elif members and not is_measured and columns == own[: len(columns)]:
            columns = own
        elif own != columns:
            if members:
                yield columns, members
            columns = own
            members = []
        members.append(row)
    if members:
        yield columns, members


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else _escaped(str(value))


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
