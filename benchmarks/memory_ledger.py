"""Predict published memory measurements, row by row: ``python -m benchmarks.memory_ledger --csv IN [--out OUT]``.

``OUT`` has a row for each row of ``IN``, with ``id``, ``predicted_gib`` and ``reason`` (empty if it was predicted).
``--page docs/memory.md`` also rewrites the tables of that page; run it after a change of ``benchmarks.published``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import rewrite
from benchmarks.published import ledger, read_rows, write_predictions
from benchmarks.published.tables import remarks, rows_table, section, summary_table
from llama_core.errors import TrainingInfraError


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, write the predictions, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_ledger", description="Predict published memory measurements."
    )
    parser.add_argument("--csv", type=Path, required=True, metavar="IN", help="measurements, a row each")
    parser.add_argument(
        "--out", type=Path, default=Path("memory-ledger.csv"), metavar="OUT", help="where predictions go, a row each"
    )
    parser.add_argument("--page", type=Path, help="a page whose tables are rewritten")
    options = parser.parse_args(arguments)
    try:
        result = ledger(read_rows(options.csv))
        write_predictions(result, options.out)
    except (TrainingInfraError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 1)
    rewrite(options.page, "published ledger", section(result))
    lines = [rows_table(result), summary_table(result), *remarks(result), f"predictions: {options.out}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
