"""Build shards with all cores: processes that each take the next shard when they have finished one.

The processes are started with their own command and not forked, because a tokenizer has threads, and not with
``multiprocessing``, which would run the caller's script once more.
"""

import json
import os
import pickle
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DataConfig
from llama_core.data.chat import chat_format
from llama_core.data.corpus import OnProgress
from llama_core.data.files.source_file import SourceFile, total_bytes
from llama_core.data.formats import FieldNames
from llama_core.data.shards.store import Recipe
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError
from llama_core.imports import safe_python
from llama_core.objectives.records import DOCUMENTS

_OF_DAMAGE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""Signals of a library that has read what it cannot read."""
_COMMAND = safe_python("-m", "llama_core.data.shards.worker")


@dataclass(frozen=True)
class Start:
    """The run whose shards are to be built."""

    data: DataConfig
    spec: ModelSpec
    reads: str = DOCUMENTS.name
    """The name of the kind of records."""


@dataclass(frozen=True)
class ShardOrder:
    """A shard to build."""

    files: tuple[SourceFile, ...]
    names: FieldNames
    newest: SourceFile
    """The newest file of the source, whose date a chat template may see."""
    directory: Path

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return total_bytes(self.files)

    def recipe(self, tokenizer: Tokenizer, start: Start) -> Recipe:
        """Return how the files become tokens."""
        chat = chat_format(start.data, tokenizer, start.spec, [self.newest])
        return Recipe(self.names, tokenizer, chat, start.data.max_bad_lines, start.data.token_dtype)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_orders(orders: Sequence[ShardOrder], start: Start, num_workers: int, on_progress: OnProgress) -> None:
    """Build shards in several processes; the largest first, so that none is left alone at the end.

    Args:
        orders: the shards.
        start: the run.
        num_workers: processes.
        on_progress: called with the bytes read so far and their total, from several threads, one at a time.

    Raises:
        DataError: if a shard cannot be built; the others that are finished by then are kept.
    """
    crew = _Crew(orders, start, on_progress)
    number = min(num_workers, len(orders))
    with ThreadPoolExecutor(max(1, number), "shards") as threads:
        try:
            working = [threads.submit(crew.work) for _ in range(number)]
            for ended in wait(working, return_when=FIRST_EXCEPTION).done:
                ended.result()
        finally:
            crew.stop()


class _Crew:
    """The processes that build some shards."""

    def __init__(self, orders: Sequence[ShardOrder], start: Start, on_progress: OnProgress) -> None:
        self._orders = deque(sorted(orders, key=lambda order: order.num_bytes, reverse=True))
        self._start = start
        self._on_progress = on_progress
        self._total = sum(order.num_bytes for order in orders)
        self._done = 0
        self._lock = Lock()
        self._workers: list[subprocess.Popen[bytes]] = []

    def work(self) -> None:
        """Start a process and let it build shards until none is left."""
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # a core for each process
        with subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as worker:
            with self._lock:
                self._workers.append(worker)
            order = None
            try:
                self._send(worker, self._start)
                while (order := self._next()) is not None:
                    self._send(worker, order)
                    self._follow(worker, order)
            except (BrokenPipeError, EOFError):
                raise _died(worker, order) from None
            except BaseException:
                worker.terminate()
                raise

    def stop(self) -> None:
        """End the processes that still work."""
        with self._lock:
            self._orders.clear()
            for worker in self._workers:
                if worker.poll() is None:
                    worker.terminate()

    def _next(self) -> ShardOrder | None:
        with self._lock:
            return self._orders.popleft() if self._orders else None

    def _send(self, worker: subprocess.Popen[bytes], what: Start | ShardOrder) -> None:
        assert worker.stdin is not None
        pickle.dump(what, worker.stdin)
        worker.stdin.flush()

    def _follow(self, worker: subprocess.Popen[bytes], order: ShardOrder) -> None:
        assert worker.stdout is not None
        seen = 0
        while True:
            line = worker.stdout.readline()
            if not line:
                raise EOFError
            answer = json.loads(line)
            if "problem" in answer:
                self._advance(order.num_bytes - seen)
                if answer["problem"]:
                    raise DataError(answer["problem"])
                return
            self._advance(answer["num_bytes"] - seen)
            seen = answer["num_bytes"]

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._on_progress(self._done, self._total)


def _died(worker: subprocess.Popen[bytes], order: ShardOrder | None) -> DataError:
    """Return the error for a worker that has ended while it built a shard: libraries die of some damaged files."""
    code = worker.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    read = [str(file.path) for file in order.files] if order else []
    where = f" while it read {read[0]}{f' or one of {len(read) - 1} others' if read[1:] else ''}" if read else ""
    remedy = "start again, with fewer --workers if it was killed for want of memory"
    if -code in _OF_DAMAGE:
        remedy = "the file is damaged, or was changed meanwhile: copy it again, or leave it out"
    return DataError(f"a process that builds shards has ended ({how}){where}; {remedy}")
