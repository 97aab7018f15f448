"""Token ids in a file, read piece by piece.

A file that is mapped into memory ends the process if it is cut short meanwhile; one that is read gives an error.
"""

from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from llama_core.data.files.source_file import SourceFile
from llama_core.errors import DataError


class StoredIds:
    """The ids of a file, of which slices are read; a context, which closes the file at its end.

    Args:
        file: the file.
        dtype: the type of the ids.
        offset: the bytes before the first one.
        number: how many there are; by default as many as the file holds.

    Raises:
        OSError: if the file cannot be opened.
        DataError: if it does not hold whole ids.
    """

    def __init__(self, file: SourceFile, dtype: np.dtype[Any], offset: int = 0, number: int | None = None) -> None:
        self.path = file.path
        self.dtype = dtype
        self._offset = offset
        if number is None:
            size = file.num_bytes - offset
            if size % dtype.itemsize:
                raise DataError(
                    f"{file.path} has {size:,} bytes of ids, which are no whole numbers of {dtype.itemsize}; copy it "
                    "again"
                )
            number = size // dtype.itemsize
        self._number = number
        self._file = file.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, ids: slice) -> npt.NDArray[Any]:
        """Return neighbouring ids, [ids].

        Raises:
            DataError: if the file has become shorter.
        """
        begin, end, step = ids.indices(self._number)
        assert step == 1, "only neighbours are read at once"
        num_bytes = max(0, end - begin) * self.dtype.itemsize
        self._file.seek(self._offset + begin * self.dtype.itemsize)
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise DataError(f"{self.path} was cut short while it was read; copy it again")
        return np.frombuffer(content, self.dtype)
