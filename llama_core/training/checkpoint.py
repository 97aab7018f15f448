"""Checkpoints: written under a hidden name, renamed when complete, never overwritten.

Every rank's engine writes its own shards; rank 0 does the rest.

A checkpoint is a directory ``step-00000100``. It holds the engines' files (in torch's distributed format with an index,
which any number of ranks under any plan can read, or in DeepSpeed's), ``state.json`` (the trainer's counters), the
``config.yaml`` that it was trained with, and ``manifest.json`` (the size and checksum of every file). It is written as
``.step-00000100.writing`` and renamed when every byte is on disk; the ``latest`` file names the newest one and is
replaced last. One that is no longer kept is renamed before its files are deleted. Killing the process at any moment
therefore leaves the other checkpoints intact.

Before a checkpoint is loaded, every byte of it is compared with the manifest. Each rank reads the files that the rank
of its number has written, so together they read every file once; under the same plan these are the files that the rank
loads next, by then in the machine's memory. One rank of each machine checking them all would take as many times longer
as a machine has ranks, and read everything once for every machine.
"""

import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from llama_core.errors import CheckpointError, TrainingInfraError, WeightsError
from llama_core.parallel.ranks import (
    first_complaint,
    from_first_rank,
    is_first_rank,
    most_over_ranks,
    num_ranks,
    own_rank,
    wait_for_all,
)
from llama_core.records.checkpoints import (
    LATEST,
    PREFIX,
    STATE,
    checkpoint_name,
    complete_state,
    list_checkpoints,
    newest_checkpoint,
    place_of,
    recorded_sums,
    write_manifest,
)
from llama_core.records.checksums import FileSum, find_damage
from llama_core.records.directory import RunDirectory, command_to_resume
from llama_core.records.files import atomic_write, is_disk_full, no_room, write_json
from llama_core.records.retention import Retention
from llama_core.training.engine import Engine

SECONDS_BETWEEN_QUESTIONS = 1.0
"""How often ranks that wait for a checkpoint to be written ask each other whether it is."""

logger = logging.getLogger(__name__)
# A single process is intended; the thread that writes would warn about it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass
class _Pending:
    """A checkpoint whose files a background thread is still writing."""

    step: int
    state: Mapping[str, Any]
    written: "Future[dict[str, FileSum]]"


class Checkpointer:
    """Saves and restores one run's weights, optimizer states and counters; all ranks call each method together.

    Args:
        run: the run.
        keep: which checkpoints stay on disk.
        num_bytes: the size of a checkpoint, for the error of a full disk.
        from_python: whether the run is continued from Python, for the error when no checkpoint can be read.
        settings: the text of the ``config.yaml`` in every checkpoint; by default, what the run's own holds now.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        keep: Retention,
        num_bytes: int = 0,
        from_python: bool = False,
        settings: str | None = None,
    ) -> None:
        self.run = run
        self.keep = keep
        self.num_bytes = num_bytes
        self.from_python = from_python
        self._settings = run.config.read_text() if settings is None else settings
        self._pending: _Pending | None = None
        self._damaged: set[str] = set()
        self._newest = ""  # the last that was published here
        self.on_published: Callable[[], None] = lambda: None
        """Called on the first rank when a checkpoint is complete."""
        self.is_held: Callable[[Path], bool] = lambda checkpoint: False
        """Says of a checkpoint that is no longer kept whether somebody still reads it."""

    def save(self, step: int, engine: Engine, state: Mapping[str, Any]) -> None:
        """Start writing the state after ``step``; ``poll`` or ``finish`` publishes it.

        Args:
            step: the last completed optimizer step, from 1.
            engine: holds the weights and the optimizer states.
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
            self.finish_alone()

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any, and publish it.

        Writing may take hours, for which the threads that write wait for each other. Meanwhile the ranks ask each
        other, so that those that cannot reach each other end as they do in a step.

        Raises:
            CheckpointError: if writing it failed; the earlier checkpoints are untouched.
        """
        num_waiting = 1
        while num_waiting:
            waiting = wait([self._pending.written], SECONDS_BETWEEN_QUESTIONS).not_done if self._pending else ()
            (num_waiting,) = most_over_ranks(len(waiting))
        self.finish_alone()

    def finish_alone(self, patience_s: float | None = None) -> None:
        """Do the same on a rank that may be the only one to do so, as after an error.

        Args:
            patience_s: seconds after which it is given up, because ranks that should take part are lost; by default
                none.

        Raises:
            CheckpointError: if writing it failed; the earlier checkpoints are untouched.
        """
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        if not wait([pending.written], patience_s).done:
            return
        try:
            sums = pending.written.result()
            if is_first_rank():  # its write completes only after all other ranks have reported theirs
                self._publish(pending.step, pending.state, sums)
        except (OSError, dcp.CheckpointException) as error:
            raise self._failed(pending.step, error) from error

    def _publish(self, step: int, state: Mapping[str, Any], sums: Mapping[str, FileSum]) -> None:
        writing = self._writing(step)
        final = self.run.checkpoints / checkpoint_name(step)
        (writing / self.run.config.name).write_text(self._settings)  # the run's own may have been edited meanwhile
        write_json(writing / STATE, {"step": step, **state})
        write_manifest(writing, sums)
        if final.exists():  # it is damaged: otherwise the run would not have repeated this step
            final.replace(self.run.checkpoints / f".{final.name}.damaged.writing")
        writing.replace(final)
        self._damaged.discard(final.name)
        with atomic_write(self.run.checkpoints / LATEST) as temporary:
            temporary.write_text(final.name + "\n")
        self._newest = final.name
        self.on_published()
        self.remove_others()

    def remove_others(self) -> None:
        """Delete the checkpoints that are no longer kept, but for those that are held; only the first rank does."""
        # any later checkpoint was found damaged
        so_far = [path for path in list_checkpoints(self.run) if path.name <= self._newest]
        good = [path for path in so_far if path.name not in self._damaged]
        kept = self.keep.kept(good)
        for path in so_far:
            if path not in kept and not self.is_held(path):
                self._remove(path)

    def load(self, engine: Engine) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint and return the trainer's counters, or None if there is none.

        A damaged checkpoint (a file is missing, truncated, changed or unreadable) is skipped with a warning.

        Raises:
            CheckpointError: if there are checkpoints but none can be read; nothing has been deleted then.
            PlanError: if the newest one can only be read under another plan.
        """
        # Rank 0 decides for all ranks: a shared file system may show the others a different state.
        candidates = from_first_rank([path.name for path in reversed(list_checkpoints(self.run))])
        problems = []
        for name in candidates:
            state, problem = self._load(engine, self.run.checkpoints / name)
            if state is not None:
                self._remove_unfinished()
                return state
            problems.append(f"{name}: {problem}")
            self._damaged.add(name)
            if is_first_rank():
                before = "; trying the one before" if name != candidates[-1] else ""
                logger.warning("checkpoint %s is damaged (%s)%s", name, problem, before)
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints in {self.run.checkpoints} can be read "
                f"({'; '.join(problems)}); restore one from a backup, or move them away to start over, and continue "
                f"with: {command_to_resume(self.run, from_python=self.from_python)}"
            )
        self._remove_unfinished()
        return None

    def _load(self, engine: Engine, path: Path) -> tuple[dict[str, Any] | None, str]:
        """Restore one checkpoint and return its counters and ""; or None and the problem with it, on all ranks."""
        state, sums, problem = from_first_rank(_look_at(path) if is_first_rank() else (None, {}, ""))
        if state is None:
            return None, problem
        if problem := _damage(path, sums):
            return None, problem
        try:
            engine.load(path)
        except (CheckpointError, dcp.CheckpointException) as error:
            problem = one_line(error)
        problem = first_complaint(problem)
        return (None, problem) if problem else (state, "")

    def _remove_unfinished(self) -> None:
        if is_first_rank():
            for unfinished in self.run.checkpoints.glob(f".{PREFIX}*.writing"):
                shutil.rmtree(unfinished)

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; a process killed meanwhile leaves a hidden rest, which the next one removes.

        One that cannot be deleted costs room, but not the run: the newer one is saved.
        """
        hidden = path.with_name(f".{path.name}.deleted.writing")
        try:
            path.replace(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("%s cannot be deleted and takes up room: %s", path, error.strerror or error)

    def _writing(self, step: int) -> Path:
        return self.run.checkpoints / f".{checkpoint_name(step)}.writing"

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        cause = no_room(self.run.checkpoints, self.num_bytes) if lacks_room(error) else one_line(error)
        shutil.rmtree(self._writing(step), ignore_errors=True)
        newest = newest_checkpoint(self.run)
        kept = f"{newest.name} is complete" if newest else "no earlier checkpoint exists"
        return CheckpointError(f"cannot save the checkpoint of step {step}: {cause}; {kept}")


def refuse_damaged_together(path: Path) -> None:
    """Compare a checkpoint with its checksums, each rank its share of the files; all ranks call it together.

    Raises:
        WeightsError: on every rank, if it is damaged.
    """
    _, sums, problem = from_first_rank(_look_at(path) if is_first_rank() else (None, {}, ""))
    if problem := problem or _damage(path, sums):
        raise WeightsError(f"{path} is damaged ({problem}); start from another checkpoint of its run")


def _damage(path: Path, sums: Mapping[str, FileSum]) -> str:
    """Return on every rank the first damage that any rank finds in its share of a checkpoint's files; "" for none."""
    own = {name: one for name, one in sums.items() if _reader(name) == own_rank()}
    problem = find_damage(path, own, below=place_of(path))
    wait_for_all()  # a collective would time out while a rank with a slow disk still reads
    return first_complaint(problem)


def _look_at(path: Path) -> tuple[dict[str, Any] | None, dict[str, FileSum], str]:
    """Return the counters of the checkpoint in ``path``, what its files must be and ""; or None and the problem."""
    try:
        return complete_state(path), recorded_sums(path), ""
    except CheckpointError as error:
        return None, {}, one_line(error)


def _reader(name: str) -> int:
    """Return the rank that checks a file: the one that wrote it, by its name, modulo the number of ranks now."""
    writer = re.search(r"(?:__|rank_)(\d+)", name)
    return int(writer[1]) % num_ranks() if writer else 0


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
    """Return the last line of an error; of those that torch has gathered from all ranks, of the first rank's."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = error.failures[min(error.failures)]
    lines = str(error).strip().splitlines()
    if isinstance(error, TrainingInfraError | OSError) and lines:
        return lines[-1]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
