"""The metrics of a run, as several Parquet parts, since a Parquet file cannot be read until it is closed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, read_json
from llama_core.records.measurements import StepRecord

if TYPE_CHECKING:
    import pyarrow as pa


def write_metrics_part(run: RunDirectory, records: Sequence[StepRecord]) -> Path:
    """Write ``records`` as the next Parquet part of the run's metrics and return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 1 + max((int(path.stem.removeprefix("part-")) for path in _parts(run)), default=-1)
    table = pa.Table.from_pylist([asdict(record) for record in records], schema=_metrics_schema())
    path = run.metrics / f"part-{number:05d}.parquet"
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)
    return path


def read_metrics(run: RunDirectory) -> "pa.Table":
    """Return the run's ``StepRecord`` rows ordered by step; an empty table if there are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(path, schema=_metrics_schema()) for path in _parts(run)]
    return pa.concat_tables([_metrics_schema().empty_table(), *tables]).sort_by("step")


def read_heartbeat(run: RunDirectory) -> StepRecord | None:
    """Return the record of the last completed step, or None if none can be read."""
    with suppress(RunDirectoryError, TypeError):  # TypeError: a version whose steps have other fields wrote it
        return StepRecord(**read_json(run.heartbeat))
    return None


def drop_metrics_after(run: RunDirectory, step: int) -> None:
    """Delete the records of steps after ``step``, which a run resumed there repeats."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    newest = read_heartbeat(run)
    if newest is not None and newest.step > step:
        run.heartbeat.unlink()
    for path in _parts(run):
        table = pq.read_table(path, schema=_metrics_schema())
        kept = table.filter(pc.field("step") <= step)
        if kept.num_rows == 0:
            path.unlink()
        elif kept.num_rows < table.num_rows:
            with atomic_write(path) as temporary:
                pq.write_table(kept, temporary)


def _parts(run: RunDirectory) -> list[Path]:
    return sorted(run.metrics.glob("part-*.parquet"))


def _metrics_schema() -> "pa.Schema":
    import pyarrow as pa

    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), float | None: pa.float64()}
    return pa.schema([(field.name, types[field.type]) for field in fields(StepRecord)])  # type: ignore[index]
