"""What this machine has, before any stage needs it: ``python -m benchmarks.gpu.preflight --record FILE``.

Needs nothing but Python: what is missing, torch too, becomes a line in the record.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import STAGES

EVERY_STAGE_NEEDS = (
    "numpy",
    "jinja2",
    "yaml",
    "psutil",
    "typing_extensions",
    "annotated_types",
    "typing_inspection",
    "pydantic_core",
    "pydantic",
)
"""The packages that ``llama_core`` imports besides torch and what torch itself needs."""
DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "jinja2": "Jinja2",
    "typing_extensions": "typing-extensions",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "pydantic_core": "pydantic-core",
    "docstring_parser": "docstring-parser",
}
"""Names of wheels that differ from the name of the package."""
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
FREE_DISK_GIB = 5
"""Room for caches of compiled code, checkpoints of tiny models and logs."""
IN_USE_SHARE = 0.05
"""Share of the device's memory that other processes may hold without a complaint; a context takes 1 %."""
_GIB = 2**30


@dataclass
class Preflight:
    """What was found."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """A value each."""
    problems: list[str] = field(default_factory=list)
    """What will go wrong, a line each."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a package cannot be imported, by its name."""
    hopeless: str = ""
    """Why no stage can run."""

    def note(self, what: str, value: object) -> None:
        """Add a row."""
        self.rows.append({"what": what, "value": value})


def look(device: str) -> Preflight:
    """Return what this machine has for a measurement on ``device``."""
    found = Preflight()
    found.note("Python", f"{platform.python_version()}, {sys.executable}")
    if sys.version_info[:2] < OLDEST_PYTHON:
        found.hopeless = f"this is Python {platform.python_version()}, and the engine needs 3.11 or newer"
    found.note("machine", f"{os.cpu_count()} cores, {_host_memory_gib():.0f} GiB")
    _look_at_disk(found)
    _look_at_packages(found)
    _look_at_compiler(found)
    try:
        _look_at_torch(found, device)
    except Exception as error:
        traceback.print_exc()
        found.hopeless = found.hopeless or f"torch cannot be used: {type(error).__name__}: {error}"
    return found


def _host_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB


def _look_at_disk(found: Preflight) -> None:
    folder = tempfile.gettempdir()
    free_gib = shutil.disk_usage(folder).free / _GIB
    found.note("free disk", f"{free_gib:.1f} GiB in {folder}")
    if free_gib < FREE_DISK_GIB:
        found.problems.append(f"{folder} has {free_gib:.1f} GiB left; set TMPDIR to a folder with {FREE_DISK_GIB} GiB")


def _look_at_packages(found: Preflight) -> None:
    stages = STAGES.values()
    for package in dict.fromkeys((*EVERY_STAGE_NEEDS, *(name for one in stages for name in (*one.needs, *one.wants)))):
        try:
            importlib.import_module(package)
        except Exception as error:  # a wheel for another Python or of another version may raise anything
            is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
            found.missing[package] = str(error) if is_absent else f"{type(error).__name__}: {error}"
    for package, why in found.missing.items():
        sys.stderr.write(f"{package}: {why}\n")
    found.problems.extend(complaints(found.missing))
    if lacking := [named(name) for name in EVERY_STAGE_NEEDS if name in found.missing]:
        found.hopeless = found.hopeless or f"missing: {', '.join(lacking)}"


def complaints(missing: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each group of packages that some stages lack.

    Args:
        missing: why a package cannot be imported, by its name.
    """
    if lacking := [name for name in EVERY_STAGE_NEEDS if name in missing]:
        remedy = "install them, or give their wheels (--wheels FOLDER)"
        yield f"no stage can run without {_explained(lacking, missing)}: {remedy}"
    for stage in STAGES.values():
        if lacking := [name for name in stage.needs if name in missing]:
            yield f"the stage {stage.name} cannot run without {_explained(lacking, missing)}"
    wanting = [stage for stage in STAGES.values() if any(name in missing for name in stage.wants)]
    if wanting:
        lacking = [name for name in wanting[0].wants if name in missing]
        names = ", ".join(stage.name for stage in wanting)
        yield f"the stages {names} measure this engine alone without {_explained(lacking, missing)}"


def _explained(packages: Sequence[str], missing: Mapping[str, str]) -> str:
    """Return the names of wheels, each with the reason if it is installed and cannot be imported."""
    return ", ".join(
        named(name) if missing[name].startswith("No module") else f"{named(name)} ({missing[name]})"
        for name in packages
    )


def named(package: str) -> str:
    """Return the name of a package's wheel."""
    return DISTRIBUTIONS.get(package, package)


def _look_at_compiler(found: Preflight) -> None:
    """See whether Triton could build the C code through which it starts kernels."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    found.note("C compiler", compiler or "none")
    found.note("Python.h", str(headers) if headers.exists() else "none")
    consequence = "so Triton builds nothing: compiled blocks and the kernels of the loss fail"
    if compiler is None:
        found.problems.append(f"there is no C compiler, {consequence}; install gcc, or set CC")
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <Python.h>\nint one(void) { return PY_MAJOR_VERSION; }\n")
        command = [
            compiler,
            "-shared",
            "-fPIC",
            f"-I{headers.parent}",
            str(source),
            "-o",
            str(source.with_suffix(".so")),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            said = f"exit code {run.returncode}\n{run.stderr}".strip() if run.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
    if said:
        sys.stderr.write(f"{said}\n")
        remedy = "install the headers of this Python (python3-dev)" if not headers.exists() else "see preflight.log"
        found.problems.append(f"{compiler} cannot compile a file that includes Python.h, {consequence}; {remedy}")


def _look_at_torch(found: Preflight, device: str) -> None:
    import torch

    found.note("torch", torch.__version__)
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        found.problems.append(f"torch {torch.__version__} is older than 2.11, the oldest that the engine runs on")
    try:
        from torch.nn.attention.varlen import varlen_attn

        found.note("varlen_attn", str(signature(varlen_attn)))
    except ImportError as error:
        found.problems.append(f"this torch has no attention over documents: {error}")
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        found.hopeless = found.hopeless or f"torch {torch.__version__} finds no CUDA device"
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    capability = f"{properties.major}.{properties.minor}"
    found.note("device", properties.name)
    found.note("device memory", f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free")
    found.note("compute capability", f"{capability}; this torch has code for {', '.join(torch.cuda.get_arch_list())}")
    for library, version in (
        ("CUDA", lambda: torch.version.cuda),
        ("cuDNN", torch.backends.cudnn.version),
        ("NCCL", lambda: ".".join(map(str, torch.cuda.nccl.version()))),  # type: ignore[no-untyped-call]
        ("Triton", lambda: importlib.import_module("triton").__version__),
    ):
        try:
            found.note(library, version())
        except Exception as error:
            found.problems.append(f"{library} cannot be used: {type(error).__name__}: {error}")
    if total - free > IN_USE_SHARE * total:
        found.problems.append(f"other processes hold {(total - free) / _GIB:.1f} GiB of the device")


def main() -> None:
    """Look, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    options.record.write_text(json.dumps(asdict(look(options.device))))


if __name__ == "__main__":
    main()
