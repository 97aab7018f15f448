"""``estimate-memory`` of a job as it runs under another framework."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.errors import ConfigError, DoesNotFitError
from training_infra.commands.command import Argument
from training_infra.commands.configuration import requested_config
from training_infra.lines import print_json, print_line

if TYPE_CHECKING:
    from llama_core.planning.frameworks.given import ReadJob

_FRAMEWORKS = ("torchtitan", "megatron")
_BESIDE_A_FILE = {"parallel.gpus", "launch.gpu_type", "launch.dollars_per_gpu_hour"}
"""Keys whose flags go with a file of another framework."""

ARGUMENTS = (
    Argument(
        "--as",
        dest="framework",
        choices=_FRAMEWORKS,
        metavar="megatron",
        help="what it takes under torchtitan or megatron",
    ),
    Argument("--from-torchtitan", type=Path, metavar="a.toml", help="a job of torchtitan, from its configuration"),
    Argument("--from-megatron", type=Path, metavar="a.sh", help="a job of Megatron-LM: its script, or YAML"),
)


def is_asked_for(options: argparse.Namespace) -> bool:
    """Return whether the command line asks about another framework."""
    return any((options.framework, options.from_torchtitan, options.from_megatron))


def estimate_as(options: argparse.Namespace) -> int:
    """Estimate a job of another framework, print what came out, and return the exit code.

    Raises:
        ConfigError: if the request or a file is wrong.
    """
    from llama_core.planning.frameworks.estimate import FrameworkEstimate

    asked, gpu_type, price = _asked(options)
    estimate = FrameworkEstimate(asked, gpu_spec(gpu_type))
    cost = estimate.cost(options.tokens, price)
    if options.json:
        print_json(estimate.as_dict() | {"cost": cost and cost.as_dict()})
    else:
        for line in estimate.lines():
            print_line(line)
        if cost is not None:
            print_line(f"cost: {cost.summary()} [--price]")
    return 0 if estimate.fits else DoesNotFitError.exit_code


def _asked(options: argparse.Namespace) -> "tuple[ReadJob, str, float]":
    """Return the job, the type of its devices, and the price of one for an hour."""
    from llama_core.chain.planned import plan_for_gpu
    from llama_core.planning.frameworks.conversion import job_of
    from llama_core.planning.frameworks.megatron_arguments import read_megatron
    from llama_core.planning.frameworks.torchtitan_file import read_torchtitan

    readers: dict[str, tuple[Path | None, Callable[[Path, int | None], ReadJob]]] = {
        "torchtitan": (options.from_torchtitan, read_torchtitan),
        "megatron": (options.from_megatron, read_megatron),
    }
    files = {name: file for name, (file, _) in readers.items() if file is not None}
    if len(files) > 1:
        raise ConfigError("--from-torchtitan and --from-megatron exclude each other; give one file")
    if not files:
        planned = plan_for_gpu(requested_config(options))
        if planned.config.launch.machine_profile is not None:
            raise ConfigError(
                f"--as {options.framework} has no use for launch.machine_profile: its efficiencies are fitted to data "
                "sheets; leave it out"
            )
        if planned.config.launch.device == "cpu":
            raise ConfigError(f"--as {options.framework} is about GPUs; leave --device cpu out")
        launch = planned.config.launch
        asked = job_of(planned.config, planned.plan, options.framework)
        return asked, launch.gpu_type or DEFAULT_GPU_TYPE, launch.dollars_per_gpu_hour
    ((name, file),) = files.items()
    _refuse_other_settings(options, name)
    config = requested_config(options)
    gpus = None if getattr(options, "parallel.gpus") is None else config.parallel.gpus
    asked = readers[name][1](file, gpus)
    if config.launch.gpu_type is None:
        asked = replace(asked, assumed=(*asked.assumed, f"--gpu-type not given: {DEFAULT_GPU_TYPE}"))
    return asked, config.launch.gpu_type or DEFAULT_GPU_TYPE, config.launch.dollars_per_gpu_hour


def _refuse_other_settings(options: argparse.Namespace, name: str) -> None:
    """Refuse what would change a job that a file describes."""
    if options.framework not in {None, name}:
        raise ConfigError(f"--from-{name} is a job of {name}; leave out --as {options.framework}")
    flags = [flag for flag in options.command.flags if flag.key not in _BESIDE_A_FILE]
    refused = [flag.name for flag in flags if getattr(options, flag.key) is not None]
    refused += ["--config"] if options.config else []
    refused += ["--set"] if options.overrides else []
    if refused:
        raise ConfigError(
            f"--from-{name} takes the job from its file; leave out {', '.join(refused)}, "
            "or change the file (of the flags, --gpus, --gpu-type, --tokens and --price go with it)"
        )
