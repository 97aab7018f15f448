"""The command ``train``: the whole chain, in this process or as a Prefect flow."""

import argparse
import sys
from functools import partial
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from training_infra.commands.command import ALLOW_DATA_CHANGE, NEW_RUN_DIR, RESUME, Argument, Command
from training_infra.commands.configuration import requested_config
from training_infra.commands.planning import rehearse
from training_infra.flags import FLAGS
from training_infra.lines import print_json, print_line, print_text


def _train(options: argparse.Namespace) -> int:
    config = requested_config(options)
    if options.dry_run:
        return rehearse(config, here=True, as_json=options.json)
    if options.print_sbatch:
        from llama_core.chain.preview import preview_script

        print_text(preview_script(config, options.run_dir))
    elif options.flow:
        if options.detach:
            raise ConfigError("--detach: a flow follows its job; drop --flow")
        from training_infra.commands.flow import run_flow

        run_flow(
            config,
            options.run_dir,
            resume=options.resume,
            allow_data_change=options.allow_data_change,
            debug=options.debug,
        )
    else:
        _run_chain(config, options)
    return 0


def _run_chain(config: RunConfig, options: argparse.Namespace) -> None:
    from llama_core.chain import steps
    from llama_core.chain.chain import run_chain
    from llama_core.runs.console import say
    from training_infra.local import local_steps

    own = local_steps(config, options.run_dir, resume=options.resume, allow_data_change=options.allow_data_change)
    with say.silenced(options.json):
        run = run_chain(own, detach=options.detach)
    if options.json:
        print_json(steps.records(run))


def _bring_here(options: argparse.Namespace) -> Path:
    from llama_core.runs.continuing import run_here

    return run_here(options.run_dir, resume=options.resume, tell=partial(print_line, file=sys.stderr))


TRAIN = Command(
    "train",
    "run the whole chain: validate, estimate, rehearse, train, benchmark, report",
    _train,
    examples=(
        "--model tiny_llama3_150m --data texts.jsonl --batch-size 32",
        "--init-from ~/Llama-3.2-1B --strategy lora --data chats.jsonl",
        "--model llama3_8b --gpus 16 --nodes 2 --launcher slurm --partition gpu --time 12:00:00",
        "--resume --run-dir runs/mine",
    ),
    bring_here=_bring_here,
    arguments=(
        NEW_RUN_DIR,
        RESUME,
        ALLOW_DATA_CHANGE,
        Argument("--dry-run", action="store_true", help="only plan and rehearse; train nothing"),
        Argument("--print-sbatch", action="store_true", help="print the job's script; submit nothing"),
        Argument("--flow", action="store_true", help="run the steps as a Prefect flow"),
        Argument("--detach", action="store_true", help="submit the job, and do not wait for it"),
    ),
    flags=FLAGS,
)
