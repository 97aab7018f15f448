"""Throughput against peak memory: the elements that no other one beats in both."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence

from llama_core.sweep.grid import GridValue
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Panel

MOST_LETTERS = 16
"""Most letters of a setting's value in a label."""
HEIGHT_PX = 430


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the elements that no other one beats (more throughput in no more memory), by memory; the first of equals.

    Args:
        points: bytes of peak memory and tokens/s of each element, by name.
    """
    front = []
    best = 0.0
    for name, (_, rate) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if rate > best:
            front.append(name)
            best = rate
    return front


def pareto_panel(
    points: Mapping[str, tuple[float, float]],
    settings: Mapping[str, Mapping[str, GridValue]],
    left_out: Mapping[str, Sequence[str]],
    how: str,
) -> Iterator[Panel]:
    """Yield a panel if there are at least two elements to compare.

    Args:
        points: bytes of peak memory and tokens/s of each element, by name.
        settings: the values of each element for the keys of the grid, by name.
        left_out: elements that have no point, by the reason.
        how: whether the points are measured or predicted.
    """
    if len(points) < 2:
        return
    front = pareto_front(points)
    keys = compared_keys(settings)
    labels = {name: short_name(settings[name], keys) for name in points}
    most = sweep_figures.MOST_DRAWN
    told = ", ".join(
        f"{name} ({points[name][1]:,.0f} tokens/s, {format_bytes(points[name][0])})" for name in front[:most]
    )
    some = "Its elements" if len(front) <= most else f"The {most} of its {len(front)} elements with the least memory"
    notes = [
        f"The line is the front: no other element is faster in as much memory. {some} are, by memory: {told}.",
        f"A label gives {', '.join(key.rpartition('.')[2] for key in keys)}; if it has no room, point at the dot.",
        *(f"Not drawn, {what}: {listed(names)}." for what, names in left_out.items() if names),
    ]
    figure = sweep_figures.throughput_against_memory(points, front, labels, how)
    yield Panel("Throughput against memory", figure, f"On the front: {told}.", notes, wide=True, height_px=HEIGHT_PX)


def compared_keys(settings: Mapping[str, Mapping[str, GridValue]]) -> list[str]:
    """Return the keys of the grid in which elements differ."""
    values: dict[str, set[str]] = {}
    for own in settings.values():
        for key, value in own.items():
            values.setdefault(key, set()).add(json.dumps(value))
    return [key for key, different in values.items() if len(different) > 1]


def short_name(settings: Mapping[str, GridValue], keys: Sequence[str]) -> str:
    """Return the values of these keys, escaped, because Plotly renders HTML."""
    texts = (value_text(settings.get(key)) for key in keys)
    return html.escape(", ".join(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…" for text in texts))


def value_text(value: GridValue) -> str:
    """Return a setting's value as in an element's name."""
    return value if isinstance(value, str) else json.dumps(value)


def listed(names: Sequence[str]) -> str:
    """Return the names, or the first of many and the number of the others."""
    most = sweep_figures.MOST_DRAWN
    return ", ".join(names[:most]) + (f" and {len(names) - most} more, in the table" if len(names) > most else "")
