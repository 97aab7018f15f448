"""The tables of a run's goodput: where its wall time went, and what passed before each new start."""

from collections.abc import Mapping, Sequence

from llama_core.launch.recoveries import SHORTENED_BY, Recovery
from llama_core.records.activity import TimePart
from llama_core.records.goodput import LABELS, Goodput
from llama_core.units import format_duration

TableRow = list[str]
MAX_RECOVERIES = 6
"""More columns do not fit beside each other."""


def goodput_table(goodput: Goodput | None) -> tuple[str, TableRow, list[TableRow]] | None:
    """Return a sentence, and the columns and rows of a table with a row for each attempt and one for all.

    None if it is unknown.
    """
    if goodput is None:
        return None
    shown = [part for part, seconds in goodput.total.items() if seconds]

    def row(name: str, parts: Mapping[TimePart, float]) -> TableRow:
        times = (sum(parts.values()), *(parts[part] for part in shown))
        return [name, *map(format_duration, times)]

    attempts = goodput.attempts if len(goodput.attempts) > 1 else ()
    rows = [row(str(number), parts) for number, parts in enumerate(attempts, 1)]
    shares = [f"{goodput.total[part] / goodput.seconds:.1%}" for part in shown]
    rows += [row("All", goodput.total), ["Share", "100.0%", *shares]]
    return f"{goodput.summary()}.", ["Attempt", "Wall time", *(LABELS[part].capitalize() for part in shown)], rows


def recoveries_table(recoveries: Sequence[Recovery]) -> tuple[TableRow, list[TableRow]] | None:
    """Return the columns and rows of a table with a column for each of the newest; None if there are none."""
    shown = recoveries[-MAX_RECOVERIES:]
    if not shown:
        return None
    rows = [["All", *(format_duration(one.seconds) for one in shown), ""]]
    for part in dict.fromkeys(part for one in shown for part in one.parts):
        times = [format_duration(one.parts[part]) if part in one.parts else "" for one in shown]
        rows.append([part.capitalize(), *times, SHORTENED_BY.get(part, "")])
    return ["Part", *(f"Before attempt {one.attempt}" for one in shown), "What shortens it"], rows
