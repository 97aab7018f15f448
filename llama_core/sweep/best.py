"""The best element of a sweep in a line of text: how far ahead it is, and whether that is more than chance."""

from collections.abc import Iterator, Mapping

from llama_core.chain import steps
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary
from llama_core.sweep.directory import SweepDirectory, SweepRecord, has_result, read_record
from llama_core.sweep.divergence import divergence_of
from llama_core.sweep.edges import edges

CHANCE = {
    True: "",
    False: ", within the spread of the held-out rows: their order may be chance",
    None: ", of unknown spread",
}
"""What to say of a difference in held-out loss, by ``Difference.is_told_apart``."""


def best_lines(sweep: SweepDirectory) -> Iterator[tuple[str, str]]:
    """Yield lines that name the best element of a sweep and what to try next, each after its word.

    There is none if fewer than two elements have a result.
    """
    record = read_record(sweep)
    done = [element.name for element in record.runnable if has_result(sweep.run(element.name), record.objective)]
    if len(done) < 2:
        return
    num_done = f"{len(done)} elements {record.objective.done}"
    if record.objective.kind == "throughput":
        timed = {name: steps.benchmark(sweep.run(name)) for name in done}
        ranked = sorted(timed, key=lambda name: -timed[name].tokens_per_second)
        yield "best", f"{_fastest(ranked, timed, record)}; {num_done}"
    else:
        summaries = {name: steps.training_summary(sweep.run(name)) for name in done}
        diverged = [name for name, summary in summaries.items() if divergence_of(sweep.run(name), summary)]
        trained = {name: summary.of_part(record.objective.part) for name, summary in summaries.items()}
        ranked = [name for name in by_held_out_loss(trained) if name not in diverged]
        num_diverged = f", {len(diverged)} of them diverged" if diverged else ""
        yield "best", f"{_lowest_loss(ranked, trained, record)}; {num_done}{num_diverged}"
    settings = {element.name: element.settings for element in record.elements}
    for edge in edges([settings[name] for name in ranked], list(settings.values())):
        yield "next", edge.sentence(settings[ranked[0]])


def by_held_out_loss(trained: Mapping[str, TrainingSummary]) -> list[str]:
    """Return the names of the runs with a held-out loss, the lowest first."""
    losses = {name: summary.eval_loss for name, summary in trained.items()}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda name: known[name])


def _fastest(ranked: list[str], timed: Mapping[str, BenchmarkRecord], record: SweepRecord) -> str:
    first, second = ranked[:2]
    rate = timed[first].tokens_per_second
    ahead = rate / timed[second].tokens_per_second - 1
    noise = "" if timed[first].is_told_apart(timed[second]) else ", within the noise of their steps"
    names = record.names
    return f"{names[first]}: {rate:,.0f} tokens/s, {ahead:.1%} more than the next ({names[second]}){noise}"


def _lowest_loss(ranked: list[str], trained: Mapping[str, TrainingSummary], record: SweepRecord) -> str:
    if not ranked:
        return f"not known: no element has a {record.objective.loss} without having diverged"
    names = record.names
    first, *others = ranked
    lowest = f"{names[first]}: {record.objective.loss} {trained[first].eval_loss:.4f}"
    if not others:
        return f"{lowest}, the only one to compare"
    ahead = trained[others[0]].eval_above(trained[first])
    return f"{lowest}, {ahead} below the next ({names[others[0]]}){CHANCE[ahead.is_told_apart]}"
