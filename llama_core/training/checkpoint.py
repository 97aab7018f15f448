"""Checkpoints: written under a hidden name, renamed when complete, never overwritten.

Every rank's engine writes its own shards; rank 0 does the rest.

A checkpoint is a directory ``step-00000100``. It holds the engines' files (in torch's distributed format, which any
number of ranks under any plan can read, or in DeepSpeed's), ``state.json`` (the trainer's counters and the size of
every file) and a copy of the run's ``config.yaml``. It is written as ``.step-00000100.writing`` and renamed when every
byte is on disk; the ``latest`` file names the newest one and is replaced last. Killing the process at any moment
therefore leaves the earlier checkpoints intact.
"""

import logging
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from llama_core.errors import CheckpointError
from llama_core.parallel.ranks import from_first_rank, is_first_rank, most_over_ranks
from llama_core.records.checkpoints import (
    LATEST,
    PREFIX,
    STATE,
    checkpoint_name,
    complete_state,
    list_checkpoints,
    newest_checkpoint,
)
from llama_core.records.directory import RunDirectory
from llama_core.records.files import atomic_write, is_disk_full, no_room, write_json
from llama_core.training.engine import Engine

logger = logging.getLogger(__name__)
# A single process is intended; the thread that writes would warn about it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class _Pending:
    """A checkpoint whose files a background thread is still writing."""

    step: int
    state: Mapping[str, Any]
    written: "Future[Any]"


class Checkpointer:
    """Saves and restores one run's weights, moments and counters; all ranks call each method together.

    Args:
        run: the run.
        keep: how many of the newest checkpoints stay on disk.
        num_bytes: the size of a checkpoint, for the error of a full disk.
    """

    def __init__(self, run: RunDirectory, *, keep: int, num_bytes: int = 0) -> None:
        self.run = run
        self.keep = keep
        self.num_bytes = num_bytes
        self._pending: _Pending | None = None

    def save(self, step: int, engine: Engine, state: Mapping[str, Any]) -> None:
        """Start writing the state after ``step``; ``poll`` or ``finish`` publishes it.

        Args:
            step: the last completed optimizer step, from 1.
            engine: holds the weights and moments.
            state: the trainer's counters, as JSON.

        Raises:
            CheckpointError: if this checkpoint, or the one before it, cannot be written.
        """
        self.finish()
        writing = self._writing(step)
        try:
            writing.mkdir(parents=True, exist_ok=True)  # the first rank to get here makes it
            written = engine.save(writing)
        except OSError as error:
            raise self._failed(step, error) from error
        self._pending = _Pending(step, state, written)

    def poll(self) -> None:
        """Publish the checkpoint being written if its files are complete.

        Raises:
            CheckpointError: if writing it failed.
        """
        if self._pending is not None and self._pending.written.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, and publish it.

        Raises:
            CheckpointError: if writing it failed; the earlier checkpoints are untouched.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.written.result()
            if is_first_rank():  # its write completes only after all other ranks have reported theirs
                self._publish(pending.step, pending.state)
        except (OSError, dcp.CheckpointException) as error:
            raise self._failed(pending.step, error) from error

    def _publish(self, step: int, state: Mapping[str, Any]) -> None:
        writing, final = self._writing(step), self.run.checkpoints / checkpoint_name(step)
        shutil.copyfile(self.run.config, writing / self.run.config.name)
        paths = sorted(path for path in writing.rglob("*") if path.is_file())
        files = {str(path.relative_to(writing)): path.stat().st_size for path in paths}
        write_json(writing / STATE, {"step": step, **state, "files": files})
        if final.exists():  # it is damaged: otherwise the run would not have repeated this step
            final.replace(self.run.checkpoints / f".{final.name}.damaged.writing")
        writing.replace(final)
        with atomic_write(self.run.checkpoints / LATEST) as temporary:
            temporary.write_text(final.name + "\n")
        # any later checkpoint was found damaged
        so_far = [path for path in list_checkpoints(self.run) if path.name <= final.name]
        for old in so_far[: -self.keep]:
            shutil.rmtree(old)

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Restore the newest complete checkpoint and return the trainer's counters, or None if there is none.

        A damaged checkpoint (a file is missing, truncated or unreadable) is skipped with a warning.

        Raises:
            CheckpointError: if there are checkpoints but none can be read.
            PlanError: if the newest one can only be read under another plan.
        """
        if is_first_rank():
            for unfinished in self.run.checkpoints.glob(f".{PREFIX}*.writing"):
                shutil.rmtree(unfinished)
        # Rank 0 decides for all ranks: a shared file system may show the others a different state.
        candidates = from_first_rank([path.name for path in reversed(list_checkpoints(self.run))])
        for name in candidates:
            path = self.run.checkpoints / name
            state, problem = from_first_rank(_state_or_problem(path) if is_first_rank() else (None, ""))
            if state is not None:
                try:
                    engine.load(path)
                except (CheckpointError, dcp.CheckpointException) as error:
                    problem = one_line(error)
                (any_problem,) = most_over_ranks(int(problem != ""))
                if not any_problem:
                    return state
            logger.warning(
                "checkpoint %s is damaged (%s); trying the one before", name, problem or "another rank cannot read it"
            )
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints in {self.run.checkpoints} can be read; "
                "restore one from a backup, or remove them to start over"
            )
        return None

    def _writing(self, step: int) -> Path:
        return self.run.checkpoints / f".{checkpoint_name(step)}.writing"

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        shutil.rmtree(self._writing(step), ignore_errors=True)
        newest = newest_checkpoint(self.run)
        kept = f"{newest.name} is complete" if newest else "no earlier checkpoint exists"
        cause = no_room(self.run.checkpoints, self.num_bytes) if lacks_room(error) else one_line(error)
        return CheckpointError(f"cannot save the checkpoint of step {step}: {cause}; {kept}")


def _state_or_problem(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the counters of the checkpoint in ``path`` and "", or None and the problem with it."""
    try:
        return complete_state(path), ""
    except CheckpointError as error:
        return None, one_line(error)


def lacks_room(error: BaseException | None) -> bool:
    """Return whether the disk was full for some rank; torch gathers the errors of all ranks in one."""
    while error is not None:
        if isinstance(error, dcp.CheckpointException):
            return any(is_disk_full(failure[0]) for failure in error.failures.values())
        if is_disk_full(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_line(error: BaseException) -> str:
    """Return the last line of an error: when torch gathers the errors of all ranks, it names the cause."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
