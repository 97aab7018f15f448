"""The best element of a sweep in a line of text: how far ahead it is, and whether that is more than chance."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from llama_core.chain import steps
from llama_core.errors import RunDirectoryError
from llama_core.records.evaluations import Score, read_scores
from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.directory import SweepDirectory, SweepRecord, has_result, read_record
from llama_core.sweep.divergence import divergence_of
from llama_core.sweep.edges import edges
from llama_core.sweep.objective import SweepObjective
from llama_core.sweep.quality import Quality, best_first, quality_of


def chance(is_told_apart: bool | None, objective: SweepObjective) -> str:
    """Return what to say of a difference by ``Difference.is_told_apart``; empty if it is more than chance."""
    if is_told_apart is None:
        return ", of unknown spread"
    over = "questions" if objective.kind == "score" else "held-out rows"
    return "" if is_told_apart else f", within the spread of the {over}: their order may be chance"


def best_lines(sweep: SweepDirectory) -> Iterator[tuple[str, str]]:
    """Yield lines that name the best element of a sweep and what to try next, each after its word.

    There is none if fewer than two elements have been timed or trained.
    """
    record = read_record(sweep)
    done = [element.name for element in record.runnable if has_result(sweep.run(element.name), record.objective)]
    if len(done) < 2:
        return
    num_done = f"{len(done)} elements {record.objective.done}"
    if record.objective.trains:
        diverged, qualities = _trained(sweep, record, done)
        ranked = best_first(qualities)
        num_diverged = f", {len(diverged)} of them diverged" if diverged else ""
        num_missing = len(done) - len(diverged) - len(ranked)
        missing = f", {num_missing} of them not evaluated" if record.objective.kind == "score" and num_missing else ""
        yield "best", f"{_best(ranked, qualities, record)}; {num_done}{num_diverged}{missing}"
    else:
        timed = {name: steps.read_benchmark(sweep.run(name)) for name in done}
        ranked = sorted(timed, key=lambda name: -timed[name].tokens_per_second)
        yield "best", f"{_fastest(ranked, timed, record)}; {num_done}"
    settings = {element.name: element.settings for element in record.elements}
    for edge in edges([settings[name] for name in ranked], list(settings.values())):
        yield "next", edge.sentence(settings[ranked[0]])


def _trained(sweep: SweepDirectory, record: SweepRecord, names: Sequence[str]) -> tuple[list[str], dict[str, Quality]]:
    """Return the elements that diverged, and how good the models of the others are, if they were evaluated."""
    evaluation = record.sweep_config.base.evaluation
    diverged = []
    qualities = {}
    for name in names:
        run = sweep.run(name)
        summary = steps.training_summary(run)
        if divergence_of(run, summary):
            diverged.append(name)
            continue
        scores: list[Score] = []
        with suppress(RunDirectoryError):  # damaged: as if it had not been evaluated
            scores = read_scores(run)
        quality = quality_of(record.objective, evaluation, summary, scores)
        if quality is not None:
            qualities[name] = quality
    return diverged, qualities


def _fastest(ranked: list[str], timed: Mapping[str, BenchmarkRecord], record: SweepRecord) -> str:
    first, second = ranked[:2]
    rate = timed[first].tokens_per_second
    names = record.names
    if noise := timed[first].why_not_told_apart(timed[second]):
        return f"{names[first]}: {rate:,.0f} tokens/s, not told apart from the next ({names[second]}): {noise}"
    ahead = rate / timed[second].tokens_per_second - 1
    return f"{names[first]}: {rate:,.0f} tokens/s, {ahead:.1%} more than the next ({names[second]})"


def _best(ranked: Sequence[str], qualities: Mapping[str, Quality], record: SweepRecord) -> str:
    objective = record.objective
    if not ranked:
        what = objective.name if objective.kind == "score" else f"a {objective.name}"
        return f"not known: no element has {what} without having diverged"
    names = record.names
    first, *others = ranked
    best = f"{names[first]}: {objective.name} {qualities[first].value:.4f}"
    if not others:
        return f"{best}, the only one to compare"
    ahead = qualities[others[0]].behind(qualities[first])
    text = f"{best}, {ahead} {objective.ahead} the next ({names[others[0]]})"
    return f"{text}{chance(ahead.is_told_apart, objective)}"
