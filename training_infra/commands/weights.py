"""The commands that use a run's weights: ``generate`` and ``export-hf``."""

import argparse
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from llama_core.errors import ConfigError
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import own_folder
from llama_core.records.files import cache_directory
from llama_core.storage.stores import is_url
from training_infra.commands.command import (
    DEVICE,
    DTYPE,
    RUN_DIR,
    SOURCE,
    STEP,
    TOKENIZER,
    Argument,
    Command,
    path_or_url,
    whole_number,
)
from training_infra.conversation import converse
from training_infra.lines import print_line, print_pieces

if TYPE_CHECKING:
    from llama_core.runs.export_source import ExportSource


_LICENCES = (
    "--license apache-2.0, llama3.2, other or another name of https://huggingface.co/docs/hub/repositories-licenses"
)


def _generate(options: argparse.Namespace) -> None:
    from llama_core.chain.downloads import fetch_weights
    from llama_core.evaluation.conversation import ChatSession
    from llama_core.evaluation.generate import TextModel
    from llama_core.runs.console import say

    if options.prompt is None and not options.chat:
        raise ConfigError("nothing to continue; give a text with --prompt, or converse with --chat")
    if options.system is not None and not options.chat:
        raise ConfigError("--system has no effect without --chat; add it, or drop --system")
    with say.silenced(True):  # standard output holds only the text
        source = fetch_weights(options.source, options.step, partial(print_line, file=sys.stderr))
    model = TextModel(
        source,
        step=options.step,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        tokenizer=options.tokenizer,
        device=options.device,
        dtype=options.dtype,
        tell=partial(print_line, file=sys.stderr),
    )
    conversation = ChatSession(model, options.system) if options.chat else None
    if options.prompt is None and conversation is not None:
        model.read_weights()
        converse(conversation.answer)
        return
    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    print_pieces(model.continue_text(prompt) if conversation is None else conversation.answer(prompt))


GENERATE = Command(
    "generate",
    "continue a prompt, to look at what a model has learnt",
    _generate,
    only_prints=True,
    examples=(
        'runs/mine --prompt "Once upon a time"',
        'runs/mine --prompt "Capital of France?" --chat --temperature 0.8 --top-p 0.95',
        'runs/mine --chat --system "Answer in one sentence."',
    ),
    arguments=(
        SOURCE,
        Argument("--prompt", metavar='"Once upon"', help="the text to continue; - reads standard input"),
        Argument(
            "--chat",
            action="store_true",
            help="the prompt is a user's message; use the chat template. Without --prompt: converse, until Ctrl-D; if "
            "standard input is no terminal, each of its lines is a message",
        ),
        Argument("--system", metavar='"Be brief."', help="with --chat: the system prompt, which comes first"),
        Argument(
            "--max-new-tokens", type=whole_number, metavar="64", default=128, help="most new tokens; default: 128"
        ),
        Argument("--temperature", type=float, metavar="0.8", default=0.0, help="draw tokens if above 0; default: 0"),
        Argument("--top-k", type=whole_number, metavar="50", help="draw from this many of the likeliest tokens"),
        Argument(
            "--top-p",
            type=float,
            metavar="0.95",
            help="draw from the likeliest tokens that together have this probability",
        ),
        Argument("--seed", type=int, metavar="1", help="draw the same each time; default: draw anew"),
        TOKENIZER,
        DEVICE,
        STEP,
        DTYPE,
    ),
)


def _export_hf(options: argparse.Namespace) -> None:
    from llama_core.evaluation.exports import refuse_missing_packages
    from llama_core.hugging_face.push import open_repository, push_folder, repository_to_push
    from llama_core.runs.console import say
    from llama_core.runs.export import refuse_export, write_export
    from llama_core.runs.export_source import find_export_source
    from llama_core.storage.folders import copy_folder, refuse_files_at

    _refuse_unfit(options)
    repository = repository_to_push(options.push) if options.push is not None else None
    store = refuse_files_at(options.out) if is_url(options.out) else None
    tell = partial(say, "export")
    export = find_export_source(
        RunDirectory(options.run_dir),
        step=options.step,
        average=options.average,
        dtype=options.dtype,
        merged=options.merged,
        tell=tell,
    )
    with ExitStack() as stack:
        folder = options.out
        if not isinstance(folder, Path):
            temporary = stack.enter_context(TemporaryDirectory(prefix="export-", dir=own_folder(cache_directory(None))))
            folder = Path(temporary) / export.run.name
        refuse_export(export, folder)
        if options.check:
            refuse_missing_packages(export)
        if repository is not None:  # a token that may not write there is found out before the weights are written
            open_repository(repository, public=options.public, tell=tell)
        write_export(export, folder, licence=options.license, tell=tell)
        if options.check:
            _check(export, folder, stays=isinstance(options.out, Path))
        if store is not None:
            copy_folder(folder, options.out)
        if repository is not None:
            message = f"{export.run.name}, step {export.step}, in {export.dtype}"
            say("push", push_folder(folder, repository, message=message, tell=partial(say, "push")))
        if options.out is not None:
            say("export", str(store or folder))


def _refuse_unfit(options: argparse.Namespace) -> None:
    """Refuse options of ``export-hf`` that need one another, and a licence that is no name of one."""
    if options.out is None and options.push is None:
        raise ConfigError("nowhere to write to; name a folder with --out, a repository with --push, or both")
    if options.push is None and options.public:
        raise ConfigError("--public is about a repository; name it with --push, or drop --public")
    if options.push is not None and options.license is None:
        raise ConfigError(
            f"--push needs the licence of the weights for their card, since no record says it: {_LICENCES}"
        )
    if options.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", options.license):
        raise ConfigError(f"--license {options.license!r} is no licence that the Hub knows; write {_LICENCES}")


def _check(export: "ExportSource", folder: Path, *, stays: bool) -> None:
    """Compare what others compute from an export with what the run computes, and say what servers make of it."""
    from llama_core.chain.downloads import fetch_weights
    from llama_core.evaluation.exports import check_export
    from llama_core.hugging_face.servers.findings import findings
    from llama_core.runs.console import say

    tell = partial(say, "check")
    fetch_weights(str(folder), None, tell)  # adapters may be over weights of the Hub
    for line in check_export(export, folder, tell=tell).summary():
        tell(line)
    for found in findings(folder):
        for line in (found if stays else replace(found, commands=())).lines:
            say("serve", line)


def _bring_here(options: argparse.Namespace) -> Path:
    from llama_core.chain.downloads import fetch_weights

    return fetch_weights(options.run_dir, options.average or options.step, partial(print_line, file=sys.stderr))


EXPORT_HF = Command(
    "export-hf",
    "write a run's weights and tokenizer for transformers or PEFT",
    _export_hf,
    bring_here=_bring_here,
    examples=(
        "runs/mine --out ~/my-llama --dtype bf16",
        "runs/mine --out ~/mean --average last:5",
        "runs/mine --out ~/merged --merged",
        "runs/mine --push me/my-llama --license apache-2.0 --dtype bf16 --check",
    ),
    arguments=(
        RUN_DIR,
        Argument(
            "--out",
            type=path_or_url,
            metavar="~/my-llama",
            help="the folder or its address; new or empty",
        ),
        Argument(
            "--push", metavar="ORG/NAME", help="the repository of the Hugging Face Hub; created if it is not there"
        ),
        Argument("--public", action="store_true", help="with --push: a new repository is public; default: private"),
        Argument("--license", metavar="apache-2.0", help="the licence of the weights, for the model card"),
        Argument(
            "--check",
            action="store_true",
            help="open the export with transformers or PEFT, compare its logits and tokens with the run's, and say "
            "what vLLM, SGLang and llama.cpp make of it; what differs is not pushed",
        ),
        STEP,
        Argument(
            "--average",
            metavar="last:5",
            help="the mean of several checkpoints: the newest, as in last:5, or those of steps, as in 1000,1200,1400",
        ),
        DTYPE,
        Argument(
            "--merged",
            action="store_true",
            help="for a run with adapters: write the full model instead of a PEFT folder",
        ),
    ),
)
