"""The metrics of a run: Parquet parts, and the steps of the next part as lines of JSON.

A Parquet file cannot be read until it is closed, and the process may be killed before. A line outlives it.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

from llama_core.errors import RunDirectoryError, why_unreadable
from llama_core.records.directory import RunDirectory
from llama_core.records.files import (
    DAMAGE,
    MAX_BYTES_OF_LINES,
    append_lines,
    atomic_write,
    checked_record,
    damaged,
    named,
    open_file,
    read_file,
    read_typed,
    table_of,
    unreadable,
)
from llama_core.records.measurements import StepRecord

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
U = TypeVar("U")
logger = logging.getLogger(__name__)

_SET_ASIDE = "damaged"
_MEASURED = "measured"
"""The field whose names are columns of their own."""


def append_metrics(run: RunDirectory, record: StepRecord) -> None:
    """Keep the record of a step that is in no part yet, so that it outlives this process."""
    with named(run.metrics_tail), run.metrics_tail.open("a") as tail:
        tail.write(json.dumps(asdict(record)) + "\n")


def write_metrics_part(run: RunDirectory, records: Sequence[StepRecord]) -> Path:
    """Write ``records`` as the next Parquet part of the metrics, in place of the appended ones; return its path."""
    path = _write_part(run, _table([asdict(record) for record in records]))
    run.metrics_tail.unlink(missing_ok=True)
    return path


def _write_part(run: RunDirectory, table: "pa.Table") -> Path:
    import pyarrow.parquet as pq

    run.metrics.mkdir(parents=True, exist_ok=True)
    with os.scandir(run.metrics) as entries:  # a long run has thousands of parts, so no list of them is made
        number = 1 + max(map(_number, entries), default=-1)
    path = run.metrics / f"part-{number:05d}.parquet"
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)
    return path


def read_metrics(run: RunDirectory, *, sets_aside: bool = False) -> "pa.Table":
    """Return the run's ``StepRecord`` rows ordered by step; an empty table if there are none.

    Every name that any step has ``measured`` is a column, null where a step has no value.

    Args:
        run: the run.
        sets_aside: rename a damaged file, with a warning, and return the rest. For the run's own processes, which must
            end and restart whatever has become of the metrics.

    Raises:
        RunDirectoryError: naming a file that is damaged, unless ``sets_aside``.
    """
    return _joined(_parts_and_tail(run, sets_aside=sets_aside)).sort_by("step")


def set_aside(run: RunDirectory) -> list[Path]:
    """Return the files of the metrics that were damaged and are no longer read."""
    return sorted(run.metrics.glob(f"_*.{_SET_ASIDE}*"))


def read_heartbeat(run: RunDirectory) -> StepRecord | None:
    """Return the record of the last completed step, or None if none can be read."""
    with suppress(RunDirectoryError):
        return read_typed(run.heartbeat, StepRecord, run.path)
    return None


def newest_evaluation(run: RunDirectory, after: int) -> StepRecord | None:
    """Return the record of the newest evaluated step after ``after``; None without one, or if a file is damaged."""
    with suppress(RunDirectoryError):
        for rows in _newest_rows(run):
            evaluated = [row for row in rows if row["eval_loss"] is not None and row["step"] > after]
            if evaluated:
                return StepRecord(**max(evaluated, key=lambda row: row["step"]))
            if rows and min(row["step"] for row in rows) <= after:
                break
    return None


def _newest_rows(run: RunDirectory) -> Iterator[list[dict[str, Any]]]:
    """Yield the appended records, then those of each part, newest first."""
    yield _appended(run)
    for path in sorted(_parts(run), key=_number, reverse=True):
        yield list(map(_of_columns, _read_part(run, path).to_pylist()))


def drop_metrics_after(run: RunDirectory, step: int) -> None:
    """Move the records of steps after ``step``, which a run resumed there repeats, to its repeated steps.

    Damaged files that it comes across are set aside.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    newest = read_heartbeat(run)
    if newest is not None and newest.step > step:
        run.heartbeat.unlink()
    rows = _or_set_aside(run.metrics_tail, lambda: _appended(run), [])
    if rows:
        before = min(row["step"] for row in rows) - 1
        known = {step for _, table in _newest_parts(run, before) for step in table.column("step").to_pylist()}
        if new := [row for row in rows if row["step"] not in known]:
            _write_part(run, _table(new))
    run.metrics_tail.unlink(missing_ok=True)
    for path, table in _newest_parts(run, step):
        kept = table.filter(pc.field("step") <= step)
        _append_repeated(run, table.filter(pc.field("step") > step))
        if kept.num_rows == 0:
            path.unlink()
        elif kept.num_rows < table.num_rows:
            with atomic_write(path) as temporary:
                pq.write_table(kept, temporary)


def copy_metrics(run: RunDirectory, to: RunDirectory, step: int) -> None:
    """Copy the records of the steps up to ``step`` to a run that has none.

    Raises:
        RunDirectoryError: naming a file that is damaged.
    """
    import pyarrow.compute as pc

    _write_part(to, read_metrics(run).filter(pc.field("step") <= step))


def _newest_parts(run: RunDirectory, step: int) -> Iterator[tuple[Path, "pa.Table"]]:
    """Yield parts and their rows, newest first, until one that ends by ``step``: a long run has thousands before it."""
    import pyarrow.compute as pc

    for path in sorted(_parts(run), key=_number, reverse=True):
        table = _or_set_aside(path, partial(_read_part, run, path), None)
        if table is None:
            continue
        yield path, table
        if table.num_rows and pc.max(table.column("step")).as_py() <= step:
            return


def _append_repeated(run: RunDirectory, rows: "pa.Table") -> None:
    lines = rows.select(["step", "time", "step_seconds", "data_seconds", "loss"]).to_pylist()
    if lines:
        _or_set_aside(run.repeated_steps, partial(_look_at_repeated, run), None)
        append_lines(run.repeated_steps, lines)


def _look_at_repeated(run: RunDirectory) -> None:
    try:
        open_file(run.repeated_steps, run.path).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(run.repeated_steps, error) from None


def _parts(run: RunDirectory) -> list[Path]:
    return sorted(path for path in run.metrics.glob("part-*.parquet") if _number(path) >= 0)


def _number(path: "Path | os.DirEntry[str]") -> int:
    """Return the number of a part; -1 if the name is not a part's."""
    found = re.fullmatch(r"part-([0-9]{1,18})\.parquet", path.name)
    return int(found[1]) if found else -1


def _parts_and_tail(run: RunDirectory, *, sets_aside: bool) -> tuple["pa.Table", "pa.Table"]:
    """Return the rows of all parts, and those that are in none yet."""
    read: Callable[[Path, Callable[[], Any], Any], Any]
    read = _or_set_aside if sets_aside else lambda path, how, otherwise: how()
    # the tail first: a part that is written meanwhile repeats it
    rows = read(run.metrics_tail, lambda: _appended(run), [])
    parts = [read(path, partial(_read_part, run, path), _table([])) for path in _parts(run)]
    table = _joined([_table([]), *parts])
    known = set(table.column("step").to_pylist())
    return table, _table([row for row in rows if row["step"] not in known])


def _or_set_aside(path: Path, read: Callable[[], T], otherwise: U) -> T | U:
    """Return what ``read`` returns; if ``path`` is damaged, rename it with a warning and return ``otherwise``."""
    try:
        return read()
    except RunDirectoryError as error:
        hidden = f"_{path.name.removeprefix('_')}"  # from readers of the folder, who take the rest for Parquet
        names = (f"{hidden}.{_SET_ASIDE}{number or ''}" for number in count())
        aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
        try:
            path.rename(aside)
        except FileNotFoundError:  # another process has just set it aside
            pass
        except OSError as failure:
            logger.warning("%s; it cannot be set aside (%s)", error, failure.strerror)
        else:
            logger.warning("%s; it is now %s", error, aside.name)
        return otherwise


def _read_part(run: RunDirectory, path: Path) -> "pa.Table":
    import pyarrow as pa

    try:
        content = read_file(path, run.path)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return table_of(content, columns=lambda written: _metrics_schema(_names_in(written)))
    except (OSError, pa.ArrowException, *DAMAGE) as error:
        raise damaged(path, error) from None


def _appended(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the appended records, without a last line that was cut short."""
    try:
        content = read_file(run.metrics_tail, run.path, MAX_BYTES_OF_LINES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(run.metrics_tail, error) from None
    try:
        rows = [json.loads(line) for line in content.decode().rpartition("\n")[0].splitlines()]
    except (ValueError, RecursionError) as error:
        raise damaged(run.metrics_tail, why_unreadable(error)) from None
    return [asdict(row) for row in checked_record(rows, list[StepRecord], run.metrics_tail)]


def _table(rows: Sequence[dict[str, Any]]) -> "pa.Table":
    import pyarrow as pa

    names = sorted({name for row in rows for name in row[_MEASURED]})
    return pa.Table.from_pylist(list(map(_in_columns, rows)), schema=_metrics_schema(names))


def _joined(tables: Iterable["pa.Table"]) -> "pa.Table":
    """Return the rows of all tables; what one has not measured is null."""
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default")


def _in_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as the columns of a table hold it."""
    own = {name: value for name, value in row.items() if name != _MEASURED}
    return {**own, **row[_MEASURED], **{name: list(row[name].items()) for name in _MAPPINGS}}


def _of_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record that is in the columns of a table: the inverse of ``_in_columns``."""
    own = {name: value for name, value in row.items() if name in _COLUMNS}
    measured = {name: value for name, value in row.items() if name not in _COLUMNS}
    return {**own, **{name: dict(row[name] or ()) for name in _MAPPINGS}, _MEASURED: measured}


def _names_in(columns: "pa.Schema") -> list[str]:
    """Return what the steps of a part have measured: its columns of numbers that are no field of every record."""
    import pyarrow as pa

    return [column.name for column in columns if column.name not in _COLUMNS and column.type == pa.float64()]


def _metrics_schema(measured: Sequence[str] = ()) -> "pa.Schema":
    import pyarrow as pa

    types = {
        int: pa.int64(),
        float: pa.float64(),
        float | None: pa.float64(),
        bool: pa.bool_(),
        str: pa.string(),
        Mapping[str, float]: pa.map_(pa.string(), pa.float64()),
        Mapping[str, tuple[float, ...]]: pa.map_(pa.string(), pa.list_(pa.float64())),
    }
    own = [(name, types[kind]) for name, kind in _COLUMNS.items()]
    return pa.schema([*own, *((name, pa.float64()) for name in measured)])


_COLUMNS: dict[str, Any] = {field.name: field.type for field in fields(StepRecord) if field.name != _MEASURED}
"""The type of each column that every table has."""
_MAPPINGS = [name for name, kind in _COLUMNS.items() if get_origin(kind) is Mapping]
"""Those of them that hold mappings."""
