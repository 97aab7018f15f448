"""A sweep in plain words: what was compared, what won, what did not run, and what to do next."""

from collections.abc import Iterator, Mapping, Sequence

from llama_core.records.directory import command_to_resume
from llama_core.records.evaluations import LOSS
from llama_core.records.measurements import BenchmarkRecord
from llama_core.redaction import shell_word
from llama_core.sweep.best import chance
from llama_core.sweep.directory import SweepDirectory, SweepRecord
from llama_core.sweep.edges import edges
from llama_core.sweep.grid import SweepObjective
from llama_core.sweep.judgement import ComparedElement, Judgement
from llama_core.sweep.naming import SettingWords, differing_keys
from llama_core.sweep.quality import Quality
from llama_core.units import format_count
from training_reports.sweep_history import shown_time
from training_reports.sweep_rows import Ranking, SweepRow
from training_reports.sweep_throughput import MAX_NAMED, not_told_apart

MAX_VALUES = 6
"""Most values of a key that a sentence names."""
LESS = 0.95
"""Share of parameters or tokens below which another element is smaller, or trained for less."""
PLENTY = 0.5
"""Share of a GPU's memory below which a larger microbatch is worth a try."""


def summarise(
    record: SweepRecord, ranking: Ranking, skipped: Sequence[SweepRow], judgement: Judgement | None
) -> list[tuple[str, str]]:
    """Return the paragraphs of the summary: a heading and some sentences each."""
    objective = record.objective
    ranked = ranking.ranked
    paragraphs = {
        "Compared": _compared(record),
        "Best": _best(objective, ranking),
        "Diverged": _diverged(ranking),
        "Not evaluated": _not_evaluated(ranking),
        "Did not run": _left_out(ranking, skipped),
        "Since last time": _since(judgement) if judgement else (),
        "Next": [
            *_edges(ranked, [*ranking.rows, *skipped]),
            *_next(objective, ranked, judgement),
        ],
    }
    written: list[tuple[str, str]] = []
    for name, sentences in paragraphs.items():
        text = " ".join(sentences)
        if text:
            written.append((name, text))
    return written


def next_commands(
    sweep: SweepDirectory,
    objective: SweepObjective,
    ranking: Ranking,
) -> Iterator[tuple[str, str]]:
    """Yield what to do next, each with the command that does it."""
    unfinished = {"cancelled", "preempted", "timeout"}
    if any(row.style == "idle" or row.status in unfinished for row in ranking.unranked):
        command = f"training-infra sweep --sweep-dir {shell_word(sweep.path)} --resume"
        yield "Finish the sweep", command
    if not ranking.ranked:
        return
    best = ranking.ranked[0]
    run = sweep.run(best.folder)
    if not objective.trains:
        command = f"training-infra train --config {shell_word(run.config)}"
        yield "Train with the fastest settings", command
    elif best.training is not None:
        twice = 2 * best.training.steps
        command = f"{command_to_resume(run)} --steps {twice}"
        yield f"Train the best one on, to step {twice:,}", command
        out = shell_word(f"{sweep.name}-best")
        command = f"training-infra export-hf {shell_word(run.path)} --out {out}"
        yield "Export the best one", command


def _compared(record: SweepRecord) -> Iterator[str]:
    settings = [element.settings for element in record.elements]
    words = SettingWords(settings)
    values: list[str] = []
    for key in differing_keys(settings):
        texts = list(words.values[key].values())
        values.append(f"{words.keys[key]} ({_values(texts)})")
    num_elements = len(record.elements)
    if values:
        yield f"{num_elements} elements: {' x '.join(values)}."


def _values(texts: Sequence[str]) -> str:
    if len(texts) <= MAX_VALUES:
        return ", ".join(texts)
    return f"{len(texts)} values, {texts[0]} to {texts[-1]}"


def _best(objective: SweepObjective, ranking: Ranking) -> Iterator[str]:
    ranked = ranking.ranked
    if not ranked:
        without = " without diverging" if ranking.diverged else ""
        yield f"No element has been {objective.ranked}{without} yet."
        return
    yield from _best_trained(ranked, objective) if objective.trains else _fastest(_timed(ranked))


def _fastest(timed: Mapping[str, BenchmarkRecord]) -> Iterator[str]:
    fastest, *slower = timed
    rate = timed[fastest].tokens_per_second
    close = not_told_apart(timed)
    yield f"{fastest}: {rate:,.0f} tokens/s."
    if close:
        yield f"Not told apart from it by their steps: {_listed(close)}."
    if apart := [name for name in slower if name not in close]:
        share = timed[apart[0]].tokens_per_second / rate
        yield f"The next ({apart[0]}) reaches {share:.0%} of that."
        if len(apart) > 1:
            share = timed[apart[-1]].tokens_per_second / rate
            yield f"The slowest ({apart[-1]}) reaches {share:.0%}."


def _best_trained(ranked: Sequence[SweepRow], objective: SweepObjective) -> Iterator[str]:
    qualities = _qualities(ranked)
    best, *others = qualities
    quality = qualities[best]
    yield f"{best}: {objective.name} {quality.value:.4f}."
    if others:
        behind = qualities[others[0]].behind(quality)
        by_chance = chance(behind.is_told_apart, objective)
        yield f"The next ({others[0]}) is {behind} {objective.behind}{by_chance}."
    if more := [name for name in _close(qualities) if name != others[0]]:
        yield f"{len(more)} more {'is' if len(more) == 1 else 'are'} within the spread."
    yield from _not_a_setting(ranked)
    yield _caveat(ranked)


def _qualities(ranked: Sequence[SweepRow]) -> dict[str, Quality]:
    return {row.name: row.quality for row in ranked if row.quality is not None}


def _close(qualities: Mapping[str, Quality]) -> list[str]:
    """Return the elements that chance alone may have put behind the first."""
    best, *others = qualities
    close: list[str] = []
    for name in others:
        behind = qualities[name].behind(qualities[best])
        # None, where the spread is unknown, does not count
        if behind.is_told_apart is False:
            close.append(name)
    return close


def _not_a_setting(ranked: Sequence[SweepRow]) -> Iterator[str]:
    """Yield sentences if the best element has the larger model, or was trained on more tokens."""
    best = ranked[0]
    sizes = {row.name: row.num_parameters for row in ranked if row.num_parameters}
    tokens = {row.name: row.training.tokens for row in ranked if row.training}
    reasons = []
    behind: set[str] = set()
    for amounts, reason in (
        (sizes, "is the larger model ({} parameters)"),
        (tokens, "was trained on more tokens ({})"),
    ):
        most = amounts.get(best.name, 0)
        with_less = {name for name, amount in amounts.items() if amount < LESS * most}
        if with_less and most == max(amounts.values()):
            reasons.append(reason.format(format_count(most)))
            behind |= with_less
    if reasons:
        other = next(row for row in ranked if row.name in behind)
        value = f" ({other.quality.value:.4f})" if other.quality else ""
        yield f"The best {' and '.join(reasons)}, which need not be a better setting."
        yield f"Of those with less, the best is {other.name}{value}."


def _caveat(ranked: Sequence[SweepRow]) -> str:
    seeds = {row.settings.get("training.seed") for row in ranked}
    steps = sorted({row.training.steps for row in ranked if row.training})
    span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    seeded = "One seed each" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{seeded}, {span} steps: other seeds or longer training may change the order."


def _diverged(ranking: Ranking) -> Iterator[str]:
    diverged = [row.name for row in ranking.rows if row.diverged]
    if diverged:
        yield f"{len(diverged)} of {len(ranking.rows)}: {_listed(diverged)}."


def _not_evaluated(ranking: Ranking) -> Iterator[str]:
    rows = [row for row in ranking.rows if row.not_evaluated]
    if rows:
        named = _with_reasons([(row.name, row.not_evaluated) for row in rows])
        yield f"{len(rows)} of {len(ranking.rows)} trained without getting a score: {named}."


def _timed(ranked: Sequence[SweepRow]) -> dict[str, BenchmarkRecord]:
    return {row.name: row.benchmark for row in ranked if row.benchmark is not None}


def _left_out(ranking: Ranking, skipped: Sequence[SweepRow]) -> Iterator[str]:
    impossible = [(row.name, row.skipped) for row in skipped]
    failed: list[tuple[str, str]] = []
    for row in ranking.missing:
        outcome = row.outcome
        if outcome:
            failed.append((row.name, f"{outcome.status}, {outcome.reason}"))
    num_elements = len(ranking.rows) + len(skipped)
    for what, reasons in (("could not run", impossible), ("failed", failed)):
        if reasons:
            yield f"{len(reasons)} of {num_elements} {what}: {_with_reasons(reasons)}."


def _with_reasons(reasons: Sequence[tuple[str, str]]) -> str:
    """Return names with a reason each, of as many elements as a sentence has room for."""
    parts: list[str] = []
    for name, reason in reasons[:MAX_NAMED]:
        text = reason.rstrip(".")
        parts.append(f"{name} ({text})")
    if len(reasons) > MAX_NAMED:
        parts.append(f"and {len(reasons) - MAX_NAMED} more, listed below")
    return "; ".join(parts)


def _since(judgement: Judgement) -> Iterator[str]:
    if not judgement.since:
        yield "This is the first result of these elements on this kind of machine."
        return
    for verdict in ("slower", "faster", "disturbed"):
        found = judgement.of(verdict)
        for one in found[:MAX_NAMED]:
            yield f"{one.element} is {verdict}: {one.sentence()}."
        if len(found) > MAX_NAMED:
            yield f"{len(found) - MAX_NAMED} more are {verdict}, listed below."
    if same := judgement.of("same"):
        some = _counted(same, judgement)
        yield f"{some[0].upper()}{some[1:]} are as fast as before, within the noise."
    if few := judgement.of("too few"):
        most = max(len(one.earlier) for one in few)
        results = "result" if most == 1 else "results"
        some = _counted(few, judgement)
        yield f"For {some} there is no verdict yet: only {most} earlier {results}."
    changed = ", ".join(change.key for change in judgement.changes)
    if changed:
        yield f"Changed since {shown_time(judgement.since)}: {changed}."
    else:
        yield "No version, commit or setting has changed."


def _counted(some: Sequence[ComparedElement], judgement: Judgement) -> str:
    num_elements = len(judgement.elements)
    return "all elements" if len(some) == num_elements else f"{len(some)} of {num_elements}"


def _next(
    objective: SweepObjective,
    ranked: Sequence[SweepRow],
    judgement: Judgement | None,
) -> Iterator[str]:
    if judgement:
        yield from _look_for(judgement)
    if objective.trains:
        yield from _more_to_ask(objective, ranked)
        return
    timed = _timed(ranked)
    if timed and not_told_apart(timed):
        steps = 4 * max(len(one.step_seconds) for one in timed.values())
        yield f"To tell those apart that are as fast, time more steps: benchmark.steps={steps}."
    if timed:
        yield from _room(ranked[0])


def _more_to_ask(objective: SweepObjective, ranked: Sequence[SweepRow]) -> Iterator[str]:
    qualities = _qualities(ranked)
    if not qualities or not _close(qualities):
        return
    rows = next(iter(qualities.values())).rows
    number = f", here {len(rows.counts)}" if rows else ""
    more = f"rows (training.eval_sequences{number})"
    if objective.kind == "score":
        more = "questions, or on more tasks"
        if objective.metric == LOSS:
            more = "sequences (evaluation.sequences)"
    seeds = "" if any("training.seed" in row.settings for row in ranked) else _SEEDS
    yield f"To tell the first ones apart, evaluate on more {more}{seeds}."


_SEEDS = ", and add training.seed: [0, 1, 2] to the grid, which shows how far chance alone moves the result"


def _look_for(judgement: Judgement) -> Iterator[str]:
    commits = [change for change in judgement.changes if change.key == "commit"]
    if judgement.of("slower") and commits:
        before = commits[0].before.removesuffix("-dirty")
        now = commits[0].now.partition(" ")[0].removesuffix("-dirty")
        if before != now:
            yield f"Look for the cause in git log {before}..{now}."
        else:
            yield "Look at the files not committed."
    noisy = [one for one in judgement.elements if one.notes]
    if noisy:
        counted = f"{len(noisy)} of {len(judgement.elements)}"
        yield f"{counted} results are noisy: repeat them while the machine is idle."


def _edges(ranked: Sequence[SweepRow], every: Sequence[SweepRow]) -> Iterator[str]:
    for edge in edges([row.settings for row in ranked], [row.settings for row in every]):
        yield edge.sentence(ranked[0].settings)


def _room(best: SweepRow) -> Iterator[str]:
    if best.memory_bytes is None or not best.usable_bytes or best.device != "cuda":
        return
    share = best.memory_bytes / best.usable_bytes
    if share < PLENTY:
        faster = "a larger microbatch or less recomputation may be faster"
        yield f"It uses {share:.0%} of the GPU's memory: {faster}."


def _listed(names: Sequence[str]) -> str:
    if len(names) > MAX_NAMED + 1:
        names = [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]
    return "; ".join(names)
