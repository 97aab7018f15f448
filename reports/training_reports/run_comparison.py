"""Runs side by side: where their settings differ, their results, and what cannot be compared."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.step_parts import WHOLE
from llama_core.runs.step_parts import SlowerStep
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.grid import HELD_OUT
from training_reports.compared_run import SOFTWARE, ComparedRun
from training_reports.contents import RunContents
from training_reports.layout import NOTHING
from training_reports.measures import ComparedMeasure, measures

_FOUND = (*SOFTWARE, "device")
"""What was found on the machines, if a record says it."""
_NO_SETTING = {"plan.notes", "tracking.run_name"}


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Each setting that is not the same in all runs, with its values."""
    measures: tuple[ComparedMeasure, ...]
    notes: tuple[str, ...]
    """Why some of the results cannot be compared."""

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a record."""
        return {
            "runs": {run.name: str(run.path) for run in self.runs},
            "differences": {key: self._by_run(values) for key, values in self.differences},
            "measures": {one.name: self._by_run(one.values) for one in self.measures},
            "step_parts": self._by_run([one and one.step.as_dict() for one in self.explained_steps]),
            "slower_steps": self._by_run([one and one.as_dict() for one in self.explained_steps]),
            "notes": list(self.notes),
        }

    @property
    def explained_steps(self) -> list[SlowerStep | None]:
        """The step of each run by part, predicted and measured; None where a run has no prediction or measurement."""
        return [run.contents.explained_step for run in self.runs]

    @property
    def step_rows(self) -> list[tuple[str, list[str]]]:
        """The parts of a step, each with both times of every run; empty if no run has a prediction."""
        rows: dict[str, list[str]] = {}
        for place, one in enumerate(self.explained_steps):
            for name, predicted, measured, _ in one.step.rows() if one else ():
                cells = rows.setdefault(name, [NOTHING] * len(self.runs))
                cells[place] = f"{measured} (predicted {predicted})"
        if WHOLE in rows:
            rows[WHOLE] = rows.pop(WHOLE)  # at the end
        return list(rows.items())

    @property
    def step_sentences(self) -> list[str]:
        """What explains the time of each run's step."""
        sentences = []
        for run, one in zip(self.runs, self.explained_steps, strict=True):
            if one is not None:
                sentences.append(f"{run.name}: {' '.join(one.sentences())}")
        return sentences

    def _by_run(self, values: Sequence[Any]) -> dict[str, Any]:
        return {run.name: value for run, value in zip(self.runs, values, strict=True)}


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Compare two runs or more, in the order given.

    Raises:
        ConfigError: if there is only one, or one is given twice.
        RunDirectoryError: if a directory holds no run, or its run has neither metrics nor timed steps.
    """
    _refuse_repeats(paths)
    names = [_name(path.resolve()) for path in paths]
    runs = tuple(
        ComparedRun(name if names.count(name) == 1 else str(path), path, _contents(path))
        for name, path in zip(names, paths, strict=True)
    )
    settings = [run.settings for run in runs]
    return RunComparison(
        runs,
        differences=tuple(_differences(settings)),
        measures=tuple(measures(runs)),
        notes=(*_notes_on_settings(settings), *_notes_on_runs(runs)),
    )


def _name(path: Path) -> str:
    """Return what people call a run: an element as in the report of its sweep, any other run by its directory."""
    sweep = SweepDirectory(path.parent.parent)
    if sweep.run(path.name).path == path and sweep.record.exists():
        with suppress(RunDirectoryError):
            return read_record(sweep).names[path.name]
    return path.name


def _refuse_repeats(paths: Sequence[Path]) -> None:
    if len(paths) < 2:
        raise ConfigError(f"{paths[0]} is only one run; name at least two to compare")
    order = sorted(paths, key=lambda path: str(path.resolve()))
    twice = [other for one, other in pairwise(order) if one.resolve() == other.resolve()]
    if twice:
        raise ConfigError(*(f"{path} is given twice; name each run once" for path in dict.fromkeys(twice)))


def _contents(path: Path) -> RunContents:
    run = RunDirectory(path)
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory; give the directory of a run, such as runs/mine")
    if SweepDirectory(path).record.exists():
        elements = sorted((path / "runs").glob("*"))
        such_as = f", such as {elements[0]}" if elements else ""
        raise RunDirectoryError(f"{path} is a sweep, which has a report of its own; give runs of it{such_as}")
    if not run.config.exists():
        raise RunDirectoryError(f"{path} holds no run (no {run.config.name})")
    contents = RunContents.read(run)
    if contents.steps.empty and contents.benchmark is None:
        raise RunDirectoryError(f"{path} has no metrics: no step was completed; train it first, or leave it out")
    return contents


def _differences(settings: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each key whose value is not the same in all runs, with the values as text."""
    keys: dict[str, None] = {}
    for own in settings:
        keys |= dict.fromkeys(own)
    for key in keys:
        if key not in _NO_SETTING and _differ(settings, key):
            yield key, tuple(_text(own.get(key)) for own in settings)


def _differ(settings: Sequence[Mapping[str, Any]], key: str) -> bool:
    values = {_text(own.get(key)) for own in settings}
    if key in _FOUND:  # an unknown value is not a difference
        values.discard(NOTHING)
    return len(values) > 1


def _text(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or NOTHING
    return str(value)


def _chooses_tokens(key: str) -> bool:
    """Return whether a key, or the mapping that it is in, changes the tokens that are held out."""
    if key.startswith("data.sources."):
        return key.endswith(".path")
    return not {key, key.rpartition(".")[0]}.isdisjoint(HELD_OUT | {"data.source"})


def _notes_on_settings(settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each kind of result that the settings make incomparable."""
    keys = sorted({key for own in settings for key in own if _chooses_tokens(key)})
    other_tokens = [key for key in keys if _differ(settings, key)]
    if _differ(settings, "training.objective"):
        yield "The objectives differ: losses cannot be compared."
    elif _differ(settings, "data.tokenizer"):
        yield "The tokenizers differ: losses per token cannot be compared."
    elif other_tokens:
        yield f"Held-out losses are not over the same tokens: {', '.join(other_tokens)} differ."
    if _differ(settings, "device") or _differ(settings, "launch.device"):
        yield "The devices differ: so do tokens/s and memory, whatever the settings."


def _notes_on_runs(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield a sentence if some runs alone were timed, and one for each run that has not finished."""
    untimed = [run.name for run in runs if run.contents.benchmark is None]
    if untimed and len(untimed) < len(runs):
        yield f"Tokens/s come from timed steps, but from training steps for {', '.join(untimed)}."
    for run in runs:
        timed = run.contents.benchmark
        if timed is not None and run.was_disturbed:
            yield (
                f"{run.name} was timed on a shared machine: its threads waited for a core {timed.waiting_share:.0%} of "
                "the time, so its speed may be another one on another day."
            )
    for run in runs:
        outcome = run.contents.outcome
        if outcome is None:
            yield f"{run.name} has not finished: no outcome yet."
        elif outcome.status != "finished":
            yield f"{run.name} has not finished: {outcome.status}."
