"""Spell settings in errors as Python arguments: ``device="cpu"`` instead of ``--device cpu``."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from llama_core.errors import ConfigError, TrainingInfraError
from llama_core.launchers.registry import LAUNCHERS
from training_infra.flags import FLAGS

_CONTINUING = re.compile(r"training-infra train --run-dir (.+?) --resume")
_VALUES = "|".join((r"\d+", "cpu", "cuda", *LAUNCHERS, "standard", "lora", "moe", "hybrid", "PATH"))
_FLAG = re.compile(rf"(--[a-z][a-z-]*[a-z])(?: ({_VALUES})\b)?")
_ARGUMENTS = {
    "--gpus": "num_gpus",
    "--model": "model_variant",
    "--run-dir": "run_dir",
    "--resume": "resume=True",
    "--allow-data-change": "allow_data_change=True",
    "--sweep-dir": "sweep_dir",
}
"""Flags whose Python argument is not a setting."""


def in_python(text: str) -> str:
    """Return a message with its command-line flags replaced by Python arguments."""
    text = _CONTINUING.sub(_continuing, text)
    return re.sub(r"(?<![\w.])gpus=(?=\d)", "num_gpus=", _FLAG.sub(_argument, text))


@contextmanager
def python_spelling() -> Iterator[None]:
    """Make the errors of a block, or of a decorated function, name Python arguments."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*map(in_python, error.problems)) from None
    except TrainingInfraError as error:
        error.args = tuple(in_python(str(argument)) for argument in error.args)
        raise


def _continuing(found: re.Match[str]) -> str:
    try:
        (run_dir,) = shlex.split(found[1])
    except ValueError:  # a name that only a shell can read
        return found[0]
    return f"launch_training(..., run_dir={run_dir!r}, resume=True)"


def _argument(found: re.Match[str]) -> str:
    name = found[1]
    value = found[2]
    flag = next((flag for flag in FLAGS if name in (flag.name, *flag.also)), None)
    if name in _ARGUMENTS:
        argument = _ARGUMENTS[name]
    elif flag is None:
        return found[0]
    elif flag.constant is not None:
        constant = f'"{flag.constant}"' if isinstance(flag.constant, str) else flag.constant
        return f"{flag.key.rpartition('.')[2]}={constant}"
    else:
        argument = flag.key.rpartition(".")[2]
    if value is None:
        return argument
    return f"{argument}={value}" if value.isdigit() or value.isupper() else f'{argument}="{value}"'
