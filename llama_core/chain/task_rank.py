"""One rank of an evaluation on tasks: ``python -m llama_core.chain.task_rank``, started by ``task_ranks``.

It reads its order from the first line of standard input, and ends when that is closed. The first rank writes what it
finds to standard output, a line of JSON each.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_core.chain.generate import find_model
from llama_core.chain.tasks import Order, follow
from llama_core.config.run import RunConfig
from llama_core.errors import TrainingInfraError
from llama_core.imports import importing_torch
from llama_core.models.pretrained import is_checkpoint, saved_run

_TIMEOUT_SECONDS = 24 * 3600
"""How long ranks wait for each other: one may have texts that take much longer than those of the others."""


def main() -> int:
    """Evaluate with the other ranks; return the exit code."""
    order, weights = Order.from_record(json.loads(_first_line()))
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    is_first = os.environ["RANK"] == "0"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**answer: Any) -> None:
        if is_first:
            out.write(json.dumps(answer) + "\n")
            out.flush()

    with importing_torch():
        from llama_core.parallel.evaluating import EvaluatingRanks
        from llama_core.parallel.ranks import joined_ranks

    try:
        with joined_ranks(order.device, _TIMEOUT_SECONDS):
            ranks = EvaluatingRanks(order.plan, order.device)
            found = follow(
                order,
                _models(weights),
                ranks,
                lambda text: say(tell=text),
                lambda name, done, total: say(progress=(name, done, total)),
            )
            for evaluation in found:
                say(evaluation=evaluation.as_dict())
    except TrainingInfraError as error:
        say(error=(type(error).__name__, str(error)))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # the other ranks may wait for this one, and gloo's threads end slowly
    return 0


def _models(weights: list[Path]) -> Iterator[tuple[Path, RunConfig]]:
    """Yield each model with its configuration; that the files are intact has been checked."""
    for path in weights:
        yield (path, saved_run(path)) if is_checkpoint(path) else find_model(path, None, lambda text: None)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _end_with_the_command() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
