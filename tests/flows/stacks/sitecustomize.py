"""On the path of a flow run's process: SIGUSR1 writes the stacks of its threads to ``$STACKS``, even if it is stuck."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

if "prefect.engine" in sys.orig_argv:
    stacks = Path(os.environ["STACKS"]).open("a")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stacks)
