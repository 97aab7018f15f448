"""The layout of a sweep's directory, and the record of its elements."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints

from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import SWEEP_RECORD, SWEEP_RUNS, RunDirectory
from llama_core.records.files import read_typed, write_json
from llama_core.runs.continuing import is_finished
from llama_core.sweep.grid import GridValue, SweepConfig
from llama_core.sweep.naming import ElementNames, element_names
from llama_core.sweep.objective import SweepObjective


@dataclass(frozen=True)
class SweepDirectory:
    """The paths inside one sweep's directory."""

    path: Path

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name

    @property
    def record(self) -> Path:
        """The ``SweepRecord``."""
        return self.path / SWEEP_RECORD

    @property
    def lock(self) -> Path:
        """Held by the process that works on the sweep; names it."""
        return self.path / "sweep.lock"

    @property
    def history(self) -> Path:
        """How its results compare with those of earlier sweeps."""
        return self.path / "history.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def run(self, element: str) -> RunDirectory:
        """Return the run directory of an element, by its name."""
        return RunDirectory(self.path / SWEEP_RUNS / element)


ElementName = Annotated[str, StringConstraints(pattern=r"^[\w,=+-][\w.,=+-]*$")]
"""The name of a run's directory, so it holds no separator."""


@dataclass(frozen=True)
class ElementRecord:
    """One element of a sweep."""

    name: ElementName
    settings: Mapping[str, GridValue]
    """Its value for each key of the grid."""
    skipped: str = ""
    """Why it cannot run; empty if it can."""


@dataclass(frozen=True)
class SweepRecord:
    """The configuration and the elements of a sweep."""

    config: Mapping[str, Any]
    """What ``SweepConfig.record`` keeps."""
    elements: tuple[ElementRecord, ...]

    @property
    def sweep_config(self) -> SweepConfig:
        """The configuration, validated."""
        return SweepConfig.from_mapping(self.config)

    @cached_property
    def names(self) -> ElementNames:
        """What people call the elements."""
        return element_names(self.elements)

    @property
    def objective(self) -> SweepObjective:
        """What ranks the elements."""
        return SweepObjective.parse(self.config.get("objective", "throughput"))

    @property
    def runnable(self) -> tuple[ElementRecord, ...]:
        """The elements that are not skipped."""
        return tuple(element for element in self.elements if not element.skipped)


def write_record(sweep: SweepDirectory, record: SweepRecord) -> None:
    """Write ``sweep.json`` atomically."""
    write_json(sweep.record, asdict(record))


def read_record(sweep: SweepDirectory) -> SweepRecord:
    """Return the record of the sweep.

    Raises:
        RunDirectoryError: if the directory holds no sweep.
    """
    return read_typed(sweep.record, SweepRecord)


def is_timed(run: RunDirectory) -> bool:
    """Return whether all timed steps of the run have been taken."""
    return run.benchmark.exists() and run.outcome.exists() and read_outcome(run).status == "finished"


def has_result(run: RunDirectory, objective: SweepObjective) -> bool:
    """Return whether the run has been timed or trained to its end, as the objective needs."""
    return is_finished(run) if objective.trains else is_timed(run)


def unfinished(sweep: SweepDirectory) -> Iterator[RunDirectory]:
    """Yield the runs of the elements that are neither skipped nor have a result."""
    record = read_record(sweep)
    for element in record.runnable:
        run = sweep.run(element.name)
        if not has_result(run, record.objective):
            yield run
