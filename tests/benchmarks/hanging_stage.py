"""A stage that hangs while it is imported, with a child; the child's number goes to a file."""

import os
import subprocess
import time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
path = Path(os.environ["HANGING_STAGE_CHILD"])
path.with_suffix(".part").write_text(str(child.pid))
path.with_suffix(".part").rename(path)
time.sleep(600)
