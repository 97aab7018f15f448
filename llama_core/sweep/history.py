"""The history of timed steps: one Parquet part for each sweep or benchmark."""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from llama_core.chain import steps
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError, RunDirectoryError
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import account_name
from llama_core.records.files import (
    DAMAGE,
    atomic_write,
    by_dotted_key,
    checked_record,
    contents_of,
    damaged,
    intact,
    open_file,
    read_json,
    table_of,
    user_path,
)
from llama_core.records.measurements import BenchmarkRecord, disturbance
from llama_core.runs.console import say
from llama_core.runs.loading import load_config
from llama_core.sweep.objective import UNTIMED

if TYPE_CHECKING:
    import pyarrow as pa

HISTORY = "history"
"""Name of the folder, unless ``benchmark.history`` names another one."""

_SECONDS = (1e-6, 1e6)
"""Between these is the time of a step that anybody has timed."""

MAX_SPREAD = 0.1
"""Interquartile range of the steps over their median above which a result is called noisy."""


@dataclass(frozen=True)
class Result:
    """The timed steps of one element of a sweep, or of one benchmark: a row of the history."""

    source: str
    """Name of the sweep or of the benchmark's run."""
    element: str
    """Name of the element; empty for a benchmark."""
    machine: str
    """Kind of machine: the device, and on a CPU the threads of a rank."""
    host: str
    fingerprint: str
    """Equal for configurations whose steps do the same work; see ``work_fingerprint``."""
    ended_at: str
    """Time of its end, in UTC as ISO 8601."""
    versions: Mapping[str, str]
    """python, torch, this package and its git commit."""
    settings: Mapping[str, Any]
    """The whole configuration, and the plan below ``plan``, by dotted key."""
    tokens_per_step: int
    tokens_per_second: tuple[float, ...]
    """A sample for each timed step, over all devices."""
    memory_peak_bytes: int
    waiting_share: float | None
    """Share of the time that a computing thread was ready to run without a core; on a GPU, one thread counts."""
    account: str = ""
    """Who has measured it: the owner of the part that it is in, whom its writer cannot choose."""

    @property
    def problem(self) -> str:
        """Why no step can have been timed so, in a clause; empty for a result."""
        least, most = _SECONDS
        times = [self.tokens_per_step / rate if rate else math.inf for rate in self.tokens_per_second]
        if self.tokens_per_step < 1 or not times or not all(least <= time <= most for time in times):
            return f"a step is not between {least:g} and {most:g} seconds long"
        if self.memory_peak_bytes < 0 or not 0 <= (self.waiting_share or 0.0) < math.inf:
            return "its memory or its waiting threads are no measurement"
        try:
            offset = datetime.fromisoformat(self.ended_at).utcoffset()
        except ValueError:
            offset = None
        return "" if offset == timedelta(0) else f"ended_at {self.ended_at!r} is no time in UTC"

    @property
    def median_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.tokens_per_step / rate for rate in self.tokens_per_second)

    @property
    def median_rate(self) -> float:
        """Tokens of a step over its median time."""
        return self.tokens_per_step / self.median_seconds

    @property
    def relative_spread(self) -> float:
        """Interquartile range of the step times over their median."""
        if len(self.tokens_per_second) < 2:
            return 0.0
        seconds = [self.tokens_per_step / rate for rate in self.tokens_per_second]
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return (high - low) / median

    @property
    def standard_error(self) -> float:
        """Relative standard error of the median, for steps with normal noise: 0.929 interquartile ranges over √n."""
        return 0.929 * self.relative_spread / math.sqrt(len(self.tokens_per_second))

    @property
    def is_disturbed(self) -> bool:
        """Whether its threads had to wait for cores."""
        return disturbance(self.waiting_share) is not None

    def noise_notes(self) -> Iterator[str]:
        """Yield a sentence for each sign that the result is noisy."""
        if self.relative_spread > MAX_SPREAD:
            yield f"the middle half of its steps spans {self.relative_spread:.0%} of their median"
        if (shared := disturbance(self.waiting_share)) is not None:
            yield shared


def work_fingerprint(config: RunConfig) -> str:
    """Return 16 hex digits that are equal for configurations whose timed steps do the same work in the same way."""
    work = by_dotted_key({**config.identity(), "parallel": config.parallel.model_dump()})
    work = {key: value for key, value in work.items() if key not in UNTIMED}
    work |= {"launch.nodes": config.num_nodes, "launch.device": config.launch.device}
    work |= {"benchmark.profile": config.benchmark.profile}
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:16]


def history_folder(config: RunConfig, directory: Path) -> Path:
    """Return the folder of the history, for results in a run's or sweep's directory."""
    configured = config.benchmark.history
    return directory.absolute().parent / HISTORY if configured is None else user_path(configured)


def check_folder(folder: Path) -> None:
    """Check, before anything is timed, that results can be kept in a folder.

    Raises:
        EnvironmentMismatchError: if they cannot.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # permissions alone do not tell: file systems refuse even what root may do
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise EnvironmentMismatchError(
            f"benchmark.history={folder}: {existing} is not a folder that you can write to ({error.strerror}); choose "
            "another --history"
        ) from None


def result_of(run: RunDirectory, source: str, element: str = "") -> Result:
    """Return the result of a run that has been timed."""
    config = load_config(run)
    timed = steps.read_benchmark(run)
    return Result(
        source=source,
        element=element,
        machine=_machine(timed, config.launch.device),
        host=timed.host,
        fingerprint=work_fingerprint(config),
        ended_at=read_outcome(run).ended_at,
        versions=timed.versions,
        settings=by_dotted_key({**config.model_dump(mode="json"), "plan": read_json(run.plan)}),
        tokens_per_step=timed.tokens_per_step,
        tokens_per_second=tuple(timed.tokens_per_step / seconds for seconds in timed.step_seconds),
        memory_peak_bytes=timed.memory_peak_bytes,
        waiting_share=timed.waiting_share,
        account=account_name(os.getuid()),
    )


def _machine(timed: BenchmarkRecord, device: str) -> str:
    return f"{timed.device}, {timed.num_threads} threads" if device == "cpu" and timed.num_threads else timed.device


def read_history(folder: Path, fingerprints: Iterable[str] | None = None, *, without: str = "") -> list[Result]:
    """Return the results kept in a folder.

    A part that cannot be read, and a row that is no result, are left out, and named in a warning.

    Args:
        folder: the folder; it need not exist.
        fingerprints: only results with one of these; None for all.
        without: name of a part to leave out.
    """
    import pyarrow as pa

    wanted = None if fingerprints is None else [("fingerprint", "in", set(fingerprints))]
    results = []
    for path in sorted(folder.glob("part-*.parquet")):
        if path.name == without:
            continue
        try:
            with open_file(path) as file:
                rows = table_of(contents_of(file), filters=wanted).to_pylist()
                account = account_name(os.fstat(file.fileno()).st_uid)
        except (OSError, pa.ArrowException, *DAMAGE) as error:
            say("warning", f"{path} is left out of the comparison: {' '.join(str(error).split())}")
            continue
        problems = []
        for row in rows:
            try:
                results.append(replace(_parsed(row, path), account=account))
            except RunDirectoryError as error:
                problems.append(str(error))
        if problems:
            say("warning", f"{len(problems)} of {len(rows)} results are left out of the comparison: {problems[0]}")
    return results


def _parsed(row: Mapping[str, Any], path: Path) -> Result:
    with intact(path):
        told = {"versions": dict(row["versions"]), "settings": json.loads(row["settings"])}
        result = checked_record({**row, **told}, Result, path)
    if result.problem:
        raise damaged(path, result.problem)
    return result


def write_part(path: Path, results: Sequence[Result]) -> None:
    """Write results as one part of a history."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [asdict(one) | {"versions": list(one.versions.items()), "settings": _json(one)} for one in results]
    with atomic_write(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), temporary)


def _json(result: Result) -> str:
    return json.dumps(result.settings, default=str)


def _schema() -> "pa.Schema":
    import pyarrow as pa

    others = {
        "versions": pa.map_(pa.string(), pa.string()),
        "tokens_per_step": pa.int64(),
        "tokens_per_second": pa.list_(pa.float64()),
        "memory_peak_bytes": pa.int64(),
        "waiting_share": pa.float64(),
    }
    return pa.schema([(field.name, others.get(field.name, pa.string())) for field in fields(Result)])
