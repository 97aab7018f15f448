"""``calibrate``: measures this machine, so that plans for it are timed by what it does."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from llama_core.units import parse_whole_count
from training_infra.commands.command import Argument, Command
from training_infra.lines import print_json, print_line

_MINUTES = {"cpu": 1.75, "cuda": 9.0}
"""What it takes by default; the processes that measure start and end beside it."""


def _calibrate(options: argparse.Namespace) -> int:
    from llama_core.calibration.demand import known_profile
    from llama_core.calibration.machine import calibrate
    from llama_core.calibration.profile import own_profile_path, write_profile
    from llama_core.errors import EnvironmentMismatchError
    from llama_core.machine.detect import detect_machine

    num_gpus = len(detect_machine().gpus)
    if options.device == "cuda" and not num_gpus:
        raise EnvironmentMismatchError(
            "there is no CUDA device here that the installed torch can use; run 'calibrate --device cuda' on a node "
            "that has one, or name a profile of it with --machine-profile"
        )
    ranks = options.ranks or ([1, num_gpus] if options.device == "cuda" else [1])
    if options.device == "cuda" and max(ranks) > num_gpus:
        raise EnvironmentMismatchError(
            f"--ranks {max(ranks)}: this machine has {num_gpus} CUDA devices, one for a rank"
        )
    minutes = options.minutes or _MINUTES[options.device]
    where = "have a GPU each" if options.device == "cuda" else "share the cores"

    def tell(num_ranks: int, num_operations: int) -> None:
        told = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks that {where}"
        if not options.json:
            print_line(f"measuring {num_operations} operations on {told}; all of it takes at most {minutes:g} minutes")

    known = known_profile(kind=options.device)
    done = calibrate(known, sorted(set(ranks)), options.only, tell, minutes=minutes)
    profile = done.profile
    path = options.out or own_profile_path(options.device)
    write_profile(path, profile)
    if options.json:
        print_json(profile.as_dict() | {"left_out": done.left_out, "failed": done.failed})
        return 0
    for name, spread in _by_first_word(profile.spread).items():
        print_line(f"{name}: repeated measurements {spread:.0%} apart (quartiles over the median)")
    for line in done.lines(minutes):
        print_line(line)
    cores = "" if options.device == "cuda" else f", {profile.cores} cores"
    print_line(f"profile of {profile.device}{cores}: {path}")
    if options.out:
        print_line(f"plans use it with --machine-profile {path}; without, they use {own_profile_path(options.device)}")
    return 0


def _by_first_word(spread: Mapping[str, float]) -> dict[str, float]:
    """Return the median spread of the figures of each kind of operation."""
    values: dict[str, list[float]] = {}
    for name, value in sorted(spread.items()):
        values.setdefault(name.split()[0], []).append(value)
    return {name: median(of_name) for name, of_name in values.items()}


def _at_least_one(text: str) -> int:
    try:
        number = parse_whole_count(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return number


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0, such as 5 or 0.5")
    return number


CALIBRATE = Command(
    "calibrate",
    "measure this machine's CPU or GPUs, so that the time of a run on it is predicted from what it does",
    _calibrate,
    examples=("", "--ranks 1 2", "--device cuda --minutes 5", "--out profiles/laptop.json"),
    arguments=(
        Argument("--device", choices=("cpu", "cuda"), default="cpu", metavar="cuda", help="cpu (the default) or cuda"),
        Argument(
            "--minutes",
            type=_minutes,
            metavar="5",
            help="time for all of it, the sizes first that plans need most; default: "
            f"{_MINUTES['cpu']:g} on a CPU, {_MINUTES['cuda']:g} on GPUs",
        ),
        Argument(
            "--ranks",
            nargs="+",
            type=_at_least_one,
            metavar="N",
            help="numbers of ranks that compute at once; default: 1, and under CUDA all GPUs too, for their links",
        ),
        Argument(
            "--only",
            nargs="+",
            default=(),
            metavar="KIND",
            help="measure only these kinds of operations again, such as linear attention",
        ),
        Argument("--out", type=Path, metavar="FILE", help="write the profile there; default: where plans look for it"),
        Argument("--json", action="store_true", help="print JSON"),
    ),
)
