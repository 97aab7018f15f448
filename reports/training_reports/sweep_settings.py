"""The held-out loss, or the score, that ranks the elements of a sweep against each of their settings."""

from collections.abc import Callable, Iterator, Sequence

from llama_core.sweep.edges import NOMINAL, is_geometric, numbers_of
from llama_core.sweep.naming import SettingWords, differing_keys
from llama_core.sweep.objective import SweepObjective
from llama_core.sweep.quality import Quality
from training_reports import sweep_figures
from training_reports.figures import LEGEND_LINE_PX
from training_reports.layout import Panel
from training_reports.sweep_figures import Point
from training_reports.sweep_rows import SweepRow

HEIGHT_PX = 300
"""Height of a figure without its legend."""
BARS = (
    "A bar is two standard errors of the distance to the best element: one that reaches the dotted line, the best "
    "element's, may differ by chance alone."
)


def settings_panels(
    rows: Sequence[SweepRow], ranked: Sequence[str], objective: SweepObjective, unit: str
) -> Iterator[Panel]:
    """Yield a panel for each setting in which elements differ; for a seed, only if nothing else differs.

    Args:
        rows: all elements that can run, in the order of the grid.
        ranked: the names of those that were evaluated and did not diverge, the best first.
        objective: what ranks them.
        unit: of their losses; empty for scores.
    """
    rows = [row for row in rows if row.name in ranked or row.diverged]
    keys = [key for key in differing_keys([row.settings for row in rows]) if all(key in row.settings for row in rows)]
    drawn = [key for key in keys if key not in NOMINAL] or keys
    for key in drawn if ranked else ():
        yield _panel(key, keys, rows, ranked, objective, unit=unit, wide=len(drawn) == 1)


def _panel(
    key: str,
    keys: Sequence[str],
    rows: Sequence[SweepRow],
    ranked: Sequence[str],
    objective: SweepObjective,
    *,
    unit: str,
    wide: bool,
) -> Panel:
    settings = [row.settings for row in rows]
    words = SettingWords(settings)
    numbers = [] if key in NOMINAL else numbers_of(settings, key)
    place = _places(key, numbers, words)
    others = [other for other in keys if other != key]
    by_name = {row.name: row for row in rows}
    lines: dict[str, list[SweepRow]] = {}
    for name in ranked:
        lines.setdefault(words.settings(by_name[name].settings, others), []).append(by_name[name])
    best = by_name[ranked[0]].quality
    points = {
        name: [_point(row, place(row)[1], best) for row in sorted(line, key=place)]
        for name, line in sweep_figures.first_drawn(lines).items()
    }
    crosses = [(row.name, place(row)[1]) for row in rows if row.diverged]
    name = objective.name if objective.kind == "score" else "held-out loss"
    figure = sweep_figures.quality_by_value(
        points,
        y_title=f"{name} ({unit})" if unit else name,
        higher_is_better=best is not None and best.higher_is_better,
        values=numbers or list(words.values[key].values()),
        x_title=words.keys[key],
        is_log=is_geometric(numbers),
        diverged=crosses,
    )
    notes = list(sweep_figures.not_drawn(lines, "the table has all elements"))
    if any(point.spread for line in points.values() for point in line):
        notes.append(BARS)
    if crosses:
        notes.append("A cross is an element that diverged, whatever its loss.")
    told = "; ".join(f"{point.name}: {point.value:.4f}" for line in points.values() for point in line)
    height = HEIGHT_PX + LEGEND_LINE_PX * (len(points) + bool(crosses))
    summary = f"{told} {unit}".rstrip()
    return Panel(f"{objective.title} by {words.keys[key]}", figure, f"{summary}.", notes, wide=wide, height_px=height)


def _places(
    key: str, numbers: Sequence[int | float], words: SettingWords
) -> Callable[[SweepRow], tuple[float, int | float | str]]:
    """Return a function of an element: its place on the x axis, and its value there."""
    in_order = list(words.values[key].values())

    def place(row: SweepRow) -> tuple[float, int | float | str]:
        value = row.settings[key]
        if numbers and isinstance(value, int | float):
            return value, value
        text = words.value(key, value)
        return in_order.index(text), text

    return place


def _point(row: SweepRow, x: int | float | str, best: Quality | None) -> Point:
    quality = row.quality
    if quality is None or best is None:
        raise ValueError(f"{row.name} was not evaluated")
    return Point(row.name, x, quality.value, None if quality is best else quality.behind(best).spread)
