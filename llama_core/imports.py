"""Imports that need care: of packages that only some runs need, and of torch.

Torch is imported without Python's collector of cyclic garbage. The modules of torch hold half a million objects that
live as long as the process. The collector goes through them again and again while they are imported, and once more when
the process ends: two fifths of the processor time of a process that imports the engine and ends.
"""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROJECT = "llama-training-infra"


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


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package, with the versions that this project asks for."""
    import importlib.metadata

    try:
        wanted = [text.partition(";")[0].strip() for text in importlib.metadata.requires(_PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        wanted = []
    requirement = next((text for text in wanted if re.match(rf"{package}\b(?!-)", text)), package)
    return f"pip install '{requirement}'"
