"""What this machine needs to build Triton's kernels: compiled blocks are made of them, and our own on CUDA."""

import os
import shutil
import socket
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from llama_core.errors import EnvironmentMismatchError

COMPILE_WORKERS = 8
"""Most processes in which a rank on CUDA compiles its blocks; torch would start one for each core, up to 32."""


def missing_for_kernels() -> tuple[str, ...]:
    """Return what is missing to build Triton's kernels, each with the command that installs it; empty if nothing is.

    Source: ``triton/runtime/build.py``, which compiles a C module for each kernel's launcher.
    """
    missing = []
    if find_spec("triton") is None:
        missing.append("Triton (pip install triton)")
    named = os.environ.get("CC")
    compilers = [named] if named else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        missing.append(f"a C compiler ({' or '.join(compilers)})")
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme for packages; its headers lie in the usual place
        scheme = "posix_prefix"
    include = sysconfig.get_paths(scheme=scheme)["include"]
    if not Path(include, "Python.h").exists():
        missing.append(f"Python.h in {include} (Debian: apt install python3-dev)")
    return tuple(missing)


@cache
def can_build_kernels() -> bool:
    """Return whether this machine has what it takes to build Triton's kernels."""
    return not missing_for_kernels()


def check_can_compile() -> None:
    """Refuse to compile blocks for a GPU on a machine that cannot.

    Raises:
        EnvironmentMismatchError: naming everything that is missing.
    """
    if missing := missing_for_kernels():
        raise EnvironmentMismatchError(
            f"parallel.compile needs {' and '.join(missing)} on {socket.gethostname()}; install it, or set "
            "parallel.compile=false"
        )
