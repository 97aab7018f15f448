"""``calibrate``: measures this machine, so that plans for it are timed by what it does."""

import argparse
from pathlib import Path

from llama_core.units import parse_whole_count
from training_infra.commands.command import Argument, Command
from training_infra.lines import print_json, print_line


def _calibrate(options: argparse.Namespace) -> int:
    from llama_core.calibration.demand import known_profile
    from llama_core.calibration.machine import calibrate
    from llama_core.calibration.profile import own_profile_path, write_profile

    def tell(num_ranks: int, num_operations: int) -> None:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks that share the cores"
        if not options.json:
            print_line(f"measuring {num_operations} operations on {ranks}; all kinds take a minute or two")

    profile = calibrate(known_profile(), sorted(set(options.ranks)), options.only, tell)
    path = options.out or own_profile_path()
    write_profile(path, profile)
    if options.json:
        print_json(profile.as_dict())
        return 0
    for name, spread in profile.spread.items():
        print_line(f"{name}: repeated measurements {spread:.0%} apart (quartiles over the median)")
    print_line(f"profile of {profile.device}, {profile.cores} cores: {path}")
    if options.out:
        print_line(f"runs on this machine use {own_profile_path()}")
    return 0


def _at_least_one(text: str) -> int:
    try:
        number = parse_whole_count(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return number


CALIBRATE = Command(
    "calibrate",
    "measure this machine's CPU, so that the time of a run on it is predicted from what it does",
    _calibrate,
    examples=("", "--ranks 1 2", "--out profiles/laptop.json"),
    arguments=(
        Argument(
            "--ranks",
            nargs="+",
            type=_at_least_one,
            default=[1],
            metavar="N",
            help="numbers of ranks that compute at once; default: 1",
        ),
        Argument(
            "--only",
            nargs="+",
            default=(),
            metavar="KIND",
            help="measure only these kinds of operations again, such as linear attention",
        ),
        Argument("--out", type=Path, metavar="FILE", help="write the profile there; default: where runs look for it"),
        Argument("--json", action="store_true", help="print JSON"),
    ),
)
