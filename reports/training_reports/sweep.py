"""The report of a sweep: a single HTML file that compares its elements, made from the sweep's directory alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from llama_core.sweep.directory import SweepDirectory, SweepRecord, read_record
from llama_core.sweep.grid import DONE, Objective
from llama_core.sweep.history import Change, Judgement
from llama_core.units import format_bytes
from training_reports import sweep_figures, sweep_loss, sweep_throughput
from training_reports.contents import RunContents
from training_reports.layout import Card, Panel, write_page
from training_reports.page import MEASURES
from training_reports.sweep_history import COLUMNS as HISTORY_COLUMNS
from training_reports.sweep_history import history_panel, history_rows, shown_time
from training_reports.sweep_rows import Ranking, Row
from training_reports.sweep_summary import summarise

RANKINGS: dict[Objective, Callable[[Sequence[Row]], Ranking]] = {
    "throughput": sweep_throughput.rank,
    "loss": sweep_loss.rank,
}
"""How the elements are ranked and compared, by the sweep's objective."""


def write_report(sweep: SweepDirectory) -> Path:
    """Write the report of ``sweep`` as it stands, the best element first, and return its path.

    Raises:
        RunDirectoryError: if the directory holds no sweep, or the page cannot be written.
    """
    record = read_record(sweep)
    contents = {element.name: RunContents.read(sweep.run(element.name)) for element in record.runnable}
    ranking = RANKINGS[record.objective]([Row(name, of_run) for name, of_run in contents.items()])
    rows, ranked = ranking.rows, [row for row in ranking.rows if row.name in ranking.results]
    config, judgement = record.sweep_config, Judgement.read(sweep.history)
    return write_page(
        sweep.report,
        "sweep.html",
        name=sweep.name,
        source=sweep.path,
        status=f"{len(ranked)} of {len(rows)} {DONE[record.objective]}",
        style=_style([row for row in rows if row not in ranked]),
        facts={
            "Model": config.base.model,
            "Launcher": config.base.launch.launcher,
            **ranking.facts,
        },
        summary=summarise(sweep, record, ranking, judgement),
        cards=[*ranking.cards, _counts(record, rows, ranking)],
        panels=[*ranking.panels, _memory(rows, ranking), *(history_panel(judgement) if judgement else ())],
        judgement=judgement,
        since=shown_time(judgement.since) if judgement else "",
        history_columns=HISTORY_COLUMNS,
        changes=[(one.key, one.before, one.now, ", ".join(one.elements) or "all") for one in _changes(judgement)],
        history=list(history_rows(judgement)) if judgement else [],
        ranking=ranking,
        done=DONE[record.objective],
        columns=("Element", "Status", *ranking.columns, "Estimated", "Rehearsed", "Measured"),
        cells={row.name: [*ranking.results.get(row.name, [None] * len(ranking.columns)), *_peaks(row)] for row in rows},
        failed=[
            (row.name, f"{outcome.status}: {outcome.reason}", outcome.next_action or None)
            for row in rows
            if (outcome := row.contents.outcome) and row not in ranked
        ],
        skipped=[(one.name, one.skipped) for one in record.elements if one.skipped],
        plans=[(row.name, row.plan) for row in rows],
        config=config,
    )


def _changes(judgement: Judgement | None) -> Sequence[Change]:
    return judgement.changes if judgement else ()


def _style(unfinished: Sequence[Row]) -> str:
    styles = [row.style for row in unfinished]
    return "bad" if "bad" in styles else "idle" if "idle" in styles else "warn" if styles else "good"


def _counts(record: SweepRecord, rows: Sequence[Row], ranking: Ranking) -> Card:
    skipped = len(record.elements) - len(rows)
    lines = [
        f"{len(rows) - len(ranking.results)} of them not {DONE[record.objective]} (yet).",
        f"{skipped} more elements were skipped.",
    ]
    return Card("Elements", str(len(rows)), "can run", lines)


def _peaks(row: Row) -> list[str | None]:
    return [None if num_bytes is None else format_bytes(num_bytes) for num_bytes in row.peaks.values()]


def _memory(rows: Sequence[Row], ranking: Ranking) -> Panel:
    title, peaks = "Peak memory by element", {row.name: row.peaks for row in rows if any(row.peaks.values())}
    if not peaks:
        return Panel(title, None, "", ["No element has been estimated yet."], wide=True)
    summary = ", ".join(f"{name} {format_bytes(max(filter(None, by.values())))}" for name, by in peaks.items())
    measured = [row for row in rows if row.peaks["measured"]]
    measures = {MEASURES.get(str(row.contents.setting("launch", "device")), "") for row in measured}
    notes = [
        f"The measurement is the peak of {measure}, including what was held before the model was built; the "
        "predictions leave that out."
        for measure in sorted(measures - {""})
    ]
    height = sweep_figures.height_px(peaks, extra_lines=2)
    return Panel(title, sweep_figures.memory_by_element(peaks), summary, notes, wide=True, height_px=height)
