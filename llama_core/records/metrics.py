"""The metrics of a run: Parquet parts, and the steps of the next part as lines of JSON.

A Parquet file cannot be read until it is closed, and the process may be killed before. A line outlives it.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, read_json
from llama_core.records.measurements import StepRecord

if TYPE_CHECKING:
    import pyarrow as pa


def append_metrics(run: RunDirectory, record: StepRecord) -> None:
    """Keep the record of a step that is in no part yet, so that it outlives this process."""
    with run.metrics_tail.open("a") as tail:
        tail.write(json.dumps(asdict(record)) + "\n")


def write_metrics_part(run: RunDirectory, records: Sequence[StepRecord]) -> Path:
    """Write ``records`` as the next Parquet part of the metrics, in place of the appended ones; return its path."""
    path = _write_part(run, _table([asdict(record) for record in records]))
    run.metrics_tail.unlink(missing_ok=True)
    return path


def _write_part(run: RunDirectory, table: "pa.Table") -> Path:
    import pyarrow.parquet as pq

    number = 1 + max((int(path.stem.removeprefix("part-")) for path in _parts(run)), default=-1)
    path = run.metrics / f"part-{number:05d}.parquet"
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)
    return path


def read_metrics(run: RunDirectory) -> "pa.Table":
    """Return the run's ``StepRecord`` rows ordered by step; an empty table if there are none."""
    import pyarrow as pa

    return pa.concat_tables(_parts_and_tail(run)).sort_by("step")


def read_heartbeat(run: RunDirectory) -> StepRecord | None:
    """Return the record of the last completed step, or None if none can be read."""
    with suppress(RunDirectoryError, TypeError):  # TypeError: a version whose steps have other fields wrote it
        return StepRecord(**read_json(run.heartbeat))
    return None


def drop_metrics_after(run: RunDirectory, step: int) -> None:
    """Move the records of steps after ``step``, which a run resumed there repeats, to its repeated steps."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    newest = read_heartbeat(run)
    if newest is not None and newest.step > step:
        run.heartbeat.unlink()
    _, tail = _parts_and_tail(run)
    if tail.num_rows:
        _write_part(run, tail)
    run.metrics_tail.unlink(missing_ok=True)
    for path in _parts(run):
        table = pq.read_table(path, schema=_metrics_schema())
        kept = table.filter(pc.field("step") <= step)
        _append_repeated(run, table.filter(pc.field("step") > step))
        if kept.num_rows == 0:
            path.unlink()
        elif kept.num_rows < table.num_rows:
            with atomic_write(path) as temporary:
                pq.write_table(kept, temporary)


def _append_repeated(run: RunDirectory, rows: "pa.Table") -> None:
    lines = rows.select(["step", "time", "step_seconds", "data_seconds", "loss"]).to_pylist()
    if lines:
        with run.repeated_steps.open("a") as repeated:
            repeated.write("".join(f"{json.dumps(line)}\n" for line in lines))


def _parts(run: RunDirectory) -> list[Path]:
    return sorted(run.metrics.glob("part-*.parquet"))


def _parts_and_tail(run: RunDirectory) -> tuple["pa.Table", "pa.Table"]:
    """Return the rows of all parts, and those that are in none yet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _appended(run)  # read first: a part that is written meanwhile repeats them
    parts = pa.concat_tables([_table([]), *(pq.read_table(path, schema=_metrics_schema()) for path in _parts(run))])
    known = set(parts.column("step").to_pylist())
    return parts, _table([row for row in rows if row["step"] not in known])


def _appended(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the appended records, without a last line that was cut short."""
    try:
        complete = run.metrics_tail.read_text().rpartition("\n")[0]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in complete.splitlines()]


def _table(rows: Sequence[dict[str, Any]]) -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=_metrics_schema())


def _metrics_schema() -> "pa.Schema":
    import pyarrow as pa

    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), float | None: pa.float64()}
    return pa.schema([(field.name, types[field.type]) for field in fields(StepRecord)])  # type: ignore[index]
