"""The report of a sweep: a single HTML file that compares its elements, made from the sweep's directory alone."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from llama_core.sweep.directory import SweepDirectory, SweepRecord, read_record
from llama_core.sweep.grid import DONE, Objective
from llama_core.sweep.judgement import Change, Judgement
from llama_core.units import format_bytes
from training_reports import sweep_figures, sweep_loss, sweep_throughput
from training_reports.contents import RunContents
from training_reports.layout import Card, Panel, write_page
from training_reports.page import MEASURES
from training_reports.sweep_history import COLUMNS as HISTORY_COLUMNS
from training_reports.sweep_history import history_panel, history_rows, read_judgement, shown_time
from training_reports.sweep_pareto import pareto_panel
from training_reports.sweep_rows import Ranking, Row, short_names
from training_reports.sweep_scaling import COLUMN as SCALING
from training_reports.sweep_scaling import Line, Sized, scaling_cells, scaling_lines, scaling_panel
from training_reports.sweep_summary import summarise
from training_reports.sweep_table import (
    PEAKS,
    PREDICTED,
    UNKNOWN,
    Cell,
    Table,
    TableRow,
    bytes_cell,
    number,
    predicted_cell,
)

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
    names, shared = short_names(
        [element.name for element in record.runnable], [element.name for element in record.elements if element.skipped]
    )
    every = [
        Row(names[element.name], RunContents.read(sweep.run(element.name)), element.settings, element.skipped)
        for element in record.elements
    ]
    ranking = RANKINGS[record.objective]([row for row in every if not row.skipped])
    skipped = [row for row in every if row.skipped]
    lines = scaling_lines(list(_sized(ranking)))
    rows, ranked = ranking.rows, [row for row in ranking.rows if row.name in ranking.results]
    config, judgement = record.sweep_config, read_judgement(sweep.history, names)
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
            **({"In all elements": ", ".join(shared)} if shared else {}),
        },
        summary=summarise(sweep, record.objective, ranking, skipped, judgement),
        cards=[*ranking.cards, _counts(record, rows, ranking)],
        panels=[
            *ranking.panels,
            *_pareto(ranking, skipped),
            *scaling_panel(lines, "measured"),
            _memory(rows),
            *(history_panel(judgement) if judgement else ()),
        ],
        judgement=judgement,
        since=shown_time(judgement.since) if judgement else "",
        history_columns=HISTORY_COLUMNS,
        changes=[(one.key, one.before, one.now, ", ".join(one.elements) or "all") for one in _changes(judgement)],
        history=list(history_rows(judgement)) if judgement else [],
        table=_table([*rows, *skipped], ranking, lines),
        done=DONE[record.objective],
        failed=[
            (row.name, f"{outcome.status}: {outcome.reason}", outcome.next_action or None)
            for row in rows
            if (outcome := row.contents.outcome) and row not in ranked
        ],
        skipped=[(row.name, row.skipped) for row in skipped],
        config=config,
    )


def _changes(judgement: Judgement | None) -> Sequence[Change]:
    return judgement.changes if judgement else ()


def _style(unfinished: Sequence[Row]) -> str:
    styles = [row.style for row in unfinished]
    return "bad" if "bad" in styles else "idle" if "idle" in styles else "warn" if styles else "good"


def _counts(record: SweepRecord, rows: Sequence[Row], ranking: Ranking) -> Card:
    done, missing, skipped = DONE[record.objective], len(rows) - len(ranking.results), len(record.elements) - len(rows)
    lines = [f"{missing} of them not {done} (yet)." if missing else f"All of them {done}."]
    if skipped:
        lines.append(f"{skipped} more {'was' if skipped == 1 else 'were'} skipped.")
    return Card("Elements", str(len(rows)), "can run", lines)


def _table(rows: Sequence[Row], ranking: Ranking, lines: Sequence[Line]) -> Table:
    """Return the table of all elements; a column that would be empty is left out."""
    columns: dict[str, dict[str, Cell]] = {
        column: {name: cells[place] for name, cells in ranking.results.items()}
        for place, column in enumerate(ranking.columns)
    }
    columns |= {SCALING: scaling_cells(lines)} if lines else {}
    if any(row.predicted_seconds for row in rows):
        columns[PREDICTED] = {row.name: predicted_cell(row.predicted_seconds, row.measured_seconds) for row in rows}
    columns["Step measured"] = {row.name: number(row.measured_seconds, "{:.3f} s") for row in rows}
    for column, how in zip(PEAKS, ("estimated", "rehearsed", "measured"), strict=True):
        columns[column] = {row.name: bytes_cell(row.peaks[how]) for row in rows}
    columns["Plan"] = {row.name: Cell(row.plan.summary() if row.plan else None) for row in rows}
    return Table(
        ranking.title,
        list(columns),
        ranking.order,
        [
            TableRow(
                row.name,
                row.status,
                row.style,
                [of_column.get(row.name, UNKNOWN) for of_column in columns.values()],
                href=None if row.skipped else f"runs/{quote(row.contents.path.name, safe='=,+')}/",
                is_best=place == 0 and row.name in ranking.results,
            )
            for place, row in enumerate(rows)
        ],
    )


def _sized(ranking: Ranking) -> Iterator[Sized]:
    """Yield the timed elements whose plan is known."""
    for row in ranking.rows:
        timed = row.contents.benchmark
        if row.name in ranking.results and timed is not None and row.plan is not None:
            yield Sized(row.name, row.settings, row.plan, timed.tokens_per_second)


def _pareto(ranking: Ranking, skipped: Sequence[Row]) -> Iterator[Panel]:
    timed = {
        row.name: (float(benchmark.memory_added_bytes), benchmark.tokens_per_second)
        for row in ranking.rows
        if row.name in ranking.results and (benchmark := row.contents.benchmark) is not None
    }
    settings = {row.name: row.settings for row in ranking.rows}
    others = [row for row in ranking.rows if row.name not in timed]
    left_out = {
        "skipped because they cannot run": [row.name for row in skipped],
        "failed": [f"{row.name} ({row.status})" for row in others if row.style == "bad"],
        "without a result": [f"{row.name} ({row.status})" for row in others if row.style != "bad"],
    }
    return pareto_panel(timed, settings, left_out, "measured")


def _memory(rows: Sequence[Row]) -> Panel:
    title, peaks = "Peak memory by element", {row.name: row.peaks for row in rows if any(row.peaks.values())}
    if not peaks:
        return Panel(title, None, "", ["No element has been estimated yet."], wide=True)
    drawn = sweep_figures.first_drawn(peaks)
    summary = ", ".join(f"{name} {format_bytes(max(filter(None, by.values())))}" for name, by in drawn.items())
    measured = [row for row in rows if row.peaks["measured"]]
    measures = {MEASURES.get(str(row.contents.setting("launch", "device")), "") for row in measured}
    notes = [
        *sweep_figures.not_drawn(peaks),
        *(
            f"The measurement is the peak of {measure}, less what was held before the model was built."
            for measure in sorted(measures - {""})
        ),
    ]
    height = sweep_figures.height_px(drawn, extra_lines=2)
    return Panel(title, sweep_figures.memory_by_element(drawn), summary, notes, wide=True, height_px=height)
