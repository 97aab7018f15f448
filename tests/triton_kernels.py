"""Runs and compiles Triton's kernels without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def interpreted(script):
    """Return the JSON that a script prints in a process in which Triton interprets: it decides that at its import."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def compiled_for_hopper(kernel, kinds, constants, *, multiples_of_16, num_warps):
    """Return a kernel compiled for sm90.

    Args:
        kernel: the kernel.
        kinds: Triton's type of each argument that is no constant.
        constants: the values of the others.
        multiples_of_16: arguments that are known to be such numbers, or to point to such places.
        num_warps: warps of a program.
    """
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in multiples_of_16
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return build(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
