"""The commands that use a run's weights: ``generate`` and ``export-hf``."""

import argparse
import sys
from functools import partial
from pathlib import Path

from llama_core.config.hugging_face import DTYPES
from llama_core.records.directory import RunDirectory
from training_infra.commands.command import RUN_DIR, Argument, Command
from training_infra.flags import LONG_NAMES
from training_infra.lines import for_standard_output, print_line, print_text

_STEP = Argument(
    "--step", type=int, metavar="400", help="the checkpoint's step; default: the newest that is not damaged"
)
_DTYPE = Argument(
    "--dtype",
    type=lambda name: LONG_NAMES.get(name, name),
    choices=tuple(DTYPES),
    metavar="bf16",
    default="fp32",
    help=f"dtype of the weights: {', '.join(DTYPES)}; default: fp32, as in training",
)


def _generate(options: argparse.Namespace) -> None:
    from llama_core.chain.generate import generate

    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    pieces = generate(
        options.source,
        prompt,
        chat=options.chat,
        step=options.step,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        tokenizer=options.tokenizer,
        device=options.device,
        dtype=options.dtype,
        tell=partial(print_line, file=sys.stderr),  # standard output holds only the text
    )
    shown = for_standard_output()
    for piece in pieces:
        print_text(shown(piece))
    print_line()


GENERATE = Command(
    "generate",
    "continue a prompt, to look at what a model has learnt",
    _generate,
    examples=(
        'runs/mine --prompt "Once upon a time"',
        'runs/mine --prompt "Capital of France?" --chat --temperature 0.8 --top-p 0.95',
    ),
    arguments=(
        Argument("source", type=Path, metavar="RUN_DIR|FOLDER", help="a run, or a Hugging Face or PEFT folder"),
        Argument("--prompt", metavar='"Once upon"', required=True, help="the text to continue; - reads standard input"),
        Argument("--chat", action="store_true", help="the prompt is a user's message; use the chat template"),
        Argument("--max-new-tokens", type=int, metavar="64", default=128, help="most new tokens; default: 128"),
        Argument("--temperature", type=float, metavar="0.8", default=0.0, help="draw tokens if above 0; default: 0"),
        Argument("--top-k", type=int, metavar="50", help="draw from this many of the likeliest tokens"),
        Argument(
            "--top-p",
            type=float,
            metavar="0.95",
            help="draw from the likeliest tokens that together have this probability",
        ),
        Argument("--seed", type=int, metavar="1", help="draw the same each time; default: draw anew"),
        Argument("--tokenizer", metavar="bytes", help="'bytes' or a path; default: the run's or the folder's"),
        Argument("--device", choices=("cpu", "cuda"), metavar="cpu", help="cpu or cuda; default: cuda if present"),
        _STEP,
        _DTYPE,
    ),
)


def _export_hf(options: argparse.Namespace) -> None:
    from llama_core.chain.console import say
    from llama_core.chain.export import export_run

    run = RunDirectory(options.run_dir)
    tell = partial(say, "export")
    exported = export_run(run, options.out, step=options.step, dtype=options.dtype, merged=options.merged, tell=tell)
    tell(str(exported))


EXPORT_HF = Command(
    "export-hf",
    "write a run's weights and tokenizer for transformers or PEFT",
    _export_hf,
    examples=("runs/mine --out ~/my-llama --dtype bf16", "runs/mine --out ~/merged --merged"),
    arguments=(
        RUN_DIR,
        Argument("--out", type=Path, metavar="~/my-llama", required=True, help="the folder; new or empty"),
        _STEP,
        _DTYPE,
        Argument(
            "--merged",
            action="store_true",
            help="for a run with adapters: write the full model instead of a PEFT folder",
        ),
    ),
)
