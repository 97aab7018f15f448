"""The page of a predicted sweep: its elements side by side, from arithmetic alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from llama_core.sweep.comparison import Comparison, ComparisonRow
from llama_core.sweep.grid import SweepConfig
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Card, Panel
from training_reports.sweep_page import ElementsPage, Problems, elements_page, memory_panel, models
from training_reports.sweep_rows import Ranking, SweepRow
from training_reports.sweep_table import Cell, bytes_cell, number

FITS = "fits"
"""The state of an element that has a plan and fits."""


def write_prediction(path: Path, config: SweepConfig, comparison: Comparison) -> Path:
    """Write the page of a predicted sweep, the fastest element first, and return its path.

    Raises:
        RunDirectoryError: if the page cannot be written.
    """
    names = comparison.names
    elements = _named(comparison)
    fitting = [one for one in elements if one.status == "finished"]
    others = [one for one in elements if one.status != "finished"]
    ranking = _rank(fitting)
    skipped = [_row(one) for one in others]
    page = ElementsPage(
        kind="predicted sweep",
        how="predicted",
        status=f"{len(fitting)} of {len(elements)} fit",
        style="good" if fitting else "bad",
        facts={
            "Model": models(config, [one.settings for one in elements]),
            **ranking.facts,
            **({"In all elements": ", ".join(names.shared)} if names.shared else {}),
            "Rates": "; ".join(line.removeprefix("rates: ") for line in comparison.rates()),
            "Price": f"${config.base.launch.dollars_per_gpu_hour:,.2f} per GPU hour",
        },
        ranking=ranking,
        skipped=skipped,
        details=_details(elements),
        left_out={
            "does not fit": [one.name for one in others if one.status == "does-not-fit"],
            "no valid plan": [one.name for one in others if one.status == "impossible"],
            "no predicted time": [row.name for row in ranking.unranked],
        },
        memory=list(memory_panel([*ranking.rows, *skipped], ["Peak of the fullest rank."], lines_per_element=1)),
        problems=[
            Problems(
                "Does not fit, or has no valid plan",
                ("Element", "Reason"),
                [(one.name, f"{one.status}: {one.reason}") for one in others],
            )
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return elements_page(page, config, name=config.name, source=path.parent).write(path)


def _named(comparison: Comparison) -> list[ComparisonRow]:
    """Return the elements with the names that people read, the fastest first."""
    names = comparison.names
    elements = [replace(one, name=names[one.name]) for one in comparison.rows]
    return sorted(elements, key=lambda one: -(one.tokens_per_second or 0.0))


def _row(one: ComparisonRow) -> SweepRow:
    fits = one.status == "finished"
    return SweepRow(
        one.name,
        one.settings,
        FITS if fits else one.status,
        "good" if fits else "bad",
        skipped="" if fits else one.reason,
        plan=one.parallel_plan,
        tokens_per_second=one.tokens_per_second,
        memory_bytes=one.memory_bytes,
        peaks={"estimated": one.memory_bytes},
    )


def _rank(fitting: Sequence[ComparisonRow]) -> Ranking:
    rates = {one.name: one.tokens_per_second for one in fitting if one.tokens_per_second}
    return Ranking(
        title="Every element, fastest first",
        columns=("Tokens/s",),
        order="descending",
        rows=[_row(one) for one in fitting],
        results={name: [number(rate, "{:,.0f}")] for name, rate in rates.items()},
        cards=_best(fitting),
        panels=[_throughput(rates)],
        facts={"Planned for": ", ".join(sorted({one.device for one in fitting})) or None},
    )


def _details(elements: Sequence[ComparisonRow]) -> dict[str, Mapping[str, Cell]]:
    return {
        "Step": {one.name: number(one.step_seconds, "{:.3g} s") for one in elements},
        "MFU": {one.name: number(one.mfu, "{:.1%}") for one in elements},
        "Memory": {one.name: bytes_cell(one.memory_bytes) for one in elements},
        "Price of 1B tokens": {one.name: number(one.dollars_per_billion_tokens, "${:,.0f}") for one in elements},
        "Plan": {one.name: Cell(one.plan or None) for one in elements},
    }


def _best(fitting: Sequence[ComparisonRow]) -> list[Card]:
    if not fitting:
        return [Card("Fastest", None, "", ["No element fits."])]
    fastest = fitting[0]
    smallest = min(fitting, key=lambda one: one.memory_bytes or 0)
    rate = number(fastest.tokens_per_second, "{:,.0f}").text
    peak, unit = format_bytes(smallest.memory_bytes or 0).split(" ")
    return [
        Card("Fastest", rate, "tokens/s predicted", [fastest.name, fastest.plan]),
        Card("Least memory", peak, f"{unit} estimated", [smallest.name, smallest.plan]),
    ]


def _throughput(rates: Mapping[str, float]) -> Panel:
    title = "Throughput by element"
    if not rates:
        return Panel(title, None, "", ["No element has a predicted time."], wide=True)
    drawn = sweep_figures.first_drawn(rates)
    notes = [
        *sweep_figures.not_drawn(rates),
        "Predicted by arithmetic: docs/cost.md compares such predictions with published measurements.",
    ]
    return Panel(
        title,
        sweep_figures.throughput_bars(drawn),
        "; ".join(f"{name}: {rate:,.0f} tokens/s" for name, rate in drawn.items()),
        notes,
        wide=True,
        height_px=sweep_figures.height_px(drawn),
    )
