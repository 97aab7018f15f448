"""The report of a sweep: a single HTML file that compares its elements, made from the sweep's directory alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llama_core.sweep.directory import SweepDirectory, SweepRecord, read_record
from llama_core.sweep.grid import SweepObjective
from llama_core.sweep.judgement import read_judgement
from training_reports import sweep_throughput, sweep_trained
from training_reports.contents import MEASURES, RunContents
from training_reports.layout import Card, ReportPage
from training_reports.sweep_page import ElementsPage, Problems, elements_page, memory_panel, models
from training_reports.sweep_rows import NOT_EVALUATED, Ranking, SweepRow, measured_row
from training_reports.sweep_summary import next_commands, summarise
from training_reports.sweep_table import PEAKS, PREDICTED, Cell, bytes_cell, number, predicted_cell


def write_report(sweep: SweepDirectory) -> Path:
    """Write the report of ``sweep`` as it stands, the best element first, and return its path.

    Raises:
        RunDirectoryError: if the directory holds no sweep, or the page cannot be written.
    """
    return page_of(sweep).write(sweep.report)


def page_of(sweep: SweepDirectory) -> ReportPage:
    """Return the report of ``sweep`` as it stands.

    Raises:
        RunDirectoryError: if the directory holds no sweep.
    """
    record = read_record(sweep)
    names = record.names
    objective = record.objective
    config = record.sweep_config
    evaluation = config.base.evaluation
    rows = [
        measured_row(names[element.name], element, RunContents.read(sweep.run(element.name)), objective, evaluation)
        for element in record.elements
    ]
    skipped = [row for row in rows if row.skipped]
    ranking = _ranking(objective, [row for row in rows if not row.skipped])
    judgement = read_judgement(sweep)
    done = objective.done
    page = ElementsPage(
        kind="sweep",
        how="measured",
        status=_status(ranking, done),
        style=_style(ranking.unranked),
        facts={
            "Model": models(config, [element.settings for element in record.elements]),
            "Launcher": config.base.launch.launcher,
            **ranking.facts,
            **({"In all elements": ", ".join(names.shared)} if names.shared else {}),
        },
        ranking=ranking,
        skipped=skipped,
        details=_details([*ranking.rows, *skipped]),
        left_out=_left_out(ranking, skipped),
        memory=list(memory_panel(ranking.rows, list(_memory_notes(ranking.rows)), lines_per_element=2)),
        problems=[
            Problems(
                "Diverged",
                ("Element", "What happened"),
                [(row.name, row.diverged) for row in ranking.rows if row.diverged],
            ),
            Problems(
                "Trained, but not evaluated",
                ("Element", "What happened"),
                [(row.name, row.not_evaluated) for row in ranking.rows if row.not_evaluated],
            ),
            Problems(
                f"Ended without being {done}", ("Element", "What happened", "Next"), list(_ended(ranking.missing))
            ),
            Problems("Skipped: cannot run", ("Element", "Reason"), [(row.name, row.skipped) for row in skipped]),
        ],
        cards=[_counts(record, ranking)],
        summary=summarise(record, ranking, skipped, judgement),
        commands=list(next_commands(sweep, objective, ranking)),
        judgement=judgement,
    )
    return elements_page(page, config, name=config.name, source=sweep.path)


def _ranking(objective: SweepObjective, rows: Sequence[SweepRow]) -> Ranking:
    return sweep_trained.rank(rows, objective) if objective.trains else sweep_throughput.rank(rows)


def _status(ranking: Ranking, done: str) -> str:
    has_run = f"{len(ranking.rows) - len(ranking.missing)} of {len(ranking.rows)} {done}"
    return ", ".join([has_run, *(f"{number} {what}" for what, number in _unsound(ranking).items())])


def _unsound(ranking: Ranking) -> dict[str, int]:
    """Return how many elements have run, but are not ranked, by the reason."""
    numbers = {
        "diverged": sum(bool(row.diverged) for row in ranking.rows),
        NOT_EVALUATED: sum(bool(row.not_evaluated) for row in ranking.rows),
    }
    return {what: number for what, number in numbers.items() if number}


def _style(unfinished: Sequence[SweepRow]) -> str:
    """Return the CSS class of the sweep: that of its worst element, but ``warn`` for one interrupted or diverged."""
    styles = {"warn" if row.diverged else row.style for row in unfinished}
    if not styles:
        return "good"
    if "bad" in styles:
        return "bad"
    return "idle" if "idle" in styles else "warn"


def _details(rows: Sequence[SweepRow]) -> dict[str, Mapping[str, Cell]]:
    """Return the times, the peaks and the plan of each element; without a prediction, no column for it."""
    columns: dict[str, Mapping[str, Cell]] = {}
    if any(row.predicted_seconds for row in rows):
        columns[PREDICTED] = {row.name: predicted_cell(row.predicted_seconds, row.measured_seconds) for row in rows}
    columns["Step measured"] = {row.name: number(row.measured_seconds, "{:.3f} s") for row in rows}
    for how, title in PEAKS.items():
        columns[title] = {row.name: bytes_cell(row.peaks[how]) for row in rows}
    columns["Plan"] = {row.name: Cell(row.plan.summary() if row.plan else None) for row in rows}
    return columns


def _left_out(ranking: Ranking, skipped: Sequence[SweepRow]) -> dict[str, list[str]]:
    """Return the elements that were not timed, by the reason."""
    untimed = [row for row in ranking.rows if row.name not in ranking.results or row.benchmark is None]
    return {
        "skipped because they cannot run": [row.name for row in skipped],
        "failed": [f"{row.name} ({row.status})" for row in untimed if row.style == "bad"],
        "without a result": [f"{row.name} ({row.status})" for row in untimed if row.style != "bad"],
    }


def _memory_notes(rows: Sequence[SweepRow]) -> Iterator[str]:
    measures = {MEASURES.get(row.device) for row in rows if row.peaks["measured"]}
    for measure in sorted(filter(None, measures)):
        yield f"The measurement is the peak of {measure}, less what was held before the model was built."


def _ended(missing: Sequence[SweepRow]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name of each element whose job has ended without a result, how it ended, and what to do."""
    for row in missing:
        outcome = row.outcome
        if outcome is not None:
            yield row.name, f"{outcome.status}: {outcome.reason}", outcome.next_action or None


def _counts(record: SweepRecord, ranking: Ranking) -> Card:
    done = record.objective.done
    num_missing = len(ranking.missing)
    num_skipped = len(record.elements) - len(ranking.rows)
    lines = [f"{num_missing} of them not {done} (yet)." if num_missing else f"All of them {done}."]
    lines += [f"{number} of them {what}." for what, number in _unsound(ranking).items()]
    if num_skipped:
        lines.append(f"{num_skipped} more {'was' if num_skipped == 1 else 'were'} skipped.")
    return Card("Elements", str(len(ranking.rows)), "can run", lines)
