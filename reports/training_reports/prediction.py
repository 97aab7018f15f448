"""The page of a predicted sweep: its elements side by side, from arithmetic alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llama_core.sweep.comparison import Comparison, Row
from llama_core.sweep.grid import SweepConfig
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Card, Panel, write_page
from training_reports.sweep_pareto import pareto_panel
from training_reports.sweep_rows import short_names
from training_reports.sweep_scaling import COLUMN as SCALING
from training_reports.sweep_scaling import Line, Sized, scaling_cells, scaling_lines, scaling_panel
from training_reports.sweep_table import UNKNOWN, Cell, Table, TableRow, bytes_cell, number

FITS = "fits"
"""The state of an element that has a plan and fits."""


def write_prediction(path: Path, config: SweepConfig, comparison: Comparison) -> Path:
    """Write the page of a predicted sweep, the fastest element first, and return its path.

    Raises:
        RunDirectoryError: if the page cannot be written.
    """
    names, shared = short_names(
        [row.name for row in comparison.rows if row.status == "finished"],
        [row.name for row in comparison.rows if row.status != "finished"],
    )
    rows = sorted(
        (replace(row, name=names[row.name]) for row in comparison.rows), key=lambda row: -(row.tokens_per_second or 0.0)
    )
    planned = [row for row in rows if row.status == "finished"]
    lines = scaling_lines(
        [
            Sized(row.name, row.settings, row.parallel_plan, row.tokens_per_second)
            for row in planned
            if row.parallel_plan and row.tokens_per_second
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_page(
        path,
        "prediction.html",
        name=config.name,
        source=path.parent,
        status=f"{len(planned)} of {len(rows)} fit",
        style="good" if planned else "bad",
        facts={
            "Model": config.base.model,
            "Planned for": ", ".join(sorted({row.device for row in planned})) or None,
            **({"In all elements": ", ".join(shared)} if shared else {}),
            "Price": f"${config.base.launch.dollars_per_gpu_hour:,.2f} per GPU hour",
        },
        cards=_best(planned),
        panels=[
            _throughput(planned),
            *_pareto(rows),
            *scaling_panel(lines, "predicted"),
            _memory([row for row in rows if row.memory_bytes]),
        ],
        table=_table(rows, lines),
        left_out=[(row.name, f"{row.status}: {row.reason}") for row in rows if row.status != "finished"],
        config=config,
    )


def _table(rows: Sequence[Row], lines: Sequence[Line]) -> Table:
    scaling = {SCALING: scaling_cells(lines)} if lines else {}
    columns: dict[str, dict[str, Cell]] = {
        "Tokens/s": {row.name: number(row.tokens_per_second, "{:,.0f}") for row in rows},
        **scaling,
        "Step": {row.name: number(row.step_seconds, "{:.3g} s") for row in rows},
        "MFU": {row.name: number(row.mfu, "{:.1%}") for row in rows},
        "Memory": {row.name: bytes_cell(row.memory_bytes) for row in rows},
        "Price of 1B tokens": {row.name: number(row.dollars_per_billion_tokens, "${:,.0f}") for row in rows},
        "Plan": {row.name: Cell(row.plan or None) for row in rows},
    }
    return Table(
        "Every element, fastest first",
        list(columns),
        "descending",
        [
            TableRow(
                row.name,
                FITS if row.status == "finished" else row.status,
                "good" if row.status == "finished" else "bad",
                [of_column.get(row.name, UNKNOWN) for of_column in columns.values()],
            )
            for row in rows
        ],
    )


def _pareto(rows: Sequence[Row]) -> Iterator[Panel]:
    planned = [row for row in rows if row.status == "finished"]
    points = {
        row.name: (float(row.memory_bytes), row.tokens_per_second)
        for row in planned
        if row.memory_bytes and row.tokens_per_second
    }
    left_out = {
        "does not fit": [row.name for row in rows if row.status == "does-not-fit"],
        "no valid plan": [row.name for row in rows if row.status == "impossible"],
        "no predicted time": [row.name for row in planned if row.name not in points],
    }
    return pareto_panel(points, {row.name: row.settings for row in planned}, left_out, "predicted")


def _best(planned: Sequence[Row]) -> list[Card]:
    if not planned:
        return [Card("Fastest", None, "", ["No element fits."])]
    fastest, leanest = planned[0], min(planned, key=lambda row: row.memory_bytes or 0)
    peak, unit = format_bytes(leanest.memory_bytes or 0).split(" ")
    return [
        Card("Fastest", _rate(fastest), "tokens/s predicted", [fastest.name, fastest.plan]),
        Card("Least memory", peak, f"{unit} estimated", [leanest.name, leanest.plan]),
    ]


def _rate(row: Row) -> str | None:
    return number(row.tokens_per_second, "{:,.0f}").text


def _throughput(planned: Sequence[Row]) -> Panel:
    rates = {row.name: row.tokens_per_second for row in planned if row.tokens_per_second}
    if not rates:
        return Panel("Throughput by element", None, "", ["No element has a predicted time."], wide=True)
    drawn = sweep_figures.first_drawn(rates)
    told = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in drawn.items())
    notes = [
        *sweep_figures.not_drawn(rates),
        "Predicted by arithmetic: docs/cost.md compares such predictions with published measurements.",
    ]
    figure, height = sweep_figures.throughput_bars(drawn), sweep_figures.height_px(drawn)
    return Panel("Throughput by element", figure, told, notes, wide=True, height_px=height)


def _memory(rows: Sequence[Row]) -> Panel:
    peaks: dict[str, dict[str, int | None]] = {row.name: {"estimated": row.memory_bytes} for row in rows}
    if not peaks:
        return Panel("Peak memory by element", None, "", ["No element has been estimated."], wide=True)
    drawn = sweep_figures.first_drawn(peaks)
    told = ", ".join(f"{name} {format_bytes(by['estimated'] or 0)}" for name, by in drawn.items())
    figure, height = sweep_figures.memory_by_element(drawn), sweep_figures.height_px(drawn)
    notes = [*sweep_figures.not_drawn(peaks), "Peak of the fullest rank."]
    return Panel("Peak memory by element", figure, told, notes, wide=True, height_px=height)
