"""Count what compiled blocks cost on an H100, without one: ``python -m benchmarks.sm90 --out DIR``.

torch and Triton compile the blocks of several models for sm90 in an environment of their own (``--venv``), which the
first call makes. No kernel runs. The table says how many kernels there are, how many bytes they read and write, and
what code they became; the JSON has each kernel. ``--page`` rewrites the table of ``docs/gpu.md``. A kind takes a minute
or two.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import publish
from benchmarks.sm90.environment import ROOT, make_environment, variables
from benchmarks.sm90.kinds import KINDS, NUM_DOCUMENTS, TOKENS
from llama_core.records.files import cache_directory
from llama_core.units import MIB

NAME = "sm90"
CAST = "_to_copy_"
"""How the name of a kernel ends, before its number, that only casts."""
COLUMNS = (
    "block",
    "graphs",
    "forward: kernels, GB",
    "backward: kernels, GB",
    "casts alone, GB",
    "kept for the backward, MiB",
    "most registers",
    "kernels with a stack",
    "kernels that read 16 bytes at a time",
)

Found = Mapping[str, Any]
"""What ``counted.py`` writes."""


def compiled(names: Iterable[str], python: Path) -> Iterator[dict[str, Any]]:
    """Yield what the blocks of each kind launch, or the last line of what its process said before it failed.

    Args:
        names: keys of ``KINDS``.
        python: of an environment with a CUDA build of torch.
    """
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            command = [str(python), "-m", "benchmarks.sm90.counted", name, str(out)]
            environment = variables(Path(folder))
            ended = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
            if ended.returncode == 0:
                yield json.loads(out.read_text(encoding="utf-8"))
            else:
                said = ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"]
                yield {"name": name, "error": said[-1]}


def table(everything: Sequence[Found]) -> str:
    """Return a row for each block, and what failed."""
    with_torch = next((found for found in everything if "error" not in found), None)
    if with_torch is None:
        raise SystemExit(f"no block could be compiled: {everything[0]['error']}")
    lines = [
        f"torch {with_torch['torch']}, Triton {with_torch['triton']}; one block, {TOKENS:,} tokens in {NUM_DOCUMENTS} "
        "documents, one rank.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for found in everything:
        if "error" in found:
            lines.append(f"| {found['name']} | {found['error'].replace('|', '/')} |" + " |" * (len(COLUMNS) - 2))
        blocks = found.get("blocks", ())
        lines += [f"| {' | '.join([_label(found, block), *_cells(block)])} |" for block in blocks]
    return "\n".join(lines) + "\n"


def _label(found: Found, block: Found) -> str:
    name = str(found["name"])
    return name if len(found["blocks"]) == 1 else f"{name}, layer {block['layer']}"


def _cells(block: Found) -> Iterator[str]:
    passes = [block["forward"]["kernels"], block["backward"]["kernels"]]
    kernels = [kernel for one in passes for kernel in one]
    yield str(block["graphs"])
    for one in passes:
        yield f"{sum(kernel['launches'] for kernel in one)}, {num_bytes(one) / 1e9:.2f}"
    yield f"{num_bytes(kernel for kernel in kernels if is_cast(kernel)) / 1e9:.2f}"
    yield f"{block['kept_bytes'] / MIB:.0f}"
    yield str(max(least(kernel, "registers") for kernel in kernels))
    yield str(sum(least(kernel, "stack_bytes") > 0 for kernel in kernels))
    yield f"{sum(any(one['wide_loads'] for one in kernel['configurations']) for kernel in kernels)} of {len(kernels)}"


def num_bytes(kernels: Iterable[Found]) -> int:
    """Return the bytes that all launches of some kernels read and write."""
    return sum(kernel["launches"] * kernel["num_bytes"] for kernel in kernels)


def is_cast(kernel: Found) -> bool:
    """Return whether a kernel only casts, by the operators in its name."""
    return str(kernel["name"]).partition("_fused_")[2].rstrip("0123456789") == CAST


def least(kernel: Found, what: str) -> int:
    """Return the least of the ways in which a kernel was compiled: a GPU chooses the fastest."""
    return min(int(one[what]) for one in kernel["configurations"])


def main() -> None:
    """Compile the blocks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON and the table go")
    parser.add_argument("--venv", type=Path, default=cache_directory(None) / NAME, help="the environment")
    parser.add_argument("--kinds", nargs="+", default=["*"], help=f"patterns of: {', '.join(KINDS)}")
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten")
    asked = parser.parse_args()
    names = [name for name in KINDS if any(fnmatch.fnmatchcase(name, pattern) for pattern in asked.kinds)]
    if not names:
        parser.error(f"no kind matches {' '.join(asked.kinds)}; choose of {', '.join(KINDS)}")
    python = make_environment(asked.venv)
    everything = []
    for found in compiled(names, python):
        everything.append(found)
        sys.stderr.write(f"{found['name']}: {found.get('error', 'compiled')}\n")
    publish(NAME, everything, table(everything), folder=asked.out, page=asked.page)


if __name__ == "__main__":
    main()
