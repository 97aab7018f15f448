"""What the tests of strangers' runs share."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("data", "reports")]  # for their templates and runs
