"""Build shards in several jobs, each of which builds some of them with all of its cores."""

import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.data.corpus import OnProgress
from llama_core.data.files.source_file import total_bytes
from llama_core.data.shards.store import Recipe, find_shards, probably_missing
from llama_core.data.shards.workers import ShardOrder, Start, build_orders, num_cores
from llama_core.data.tokenizer import model_tokenizer
from llama_core.errors import DataError, RunDirectoryError, TrainingInfraError
from llama_core.launch.jobs.tasks import TaskJobs, TaskRequest
from llama_core.records.files import read_typed, write_json

_NAME = "tokenize"


@dataclass(frozen=True)
class _Ending:
    """What a task that could not build a shard leaves."""

    problem: str


@dataclass(frozen=True)
class ShardTask:
    """What one of the jobs calls on its node."""

    orders: tuple[ShardOrder, ...]
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


def build_in_jobs(
    orders: Sequence[ShardOrder],
    start: Start,
    config: RunConfig,
    num_tasks: int,
    *,
    jobs: TaskJobs,
    folder: Path,
    on_progress: OnProgress,
) -> None:
    """Build shards in jobs, and wait for them.

    Args:
        orders: the shards.
        start: the run.
        config: a configuration with the resources of each job: those of one rank on the CPU.
        num_tasks: number of jobs.
        jobs: starts them.
        folder: where the files of the jobs go, new and on a file system that the nodes share.
        on_progress: called with the bytes whose shards are there, and all.

    Raises:
        EnvironmentMismatchError: if the launcher is not to be had here, or refuses the jobs.
        DataError: if a shard cannot be built; the others are kept.
    """
    by_size = sorted(orders, key=lambda order: order.num_bytes, reverse=True)
    number = min(num_tasks, len(by_size))
    endings = [folder / f"problem-{index}.json" for index in range(number)]
    tasks = [ShardTask(tuple(by_size[index::number]), start, ending) for index, ending in enumerate(endings)]
    directories = {order.directory for order in orders}
    others = {entry.name for directory in directories for entry in directory.glob("shard-*")}
    request = TaskRequest(
        tuple(tasks), config, 1, _NAME, folder, "cache directory", "another data.cache_dir", can_repeat=True
    )
    job_ids = jobs.submit(request)
    try:
        states = _follow(jobs, job_ids, orders, start, others=others, on_progress=on_progress)
    except BaseException:
        jobs.cancel(job_ids)
        raise
    for ending in endings:
        if ending.exists():
            raise DataError(_problem(ending))
    left = _missing(orders, start)
    if left:
        ended = ", ".join(f"{count} {state}" for state, count in Counter(states).items()) or "unknown"
        title = config.launch.kind.title
        raise DataError(
            f"{len(left):,} shards are missing after the end of {title}'s jobs (states: {ended}); their logs are in "
            f"{folder}; start again to build these"
        )


def _follow(
    jobs: TaskJobs,
    job_ids: Sequence[str],
    orders: Sequence[ShardOrder],
    start: Start,
    *,
    others: Container[str],
    on_progress: OnProgress,
) -> Sequence[str]:
    """Wait until all shards are there or the jobs have ended; return the last known states of the jobs.

    Args:
        jobs: how to ask about them.
        job_ids: their ids.
        orders: the shards.
        start: the run.
        others: names of the shards that were there before.
        on_progress: called with the bytes whose shards are there, and all.
    """
    sources = list(_by_source(orders, start))
    total = sum(order.num_bytes for order in orders)
    ended_at = float("inf")
    states: Sequence[str] = []
    while True:
        missing = [
            files
            for recipe, own in sources
            for files in probably_missing(recipe, [order.files for order in own], own[0].directory, others=others)
        ]
        on_progress(total - sum(map(total_bytes, missing)), total)
        if not missing or time.monotonic() > ended_at + jobs.files_seconds:
            return states
        now_in = jobs.states(job_ids, _NAME)
        if now_in is not None:
            states = now_in or states
            if jobs.ended.issuperset(now_in):
                ended_at = min(ended_at, time.monotonic())  # what it wrote last may still be on its way to this machine
        time.sleep(jobs.poll_seconds)


def _missing(orders: Sequence[ShardOrder], start: Start) -> list[ShardOrder]:
    """Return the orders whose shards are not there."""
    missing = []
    for recipe, own in _by_source(orders, start):
        found = find_shards(recipe, [order.files for order in own], own[0].directory)
        missing += [order for order, shard in zip(own, found, strict=True) if shard is None]
    return missing


def _by_source(orders: Sequence[ShardOrder], start: Start) -> Iterator[tuple[Recipe, list[ShardOrder]]]:
    """Yield how the files of each source become tokens, and its orders."""
    tokenizer = model_tokenizer(start.data, start.spec)
    by_source: dict[tuple[Path, Path], list[ShardOrder]] = {}
    for order in orders:
        by_source.setdefault((order.directory, order.newest.path), []).append(order)
    for own in by_source.values():
        yield own[0].recipe(tokenizer, start), own


def _problem(ending: Path) -> str:
    try:
        return read_typed(ending, _Ending).problem
    except RunDirectoryError as error:
        return str(error)
