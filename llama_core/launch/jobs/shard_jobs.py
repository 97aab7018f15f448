"""Build shards in a Slurm job array, each element of which builds some of them with all of its cores."""

import shlex
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.data.corpus import OnProgress
from llama_core.data.shard_store import Recipe, find_shards, probably_missing
from llama_core.data.shard_workers import Order, Start, build_orders, num_cores
from llama_core.data.source_file import total_bytes
from llama_core.data.tokenizer import model_tokenizer
from llama_core.errors import DataError, EnvironmentMismatchError, RunDirectoryError, TrainingInfraError
from llama_core.imports import safe_python
from llama_core.launch.jobs.slurm import ENDED, FILES_SECONDS, FIRST_POLL_SECONDS, slurm_executor
from llama_core.launch.jobs.slurm_request import comment_of, job_name, slurm_parameters, submission_environment
from llama_core.launch.scheduler import array_statuses, cancel
from llama_core.records.files import read_typed, write_json

_NAME = "tokenize"


@dataclass(frozen=True)
class _Ending:
    """What a task that could not build a shard leaves."""

    problem: str


@dataclass(frozen=True)
class ShardTask:
    """One element of the array; submitit calls it on its node."""

    orders: tuple[Order, ...]
    start: Start
    ending: Path
    """Where it leaves the reason if it cannot build a shard."""

    def __call__(self) -> None:
        """Build the shards that are still missing."""
        try:
            missing = _missing(self.orders, self.start)
            build_orders(missing, self.start, num_cores(), lambda done, total: None)
        except TrainingInfraError as error:
            write_json(self.ending, _Ending(str(error)))

    def checkpoint(self) -> Any:
        """Return the task that goes on with this one's work in a job that Slurm has stopped and queued again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def build_on_slurm(
    orders: Sequence[Order],
    start: Start,
    config: RunConfig,
    num_tasks: int,
    *,
    folder: Path,
    on_progress: OnProgress,
) -> None:
    """Build shards in a job array, and wait for it.

    Args:
        orders: the shards.
        start: the run.
        config: a configuration with the resources of each element: those of one rank on the CPU.
        num_tasks: elements of the array.
        folder: where the files of the array go, new and on a file system that the nodes share.
        on_progress: called with the bytes whose shards are there, and all.

    Raises:
        EnvironmentMismatchError: if there is no Slurm here, or it refuses the job.
        DataError: if a shard cannot be built; the others are kept.
    """
    by_size = sorted(orders, key=lambda order: order.num_bytes, reverse=True)
    number = min(num_tasks, len(by_size))
    endings = [folder / f"problem-{index}.json" for index in range(number)]
    tasks = [ShardTask(tuple(by_size[index::number]), start, ending) for index, ending in enumerate(endings)]
    directories = {order.directory for order in orders}
    others = {entry.name for directory in directories for entry in directory.glob("shard-*")}
    array = _submit(tasks, config, folder)
    try:
        states = _follow(array, orders, start, others, on_progress)
    except BaseException:
        cancel(array)
        raise
    for ending in endings:
        if ending.exists():
            raise DataError(_problem(ending))
    left = _missing(orders, start)
    if left:
        ended = ", ".join(f"{count} {state}" for state, count in Counter(states).items()) or "unknown"
        raise DataError(
            f"{len(left):,} shards are missing after the end of Slurm job {array} (states: {ended}); "
            f"its logs are in {folder}; start again to build these"
        )


def _submit(tasks: Sequence[ShardTask], config: RunConfig, folder: Path) -> str:
    """Submit an array and return its job id."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    python = shlex.join(safe_python())
    executor = slurm_executor(folder, python, f"cache directory {str(folder)!r}", "another data.cache_dir")
    executor.update_parameters(**slurm_parameters(config, _NAME, comment_of(folder), num_ranks=1))
    try:
        with submission_environment():
            jobs = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        raise EnvironmentMismatchError(
            f"Slurm refused the job: {' '.join(str(error).split())}; change launch.slurm or the request"
        ) from None
    return str(jobs[0].job_id).partition("_")[0]


def _follow(
    array: str, orders: Sequence[Order], start: Start, others: Container[str], on_progress: OnProgress
) -> list[str]:
    """Wait until all shards are there or the array has ended; return the last known states of its elements.

    Args:
        array: its job id.
        orders: the shards.
        start: the run.
        others: names of the shards that were there before.
        on_progress: called with the bytes whose shards are there, and all.
    """
    sources = list(_by_source(orders, start))
    total = sum(order.num_bytes for order in orders)
    ended_at = float("inf")
    states: list[str] = []
    while True:
        missing = [
            files
            for recipe, own in sources
            for files in probably_missing(recipe, [order.files for order in own], own[0].directory, others=others)
        ]
        on_progress(total - sum(map(total_bytes, missing)), total)
        if not missing or time.monotonic() > ended_at + FILES_SECONDS:
            return states
        statuses = array_statuses(array, job_name(_NAME))
        if statuses is not None:
            states = [status.state for status in statuses.values()] or states
            if all(status.state in ENDED for status in statuses.values()):
                ended_at = min(ended_at, time.monotonic())  # what it wrote last may still be on its way to this machine
        time.sleep(FIRST_POLL_SECONDS)


def _missing(orders: Sequence[Order], start: Start) -> list[Order]:
    """Return the orders whose shards are not there."""
    missing = []
    for recipe, own in _by_source(orders, start):
        found = find_shards(recipe, [order.files for order in own], own[0].directory)
        missing += [order for order, shard in zip(own, found, strict=True) if shard is None]
    return missing


def _by_source(orders: Sequence[Order], start: Start) -> Iterator[tuple[Recipe, list[Order]]]:
    """Yield how the files of each source become tokens, and its orders."""
    tokenizer = model_tokenizer(start.data, start.spec)
    by_source: dict[tuple[Path, Path], list[Order]] = {}
    for order in orders:
        by_source.setdefault((order.directory, order.newest.path), []).append(order)
    for own in by_source.values():
        yield own[0].recipe(tokenizer, start), own


def _problem(ending: Path) -> str:
    try:
        return read_typed(ending, _Ending).problem
    except RunDirectoryError as error:
        return str(error)
