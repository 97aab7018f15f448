"""Imports that need care: of packages that only some runs need, from the current folder, and of torch.

Torch is imported without Python's collector of cyclic garbage. The modules of torch hold half a million objects that
live as long as the process. The collector goes through them again and again while they are imported, and once more when
the process ends: two fifths of the processor time of a process that imports the engine and ends.

It is also imported with the way in which its threads wait for each other at the end of an operation, as OpenMP reads
that only once. By default they spin for milliseconds, in which the thread that they wait for cannot run if other
programs have its core. Threads that look less often and then sleep train twice as fast beside one busy process more
than there are cores, and lose less than 2 % on an idle machine (``benchmarks/busy_machine.py``).
"""

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROJECT = "llama-training-infra"
SPINS = "10000"
"""How often a thread looks before it goes to sleep, with the OpenMP of torch's own packages (libgomp)."""
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables that say how threads wait."""


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch and the engine inside the block, and exempt all objects that exist at its end from the collector.

    Does nothing if torch has been imported before. The collector stays as it is if it is off.
    """
    if "torch" not in sys.modules:
        let_threads_sleep()
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def let_threads_sleep() -> None:
    """Have the threads of torch, if it is not imported yet, sleep rather than spin, unless the user has chosen."""
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def safe_python(*arguments: str) -> tuple[str, ...]:
    """Return the command line of a Python that imports nothing from the current folder, as with ``-c`` and ``-m``."""
    return (sys.executable, "-P", *arguments)


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package, with the versions that this project asks for."""
    import importlib.metadata

    try:
        wanted = [text.partition(";")[0].strip() for text in importlib.metadata.requires(_PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        wanted = []
    requirement = next((text for text in wanted if re.match(rf"{package}\b(?!-)", text)), package)
    return f"pip install '{requirement}'"
