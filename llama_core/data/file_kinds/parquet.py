"""Parquet and Arrow files: a record a row, of the columns that a format may read.

They are read, not mapped: if a file were cut short meanwhile, that would be fatal.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from llama_core.data.files.raw_record import RawRecord
from llama_core.data.files.source_file import Digest, SourceFile, take_all
from llama_core.data.formats import FieldNames, choice_of_field, what_is_missing
from llama_core.errors import DataError

_WITH_INDEX = b"ARROW1"


def parquet_records(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: if the file cannot be read, or no format is recognised by its columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if content is not None:  # the columns are not read in order
        take_all(file, content)
    try:
        with pa.PythonFile(file.open()) as source, pq.ParquetFile(source) as table:
            columns = _columns(file, table.schema_arrow, names)
            unread = _others(table.schema_arrow, columns)
            number = 0
            num_rows = table.metadata.num_rows
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for values in zip(*(batch.column(name) for name in columns), strict=True):
                    number += 1
                    position = file.num_bytes * number // num_rows
                    yield RawRecord(f":{number}", position, partial(_row, columns, values), True, unread)
    except pa.ArrowException as error:
        raise DataError(f"{file.path} is not a readable Parquet file: {' '.join(str(error).split())}") from None


def arrow_records(file: SourceFile, names: FieldNames, content: Digest | None) -> Iterator[RawRecord]:
    """Yield the rows of an Arrow file, as Hugging Face's datasets library saves a data set, or of a Feather file.

    Raises:
        DataError: if the file cannot be read, or no format is recognised by its columns.
    """
    import pyarrow as pa

    if content is not None:
        take_all(file, content)
    try:
        with pa.PythonFile(file.open()) as source:
            batches = _batches(source)
            number = 0
            for batch in batches:
                columns = _columns(file, batch.schema, names)
                unread = _others(batch.schema, columns)
                for name in columns:
                    _refuse_lies(batch.column(name))
                position = source.tell()
                for values in zip(*(batch.column(name) for name in columns), strict=True):
                    number += 1
                    yield RawRecord(f":{number}", position, partial(_row, columns, values), True, unread)
    except pa.ArrowException as error:
        raise DataError(f"{file.path} is not a readable Arrow file: {' '.join(str(error).split())}") from None


def _batches(source: Any) -> Iterator[Any]:
    """Yield the batches of an Arrow file that is a stream, or one with an index at its end."""
    from pyarrow import ipc

    if source.read(len(_WITH_INDEX)) == _WITH_INDEX:
        reader = ipc.open_file(source)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        source.seek(0)
        yield from ipc.open_stream(source)


def _refuse_lies(column: Any) -> None:
    """Refuse a column of an Arrow file whose offsets, which are the file's own, lead to other memory, or to none.

    Raises:
        ArrowInvalid: if they do, or text inside other values is not UTF-8. Other text that is not is a row's own fault.
    """
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if not (_holds_strings(column.type) and "UTF8" in str(error)):
            raise


def _row(columns: Sequence[str], values: Sequence[Any]) -> dict[str, object]:
    return {name: _plain(value) for name, value in zip(columns, values, strict=True)}


def _plain(value: Any) -> object:
    """Return a value as JSON has it; numbers of a list stay an array, which takes a hundredth of the time."""
    from pyarrow import types

    kind = value.type
    if (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type) and value.is_valid:
        if value.values.null_count:
            return value.as_py()
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()


def _columns(file: SourceFile, schema: Any, names: FieldNames) -> list[str]:
    """Return the columns that a format may read.

    Raises:
        DataError: if there is none, or two have one name.
    """
    columns = [name for name in names.columns if name in schema.names]
    if twice := [name for name in columns if schema.names.count(name) > 1]:
        raise DataError(f"{file.path} has two columns {twice[0]!r}; keep one")
    if names.text in columns and not _holds_strings(schema.field(names.text).type):
        if not names.has_format([name for name in columns if name != names.text]):
            others = {name: value for name, value in _example(schema).items() if name != names.text}
            kind = schema.field(names.text).type
            raise DataError(f"{file.path}: column {names.text!r} is {kind}, not text; {choice_of_field(others, names)}")
        columns.remove(names.text)
    if not names.has_format(columns):
        raise DataError(f"{file.path} has {what_is_missing(_example(schema), names)}")
    return columns


def _example(schema: Any) -> dict[str, object]:
    """Return a record such as a table may have: with empty texts, and lists of one object."""
    return {field.name: _example_of(field.type) for field in schema}


def _example_of(kind: Any) -> object:
    from pyarrow import types

    if _holds_strings(kind):
        return ""
    if types.is_struct(kind):
        return {field.name: _example_of(field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_example_of(kind.value_type)]
    return 0


def _others(schema: Any, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a table that are not read and may hold something."""
    from pyarrow import types

    return tuple(field.name for field in schema if field.name not in columns and not types.is_null(field.type))


def _holds_strings(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _holds_strings(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
