"""The import of torch, without Python's collector of cyclic garbage.

The modules of torch hold half a million objects that live as long as the process. The collector goes through them again
and again while they are imported, and once more when the process ends: two fifths of the processor time of a process
that imports the engine and ends.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch and the engine inside the block, and exempt all objects that exist at its end from the collector.

    Does nothing if torch has been imported before, or if the collector is off.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
