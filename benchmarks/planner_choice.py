"""Compare the plan that should be fastest with the one that is: ``python -m benchmarks.planner_choice``.

Two ranks share this machine's CPU in four small worlds. Each is trained under every plan: copies, divided matrices, two
stages, each with and without activation checkpointing. A run measures its operations before it starts, so all plans are
predicted from the rates of this machine. The machine should have nothing else to do.
"""

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.calibration_ledger import LARGE, SMALL, Figures, Shape, measure, shape, this_machine
from benchmarks.pages import publish

NAME = "planner choice"
BOUND = 0.05
"""How much longer than the fastest plan's a step of the chosen one may take."""
_DIVIDED = {
    "dp 2": ("--tensor-parallel=1", "--zero-stage=0"),
    "tp 2": ("--tensor-parallel=2",),
    "pp 2": ("--pipeline-parallel=2",),
}
_RECOMPUTED = {"": "none", ", recomputed": "full"}
PLANS = {
    f"{name}{suffix}": ("--gpus=2", *flags, f"--activation-checkpointing={mode}")
    for name, flags in _DIVIDED.items()
    for suffix, mode in _RECOMPUTED.items()
}
"""The flags of each plan."""


class World(NamedTuple):
    """A model and the rows of its step."""

    model: str
    rows: str
    """Sequences and their length, as ``"8 x 128"``."""

    def under(self, plan: str) -> Shape:
        """Return a short run under a plan."""
        return shape(plan, self.model, self.rows, *PLANS[plan])


WORLDS = {
    "50m, 16 x 64": World(SMALL, "16 x 64"),
    "50m, 4 x 512": World(SMALL, "4 x 512"),
    "50m, 2 x 1024": World(SMALL, "2 x 1024"),
    "150m, 4 x 128": World(LARGE, "4 x 128"),
}


class Choice(NamedTuple):
    """What a planner would choose in a world, and what would have been best."""

    chosen: str
    """The plan with the least predicted step."""
    best: str
    """The plan with the least measured step."""
    excess: float
    """How much longer the chosen plan's step took, as a share of the best one's."""


def choice(runs: Mapping[str, Sequence[Figures]]) -> Choice:
    """Return the choice among plans, each with its runs."""
    predicted = {}
    measured = {}
    for plan, of_plan in runs.items():
        steps = [one.step_predicted for one in of_plan if one.step_predicted is not None]
        predicted[plan] = median(steps)
        measured[plan] = median(one.step for one in of_plan)
    chosen = min(predicted, key=predicted.__getitem__)
    best = min(measured, key=measured.__getitem__)
    return Choice(chosen, best, measured[chosen] / measured[best] - 1)


def table(ledger: Mapping[str, Mapping[str, Sequence[Figures]]]) -> str:
    """Return the predicted and measured step of every plan in each world, and how good the choices were."""
    choices = {world: choice(runs) for world, runs in ledger.items()}
    good = sum(one.excess <= BOUND for one in choices.values())
    lines = [
        f"In {good} of {len(choices)} worlds, the plan that is predicted to be fastest is, or takes at most "
        f"{BOUND:.0%} longer than the one that is.",
        "",
        f"| world | {' | '.join(PLANS)} | chosen over best |",
        f"|---|{'---|' * len(PLANS)}---|",
    ]
    for world, runs in ledger.items():
        cells = []
        for of_plan in runs.values():
            predicted = median(one.step_predicted or 0.0 for one in of_plan)
            measured = median(one.step for one in of_plan)
            cells.append(f"{predicted:.2f} / {measured:.2f} s")
        made = choices[world]
        told = "the best" if made.chosen == made.best else f"{made.excess:+.1%}, {made.chosen} over {made.best}"
        lines.append(f"| {world} | {' | '.join(cells)} | {told} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results and print the table."""
    options = _options(arguments)
    chosen = {name: world for name, world in WORLDS.items() if fnmatch.fnmatch(name, f"*{options.only}*")}
    if not chosen:
        raise SystemExit(f"no world matches {options.only!r}; there are {'; '.join(WORLDS)}")
    ledger: dict[str, dict[str, list[Figures]]] = {}
    for name, world in chosen.items():
        ledger[name] = {plan: measure(world.under(plan), options.times) for plan in PLANS}
        sys.stderr.write(table({name: ledger[name]}).splitlines()[-1] + "\n")
    records: dict[str, Any] = {
        name: {plan: [asdict(one) for one in runs] for plan, runs in of_world.items()}
        for name, of_world in ledger.items()
    }
    publish(NAME, records, f"{this_machine()}\n\n{table(ledger)}", folder=options.out, page=options.page)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_choice", description=description)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results; made if not there")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/cost.md")
    parser.add_argument("--only", default="", metavar="PATTERN", help="worlds whose names contain it, such as '150m'")
    parser.add_argument("--times", type=int, default=1, help="runs of each plan")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
