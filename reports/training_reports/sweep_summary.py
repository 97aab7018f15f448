"""A sweep in plain words: what was best, what did not run, what has changed since last time, and what to try next."""

import shlex
from collections.abc import Iterator, Sequence

from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.directory import SweepDirectory
from llama_core.sweep.grid import DONE, Objective
from llama_core.sweep.judgement import ComparedElement, Judgement
from training_reports.sweep_history import shown_time
from training_reports.sweep_rows import Ranking, Row
from training_reports.sweep_throughput import MOST_NAMED, not_told_apart

PLENTY = 0.5
"""Share of a GPU's memory below which a larger microbatch is worth a try."""


def summarise(
    sweep: SweepDirectory,
    objective: Objective,
    ranking: Ranking,
    skipped: Sequence[Row],
    judgement: Judgement | None,
) -> list[tuple[str, str]]:
    """Return the paragraphs of the summary: a heading and some sentences each."""
    ranked = ranking.ranked
    others = ranking.unranked
    paragraphs = {
        "Best": _best(objective, ranked),
        "Did not run": _left_out(ranking, skipped, others),
        "Since last time": _since(judgement) if judgement else (),
        "Try next": [
            *_next(sweep, objective, ranked, others, judgement),
            *_edges(ranked, [*ranking.rows, *skipped]),
        ],
    }
    texts = {name: " ".join(sentences) for name, sentences in paragraphs.items()}
    return [(name, text) for name, text in texts.items() if text]


def _best(objective: Objective, ranked: Sequence[Row]) -> Iterator[str]:
    if not ranked:
        yield f"No element has been {DONE[objective]} yet."
        return
    if objective == "loss":
        yield from _lowest_loss(ranked)
        return
    timed = _timed(ranked)
    fastest, *slower = timed
    rate = timed[fastest].tokens_per_second
    close = not_told_apart(timed)
    if close:
        yield f"{_listed([fastest, *close])} are equally fast within the noise of their steps: {rate:,.0f} tokens/s."
    else:
        yield f"{fastest} is the fastest, with {rate:,.0f} tokens/s."
    if apart := [name for name in slower if name not in close]:
        yield f"The next, {apart[0]}, reaches {timed[apart[0]].tokens_per_second / rate:.0%} of that."
        if len(apart) > 1:
            yield f"The slowest, {apart[-1]}, reaches {timed[apart[-1]].tokens_per_second / rate:.0%}."


def _lowest_loss(ranked: Sequence[Row]) -> Iterator[str]:
    losses = {row.name: row.training.eval_loss for row in ranked if row.training}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    best, *others = known
    yield f"{best} has the lowest held-out loss, {known[best]:.4f}."
    if others:
        yield f"The next, {others[0]}, is {known[others[0]] - known[best]:.4f} above."


def _timed(ranked: Sequence[Row]) -> dict[str, BenchmarkRecord]:
    return {row.name: row.benchmark for row in ranked if row.benchmark is not None}


def _left_out(ranking: Ranking, skipped: Sequence[Row], others: Sequence[Row]) -> Iterator[str]:
    failed = [(row.name, f"{outcome.status}, {outcome.reason}") for row in others if (outcome := row.outcome)]
    for what, reasons in (("could not run", [(row.name, row.skipped) for row in skipped]), ("failed", failed)):
        if reasons:
            named = "; ".join(f"{name} ({reason.rstrip('.')})" for name, reason in reasons[:MOST_NAMED])
            more = f"; and {len(reasons) - MOST_NAMED} more, listed below" if len(reasons) > MOST_NAMED else ""
            yield f"{len(reasons)} of {len(ranking.rows) + len(skipped)} {what}: {named}{more}."


def _since(judgement: Judgement) -> Iterator[str]:
    if not judgement.since:
        yield "This is the first result of these elements on this kind of machine."
        return
    for verdict in ("slower", "faster", "disturbed"):
        found = judgement.of(verdict)
        for one in found[:MOST_NAMED]:
            yield f"{one.element} is {verdict}: {one.sentence()}."
        if len(found) > MOST_NAMED:
            yield f"{len(found) - MOST_NAMED} more are {verdict}, listed below."
    if same := judgement.of("same"):
        some = _counted(same, judgement)
        yield f"{some[0].upper()}{some[1:]} are as fast as before, within the noise."
    if few := judgement.of("too few"):
        most = max(len(one.earlier) for one in few)
        results = "result" if most == 1 else "results"
        yield f"For {_counted(few, judgement)} there is no verdict yet: only {most} earlier {results}."
    changed = ", ".join(change.key for change in judgement.changes)
    yield (
        f"Changed since {shown_time(judgement.since)}: {changed}."
        if changed
        else "No version, commit or setting has changed."
    )


def _counted(some: Sequence[ComparedElement], judgement: Judgement) -> str:
    return "all elements" if len(some) == len(judgement.elements) else f"{len(some)} of {len(judgement.elements)}"


def _next(
    sweep: SweepDirectory,
    objective: Objective,
    ranked: Sequence[Row],
    others: Sequence[Row],
    judgement: Judgement | None,
) -> Iterator[str]:
    if any(row.style == "idle" or row.status in {"cancelled", "preempted", "timeout"} for row in others):
        yield f"Finish the sweep: training-infra sweep --sweep-dir {shlex.quote(str(sweep.path))} --resume."
    if judgement:
        yield from _look_for(judgement)
    timed = _timed(ranked) if objective == "throughput" else {}
    if timed and (close := not_told_apart(timed)):
        steps = 4 * max(len(one.step_seconds) for one in timed.values())
        yield f"To tell {_listed([next(iter(timed)), *close])} apart, time more steps: benchmark.steps={steps}."
    if timed:
        yield from _room(ranked[0])


def _look_for(judgement: Judgement) -> Iterator[str]:
    commits = [change for change in judgement.changes if change.key == "commit"]
    if judgement.of("slower") and commits:
        before, now = (
            commit.removesuffix("-dirty") for commit in (commits[0].before, commits[0].now.partition(" ")[0])
        )
        yield f"Look for the cause in git log {before}..{now}." if before != now else "Look at the files not committed."
    noisy = [one for one in judgement.elements if one.notes]
    if noisy:
        yield f"{len(noisy)} of {len(judgement.elements)} results are noisy: repeat them while the machine is idle."


def _edges(ranked: Sequence[Row], every: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each setting of the best element that is the largest or smallest in the grid."""
    for key, value in ranked[0].settings.items() if ranked else ():
        if len({row.settings[key] for row in ranked}) < 2:  # nothing says that it matters
            continue
        values = {row.settings[key] for row in every}
        numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
        if len(numbers) < len(values):
            continue
        name = key.rpartition(".")[2]
        if value == numbers[-1]:
            yield f"The best {name}, {value}, is the largest in the grid: try larger ones."
        elif value == numbers[0] and numbers[0] != 1 and numbers[0] > 0:
            yield f"The best {name}, {value}, is the smallest in the grid: try smaller ones."


def _room(best: Row) -> Iterator[str]:
    if best.memory_bytes is None or not best.usable_bytes or best.device != "cuda":
        return
    share = best.memory_bytes / best.usable_bytes
    if share < PLENTY:
        yield f"It uses {share:.0%} of the GPU's memory: a larger microbatch or less recomputation may be faster."


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED + 1:
        names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
