"""The report of a sweep: a single HTML file that compares its elements, made from the sweep's directory alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.directory import SweepDirectory, SweepRecord, read_record
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.contents import RunContents
from training_reports.figures import throughput_quartiles
from training_reports.layout import STATUS_STYLE, Card, Panel, write_page
from training_reports.page import MEASURES


@dataclass(frozen=True)
class _Row:
    """One element that can run, with its records."""

    name: str
    contents: RunContents

    @property
    def timed(self) -> BenchmarkRecord | None:
        """Its benchmark, if it finished."""
        return self.contents.benchmark if self.status == "finished" else None

    @property
    def status(self) -> str:
        """How its job ended, or its state so far."""
        outcome, job = self.contents.outcome, self.contents.job
        return outcome.status if outcome else "submitted" if job else "waiting"

    @property
    def style(self) -> str:
        """The CSS class of the status."""
        return STATUS_STYLE.get(self.status, "bad") if self.contents.outcome else "idle"

    @property
    def peaks(self) -> dict[str, int | None]:
        """Bytes of peak memory: estimated, rehearsed and measured."""
        peaks: dict[str, int | None] = {
            how: profile["peak_bytes"] if profile else None for how, _, profile in self.contents.predictions
        }
        return peaks | {"measured": self.timed.memory_peak_bytes if self.timed else None}

    @property
    def cells(self) -> list[str | None]:
        """The cells of its row after name and status."""
        timed = self.timed
        speed: list[str | None] = [None] * 4
        if timed:
            slow, fast = throughput_quartiles(timed)
            speed = [
                f"{timed.tokens_per_second:,.0f}",
                f"{slow:,.0f} to {fast:,.0f}",
                f"{timed.median_seconds:.3f} s",
                None if timed.mfu is None else f"{timed.mfu:.1%}",
            ]
        return speed + [None if num_bytes is None else format_bytes(num_bytes) for num_bytes in self.peaks.values()]


def write_report(sweep: SweepDirectory) -> Path:
    """Write the report of ``sweep`` as it stands, the fastest element first, and return its path.

    Raises:
        RunDirectoryError: if the directory holds no sweep, or the page cannot be written.
    """
    record = read_record(sweep)
    rows = sorted(
        (_Row(element.name, RunContents.read(sweep.run(element.name))) for element in record.runnable),
        key=lambda row: -row.timed.tokens_per_second if row.timed else 0.0,
    )
    timed = {row.name: row.timed for row in rows if row.timed}
    config = record.sweep_config
    return write_page(
        sweep.report,
        "sweep.html",
        name=sweep.name,
        source=sweep.path,
        status=f"{len(timed)} of {len(rows)} timed",
        style=_style(rows),
        facts={
            "Model": config.base.model,
            "Launcher": config.base.launch.launcher,
            "Measured on": ", ".join(sorted({benchmark.device for benchmark in timed.values()})) or None,
        },
        cards=[*_best(timed), _counts(record, rows, timed)],
        panels=[_throughput(timed), _memory(rows)],
        rows=rows,
        failed=[
            (row.name, f"{outcome.status}: {outcome.reason}", outcome.next_action or None)
            for row in rows
            if (outcome := row.contents.outcome) and not row.timed
        ],
        skipped=[(one.name, one.skipped) for one in record.elements if one.skipped],
        grid=config.grid,
        base=yaml.safe_dump(config.base.model_dump(exclude_defaults=True), sort_keys=False),
    )


def _style(rows: Sequence[_Row]) -> str:
    unfinished = [row.style for row in rows if row.timed is None]
    return "bad" if "bad" in unfinished else "idle" if "idle" in unfinished else "warn" if unfinished else "good"


def _best(timed: Mapping[str, BenchmarkRecord]) -> list[Card]:
    if not timed:
        return [Card("Fastest", None, "", ["No element has been timed yet."])]
    fastest, leanest = next(iter(timed)), min(timed, key=lambda name: timed[name].memory_peak_bytes)
    slow, fast = throughput_quartiles(timed[fastest])
    rate = f"{timed[fastest].tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
    peak, unit = format_bytes(timed[leanest].memory_peak_bytes).split(" ")
    return [
        Card("Fastest", rate, "tokens/s", [fastest, *_not_told_apart(timed)]),
        Card("Least memory", peak, f"{unit} measured", [leanest]),
    ]


def _counts(record: SweepRecord, rows: Sequence[_Row], timed: Mapping[str, BenchmarkRecord]) -> Card:
    skipped = len(record.elements) - len(rows)
    lines = [f"{len(rows) - len(timed)} of them not timed (yet).", f"{skipped} more elements were skipped."]
    return Card("Elements", str(len(rows)), "can run", lines)


def _not_told_apart(timed: Mapping[str, BenchmarkRecord]) -> Iterator[str]:
    """Yield a sentence with the elements whose interquartile range overlaps that of the fastest."""
    quartiles = {name: throughput_quartiles(record) for name, record in timed.items()}
    fastest, *others = timed
    close = [name for name in others if quartiles[name][1] >= quartiles[fastest][0]]
    if close:
        yield f"Its middle half overlaps that of {' and of '.join(close)}; time more steps to tell them apart."


def _throughput(timed: Mapping[str, BenchmarkRecord]) -> Panel:
    title = "Throughput by element"
    if not timed:
        return Panel(title, None, "", ["No element has been timed yet."], wide=True)
    rates = [f"{name} {record.tokens_per_second:,.0f} tokens/s" for name, record in timed.items()]
    notes = ["Bars are medians of the timed steps, over all devices; lines span the middle half of the steps."]
    figure = sweep_figures.throughput_by_element(timed)
    return Panel(title, figure, ", ".join(rates), notes, wide=True, height_px=sweep_figures.height_px(timed))


def _memory(rows: Sequence[_Row]) -> Panel:
    title, peaks = "Peak memory by element", {row.name: row.peaks for row in rows if any(row.peaks.values())}
    if not peaks:
        return Panel(title, None, "", ["No element has been estimated yet."], wide=True)
    summary = ", ".join(f"{name} {format_bytes(max(filter(None, by.values())))}" for name, by in peaks.items())
    measures = {MEASURES.get(str(row.contents.setting("launch", "device")), "") for row in rows if row.timed}
    notes = [
        f"The measurement is the peak of {measure}, including what was held before the model was built; the "
        "predictions leave that out."
        for measure in sorted(measures - {""})
    ]
    height = sweep_figures.height_px(peaks, extra_lines=2)
    return Panel(title, sweep_figures.memory_by_element(peaks), summary, notes, wide=True, height_px=height)
