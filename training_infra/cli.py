"""The command line: ``training-infra``, ``python -m training_infra`` or ``python -m training_infra.cli``.

The commands are in ``commands/``, each beside its own flags; the flags of a run, and the configuration keys they set,
are a table in ``flags.py``. Nothing here imports torch; the commands import what they need.
"""

import signal
import sys

if sys.argv[0] == "-m" or sys.argv[0].endswith(
    ("training-infra", "training_infra/__main__.py", "training_infra/cli.py")
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends the process without a traceback

import argparse
import io
import os
from collections.abc import Sequence

from llama_core.errors import ConfigError, RequestError, StoppedError, TrainingInfraError, safe
from llama_core.log_lines import warnings_on_stderr
from llama_core.records.files import is_disk_full
from llama_core.storage.stores import is_url
from training_infra.commands import (
    calibration,
    decay,
    evaluate,
    planning,
    runs,
    sweep,
    timing,
    tokenize,
    train,
    weights,
)
from training_infra.commands.command import Command
from training_infra.lines import print_line
from training_infra.parser import Parser

COMMANDS = {
    "before a run": (
        planning.MODELS,
        planning.ESTIMATE_MEMORY,
        planning.DRY_RUN,
        planning.VALIDATE_ENVIRONMENT,
        calibration.CALIBRATE,
        tokenize.TOKENIZE,
    ),
    "run": (
        train.TRAIN,
        timing.BENCHMARK,
        timing.PROFILE,
        sweep.SWEEP,
        decay.DECAY,
    ),
    "follow a run, and use it": (
        runs.LOGS,
        runs.WATCH,
        runs.CANCEL,
        runs.DOCTOR,
        runs.REPORT,
        runs.COMPARE,
        evaluate.EVALUATE,
        weights.GENERATE,
        weights.EXPORT_HF,
    ),
}
"""All commands, in the order of the help, by when they are used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see ``training-infra --help``."""
    is_heard = _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are not text
    try:
        options = make_parser().parse_args(arguments)
    except SystemExit as ended:  # after the help, or a wrong argument
        if is_heard or ended.code:
            raise
        return _unheard()
    return _run(options) if is_heard or not options.command.only_prints else _unheard()


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Treat SIGTERM like Ctrl-C: stop the job with a checkpoint instead of leaving it behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with warnings_on_stderr():
            _bring_run_here(options)
            return int(options.command.run(options) or 0)
    except TrainingInfraError as error:
        if options.debug:
            raise
        begins = "" if isinstance(error, StoppedError) else "error: "
        for problem in error.problems if isinstance(error, ConfigError) else (str(error),):
            print_line(f"{begins}{problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print_line("interrupted", file=sys.stderr)
        return StoppedError.exit_code
    except BrokenPipeError:  # the reader of our output (head, less) has closed it
        sys.stderr.close()
        return 0
    except OSError as error:  # such as a full disk, which a traceback would not explain
        if options.debug:
            raise
        print_line(f"error: {_explained(error)}", file=sys.stderr)
        return RequestError.exit_code if isinstance(error, PermissionError) else 1


def _bring_run_here(options: argparse.Namespace) -> None:
    """Put a directory in place of the address of a run on a mirror, wherever a command takes one."""
    given = getattr(options, "run_dir", None)
    if not is_url(given):
        return
    command: Command = options.command
    if command.bring_here is None:
        raise ConfigError(f"{command.name} takes the directory of a run here, not an address such as {given}")
    options.run_dir = command.bring_here(options)


def _open_streams() -> bool:
    """Open to nowhere what the caller has closed of the standard streams; return whether standard output was open.

    Else the next files that are opened would take their places, and get what is printed here and by processes below.
    """
    is_open = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    return is_open


def _unheard() -> int:
    print_line("error: standard output is closed, and this only prints; redirect it to a file", file=sys.stderr)
    return 1


def _explained(error: OSError) -> str:
    """Return one line with the problem of a file or a disk, and its remedy."""
    if is_disk_full(error):
        writing = f", writing {error.filename}" if error.filename else ""
        return safe(f"a disk is full{writing}; free some space")
    if isinstance(error, PermissionError) and error.filename:  # somebody else's run, for example
        return safe(f"{error.filename}: permission denied; use one of your own, or ask its owner")
    if str(error.strerror).startswith("No usable temporary directory"):  # Python's, with the folders that it has tried
        return safe(f"{error.strerror}; free some space in one of them, or set TMPDIR to a folder with room")
    return safe(str(error))


def make_parser() -> Parser:
    """Return the parser of all commands; ``options.command`` is the one that was given."""
    parser = Parser(
        prog="training-infra",
        description="Train LLaMA models: validate, estimate, rehearse, train, benchmark, report.",
        epilog="exit codes: 0 success, 1 the run failed or has a problem, 2 invalid request, 3 does not fit, "
        "4 slower than before, 130 interrupted",
        examples=("train --help", "train --model tiny_llama3_50m --device cpu --steps 20"),
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    parsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for when, commands in COMMANDS.items():
        parser.tables[when] = [(command.name, command.help) for command in commands]
        for command in commands:
            command.add_to(parsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
