"""The command ``tokenize``: the tokens of a run's data, before a job waits for them."""

import argparse

from training_infra.commands.command import Argument, Command, whole_number
from training_infra.commands.configuration import requested_config
from training_infra.flags import FLAGS
from training_infra.lines import print_json


def _tokenize(options: argparse.Namespace) -> None:
    from llama_core.chain.tokenize import tokenize
    from llama_core.runs.console import say

    config = requested_config(options)
    with say.silenced(options.json):
        made = tokenize(config, options.workers)
        say("tokenize", made.summary())
    if options.json:
        print_json(made.as_dict())


TOKENIZE = Command(
    "tokenize",
    "tokenise the data of a run with all cores, here or in jobs of a cluster, and go on where it was stopped",
    _tokenize,
    examples=(
        "--data corpus --tokenizer ~/my-tokenizer --workers 32",
        "--config configs/llama3_8b.yaml --launcher slurm --partition cpu --workers 64",
    ),
    arguments=(
        Argument(
            "--workers",
            type=whole_number,
            metavar="32",
            help="processes on this machine, or elements of the job array; default: the cores of this machine, or 16 "
            "elements",
        ),
    ),
    flags=FLAGS,
)
