"""Tokenise the data of a run before it begins, with all cores of this machine or of a cluster's nodes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llama_core.chain.downloads import INITIAL_WEIGHTS, resolve
from llama_core.chain.paths import data_from_anywhere
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, SAMPLE, DataSource, paths_of
from llama_core.data.corpus import OnProgress
from llama_core.data.datasets import load_datasets
from llama_core.data.files.source_file import SourceFile, total_bytes
from llama_core.data.find import find_files
from llama_core.data.shards.grouping import grouped
from llama_core.data.shards.store import find_shards, probably_missing, remove_abandoned
from llama_core.data.shards.workers import ShardOrder, Start, build_orders, num_cores
from llama_core.data.tokenising import FoundSource, found_source, naming, writing_to
from llama_core.data.tokenizer import model_tokenizer
from llama_core.errors import ConfigError, DataError
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.launchers.registry import with_nodes
from llama_core.runs.console import say
from llama_core.units import MIB, format_bytes, format_duration

NUM_TASKS = 16
"""Jobs that build shards, if the command names no other number."""
SLOW_BYTES_PER_SECOND = 4 * MIB
"""Bytes that one process reads and tokenises in a second; ``benchmarks/data_at_scale.py`` measures them."""
LONGEST_WAIT_SECONDS = 600.0
"""Most seconds for which a job's GPUs may wait for one process that tokenises."""
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Tokenized:
    """The shards of a run's data."""

    num_shards: int
    num_new_shards: int
    """Those that were missing."""
    num_documents: int
    """Documents to train on, and held-out ones."""
    num_tokens: int
    """Their tokens."""
    seconds: float
    """How long it took to build the new shards and to look at all of them."""
    directories: tuple[str, ...]
    """Where the shards are."""

    def summary(self) -> str:
        """Return the counts in one line."""
        return (
            f"{self.num_tokens:,} tokens of {self.num_documents:,} documents in {self.num_shards:,} shards, "
            f"{self.num_new_shards:,} of them new ({format_duration(self.seconds)}): {', '.join(self.directories)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a record."""
        return asdict(self)


def tokenize(config: RunConfig, num_workers: int | None = None) -> Tokenized:
    """Build the missing shards of a run's data. A call that was stopped at any moment goes on at the next one.

    Args:
        config: the run. If its launcher runs tasks, jobs build the shards, else processes of this machine.
        num_workers: processes, or jobs; default: one process for each core, or ``NUM_TASKS`` jobs.

    Raises:
        ConfigError: if the run has data of its own, or ``num_workers`` is not positive.
        DataError: if the data or the tokenizer cannot be used; shards that are finished are kept.
        HubError: if something of the Hub cannot be had.
        EnvironmentMismatchError: if the launcher is not to be had here, or refuses the jobs.
    """
    if config.data.source == DATALOADER:
        raise ConfigError("this run trains on a dataloader: there is nothing to tokenise")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"workers={num_workers}: at least one process must work")
    began = time.monotonic()
    asked = resolve(config)
    for source in asked.sources:
        if source.setting != INITIAL_WEIGHTS:
            source.fetch()
    config = asked.config
    start = Start(data_from_anywhere(config.data), config.spec, config.objective.reads)
    sources = _found(start)
    orders = [order for source in sources for order in _orders(source)]
    if orders:
        with _progress() as follow:
            _build(orders, start, config, num_workers, follow)
    # so that a job finds its manifests, too
    datasets = load_datasets(
        start.data, start.spec, seq_len=config.first_seq_len, stages=config.stages, objective=config.objective
    )
    statistics = datasets.statistics
    return Tokenized(
        num_shards=sum(len(grouped(source.found.files)) for source in sources),
        num_new_shards=len(orders),
        num_documents=statistics.num_documents + statistics.num_validation_documents,
        num_tokens=statistics.num_tokens + statistics.num_validation_tokens,
        seconds=time.monotonic() - began,
        directories=tuple(dict.fromkeys(str(source.directory) for source in sources)),
    )


def refuse_long_wait(config: RunConfig) -> None:
    """Refuse a job that would keep its GPUs waiting for long while one process tokenises the data.

    Raises:
        DataError: naming the command that tokenises with all cores, before the job.
    """
    data = config.data
    files = [*_files(data.training_sources), *_files(data.validation_sources, held_out=True)]
    if _wait(files) <= LONGEST_WAIT_SECONDS:  # and nothing is written on this machine
        return
    missing = [
        file
        for source in _found(Start(data, config.spec, config.objective.reads))
        for group in probably_missing(source.recipe, grouped(source.found.files), source.directory)
        for file in group
    ]
    if _wait(missing) > LONGEST_WAIT_SECONDS:
        raise DataError(
            f"{format_bytes(total_bytes(missing))} of {data.name} are not tokenised yet, for which the job's ranks "
            f"would wait {format_duration(_wait(missing))}; first run training-infra tokenize with the same arguments, "
            f"which uses all cores, here or of jobs without GPUs ({with_nodes()})"
        )


def _files(sources: Mapping[str, DataSource], *, held_out: bool = False) -> Iterator[SourceFile]:
    for source in sources.values():
        if source != SAMPLE:
            yield from find_files(*paths_of(source), held_out=held_out).files


def _wait(files: Sequence[SourceFile]) -> float:
    """Return the seconds for which ranks wait for files to be tokenised."""
    return total_bytes(files) / SLOW_BYTES_PER_SECOND


def _found(start: Start) -> list[FoundSource]:
    """Return the sources of a run, also those of held-out documents."""
    tokenizer = model_tokenizer(start.data, start.spec)
    find = partial(found_source, data=start.data, tokenizer=tokenizer, spec=start.spec, reads=start.reads)
    training = [find(source) for source in start.data.training_sources.values()]
    return [*training, *(find(source, held_out=True) for source in start.data.validation_sources.values())]


def _orders(source: FoundSource) -> list[ShardOrder]:
    """Return the shards of a source that are missing."""
    newest = max(source.found.files, key=lambda file: file.mtime_ns)
    groups = grouped(source.found.files)
    with naming(source.given), writing_to(source.directory):
        remove_abandoned(source.directory)
        found = find_shards(source.recipe, groups, source.directory)
    missing = [files for files, shard in zip(groups, found, strict=True) if shard is None]
    return [ShardOrder(files, source.recipe.names, newest, source.directory) for files in missing]


def _build(
    orders: list[ShardOrder], start: Start, config: RunConfig, num_workers: int | None, on_progress: OnProgress
) -> None:
    jobs = launcher_of(config.launch.launcher).tasks
    if jobs is None:
        build_orders(orders, start, num_workers or num_cores(), on_progress)
        return
    from llama_core.launch.jobs.shard_jobs import build_in_jobs

    folder = orders[0].directory / f"jobs-{uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    launch = config.launch
    alone: dict[str, Any] = {"launcher": launch.launcher, "device": "cpu"}
    if section := launch.kind.section:
        alone[section] = launch.request.model_dump()
    say("tokenize", f"{len(orders):,} shards in jobs of {launch.kind.title}; their logs: {folder}")
    build_in_jobs(
        orders,
        start,
        RunConfig.from_mapping({"launch": alone}),
        num_workers or NUM_TASKS,
        jobs=jobs,
        folder=folder,
        on_progress=on_progress,
    )


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Yield a function that shows the bytes read: as a bar on a terminal, else as a line now and then."""
    if not say.can_redraw:
        yield _Lines()
        return
    columns = (
        TextColumn("[bold]tokenize  "),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=say.console, transient=True) as bar:
        task = bar.add_task("tokenize", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Prints a line with the speed and the time left if there is news, at most every ``_SECONDS_BETWEEN_LINES``."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._printed_at = float("-inf")
        self._printed = -1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == self._printed or (done < total and now - self._printed_at < _SECONDS_BETWEEN_LINES):
            return
        self._printed_at = now
        self._printed = done
        speed = done / max(now - self._began, 1e-3)
        left = f", {format_duration((total - done) / speed)} left" if done else ""
        say("tokenize", f"{format_bytes(done)} of {format_bytes(total)}, {speed / MIB:.1f} MiB/s{left}")
