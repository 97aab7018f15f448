"""A command as data, and the arguments that several commands take."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_core.config.config_json.writing import DTYPES
from llama_core.storage.stores import is_url
from llama_core.units import parse_count, parse_whole_count
from training_infra.flags import LONG_NAMES, Flag
from training_infra.parser import Parser


class Argument:
    """An argument of a command, as ``argparse.ArgumentParser.add_argument`` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names = names
        self.options = options


@dataclass(frozen=True)
class Command:
    """A command of ``training-infra``."""

    name: str
    help: str
    """What it does, without a capital letter and a full stop."""
    run: Callable[[argparse.Namespace], int | None]
    """Returns the exit code; None means 0."""
    examples: Sequence[str]
    """Arguments of the command, for its help."""
    arguments: Sequence[Argument] = ()
    flags: Sequence[Flag] = ()
    """The flags of a run, if it takes a configuration; ``--config``, ``--set`` and ``--json`` come with them."""
    only_prints: bool = False
    """Whether nothing is left of it where its output goes nowhere."""
    bring_here: Callable[[argparse.Namespace], Path] | None = None
    """Returns the directory of the run whose address is given for it; None if the command takes no address."""

    def add_to(self, parsers: "argparse._SubParsersAction[Parser]") -> None:
        """Add the parser of the command to those of the others."""
        sentence = f"{self.help[0].upper()}{self.help[1:]}."
        parser = parsers.add_parser(self.name, description=sentence, examples=self.examples, flags=self.flags)
        parser.set_defaults(command=self, parser=parser)
        if self.flags:
            parser.add_argument("--json", action="store_true", help="print the result as JSON")
        # SUPPRESS: without the flag here, the value of --debug before the command's name stays.
        parser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show a traceback with an error"
        )
        for argument in self.arguments:
            parser.add_argument(*argument.names, **argument.options)


def _count(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 15T, 200B or 1e9") from None


def path_or_url(text: str) -> Path | str:
    """Read a path of the command line, or an address in an object store."""
    return text if is_url(text) else Path(text)


def whole_number(text: str) -> int:
    """Read a whole number of the command line, such as 4096, 128k or 1e6."""
    try:
        return parse_whole_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, such as 4096, 128k or 1e6") from None


RUN_DIR = Argument("run_dir", type=path_or_url, metavar="RUN_DIR", help="the run's directory")
"""The run that a command is about."""

NEW_RUN_DIR = Argument(
    "--run-dir",
    type=path_or_url,
    metavar="runs/mine",
    help="the run's directory; default: runs/<model>-<date>-<fingerprint>",
)
"""Where a run goes that may be new."""

RESUME = Argument(
    "--resume",
    action="store_true",
    help="continue the run in --run-dir, or the newest unfinished or shorter one",
)

ALLOW_DATA_CHANGE = Argument(
    "--allow-data-change",
    action="store_true",
    help="with --resume: change a mixture's sources, weights or stages",
)

TOKENS = Argument(
    "--tokens",
    type=_count,
    metavar="15T",
    help="tokens to train on, for the days and the price; default: those of --steps or --data",
)

FAIL_ON_REGRESSION = Argument(
    "--fail-on-regression",
    action="store_true",
    help="exit with 4 if a result is slower than earlier ones of the same work on this kind of machine",
)


def _step(text: str) -> int | str:
    try:
        return "best" if text == "best" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor 'best'") from None


STEP = Argument(
    "--step",
    type=_step,
    metavar="400",
    help="the checkpoint's step, or best: the one with the lowest held-out loss; default: the newest that is not "
    "damaged",
)
"""The checkpoint of a run that a command is about."""

SOURCE = Argument(
    "source",
    metavar="RUN_DIR|FOLDER",
    help="a run or its address on a mirror, a Hugging Face or PEFT folder, or org/name on the Hub",
)
"""The weights that a command is about."""

TOKENIZER = Argument("--tokenizer", metavar="bytes", help="'bytes' or a path; default: the run's or the folder's")

DEVICE = Argument("--device", choices=("cpu", "cuda"), metavar="cpu", help="cpu or cuda; default: cuda if present")

DTYPE = Argument(
    "--dtype",
    type=lambda name: LONG_NAMES.get(name, name),
    choices=tuple(DTYPES),
    metavar="bf16",
    default="fp32",
    help=f"dtype of the weights: {', '.join(DTYPES)}; default: fp32, as in training",
)
"""The dtype of weights that a command reads."""
