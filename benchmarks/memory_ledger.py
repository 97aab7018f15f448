"""Predict the published figures in ``data/published_memory.csv`` and rewrite their section of ``docs/memory.md``.

``python -m benchmarks.memory_ledger`` is run after a change of ``llama_core.planning.published``.
"""

import sys
from pathlib import Path

from llama_core.planning.published import ledger, read_rows
from llama_core.planning.published.tables import section, summary_table

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- published ledger -->", "<!-- end of published ledger -->"


def main() -> None:
    """Predict, rewrite the section, and print the summary."""
    result = ledger(read_rows(ROOT / "benchmarks/data/published_memory.csv"))
    page = ROOT / "docs/memory.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{section(result)}\n{END}{after}", encoding="utf-8")
    sys.stdout.write(summary_table(result) + "\n")


if __name__ == "__main__":
    main()
