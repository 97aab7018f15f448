"""Whatever is in a file or on a command line: one line, no traceback, no write elsewhere, no process, and an end."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / name) for name in ("data", "reports")]  # for their synthetic runs and templates
