"""Start Python with the signals of a job held back: ``python -P -S start.py ARGUMENTS OF PYTHON``.

That Python, too, imports nothing from the current folder (``-P``).

While Python imports what a supervisor needs, SIGTERM would end it, and submitit's handlers would swallow the signal: a
job that is preempted in its first seconds would not be queued again. The kernel keeps a blocked signal, also across
``exec``, until the supervisor unblocks it.
"""

import os
import signal
import sys

CONTROLLER_ONLY = "controller only"
"""Value of ``PYTHONSAFEPATH`` for submitit's controller, which submitit starts with ``python -m``. Programs that the
ranks start are not ours to restrict."""
HELD_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def python_command() -> str:
    """Return the shell's words for a Python that starts with ``HELD_SIGNALS`` blocked; its arguments may follow."""
    import shlex

    return shlex.join([sys.executable, "-P", "-S", __file__])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    if os.environ.get("PYTHONSAFEPATH") == CONTROLLER_ONLY:
        del os.environ["PYTHONSAFEPATH"]
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv[1:]])
