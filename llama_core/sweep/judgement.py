"""How new results compare with the history: verdicts beyond the noise, and what has changed in between."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import StringConstraints

from llama_core.errors import RegressionError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.runs.console import say
from llama_core.runs.loading import load_config
from llama_core.sweep.directory import SweepDirectory, is_timed, read_record
from llama_core.sweep.history import Result, history_folder, read_history, result_of, write_part
from llama_core.sweep.naming import ElementNames
from llama_core.sweep.regression import FEWEST, WINDOW, alarms, expected, noise, p_value

_SAYS_NOTHING = {"benchmark.history", "data.cache_dir", "tracking.run_name"}
"""Settings that are not listed as changed."""

Verdict = Literal["first", "too few", "same", "slower", "faster", "disturbed"]


@dataclass(frozen=True)
class ComparedElement:
    """A result beside the earlier ones of the same work on the same kind of machine."""

    element: str
    verdict: Verdict
    tokens_per_second: float
    memory_peak_bytes: int
    earlier: tuple[tuple[str, float], ...]
    """Time and tokens/s of the earlier results that it is compared with, oldest first."""
    expected: float | None
    """Tokens/s to expect after them; None without any."""
    noise: float | None
    """Relative standard deviation between them; None for fewer than two."""
    p_value: float | None
    """Probability of such a difference by chance; None without a verdict."""
    earlier_memory_bytes: int | None
    """Peak memory of the latest earlier result."""
    notes: tuple[str, ...]
    """Why the result is noisy."""
    others: tuple[str, ...]
    """The accounts of other users that have measured some of the earlier results."""

    @property
    def change(self) -> float | None:
        """Relative change of the tokens/s against those expected."""
        return None if self.expected is None else self.tokens_per_second / self.expected - 1

    def sentence(self) -> str:
        """Return the comparison in words."""
        if self.expected is None or self.change is None:
            return "the first result of this configuration on this kind of machine"
        direction = "below" if self.change < 0 else "above"
        past = "the one earlier result" if len(self.earlier) == 1 else f"{len(self.earlier)} earlier results"
        if self.others:
            past += f" (with those of {', '.join(self.others)})"
        text = f"{abs(self.change):.1%} {direction} the {self.expected:,.0f} tokens/s of {past}"
        if self.noise is not None:
            text += f", which vary by {self.noise:.1%}"
        match self.verdict:
            case "too few":
                return f"{text}; a verdict needs {FEWEST}"
            case "disturbed":
                return f"{text}; measured while the machine was shared, so repeat it"
            case "slower" | "faster":
                return f"{text} (p {_p(self.p_value)})"
        return text


def _p(value: float | None) -> str:
    return "unknown" if value is None else f"= {value:.2g}" if value > 1e-4 else "< 0.0001"


@dataclass(frozen=True)
class ChangedSetting:
    """A setting or version that differs from the latest earlier result."""

    key: str
    before: str
    now: str
    elements: tuple[str, ...] = ()
    """The elements that it concerns; empty for all."""

    def __str__(self) -> str:
        """Return the change on one line."""
        where = f" ({'; '.join(self.elements)})" if self.elements else ""
        return f"{self.key} {self.before} -> {self.now}{where}"


@dataclass(frozen=True)
class Judgement:
    """How the results of a sweep or a benchmark compare with the history."""

    folder: str
    part: Annotated[str, StringConstraints(pattern=r"^part-[\w.-]+\.parquet$")]
    """Its own file in the folder."""
    since: str
    """When the latest earlier result was measured; empty without any."""
    elements: tuple[ComparedElement, ...]
    changes: tuple[ChangedSetting, ...]

    def of(self, *verdicts: Verdict) -> list[ComparedElement]:
        """Return the elements with these verdicts."""
        return [one for one in self.elements if one.verdict in verdicts]

    @classmethod
    def read(cls, path: Path) -> "Judgement | None":
        """Return the judgement in a ``history.json``; None if there is none, or another version wrote it."""
        if not path.exists():
            return None
        with suppress(RunDirectoryError):
            return read_typed(path, cls)
        return None

    def renamed(self, names: ElementNames) -> "Judgement":
        """Return it with the names of the elements that people read; a ``history.json`` has those of their folders."""
        elements = [replace(one, element=names[one.element]) for one in self.elements]
        changes = [replace(one, elements=tuple(names[name] for name in one.elements)) for one in self.changes]
        return replace(self, elements=tuple(elements), changes=tuple(changes))

    def lines(self) -> Iterator[str]:
        """Yield the lines that the terminal shows."""
        for one in self.elements:
            name = f"{one.element}: " if one.element else ""
            if one.verdict in {"slower", "faster", "disturbed", "too few"}:
                yield f"{name}{'no verdict' if one.verdict == 'too few' else one.verdict}: {one.sentence()}"
            for note in one.notes:
                yield f"{name}noisy: {note}"
        if same := self.of("same"):
            yield f"as fast as before, within the noise: {'; '.join(one.element or 'this run' for one in same)}"
        if new := self.of("first"):
            yield f"first on this kind of machine: {'; '.join(one.element or 'this run' for one in new)}"
        if self.changes:
            yield f"changed since {self.since}: {'; '.join(map(str, self.changes))}"


def remember_sweep(sweep: SweepDirectory) -> Judgement | None:
    """Keep the timed elements of a sweep in the history, and compare them with it; None if none was timed.

    A sweep that is repeated or resumed replaces its own part. The result has the names of the elements that people
    read.

    Raises:
        RunDirectoryError: if the history cannot be written.
    """
    record = read_record(sweep)
    runs = {element.name: sweep.run(element.name) for element in record.runnable}
    timed = [result_of(run, sweep.name, name) for name, run in runs.items() if is_timed(run)]
    if record.objective.kind != "throughput" or not timed:
        return None
    folder = history_folder(record.sweep_config.base, sweep.path)
    judgement = _remember(timed, folder, sweep.history).renamed(record.names)
    _say(judgement)
    return judgement


def read_judgement(sweep: SweepDirectory) -> Judgement | None:
    """Return how a sweep compares with earlier ones, with the names of the elements that people read; None if unknown.

    Raises:
        RunDirectoryError: if the directory holds no sweep.
    """
    judgement = Judgement.read(sweep.history)
    return None if judgement is None else judgement.renamed(read_record(sweep).names)


def remember_run(run: RunDirectory) -> Judgement:
    """Keep the timed steps of a benchmark in the history, and compare them with it.

    Raises:
        RunDirectoryError: if the history cannot be written.
    """
    judgement = _remember([result_of(run, run.name)], history_folder(load_config(run), run.path), run.history)
    _say(judgement)
    return judgement


def _remember(results: Sequence[Result], folder: Path, record: Path) -> Judgement:
    before = Judgement.read(record)
    again = before is not None and before.folder == str(folder)
    part = before.part if before and again else f"part-{results[0].ended_at[:10]}-{uuid4().hex[:12]}.parquet"
    earlier = read_history(folder, {result.fingerprint for result in results}, without=part)
    judgement = judge(results, earlier, str(folder), part)
    try:
        write_part(folder / part, results)
    except OSError as error:
        raise RunDirectoryError(f"cannot keep the results in {folder}: {error}; choose another --history") from None
    write_json(record, judgement)
    say("history", f"{len(results)} result{'s' if len(results) > 1 else ''} in {folder / part}")
    return judgement


def _say(judgement: Judgement) -> None:
    for line in judgement.lines():
        say("history", line)


def judge(results: Sequence[Result], history: Iterable[Result], folder: str, part: str) -> Judgement:
    """Compare results with all earlier ones of the same work on the same kind of machine."""
    past = {result.element: _predecessors(result, history) for result in results}
    p_values = {
        result.element: p_value(
            result.median_seconds, [one.median_seconds for one in past[result.element]], result.standard_error
        )
        for result in results
        if len(past[result.element]) >= FEWEST
    }
    slower = alarms(p_values)
    faster = alarms({name: 1 - value for name, value in p_values.items()})
    elements = []
    for result in results:
        name = result.element
        earlier = past[result.element]
        verdict: Verdict = "first" if not earlier else "too few" if name not in p_values else "same"
        if name in slower:
            verdict = "disturbed" if _more_disturbed(result, earlier) else "slower"
        elif name in faster:
            verdict = "faster"
        elements.append(_compared(result, earlier, verdict, p_values.get(name)))
    latest = [earlier[-1].ended_at for earlier in past.values() if earlier]
    changes = _changes({result.element: (past[result.element][-1:], result) for result in results})
    return Judgement(folder, part, max(latest, default=""), tuple(elements), changes)


def _compared(result: Result, earlier: Sequence[Result], verdict: Verdict, p: float | None) -> ComparedElement:
    rates = [one.median_rate for one in earlier]
    return ComparedElement(
        element=result.element,
        verdict=verdict,
        tokens_per_second=result.median_rate,
        memory_peak_bytes=result.memory_peak_bytes,
        earlier=tuple((one.ended_at, one.median_rate) for one in earlier),
        expected=expected(rates) if rates else None,
        noise=noise(rates) if len(rates) > 1 else None,
        p_value=None if p is None else min(p, 1 - p) if verdict != "same" else p,
        earlier_memory_bytes=earlier[-1].memory_peak_bytes if earlier else None,
        notes=tuple(result.noise_notes()),
        others=tuple(sorted({one.account for one in earlier} - {result.account})),
    )


def _predecessors(result: Result, history: Iterable[Result]) -> list[Result]:
    key = (result.machine, result.fingerprint)
    same = [one for one in history if (one.machine, one.fingerprint) == key and one.ended_at < result.ended_at]
    return sorted(same, key=lambda one: one.ended_at)[-WINDOW:]


def _more_disturbed(result: Result, earlier: Sequence[Result]) -> bool:
    """Return whether threads waited for cores, and more than they used to."""
    usual = statistics.median(one.waiting_share or 0.0 for one in earlier)
    return result.is_disturbed and (result.waiting_share or 0.0) > 2 * usual


def _changes(pairs: Mapping[str, tuple[Sequence[Result], Result]]) -> tuple[ChangedSetting, ...]:
    """Return what differs between each result and the one before it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    compared = {element: (before[0], now) for element, (before, now) in pairs.items() if before}
    for element, (before, now) in compared.items():
        for change in _differences(before, now):
            found.setdefault(change, []).append(element)
    everywhere = len(compared)
    return tuple(
        ChangedSetting(*change, () if len(elements) == everywhere else tuple(elements))
        for change, elements in found.items()
    )


def _differences(before: Result, now: Result) -> Iterator[tuple[str, str, str]]:
    for left, right in (
        ({**before.versions, "host": before.host}, {**now.versions, "host": now.host}),
        (before.settings, now.settings),
    ):
        for key in dict.fromkeys([*left, *right]):
            one, other = (str(side.get(key, "unknown")) for side in (left, right))
            if one != other and key not in _SAYS_NOTHING:
                yield key, one, other
    commit = now.versions.get("commit", "")
    if commit == before.versions.get("commit") and commit.endswith("-dirty"):
        yield "commit", commit, f"{commit} (files that are not committed may differ)"


def refuse_regressions(judgement: Judgement | None) -> None:
    """Do nothing if no result is slower than before.

    Raises:
        RegressionError: naming every result that is.
    """
    slower = judgement.of("slower") if judgement else []
    if judgement and slower:
        told = "; ".join(f"{one.element or 'this run'} is {one.sentence()}" for one in slower)
        changed = f"; changed since {judgement.since}: {'; '.join(map(str, judgement.changes))}"
        raise RegressionError(f"slower than before: {told}{changed if judgement.changes else ''}")
