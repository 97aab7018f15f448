"""The elements of a sweep ranked by their throughput."""

from collections.abc import Iterator, Mapping, Sequence

from llama_core.records.measurements import BenchmarkRecord
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Card, Panel
from training_reports.sweep_rows import Ranking, SweepRow, ordered
from training_reports.sweep_table import Cell, number

MAX_NAMED = 3
"""Most elements that a sentence names."""


def rank(rows: Sequence[SweepRow]) -> Ranking:
    """Return the elements by the tokens/s of their timed steps, the fastest first."""
    benchmarks = {row.name: row.benchmark for row in rows if row.status == "finished"}
    fastest_first = sorted(
        ((name, record) for name, record in benchmarks.items() if record is not None),
        key=lambda item: -item[1].tokens_per_second,
    )
    timed = dict(fastest_first)
    return Ranking(
        title="Every element, fastest first",
        columns=("Tokens/s", "Middle half", "MFU"),
        order="descending",
        rows=ordered(rows, timed),
        results={name: _cells(record) for name, record in timed.items()},
        cards=_best(timed),
        panels=[_throughput(timed)],
        facts={"Measured on": ", ".join(sorted({record.device for record in timed.values()})) or None},
    )


def _cells(timed: BenchmarkRecord) -> list[Cell]:
    slow, fast = timed.throughput_quartiles
    return [
        number(timed.tokens_per_second, "{:,.0f}"),
        Cell(f"{slow:,.0f} to {fast:,.0f}", slow),
        number(timed.mfu, "{:.1%}"),
    ]


def _best(timed: Mapping[str, BenchmarkRecord]) -> list[Card]:
    if not timed:
        return [Card("Fastest", None, "", ["No element has been timed yet."])]
    fastest = next(iter(timed))
    smallest = min(timed, key=lambda name: timed[name].memory_added_bytes)
    slow, fast = timed[fastest].throughput_quartiles
    rate = f"{timed[fastest].tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
    peak, unit = format_bytes(timed[smallest].memory_added_bytes).split(" ")
    return [
        Card("Fastest", rate, "tokens/s", [fastest, *_overlaps(timed)]),
        Card("Least memory", peak, f"{unit} measured", [smallest]),
    ]


def not_told_apart(timed: Mapping[str, BenchmarkRecord]) -> list[str]:
    """Return the elements that may be as fast as the fastest, which is the first."""
    fastest, *others = timed
    return [name for name in others if not timed[fastest].is_told_apart(timed[name])]


def _overlaps(timed: Mapping[str, BenchmarkRecord]) -> Iterator[str]:
    if close := not_told_apart(timed):
        more = f"; and of {len(close) - MAX_NAMED} more" if len(close) > MAX_NAMED else ""
        fastest = next(iter(timed.values()))
        yield f"Not told apart from: {'; '.join(close[:MAX_NAMED])}{more}."
        yield from dict.fromkeys(f"Because {fastest.why_not_told_apart(timed[name])}." for name in close[:MAX_NAMED])


def _throughput(timed: Mapping[str, BenchmarkRecord]) -> Panel:
    title = "Throughput by element"
    if not timed:
        return Panel(title, None, "", ["No element has been timed yet."], wide=True)
    drawn = sweep_figures.first_drawn(timed)
    rates = [f"{name}: {record.tokens_per_second:,.0f} tokens/s" for name, record in drawn.items()]
    notes = [
        *sweep_figures.not_drawn(timed),
        "Bars are medians of the timed steps, over all devices; lines span the middle half of the steps.",
    ]
    figure = sweep_figures.throughput_by_element(drawn)
    return Panel(title, figure, "; ".join(rates), notes, wide=True, height_px=sweep_figures.height_px(drawn))
