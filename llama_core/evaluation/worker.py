"""One rank of an evaluation: ``python -m llama_core.evaluation.worker``, started by ``ranks``.

It reads its order from the first line of standard input, and ends when that is closed. The first rank writes what it
finds to standard output, a line of JSON each.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.errors import TrainingInfraError
from llama_core.evaluation.generate import find_model
from llama_core.evaluation.held_out import LossOnData
from llama_core.evaluation.questions import AskedQuestion, Question
from llama_core.evaluation.tasks import ScoresOnTasks
from llama_core.hugging_face.pretrained import is_checkpoint, saved_run
from llama_core.imports import importing_torch
from llama_core.launch.jobs.launcher import started_ranks
from llama_core.machine.shared_cores import sleeping_beside_others
from llama_core.planning.plan import ParallelPlan

_QUESTIONS: dict[str, Callable[[Mapping[str, Any]], Question[Any]]] = {
    LossOnData.kind: LossOnData.from_record,
    ScoresOnTasks.kind: ScoresOnTasks.from_record,
}

_TIMEOUT_SECONDS = 24 * 3600
"""How long ranks wait for each other: one may have texts that take much longer than those of the others."""


def main() -> int:
    """Evaluate with the other ranks; return the exit code."""
    record = json.loads(_first_line())
    started_ranks()
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    is_first = os.environ["RANK"] == "0"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**answer: Any) -> None:
        if is_first:
            out.write(json.dumps(answer) + "\n")
            out.flush()

    with importing_torch():
        from llama_core.parallel.ranks import joined_ranks

    try:
        order = _order(record)
        with joined_ranks(order.device, _TIMEOUT_SECONDS), sleeping_beside_others():
            found = order.follow(
                _models(map(Path, record["weights"])),
                lambda text: say(tell=text),
                lambda name, done, total: say(progress=(name, done, total)),
            )
            for answer in found:
                say(answer=answer.as_record())
    except TrainingInfraError as error:
        say(error=(type(error).__name__, str(error)))
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # the other ranks may wait for this one, and gloo's threads end slowly
    return 0


def _order(record: Mapping[str, Any]) -> AskedQuestion[Any]:
    question = record["question"]
    plan = ParallelPlan.from_dict(record["plan"])
    return AskedQuestion(_QUESTIONS[question["kind"]](question), record["device"], record["dtype"], plan)


def _models(weights: Iterable[Path]) -> Iterator[tuple[Path, RunConfig]]:
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
