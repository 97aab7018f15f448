"""The page of a predicted sweep: its elements side by side, from arithmetic alone."""

from collections.abc import Sequence
from pathlib import Path

from llama_core.sweep.comparison import Comparison, Row
from llama_core.sweep.grid import SweepConfig
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Card, Panel, write_page


def write_prediction(path: Path, config: SweepConfig, comparison: Comparison) -> Path:
    """Write the page of a predicted sweep, the fastest element first, and return its path.

    Raises:
        RunDirectoryError: if the page cannot be written.
    """
    rows = sorted(comparison.rows, key=lambda row: -(row.tokens_per_second or 0.0))
    planned = [row for row in rows if row.status == "finished"]
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
            "Price": f"${config.base.launch.dollars_per_gpu_hour:,.2f} per GPU hour",
        },
        cards=_best(planned),
        panels=[_throughput(planned), _memory([row for row in rows if row.memory_bytes])],
        rows=[(row.name, *_cells(row)) for row in planned],
        left_out=[(row.name, f"{row.status}: {row.reason}") for row in rows if row.status != "finished"],
        config=config,
    )


def _cells(row: Row) -> list[str | None]:
    return [
        None if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        None if row.step_seconds is None else f"{row.step_seconds:.3g} s",
        None if row.mfu is None else f"{row.mfu:.1%}",
        None if row.memory_bytes is None else format_bytes(row.memory_bytes),
        None if row.dollars_per_billion_tokens is None else f"${row.dollars_per_billion_tokens:,.0f}",
        row.plan,
    ]


def _best(planned: Sequence[Row]) -> list[Card]:
    if not planned:
        return [Card("Fastest", None, "", ["No element fits."])]
    fastest, leanest = planned[0], min(planned, key=lambda row: row.memory_bytes or 0)
    peak, unit = format_bytes(leanest.memory_bytes or 0).split(" ")
    return [
        Card("Fastest", _cells(fastest)[0], "tokens/s predicted", [fastest.name, fastest.plan]),
        Card("Least memory", peak, f"{unit} estimated", [leanest.name, leanest.plan]),
    ]


def _throughput(planned: Sequence[Row]) -> Panel:
    rates = {row.name: row.tokens_per_second for row in planned if row.tokens_per_second}
    if not rates:
        return Panel("Throughput by element", None, "", ["No element has a predicted time."], wide=True)
    told = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in rates.items())
    notes = ["Predicted by arithmetic: docs/cost.md compares such predictions with published measurements."]
    figure, height = sweep_figures.predicted_throughput(rates), sweep_figures.height_px(rates)
    return Panel("Throughput by element", figure, told, notes, wide=True, height_px=height)


def _memory(rows: Sequence[Row]) -> Panel:
    peaks: dict[str, dict[str, int | None]] = {row.name: {"estimated": row.memory_bytes} for row in rows}
    if not peaks:
        return Panel("Peak memory by element", None, "", ["No element has been estimated."], wide=True)
    told = ", ".join(f"{row.name} {format_bytes(row.memory_bytes or 0)}" for row in rows)
    figure, height = sweep_figures.memory_by_element(peaks), sweep_figures.height_px(peaks)
    return Panel("Peak memory by element", figure, told, ["Of the fullest rank."], wide=True, height_px=height)
