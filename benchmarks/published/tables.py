"""A ledger as Markdown tables, for the terminal and for ``docs/memory.md``."""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.published.comparison import OFF_BY, Entry, Ledger, Summary
from llama_core.planning.frameworks.peak import SLACK
from llama_core.planning.frameworks.registry import FRAMEWORKS


def rows_table(ledger: Ledger) -> str:
    """Return every row with its figures."""
    header = ("id", "framework", "model", "statistic", "measured GiB", "predicted GiB", "error")
    return _table(header, map(_row, ledger.entries))


def _row(entry: Entry) -> Sequence[str]:
    row = entry.row
    prediction = entry.prediction
    measured = f"{entry.measured:.1f}" if entry.measured else ""
    error = f"{entry.error:+.1%}" if entry.error is not None else ""
    framework = _framework(entry)
    if prediction is None:
        return entry.name, framework, row.get("model") or "", "", measured, "refused", ""
    return (
        entry.name,
        framework,
        row.get("model") or "",
        prediction.statistic,
        measured,
        f"{prediction.gib:.1f}",
        error,
    )


def summary_table(ledger: Ledger) -> str:
    """Return the errors over all rows, by framework and by statistic, or an empty string if nothing was measured."""
    summary = ledger.summary()
    if summary is None:
        return ""
    stated = ledger.stating_conditions()
    groups: list[tuple[str, Summary]] = [("all", summary)]
    groups += [("conditions stated", stated)] if stated else []
    groups += ledger.by_framework().items()
    groups += ledger.by_statistic().items()
    header = ("rows", "number", "mean absolute error", "bias", f"off by more than {OFF_BY:.0%}")
    return _table(
        header,
        ((name, str(s.count), f"{s.mean_absolute:.1%}", f"{s.bias:+.1%}", f"{s.share_off:.0%}") for name, s in groups),
    )


def remarks(ledger: Ledger) -> Iterator[str]:
    """Yield remarks: refused rows, wrong verdicts on fitting, the worst rows, equal rows with different figures."""
    mapped = len(ledger.entries) - len(ledger.refused)
    yield f"{mapped} of {len(ledger.entries)} rows are mapped."
    for entry in ledger.refused:
        yield f"{entry.name} is refused: {entry.reason}."
    if not ledger.compared:
        return
    fit = ledger.fit()
    yield (
        f"Of {fit.count} rows whose GPU is known, {fit.false_hopes} are wrongly predicted to fit, "
        f"and {fit.false_alarms} wrongly predicted not to fit."
    )
    worst = (f"{entry.name} ({entry.error:+.0%})" for entry in ledger.compared[:6])
    yield f"The worst rows are {', '.join(worst)}."
    for entries in ledger.spreads():
        figures = ", ".join(f"{entry.name} {entry.measured:.2f}" for entry in entries if entry.measured)
        yield f"Same columns, different figures: {figures} GiB."


def without_slack_of(ledger: Ledger, framework: str) -> tuple[float, float]:
    """Return the slack of reserved memory, fitted without one framework's rows, and that framework's error with it."""
    reserved = [e for e in ledger.compared if e.prediction and e.prediction.statistic == "reserved"]
    others = [e for e in reserved if not (e.row.get("framework") or "").startswith(framework)]
    held_out = [e for e in reserved if (e.row.get("framework") or "").startswith(framework)]
    factor = SLACK["reserved"] / (1 + sum(e.error or 0 for e in others) / len(others))
    change = factor / SLACK["reserved"]
    return factor, sum(abs((1 + (e.error or 0)) * change - 1) for e in held_out) / len(held_out)


def section(ledger: Ledger) -> str:
    """Return a ledger's section of ``docs/memory.md``."""
    bullets = [*remarks(ledger), *_held_out(ledger)]
    parts = [
        summary_table(ledger),
        "\n".join(f"* {bullet}" for bullet in bullets),
        rows_table(ledger),
        "Assumptions about each framework; the loss's bytes are eager / divided over ranks / compiled:",
        frameworks_table(),
    ]
    return "\n\n".join(parts)


def _held_out(ledger: Ledger) -> Iterator[str]:
    """Yield the errors with a slack that was fitted without a row's configuration, or its framework."""
    left_out = ledger.without_own_slack()
    everything = left_out.summary()
    stated = left_out.stating_conditions()
    if everything and stated:
        yield (
            "With a slack fitted without the rows of its configuration, the mean absolute error is "
            f"{everything.mean_absolute:.1%}, and {stated.mean_absolute:.1%} where conditions are stated."
        )
    for name in ("torchtitan", "nanotron"):
        factor, error = without_slack_of(ledger, name)
        yield f"Slack fitted without {name} is {factor - 1:.1%}; under it, {name}'s mean absolute error is {error:.1%}."


def _framework(entry: Entry) -> str:
    return (entry.row.get("framework") or "").split(" ")[0]


def frameworks_table() -> str:
    """Return the assumptions about every framework, one entry per line."""
    header = ("framework", "from", "weights", "gradients", "norm keeps", "loss per logit", "source")
    return _table(
        header,
        (
            (
                entry.name,
                entry.since,
                "gathered from shards"
                if entry.sharding == "fully_shard"
                else f"whole, {entry.master_bytes:g} B master",
                f"{entry.gradient_bytes:g} B" + (", always" if entry.persistent_gradients else ""),
                f"{entry.norm_saved:g} B",
                " / ".join(f"{b:g}" for b in (entry.loss.eager, entry.loss.sharded, entry.loss.compiled)) + " B",
                entry.source,
            )
            for entry in FRAMEWORKS
        ),
    )


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ("---",) * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
