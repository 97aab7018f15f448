"""The page that compares the elements of a sweep, measured or predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.sweep.grid import GridValue, SweepConfig
from llama_core.sweep.judgement import Judgement
from llama_core.sweep.naming import values_in_words
from llama_core.units import format_bytes
from training_reports import sweep_figures
from training_reports.layout import Card, Panel, ReportPage
from training_reports.sweep_history import COLUMNS as HISTORY_COLUMNS
from training_reports.sweep_history import history_panel, history_rows, shown_time
from training_reports.sweep_pareto import are_alike, pareto_panel
from training_reports.sweep_rows import Ranking, SweepRow
from training_reports.sweep_scaling import COLUMN as SCALING
from training_reports.sweep_scaling import ScalingLine, Sized, scaling_cells, scaling_lines, scaling_panel
from training_reports.sweep_table import UNKNOWN, Cell, Table, TableRow, same_in_all


@dataclass(frozen=True)
class Problems:
    """A table of the elements without a result, and why."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str | None, ...]]


@dataclass(frozen=True)
class ElementsPage:
    """What the page says about the elements of a sweep."""

    kind: str
    """``sweep`` or ``predicted sweep``."""
    how: str
    """Whether the figures are measured or predicted."""
    status: str
    """How many elements have a result."""
    style: str
    """The CSS class of the status."""
    facts: Mapping[str, object]
    ranking: Ranking
    skipped: Sequence[SweepRow]
    """The elements that cannot run."""
    details: Mapping[str, Mapping[str, Cell]]
    """The last columns of the table: the cells of elements by name, by the title of the column."""
    left_out: Mapping[str, Sequence[str]]
    """The elements that have no point in the figure of throughput against memory, by the reason."""
    memory: Sequence[Panel]
    """The peak memory of the elements, if it differs."""
    problems: Sequence[Problems]
    cards: Sequence[Card] = ()
    """More cards than those of the ranking."""
    summary: Sequence[tuple[str, str]] = ()
    """Paragraphs, each with its heading."""
    commands: Sequence[tuple[str, str]] = ()
    """What to do next, each with its command."""
    judgement: Judgement | None = None
    """How the elements compare with earlier sweeps of them."""


def elements_page(page: ElementsPage, config: SweepConfig, *, name: str, source: Path) -> ReportPage:
    """Return the page.

    Args:
        page: what the page says.
        config: the sweep.
        name: the title.
        source: the directory that the page is about.
    """
    ranking = page.ranking
    judgement = page.judgement
    lines = scaling_lines(list(_sized(ranking.ranked)))
    return ReportPage(
        "sweep.html",
        kind=page.kind,
        name=name,
        source=source,
        status=page.status,
        style=page.style,
        facts=page.facts,
        summary=page.summary,
        commands=page.commands,
        cards=[*ranking.cards, *page.cards],
        panels=[
            *ranking.panels,
            *_pareto(page),
            *scaling_panel(lines, page.how),
            *page.memory,
            *(history_panel(judgement) if judgement else ()),
        ],
        table=_table(page, lines),
        judgement=judgement,
        since=shown_time(judgement.since) if judgement else "",
        history_columns=HISTORY_COLUMNS,
        history=list(history_rows(judgement)) if judgement else [],
        changes=_changes(judgement) if judgement else [],
        problems=[problems for problems in page.problems if problems.rows],
        config=config,
    )


def _changes(judgement: Judgement) -> list[tuple[str, str, str, str]]:
    return [(one.key, one.before, one.now, ", ".join(one.elements) or "all") for one in judgement.changes]


def _sized(rows: Sequence[SweepRow]) -> Iterator[Sized]:
    """Yield the elements whose plan and throughput are known."""
    for row in rows:
        if row.plan is not None and row.tokens_per_second:
            yield Sized(row.name, row.settings, row.plan, row.tokens_per_second)


def _table(page: ElementsPage, lines: Sequence[ScalingLine]) -> Table:
    """Return the table of all elements: results, then scaling if there is a line, then details."""
    ranking = page.ranking
    columns: dict[str, Mapping[str, Cell]] = {}
    for place, title in enumerate(ranking.columns):
        columns[title] = {name: cells[place] for name, cells in (*ranking.results.items(), *ranking.diverged.items())}
    if lines:
        columns[SCALING] = scaling_cells(lines)
    columns |= page.details
    ranks = ranking.columns[0]
    same = {
        title: text for title, cells in columns.items() if title != ranks and (text := same_in_all(cells)) is not None
    }
    columns = {
        title: cells
        for title, cells in columns.items()
        if title == ranks or (title not in same and any(cell.text is not None for cell in cells.values()))
    }
    best = ranking.ranked[0].name if ranking.results else None
    rows = [
        TableRow(
            row.name,
            row.status,
            row.style,
            [cells.get(row.name, UNKNOWN) for cells in columns.values()],
            href=row.href,
            is_best=row.name == best,
        )
        for row in (*ranking.rows, *page.skipped)
    ]
    return Table(ranking.title, list(columns), ranking.order, rows, same)


def _pareto(page: ElementsPage) -> Iterator[Panel]:
    points = {
        row.name: (float(row.memory_bytes), row.tokens_per_second)
        for row in page.ranking.ranked
        if row.memory_bytes is not None and row.tokens_per_second
    }
    settings = {row.name: row.settings for row in page.ranking.rows}
    return pareto_panel(points, settings, page.left_out, page.how)


def memory_panel(rows: Sequence[SweepRow], notes: Sequence[str], *, lines_per_element: int) -> Iterator[Panel]:
    """Yield a panel with the peak memory of the elements, if it differs between them.

    Args:
        rows: the elements.
        notes: sentences below the figure.
        lines_per_element: height of each element beyond its name, in lines.
    """
    title = "Peak memory by element"
    peaks = {row.name: row.peaks for row in rows if any(row.peaks.values())}
    if not _differ(list(peaks.values())):
        return
    drawn = sweep_figures.first_drawn(peaks)
    summary = "; ".join(f"{name}: {format_bytes(max(filter(None, by.values())))}" for name, by in drawn.items())
    yield Panel(
        title,
        sweep_figures.memory_by_element(drawn),
        summary,
        [*sweep_figures.not_drawn(peaks), *notes],
        wide=True,
        height_px=sweep_figures.height_px(drawn, extra_lines=lines_per_element),
    )


def _differ(peaks: Sequence[Mapping[str, int | None]]) -> bool:
    """Return whether one kind of peak is not alike in all elements."""
    by_kind: dict[str, list[int]] = {}
    for own in peaks:
        for kind, num_bytes in own.items():
            if num_bytes:
                by_kind.setdefault(kind, []).append(num_bytes)
    return not all(map(are_alike, by_kind.values()))


def models(config: SweepConfig, settings: Sequence[Mapping[str, GridValue]]) -> str:
    """Return the models of the elements, for the page's header."""
    used = dict.fromkeys(own.get("model", config.base.model) for own in settings)
    return ", ".join(values_in_words(used))
