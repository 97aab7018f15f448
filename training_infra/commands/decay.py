"""The command ``decay``: a run that branches off the stable phase of another one."""

import argparse
from functools import partial
from pathlib import Path

from llama_core.records.directory import RunDirectory, command_to_resume
from training_infra.commands.command import RUN_DIR, STEP, Argument, Command, whole_number


def _decay(options: argparse.Namespace) -> None:
    from llama_core.runs.console import say
    from llama_core.runs.decay import branch_off

    tell = partial(say, "decay")
    run = RunDirectory(options.run_dir)
    branch = branch_off(run, options.out, num_steps=options.steps, step=options.step, tell=tell)
    tell(f"{branch.path} goes on from {run.path}; train it with: {command_to_resume(branch)}")


DECAY = Command(
    "decay",
    "branch a run off the stable phase of another, in which the learning rate decays",
    _decay,
    examples=("runs/mine --steps 2000 --out runs/decayed", "runs/mine --step 8000 --steps 500 --out runs/at-8000"),
    arguments=(
        RUN_DIR,
        Argument("--steps", type=whole_number, metavar="2000", required=True, help="steps of the decay"),
        STEP,
        Argument("--out", type=Path, metavar="runs/decayed", required=True, help="the branch's folder; new or empty"),
    ),
)
