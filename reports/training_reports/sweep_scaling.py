"""Throughput by the number of ranks, against the ideal: tokens/s in proportion to the ranks."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from llama_core.planning.plan import ParallelPlan
from llama_core.sweep.grid import GridValue
from llama_core.sweep.naming import SettingWords, differing_keys
from training_reports import sweep_figures
from training_reports.figures import LEGEND_LINE_PX
from training_reports.layout import Panel
from training_reports.sweep_table import Cell

COLUMN = "Scaling"
SIZES = frozenset(("parallel.gpus", "launch.nodes"))
"""Keys that ask for a number of ranks."""
DEGREES = frozenset(f"parallel.{axis}" for axis in ("tp", "pp", "cp", "ep", "dp_replicate"))
"""Keys that set how ranks divide the work."""
AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context"}
"""Kinds of parallelism; the product of their degrees is the number of ranks."""

MAX_LINES = 6
"""Most lines in the figure and in the text below it."""
LEGEND_LETTERS = 38
"""Most letters of a line of the legend, on a narrow page."""


@dataclass(frozen=True)
class Sized:
    """An element, its plan and its throughput."""

    name: str
    settings: Mapping[str, GridValue]
    plan: ParallelPlan
    tokens_per_second: float


@dataclass(frozen=True)
class ScalingLine:
    """Elements that differ in nothing but the number of ranks, the fewest ranks first; each number occurs once."""

    axes: str
    """The kinds of parallelism that grow, such as ``data`` or ``data and tensor``."""
    name: str
    elements: tuple[Sized, ...]

    def ideal(self, num_ranks: int) -> float:
        """Return the tokens/s if every rank did as much as a rank of the smallest element."""
        first = self.elements[0]
        return first.tokens_per_second * num_ranks / first.plan.world_size

    def efficiency(self, element: Sized) -> float:
        """Return the throughput of an element over the ideal one."""
        return element.tokens_per_second / self.ideal(element.plan.world_size)


def scaling_lines(elements: Sequence[Sized]) -> list[ScalingLine]:
    """Return the lines along which the number of ranks grows and no other setting changes.

    A line joins elements whose settings differ only in the number of ranks, whatever their plans, or whose plans differ
    only in the degree of one kind of parallelism. A line that is part of another is left out. The line that reaches the
    most tokens/s comes first.
    """
    groups: dict[str, list[Sized]] = {}
    for kind in (None, *AXES):
        for element in elements:
            groups.setdefault(json.dumps([kind, _common(element, kind)], sort_keys=True), []).append(element)
    settings = [one.settings for one in elements]
    compared = [key for key in differing_keys(settings) if key not in SIZES | DEGREES]
    words = SettingWords(settings)
    lines: list[ScalingLine] = []
    for group in groups.values():
        fastest: dict[int, Sized] = {}
        for element in sorted(group, key=lambda one: one.tokens_per_second):
            fastest[element.plan.world_size] = element
        names = {one.name for one in fastest.values()}
        if len(fastest) > 1 and not any(names <= {one.name for one in line.elements} for line in lines):
            lines.append(_line(tuple(fastest[size] for size in sorted(fastest)), compared, words))
    return sorted(lines, key=lambda line: -max(one.tokens_per_second for one in line.elements))


def _common(element: Sized, kind: str | None) -> Mapping[str, object]:
    """Return the settings that the elements on a line share and, for a kind of parallelism, the other degrees."""
    if kind is None:
        return {key: value for key, value in element.settings.items() if key not in SIZES}
    others = {axis: getattr(element.plan, axis) for axis in (*AXES, "ep") if axis != kind}
    return others | {key: value for key, value in element.settings.items() if key not in SIZES | DEGREES}


def _line(elements: tuple[Sized, ...], compared: Sequence[str], words: SettingWords) -> ScalingLine:
    """Return a line with its name; ``compared`` are the keys in which elements differ, degrees and sizes left out."""
    degrees = {axis: [getattr(one.plan, axis) for one in elements] for axis in AXES}
    axes = " and ".join(AXES[axis] for axis, sizes in degrees.items() if len(set(sizes)) > 1)
    common = [f"{axis} {sizes[0]}" for axis, sizes in degrees.items() if len(set(sizes)) == 1 and sizes[0] > 1]
    common += [words.settings(elements[0].settings, [key]) for key in compared]
    return ScalingLine(axes, ", ".join([f"{axes} parallel", *common]), elements)


def scaling_cells(lines: Sequence[ScalingLine]) -> dict[str, Cell]:
    """Return the efficiency of each element that is on a line, by name; one for each of its lines, and its kind."""
    cells = {line.elements[0].name: Cell("100.0%", 1.0) for line in lines}
    found: dict[str, list[tuple[float, str]]] = {}
    for line in lines:
        for element in line.elements[1:]:
            found.setdefault(element.name, []).append((line.efficiency(element), line.axes))
    return cells | {
        name: Cell("; ".join(f"{efficiency:.1%} {axes}" for efficiency, axes in shares), shares[0][0])
        for name, shares in found.items()
    }


def scaling_panel(lines: Sequence[ScalingLine], how: str) -> Iterator[Panel]:
    """Yield a panel if there is a line.

    Args:
        lines: the lines.
        how: whether the throughputs are measured or predicted.
    """
    if not lines:
        return
    drawn = lines[:MAX_LINES]
    told = [
        f"{line.name}: {', '.join(f'{line.efficiency(one):.1%} on {one.plan.world_size}' for one in line.elements[1:])}"
        for line in drawn
    ]
    notes = [
        "Elements on a line differ only in the number of ranks. The dotted line is the ideal, in which every rank does "
        f"as much as a rank of the smallest element.{_batches(lines)}",
        f"Share of the ideal, by ranks. {'; '.join(told)}.",
        *([f"The {MAX_LINES} fastest of {len(lines)} lines; the table has all."] if len(lines) > MAX_LINES else ()),
    ]
    points = {
        "<br>".join(wrap(html.escape(line.name), LEGEND_LETTERS)): [
            (one.plan.world_size, one.tokens_per_second, line.ideal(one.plan.world_size), one.name)
            for one in line.elements
        ]
        for line in drawn
    }
    figure = sweep_figures.throughput_by_ranks(points, how)
    height = 320 + LEGEND_LINE_PX * sum(name.count("<br>") + 1 for name in points)
    yield Panel("Scaling", figure, f"Share of the ideal: {'; '.join(told)}.", notes, wide=True, height_px=height)


def _batches(lines: Sequence[ScalingLine]) -> str:
    """Return a sentence on how the batch grows, if it does the same on every line."""
    pairs = [(line.elements[0].plan, one.plan) for line in lines for one in line.elements[1:]]
    if all(plan.batch_size == first.batch_size for first, plan in pairs):
        return " All have the same batch (strong scaling)."
    if all(plan.batch_size * first.world_size == first.batch_size * plan.world_size for first, plan in pairs):
        return " The batch grows with the ranks (weak scaling)."
    return ""
