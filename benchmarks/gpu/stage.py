"""The process of one stage: it runs the stage's sections and writes their rows as they come."""

import argparse
import faulthandler
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.errors import in_one_line
from llama_core.imports import importing_torch

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

NO_NEW_ROW_SHARE = 0.8
"""Share of the limit after which no row is begun."""
DUMP_SECONDS = 3.0
"""How long before the limit the stacks are written; of a short limit, a fifth."""


def main() -> int:
    """Run one stage; return 1 if a section raised."""
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="+", metavar="MODULE:FUNCTION")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, required=True, help="the limit, after which this process is killed")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    before_dump = options.seconds - min(DUMP_SECONDS, options.seconds / 5)
    faulthandler.dump_traceback_later(before_dump, exit=False)

    @cache
    def bench() -> "Bench":
        from benchmarks.gpu.bench import prepared

        ends = started + before_dump
        return prepared(options.device, options.folder, started + NO_NEW_ROW_SHARE * options.seconds, ends)

    rows: list[dict[str, Any]] = []
    failure = ""
    for section in options.sections:
        try:
            for row in _rows(section, bench):
                rows.append(row)
                _keep(rows, options.rows)
        except Exception as error:
            failure = in_one_line(error)
            rows.append({"what": f"all of {section.rpartition(':')[2]}", "error": failure})
            _keep(rows, options.rows)
    sys.stdout.write(f"{failure}\n")  # the last line of the log is how a stage failed
    return 1 if failure else 0


def _rows(section: str, bench: "Callable[[], Bench]") -> Iterator[dict[str, Any]]:
    """Yield the rows of a section; its module comes first, so that torch is imported only once that is there."""
    module, _, function = section.partition(":")
    try:
        with importing_torch():
            rows_of = getattr(importlib.import_module(module), function)
            prepared_bench = bench()
        yield from rows_of(prepared_bench)
    except Exception:
        traceback.print_exc()
        raise


def _keep(rows: list[dict[str, Any]], path: Path) -> None:
    """Write all rows anew, so that the file is whole at every moment, and show the newest in the log."""
    sys.stdout.write(f"{rows[-1]}\n")
    sys.stdout.flush()
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(rows))
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
