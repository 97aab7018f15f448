"""The environment in which blocks are compiled: a CUDA build of torch, and what stands in for the driver."""

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "pydantic", "pyyaml", "jinja2", "psutil")
"""What the engine needs besides torch."""
ROOT = Path(__file__).parents[2]
HAS_CUDA = "import torch; raise SystemExit(torch.version.cuda is None)"


def torch_of_cuda() -> str:
    """Return pip's name for the CUDA build of the torch that runs this."""
    # the version to the letter: with two equals signs, a build for CPUs that is at hand would do
    return f"torch==={metadata.version('torch').partition('+')[0]}"


def has_cuda_build(python: Path) -> bool:
    """Return whether a Python is there and imports a CUDA build of torch."""
    return (
        python.exists()
        and subprocess.run([str(python), "-c", HAS_CUDA], check=False, capture_output=True).returncode == 0
    )


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with a CUDA build of torch, which is made unless it is there: some 5 GB.

    Raises:
        SystemExit: if pip cannot install it.
    """
    python = folder / "bin/python"
    if has_cuda_build(python):
        return python
    sys.stderr.write(f"Installing {torch_of_cuda()} into {folder}\n")
    venv.create(folder, with_pip=True, clear=True)
    constraints = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    command = [str(python), "-m", "pip", "install", "--quiet", torch_of_cuda(), *constraints]
    if subprocess.run(command, check=False).returncode != 0 or not has_cuda_build(python):
        raise SystemExit(
            f"{torch_of_cuda()} could not be installed into {folder}; name an environment that has it with --venv"
        )
    return python


def built_driver(folder: Path) -> Path:
    """Return the stand-in for the driver, compiled into a folder under the driver's name.

    Raises:
        SystemExit: if no C compiler can build it.
    """
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("no_driver.c")
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"no C compiler {compiler}; install one, or name it in CC") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{compiler} cannot build {source.name}: {error.stderr.strip().splitlines()[0]}") from None
    return library


def variables(folder: Path) -> dict[str, str]:
    """Return the environment of a process that compiles anew, keeps all in a folder, and has the stand-in."""
    return os.environ | {
        "LD_PRELOAD": str(built_driver(folder)),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # kernels are compiled in the process that has the stand-ins
    }
