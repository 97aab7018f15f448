"""Saving in the background: a state is copied into memory that stays for the next one, and threads write the copy."""

import os
from collections.abc import Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from llama_core.records.checksums import FileSum, SummedFile
from llama_core.training.index import INDEX, index_lines

FILES_PER_RANK = 4
"""Files that a rank on a GPU writes at once: one stream does not reach the bandwidth of a shared file system. The ranks
on a CPU write one, because their cores train meanwhile."""

_SUMS = MetadataIndex("checksums")
"""Where a rank's checksums are among the results that torch collects on the first rank."""

_savers = count()


class BackgroundSaver:
    """Saves one state after another while training goes on. All states have tensors of the same names and sizes.

    The copy is as large as this rank's part of a checkpoint. Its memory is made in the first save and kept until
    ``close``. For a GPU it is pinned: that takes longer than a copy, but makes every copy faster.

    Ranks agree only once on who writes what. With many ranks that takes seconds of Python on rank 0, which its training
    would wait for.

    Args:
        device: where the tensors are.
        num_files: files that this rank writes at once; by default one, or ``FILES_PER_RANK`` from a GPU.
    """

    def __init__(self, device: torch.device, num_files: int | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._num_files = num_files or (FILES_PER_RANK if self._on_gpu else 1)
        # torch keeps the plans of a class by its name; another saver's tensors may be others
        self._planner = type(f"Planner{next(_savers)}", (DefaultSavePlanner,), {})
        self._stager: KeptStager | None = None
        self._written: Future[Any] | None = None

    def save(
        self, state: dict[str, Any], folder: Path, writers: dist.ProcessGroup | None
    ) -> "Future[dict[str, FileSum]]":
        """Copy ``state`` and start writing the copy to ``folder``; wait first until an earlier one is written.

        The future's result on the first rank is the checksum of every file of every rank, by name; the threads that
        write the files compute it. On the other ranks it is empty.

        Args:
            state: what to save.
            folder: an existing folder to write to.
            writers: the group of the writing threads of all ranks; None for a single process.

        Raises:
            OSError: if the folder cannot be written to; the future raises later errors.
        """
        if self._written is not None:
            wait([self._written])
        if self._stager is None:
            self._stager = KeptStager(on_gpu=self._on_gpu)
        writer = _Writer(folder, self._num_files)
        written = dcp.async_save(
            state,
            checkpoint_id=folder,
            storage_writer=writer,
            planner=self._planner(enable_plan_caching=True),
            async_stager=self._stager,
            process_group=writers,
            no_dist=writers is None,
        )
        if not isinstance(written, Future):
            raise TypeError(f"async_save returned {type(written).__name__}")
        self._written = written
        sums: Future[dict[str, FileSum]] = Future()

        def pass_on(done: "Future[Any]") -> None:
            error = done.exception()
            if error is None:
                sums.set_result(writer.sums)
            else:
                sums.set_exception(error)

        written.add_done_callback(pass_on)
        return sums

    def close(self) -> None:
        """Give up the memory of the copy, which a thread that still writes it keeps; a later save makes it again."""
        if self._stager is not None:
            self._stager.close()
        self._stager = None


class KeptStager(AsyncStager):
    """Copies one state after another to the same host memory, until ``close``.

    torch's own ``DefaultStager`` does so since 2.13; before, it gives the memory up after each copy.

    Args:
        on_gpu: whether the states are on a GPU; the memory is then pinned.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._copies = StateDictStager(pin_memory=on_gpu, share_memory=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state, once it is complete."""
        staged: dict[str, Any] = self._copies.stage(state_dict, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.accelerator.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete already."""

    def close(self) -> None:
        """Give up the memory, which a thread that still writes it keeps."""
        self._copies.close()  # type: ignore[no-untyped-call]


class _Writer(dcp.FileSystemWriter):
    """Writes a rank's tensors to several files at once, and sums them on the way.

    torch's own would call a checkpoint complete if one of its threads could not write its file: it only prints what a
    thread raises.
    """

    def __init__(self, folder: Path, num_files: int) -> None:
        super().__init__(folder, thread_count=num_files, per_thread_copy_ahead=0)  # the copy is in host memory already
        self.sums: dict[str, FileSum] = {}
        """On the first rank, the checksums of the files of all ranks, by name, once all are written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files, and add their checksums to the results; raise the first error of any thread."""
        self.fs = disk = _SummingThreads()
        results = super().write_data(plan, planner).value()
        if disk.errors:
            raise disk.errors[0]
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([*results, WriteResult(_SUMS, 0, disk.sums)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the index, with the results of all ranks; only the first rank does."""
        self.fs = disk = _Summing()
        of_tensors = [[one for one in of_rank if one.index != _SUMS] for of_rank in results]
        super().finish(metadata, of_tensors)
        # torch 2.11 sets the places in a copy of the metadata
        places = {one.index: one.storage_data for of_rank in of_tensors for one in of_rank}
        with disk.create_stream(Path(self.path) / INDEX, "wb") as file:
            for line in index_lines(replace(metadata, storage_data=places)):
                file.write(line)
            os.fsync(file.fileno())
        self.sums |= disk.sums
        for of_rank in results:
            for one in of_rank:
                self.sums |= one.storage_data if one.index == _SUMS else {}


class _Summing(FileSystem):
    """Files whose checksums are taken while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Yield an open file; reading is not expected."""
        with self._opened(Path(path), mode) as stream:
            summed = SummedFile(stream)
            yield summed
        self.sums[Path(path).name] = summed.sum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)

    def _opened(self, path: Path, mode: str) -> IO[Any]:
        return path.open(mode)


class _SummingThreads(_Summing):
    """The same, but errors are kept instead of raised, because a thread raises them to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Yield an open file."""
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            self.errors.append(error)

    def _opened(self, path: Path, mode: str) -> IO[Any]:
        try:
            return super()._opened(path, mode)
        except OSError as error:
            self.errors.append(error)
            return Path(os.devnull).open(mode)
