"""The elements of a sweep ranked by their throughput."""

from collections.abc import Iterator, Mapping, Sequence

from llama_core.records.measurements import BenchmarkRecord
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.figures import throughput_quartiles
from training_reports.layout import Card, Panel
from training_reports.sweep_rows import Ranking, Row, ordered


def rank(rows: Sequence[Row]) -> Ranking:
    """Return the elements by the tokens/s of their timed steps, the fastest first."""
    benchmarks = {row.name: row.contents.benchmark for row in rows if row.status == "finished"}
    fastest_first = sorted(
        ((name, record) for name, record in benchmarks.items() if record is not None),
        key=lambda item: -item[1].tokens_per_second,
    )
    timed = dict(fastest_first)
    return Ranking(
        title="Every element, fastest first",
        columns=("Tokens/s", "Middle half", "Step", "MFU"),
        rows=ordered(rows, timed),
        results={name: _cells(record) for name, record in timed.items()},
        cards=_best(timed),
        panels=[_throughput(timed)],
        facts={"Measured on": ", ".join(sorted({record.device for record in timed.values()})) or None},
    )


def _cells(timed: BenchmarkRecord) -> list[str | None]:
    slow, fast = throughput_quartiles(timed)
    return [
        f"{timed.tokens_per_second:,.0f}",
        f"{slow:,.0f} to {fast:,.0f}",
        f"{timed.median_seconds:.3f} s",
        None if timed.mfu is None else f"{timed.mfu:.1%}",
    ]


def _best(timed: Mapping[str, BenchmarkRecord]) -> list[Card]:
    if not timed:
        return [Card("Fastest", None, "", ["No element has been timed yet."])]
    fastest, leanest = next(iter(timed)), min(timed, key=lambda name: timed[name].memory_peak_bytes)
    slow, fast = throughput_quartiles(timed[fastest])
    rate = f"{timed[fastest].tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
    peak, unit = format_bytes(timed[leanest].memory_peak_bytes).split(" ")
    return [
        Card("Fastest", rate, "tokens/s", [fastest, *_overlaps(timed)]),
        Card("Least memory", peak, f"{unit} measured", [leanest]),
    ]


def not_told_apart(timed: Mapping[str, BenchmarkRecord]) -> list[str]:
    """Return the elements whose interquartile range overlaps that of the fastest, which is the first."""
    quartiles = {name: throughput_quartiles(record) for name, record in timed.items()}
    fastest, *others = timed
    return [name for name in others if quartiles[name][1] >= quartiles[fastest][0]]


def _overlaps(timed: Mapping[str, BenchmarkRecord]) -> Iterator[str]:
    if close := not_told_apart(timed):
        yield f"Its middle half overlaps that of {' and of '.join(close)}; time more steps to tell them apart."


def _throughput(timed: Mapping[str, BenchmarkRecord]) -> Panel:
    title = "Throughput by element"
    if not timed:
        return Panel(title, None, "", ["No element has been timed yet."], wide=True)
    rates = [f"{name} {record.tokens_per_second:,.0f} tokens/s" for name, record in timed.items()]
    notes = ["Bars are medians of the timed steps, over all devices; lines span the middle half of the steps."]
    figure = sweep_figures.throughput_by_element(timed)
    return Panel(title, figure, ", ".join(rates), notes, wide=True, height_px=sweep_figures.height_px(timed))
