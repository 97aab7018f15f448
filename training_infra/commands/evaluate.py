"""The command ``evaluate``: the loss of weights on named data, and their scores on tasks."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from llama_core.errors import ConfigError
from training_infra.commands.command import DEVICE, DTYPE, SOURCE, TOKENIZER, Argument, Command, whole_number
from training_infra.lines import ProgressLine, print_json, print_line

if TYPE_CHECKING:
    from llama_core.evaluation.questions import All, Devices
    from llama_core.runs.checkpoints import Best

_OF_DATA = ("--data", "--sequences", "--seq-len")
_OF_TASKS = (
    "--include-path",
    "--limit",
    "--num-fewshot",
    "--chat",
    "--system",
    "--allow-task-code",
)


def _evaluate(options: argparse.Namespace) -> int:
    _refuse_mixture(options)
    unrecorded: list[str] = []
    if options.tasks:
        _evaluate_tasks(options, unrecorded)
    else:
        _evaluate_data(options, unrecorded)
    return 1 if unrecorded else 0


def _refuse_mixture(options: argparse.Namespace) -> None:
    values = vars(options)
    others = _OF_DATA if options.tasks else _OF_TASKS
    given = [flag for flag in others if values[flag.removeprefix("--").replace("-", "_")] not in (None, False)]
    if given and options.tasks:
        raise ConfigError(f"--tasks and {given[0]} exclude each other; evaluate on data in a command of its own")
    if given:
        raise ConfigError(f"{given[0]} has no effect without --tasks; name tasks, or drop it")


def _source(options: argparse.Namespace) -> Path:
    from llama_core.chain.downloads import fetch_weights
    from llama_core.runs.console import say

    with say.silenced(True):  # standard output holds only the results
        return fetch_weights(options.source, _step(options.step), partial(print_line, file=sys.stderr))


def _evaluate_data(options: argparse.Namespace, unrecorded: list[str]) -> None:
    from llama_core.evaluation.held_out import evaluate
    from llama_core.evaluation.recording import recorded_losses

    data = _named(options.data) if options.data else None
    tell = partial(print_line, file=sys.stderr)
    rows = {"seq_len": options.seq_len, "num_sequences": options.sequences}
    steps = _step(options.step)
    asked = rows | {"tokenizer": options.tokenizer, "tell": tell}
    found = evaluate(_source(options), data, steps=steps, devices=_devices(options), **asked)
    recorded = recorded_losses(found, dtype=options.dtype, problems=unrecorded, **asked)
    if options.json:
        print_json({"evaluations": [evaluation.as_dict() for evaluation in recorded]})
        return
    for evaluation in recorded:
        print_line(evaluation.summary())


def _evaluate_tasks(options: argparse.Namespace, unrecorded: list[str]) -> None:
    from llama_core.evaluation.recording import recorded_tasks
    from llama_core.evaluation.tasks import Asked, evaluate_tasks

    asked = Asked(options.limit, options.num_fewshot, options.chat, options.system)
    progress = ProgressLine(sys.stderr)
    kept = {"tokenizer": options.tokenizer, "tell": progress.tell}
    steps = _step(options.step)
    found = evaluate_tasks(
        _source(options),
        options.tasks,
        folder=options.include_path,
        steps=steps,
        asked=asked,
        allow_code=options.allow_task_code,
        on_progress=progress,
        devices=_devices(options),
        **kept,
    )
    records: list[dict[str, Any]] = []
    try:
        for evaluation in recorded_tasks(found, asked, dtype=options.dtype, problems=unrecorded, **kept):
            progress.clear()
            records += evaluation.as_dicts()
            for line in () if options.json else evaluation.lines():
                print_line(line)
    finally:
        progress.clear()
    if options.json:
        print_json({"scores": records})


def _devices(options: argparse.Namespace) -> "Devices":
    from llama_core.evaluation.questions import Devices

    return Devices(
        options.device,
        options.dtype,
        options.gpus,
        options.tensor_parallel,
        options.pipeline_parallel,
        options.nodes,
    )


def _named(given: Sequence[str]) -> dict[str, str]:
    """Return the data by name: ``NAME=PATH``, or a path, which is called as its last part."""
    data: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = PurePath(text).name or text, text
        if name in data:
            raise ConfigError(f"--data has two sets called {name}; name them: --data first={data[name]} second={path}")
        if not path:
            raise ConfigError(f"--data {text}: no path after the name; give {name}=PATH")
        data[name] = path
    return data


def _step(text: str | None) -> "int | Best | All | None":
    if text is None or text in {"best", "all"}:
        return cast("Best | All | None", text)
    if not text.isdecimal():
        raise ConfigError(f"--step {text}: give the step of a checkpoint, best or all")
    return int(text)


EVALUATE = Command(
    "evaluate",
    "tell the loss and perplexity of weights on the run's held-out data or on any other, or their scores on tasks",
    _evaluate,
    only_prints=True,
    examples=(
        "runs/mine",
        "runs/mine --step all --json",
        "~/my-llama --data wiki=wiki.jsonl code=src --sequences 0 --dtype bf16",
        "runs/mine --tasks hellaswag arc_easy --limit 200",
        "runs/mine --tasks mine --include-path tasks --num-fewshot 3 --chat",
        "runs/mine --gpus 8 --tensor-parallel 2 --dtype bf16",
        "runs/mine --tasks mmlu --gpus 16 --nodes 2 --tensor-parallel 8 --pipeline-parallel 2 --dtype bf16",
    ),
    arguments=(
        SOURCE,
        Argument(
            "--data",
            nargs="+",
            metavar="NAME=PATH",
            help="what to evaluate on: files or folders as for train; default: what the run has held out",
        ),
        Argument(
            "--step", metavar="400", help="the checkpoint's step, best or all; default: the newest that is not damaged"
        ),
        Argument(
            "--sequences",
            type=whole_number,
            metavar="256",
            help="most sequences of each, spread evenly; 0: all; default: those of an evaluation in training",
        ),
        Argument(
            "--seq-len",
            type=whole_number,
            metavar="2048",
            help="tokens per sequence; default: the run's or the model's",
        ),
        Argument("--tasks", nargs="+", metavar="TASK", help="tasks of lm-evaluation-harness instead of data"),
        Argument("--include-path", metavar="DIR", help="a folder with the YAML files of further tasks"),
        Argument(
            "--limit",
            type=whole_number,
            metavar="200",
            help="most questions of each task, the first ones; default: all",
        ),
        Argument(
            "--num-fewshot",
            type=whole_number,
            metavar="5",
            help="solved examples before each question; default: the task's",
        ),
        Argument("--chat", action="store_true", help="ask in the chat template, with solved examples as turns"),
        Argument("--system", metavar="TEXT", help="the system prompt, with --chat"),
        Argument(
            "--allow-task-code",
            action="store_true",
            help="execute Python code that comes with a task, or that the model writes for one",
        ),
        Argument("--gpus", type=whole_number, default=1, metavar="4", help="devices that share the work; default: 1"),
        Argument(
            "--tensor-parallel",
            type=whole_number,
            default=1,
            metavar="2",
            help="devices among them that divide the matrices of each copy of the model; default: 1",
        ),
        Argument(
            "--pipeline-parallel",
            type=whole_number,
            default=1,
            metavar="2",
            help="devices among them that divide the layers of each copy; default: 1",
        ),
        Argument(
            "--nodes",
            type=whole_number,
            default=1,
            metavar="2",
            help="nodes of the job around this command that have the devices; default: this machine",
        ),
        TOKENIZER,
        DEVICE,
        DTYPE,
        Argument("--json", action="store_true", help="print JSON"),
    ),
)
