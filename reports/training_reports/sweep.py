"""The report of a sweep: a single HTML file that compares all its elements, made from its directory alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from llama_core.records.files import now
from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.directory import SweepDirectory, SweepRecord, read_record
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.contents import RunContents
from training_reports.figures import throughput_quartiles
from training_reports.layout import NOTHING, STATUS_STYLE, Panel, card, header, panels, section, write_page
from training_reports.markup import Markup, details, element, table
from training_reports.page import MEASURES

_COLUMNS = (
    "Element", "Status", "Tokens/s", "Middle half", "Step", "MFU", "Estimated", "Rehearsed", "Measured"
)  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """One element that can be run, and what is known of it."""

    name: str
    contents: RunContents

    @property
    def timed(self) -> BenchmarkRecord | None:
        """Its timed steps, if they were all taken."""
        return self.contents.benchmark if self.status == "finished" else None

    @property
    def status(self) -> str:
        """How its job ended, or how far it is."""
        outcome, job = self.contents.outcome, self.contents.job
        return outcome.status if outcome else "submitted" if job else "waiting"

    @property
    def style(self) -> str:
        """The CSS class of the status."""
        return STATUS_STYLE.get(self.status, "bad") if self.contents.outcome else "idle"

    @property
    def peaks(self) -> dict[str, int | None]:
        """Bytes of the peak memory by how it is known."""
        peaks: dict[str, int | None] = {
            how: profile["peak_bytes"] if profile else None for how, _, profile in self.contents.predictions
        }
        return peaks | {"measured": self.timed.memory_peak_bytes if self.timed else None}


def write_report(sweep: SweepDirectory) -> Path:
    """Write the report of ``sweep`` as it stands, the fastest element first, and return its path.

    Raises:
        RunDirectoryError: if the directory holds no sweep, or the page cannot be written there.
    """
    record = read_record(sweep)
    rows = sorted(
        (_Row(element.name, RunContents.read(sweep.run(element.name))) for element in record.runnable),
        key=lambda row: -row.timed.tokens_per_second if row.timed else 0.0,
    )
    body = (
        _header(sweep, record, rows),
        _cards(record, rows),
        panels([_throughput(rows), _memory(rows)]),
        section("Every element, the fastest first", element("div", _comparison(rows), class_="compare")),
        *_failures(rows),
        *_skipped(record),
        _grid(record),
        element("footer", f"Written {now()} from ", element("code", str(sweep.path))),
    )
    return write_page(sweep.report, f"{sweep.name} · sweep report", body)


def _header(sweep: SweepDirectory, record: SweepRecord, rows: Sequence[_Row]) -> Markup:
    timed = _timed(rows)
    unfinished = [row.style for row in rows if row.timed is None]
    style = "bad" if "bad" in unfinished else "idle" if "idle" in unfinished else "warn" if unfinished else "good"
    base = record.sweep_config.base
    facts = {
        "Model": base.model,
        "Launcher": base.launch.launcher,
        "Measured on": ", ".join(sorted({benchmark.device for benchmark in timed.values()})) or None,
    }
    return header(sweep.name, f"{len(timed)} of {len(rows)} timed", style, facts)


def _cards(record: SweepRecord, rows: Sequence[_Row]) -> Markup:
    timed = _timed(rows)
    if timed:
        fastest, leanest = next(iter(timed)), min(timed, key=lambda name: timed[name].memory_peak_bytes)
        slow, fast = throughput_quartiles(timed[fastest])
        rate = f"{timed[fastest].tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
        peak, unit = format_bytes(timed[leanest].memory_peak_bytes).split(" ")
        shown = [
            card("Fastest", rate, "tokens/s", [fastest, *_not_told_apart(timed)]),
            card("Least memory", peak, f"{unit} measured", [leanest]),
        ]
    else:
        shown = [card("Fastest", None, "", ["No element has been timed yet."])]
    skipped = len(record.elements) - len(rows)
    lines = [f"{len(rows) - len(timed)} of them not timed, or not yet.", f"{skipped} more of the grid were skipped."]
    shown.append(card("Elements", str(len(rows)), "can be run", lines))
    return element("section", *shown, class_="cards", aria_label="Headline numbers")


def _not_told_apart(timed: dict[str, BenchmarkRecord]) -> Iterator[str]:
    """Yield which elements are not slower than the fastest beyond the spread of both."""
    quartiles = {name: throughput_quartiles(record) for name, record in timed.items()}
    fastest, *others = timed
    close = [name for name in others if quartiles[name][1] >= quartiles[fastest][0]]
    if close:
        yield f"Its middle half overlaps with that of {' and of '.join(close)}: time more steps to tell them apart."


def _throughput(rows: Sequence[_Row]) -> Panel:
    title, timed = "Throughput by element", _timed(rows)
    if not timed:
        return Panel(title, None, "", ["No element has been timed yet."], wide=True)
    rates = [f"{name} {record.tokens_per_second:,.0f} tokens/s" for name, record in timed.items()]
    notes = ["Bars are medians of the timed steps, all devices together; lines span the middle half of the steps."]
    figure = sweep_figures.throughput_by_element(timed)
    return Panel(title, figure, ", ".join(rates), notes, wide=True, height_px=sweep_figures.height_px(timed))


def _memory(rows: Sequence[_Row]) -> Panel:
    title, peaks = "Peak memory by element", {row.name: row.peaks for row in rows if any(row.peaks.values())}
    if not peaks:
        return Panel(title, None, "", ["No element has been estimated yet."], wide=True)
    summary = ", ".join(f"{name} {format_bytes(max(filter(None, by.values())))}" for name, by in peaks.items())
    measures = {MEASURES.get(str(row.contents.setting("launch", "device")), "") for row in rows if row.timed}
    notes = [
        f"Measured is the peak of {measure}, with all that was held before the model was built; the predictions are of "
        "the model's own."
        for measure in sorted(measures - {""})
    ]
    height = sweep_figures.height_px(peaks, extra_lines=2)
    return Panel(title, sweep_figures.memory_by_element(peaks), summary, notes, wide=True, height_px=height)


def _comparison(rows: Sequence[_Row]) -> Markup:
    return table(_COLUMNS, map(_cells, rows), emphasised=[row.name for row in rows[:1] if row.timed])


def _cells(row: _Row) -> list[str]:
    timed = row.timed
    speed = [NOTHING] * 4
    if timed:
        slow, fast = throughput_quartiles(timed)
        speed = [
            f"{timed.tokens_per_second:,.0f}",
            f"{slow:,.0f} to {fast:,.0f}",
            f"{timed.median_seconds:.3f} s",
            NOTHING if timed.mfu is None else f"{timed.mfu:.1%}",
        ]
    peaks = [NOTHING if num_bytes is None else format_bytes(num_bytes) for num_bytes in row.peaks.values()]
    return [row.name, element("strong", row.status, class_=row.style), *speed, *peaks]


def _failures(rows: Sequence[_Row]) -> Iterator[Markup]:
    failed = [
        (row.name, f"{outcome.status}: {outcome.reason}", outcome.next_action or NOTHING)
        for row in rows
        if (outcome := row.contents.outcome) and not row.timed
    ]
    if failed:
        yield section("Ended without being timed", table(("Element", "What happened", "Next"), failed))


def _skipped(record: SweepRecord) -> Iterator[Markup]:
    skipped = [(one.name, one.skipped) for one in record.elements if one.skipped]
    if skipped:
        yield section("Skipped: these cannot be run", table(("Element", "Reason"), skipped))


def _grid(record: SweepRecord) -> Markup:
    config = record.sweep_config
    values = [(key, ", ".join(map(str, values))) for key, values in config.grid.items()]
    base = yaml.safe_dump(config.base.model_dump(exclude_defaults=True), sort_keys=False)
    folded = details("Base configuration", element("div", element("pre", element("code", base)), class_="table"))
    return section("Grid", table(("Key", "Values"), values), folded)


def _timed(rows: Sequence[_Row]) -> dict[str, BenchmarkRecord]:
    return {row.name: row.timed for row in rows if row.timed}
