"""Throughput against peak memory: the elements that no other one beats in both."""

import html
from collections.abc import Iterator, Mapping, Sequence

from llama_core.sweep.grid import GridValue
from llama_core.sweep.naming import SettingWords, differing_keys
from llama_core.units import MIB, format_bytes
from training_reports import sweep_figures
from training_reports.layout import Panel

HEIGHT_PX = 430
ALIKE = 0.05
"""Relative difference up to which peaks of memory are alike: measurements of one step differ by some percent."""
ALIKE_BYTES = 8 * MIB
"""What they differ by beyond that: of a small model, the percents are less than what a process takes in one piece."""


def are_alike(peaks: Sequence[float]) -> bool:
    """Return whether peaks of memory differ by no more than measurements of one step do."""
    return max(peaks) <= (1 + ALIKE) * min(peaks) + ALIKE_BYTES


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
    """Yield a panel if there are at least two elements to compare, and they differ in memory.

    Args:
        points: bytes of peak memory and tokens/s of each element, by name.
        settings: the values of each element for the keys of the grid, by name.
        left_out: elements that have no point, by the reason.
        how: whether the points are measured or predicted.
    """
    sizes = [num_bytes for num_bytes, _ in points.values()]
    if len(points) < 2 or are_alike(sizes):
        return
    front = pareto_front(points)
    keys = differing_keys(list(settings.values()))
    words = SettingWords(list(settings.values()))
    labels = {
        name: html.escape(", ".join(words.value(key, settings[name][key]) for key in keys if key in settings[name]))
        for name in points
    }
    most = sweep_figures.MAX_DRAWN
    told = "; ".join(
        f"{name} ({points[name][1]:,.0f} tokens/s, {format_bytes(points[name][0])})" for name in front[:most]
    )
    some = "Its elements" if len(front) <= most else f"The {most} of its {len(front)} elements with the least memory"
    notes = [
        f"The line is the front: no other element is faster in as much memory. {some} are, by memory: {told}.",
        f"A label gives {', '.join(words.keys[key] for key in keys)}; if it has no room, point at the dot.",
        *(f"Not drawn, {what}: {listed(names)}." for what, names in left_out.items() if names),
    ]
    figure = sweep_figures.throughput_against_memory(points, front, labels, how)
    yield Panel("Throughput against memory", figure, f"On the front: {told}.", notes, wide=True, height_px=HEIGHT_PX)


def listed(names: Sequence[str]) -> str:
    """Return the names, or the first of many and the number of the others."""
    most = sweep_figures.MAX_DRAWN
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more, in the table" if len(names) > most else "")
