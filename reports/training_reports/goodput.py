"""The tables of a run's goodput: where its wall time went, and what passed before each new start."""

from collections.abc import Mapping, Sequence

from llama_core.launch.recoveries import Recovery
from llama_core.records.activity import TimePart
from llama_core.records.goodput import LABELS, Goodput
from llama_core.units import format_duration

TableRow = list[str]


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
    """Return the columns and rows of a table with a row for each new start; None if there was none."""
    if not recoveries:
        return None
    parts = list(dict.fromkeys(part for one in recoveries for part in one.parts))

    def row(one: Recovery) -> TableRow:
        times = [format_duration(one.parts[part]) if part in one.parts else "" for part in parts]
        return [str(one.attempt), format_duration(one.seconds), *times, one.advice]

    columns = ["Attempt", "All", *(part.capitalize() for part in parts), "What shortens the longest"]
    return columns, [row(one) for one in recoveries]
