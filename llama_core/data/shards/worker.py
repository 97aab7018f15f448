"""A process that builds shards for another one: ``python -m llama_core.data.shards.worker``.

Its parent writes a pickled ``Start`` and then one ``ShardOrder`` after another to its standard input. What it answers
on its standard output is JSON, a line each: the bytes of an order that it has read so far (``num_bytes``), and at the
end why there is no shard, or an empty string (``problem``). It ends when its input does.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import IO

from llama_core.data.shards.store import build_shard
from llama_core.data.shards.workers import ShardOrder, Start
from llama_core.data.tokenizer import Tokenizer, model_tokenizer
from llama_core.errors import DataError, TrainingInfraError
from llama_core.log_lines import warnings_on_stderr
from llama_core.records.files import is_disk_full, no_room


def main() -> int:
    """Build what is ordered, until the input ends."""
    orders = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the answers
    start: Start = pickle.load(orders)
    make = _Maker(start)

    def answer(**what: int | str) -> None:
        answers.write(f"{json.dumps(what)}\n".encode())
        answers.flush()

    try:
        with warnings_on_stderr():
            while (order := _next(orders)) is not None:
                answer(problem=make(order, lambda num_bytes: answer(num_bytes=num_bytes)))
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or somebody has stopped both
        return 1
    return 0


def _next(orders: IO[bytes]) -> ShardOrder | None:
    try:
        order: ShardOrder = pickle.load(orders)
    except EOFError:
        return None
    return order


class _Maker:
    """Builds shards, and reads the tokenizer only once."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._tokenizer: Tokenizer | None = None

    def __call__(self, order: ShardOrder, on_progress: Callable[[int], None]) -> str:
        """Build a shard; return why that is impossible, or an empty string."""
        try:
            if self._tokenizer is None:
                self._tokenizer = model_tokenizer(self._start.data, self._start.spec)
            recipe = order.recipe(self._tokenizer, self._start)
            build_shard(recipe, order.files, order.directory, on_progress=lambda done, total: on_progress(done))
        except BrokenPipeError:
            raise
        except TrainingInfraError as error:
            return str(error)
        except OSError as error:
            cause = no_room(order.directory) if is_disk_full(error) else error.strerror or str(error)
            return str(DataError(f"cannot write the token cache in {str(order.directory)!r}: {cause}"))
        return ""


if __name__ == "__main__":
    sys.exit(main())
