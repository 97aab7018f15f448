"""Detect the devices, cores and memory that a process may use on this machine, without torch."""

import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from llama_core.config.hardware import DeviceSpec, recognise_gpu
from llama_core.imports import safe_python

_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_DRIVER = Path("/proc/driver/nvidia/version")
"""Where NVIDIA's driver says its version, in a container too."""
_SLICE = "MIG-"
"""How the UUID of a slice of a device begins; ``nvidia-smi`` lists whole devices."""
_ASK_TORCH = """
import csv, sys, torch
for index in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(index)
    capability = f"{device.major}.{device.minor}"
    csv.writer(sys.stdout).writerow([index, device.uuid, device.name, device.total_memory >> 20, capability])
"""


class _MemoryFiles(NamedTuple):
    limit: str
    used: str
    cached: str


_MEMORY_FILES = {
    1: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class Machine:
    """The devices, cores and memory that a process here may use."""

    gpus: tuple[str, ...]
    """Names of the CUDA devices that the installed torch can use."""
    gpu_type: DeviceSpec | None
    """The type of the first one; None without one, or if it is not in the table of devices."""
    cpu_native_bf16: bool
    """Whether the CPU multiplies bf16 matrices in hardware."""
    memory_bytes: int
    """Host memory, or the limit of this process's control group if that is lower."""
    available_memory_bytes: int
    """Part of it that is free or can be freed."""
    cores: int
    """Physical cores this process may use."""


@dataclass(frozen=True)
class Gpu:
    """A device as ``nvidia-smi`` lists it or, without that program, torch."""

    index: str
    uuid: str
    name: str
    memory_mib: str
    driver: str
    capability: str = ""
    """Its compute capability; empty if it has to be asked for."""


def code_commit() -> str | None:
    """Return the git commit of this software, with ``-dirty`` after it if files differ; None outside a checkout."""
    folder = Path(__file__).parent
    # A checkout of something else, with this software installed inside, says nothing about this software.
    if not _git(folder, "ls-files", Path(__file__).name):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def software_versions() -> dict[str, str]:
    """Return the versions of the software that decides the speed: python, torch, this package, its commit, driver."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "llama-training-infra"):
        if (version := package_version(package)) is not None:  # a checkout need not be installed
            versions[package] = version
    if (commit := code_commit()) is not None:
        versions["commit"] = commit
    if gpus := installed_gpus():
        versions["driver"] = gpus[0].driver
    return versions


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git in a folder; empty if git is missing or fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def detect_machine() -> Machine:
    """Return the hardware that this process may use, within cgroup limits and ``CUDA_VISIBLE_DEVICES``."""
    import psutil

    gpus = tuple(gpu.name for gpu in visible_gpus()) if torch_has_cuda() else ()
    memory = psutil.virtual_memory()
    total = memory.total
    available = memory.available
    for limit, used in cgroup_memory():
        total = min(total, limit)
        available = min(available, limit - used)
    return Machine(
        gpus=gpus,
        gpu_type=recognise_gpu(gpus[0]) if gpus else None,
        cpu_native_bf16=not _BF16_FLAGS.isdisjoint(_cpu_flags()),
        memory_bytes=total,
        available_memory_bytes=max(0, available),
        cores=available_cores(),
    )


def device_label(device: str) -> str:
    """Return the maker's name for this machine's ``'cuda'`` or ``'cpu'`` device."""
    if device == "cuda":
        gpus = visible_gpus()
        return gpus[0].name if gpus else "unknown CUDA device"
    return cpu_model()


@cache
def installed_gpus() -> tuple[Gpu, ...]:
    """Return the devices that NVIDIA's driver lists; empty if it does not answer."""
    fields = "index,uuid,name,memory.total,driver_version"
    listed = _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = csv.reader(listed.splitlines(), skipinitialspace=True)
    return tuple(Gpu(*row) for row in rows if len(row) == 5)


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first visible device, such as (9, 0); None if the driver does not say."""
    gpus = visible_gpus()
    if not gpus:
        return None
    said = gpus[0].capability
    if not said:
        said = _nvidia_smi(f"--id={gpus[0].uuid}", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.fullmatch(r"(\d+)\.(\d+)", said.strip())
    return (int(found[1]), int(found[2])) if found else None


def gpu_links() -> dict[tuple[str, str], str]:
    """Return the link between every pair of visible devices, by index, as ``nvidia-smi topo`` names it.

    ``NV18`` is 18 NVLinks; ``PIX`` and ``PXB`` are PCIe switches; ``PHB``, ``NODE`` and ``SYS`` go through the CPU.
    """
    head, _, body = re.sub(r"\x1b\[[\d;]*m", "", _nvidia_smi("topo", "-m")).partition("\n")
    columns = head.split()
    rows = {row[0]: row[1:] for row in map(str.split, body.splitlines()) if row}
    pairs = combinations([gpu.index for gpu in visible_gpus()], 2)
    return {
        (one, other): rows[f"GPU{one}"][columns.index(f"GPU{other}")]
        for one, other in pairs
        if f"GPU{one}" in rows and f"GPU{other}" in columns
    }


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of ``nvidia-smi``; empty if it fails."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the devices that ``CUDA_VISIBLE_DEVICES`` selects, in its order.

    ``nvidia-smi`` lists them. Where it is missing, as in some containers, and for slices of devices, torch does.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = installed_gpus()
    are_listed = installed and not (chosen or "").startswith(_SLICE)
    if not are_listed and _DRIVER.exists() and torch_has_cuda():
        return _gpus_of_torch(chosen)
    return installed if chosen is None else tuple(_choose(installed, chosen))


@cache
def _gpus_of_torch(chosen: str | None) -> tuple[Gpu, ...]:
    """Return the devices that torch sees with this value of ``CUDA_VISIBLE_DEVICES``, in a process of its own."""
    try:
        asked = subprocess.run(safe_python("-c", _ASK_TORCH), capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    version = re.search(r"Module\s+(\S+)", _read(_DRIVER))
    driver = version[1] if version else "unknown"
    return tuple(
        Gpu(index, uuid, name, memory_mib, driver, capability)
        for index, uuid, name, memory_mib, capability in csv.reader(asked.stdout.splitlines())
    )


def _choose(gpus: tuple[Gpu, ...], chosen: str) -> Iterator[Gpu]:
    """Yield the devices named by index or by a prefix of their UUID, up to the first name that matches none."""
    for name in filter(None, map(str.strip, chosen.split(","))):
        match = next((gpu for gpu in gpus if gpu.index == name or gpu.uuid.startswith(name)), None)
        if match is None:
            return
        yield match


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA; True without torch, since nothing is known then."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    # Importing torch takes seconds; version.py names the build in one line.
    version = (Path(found.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b[^=]*= *'", version, re.MULTILINE) is not None


def available_cores() -> int:
    """Return the physical cores that affinity and a CPU quota leave to this process."""
    import psutil

    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    cores = min(physical, -(-allowed * physical // logical))
    return max(1, min([cores, *(int(quota) for quota in _cgroup_cpus())]))


def cgroup_memory(mounted_at: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[tuple[int, int]]:
    """Return the limit and the usage, in bytes, of each control group around this process that limits memory.

    Inactive file cache counts as unused, since the kernel can reclaim it.

    Args:
        mounted_at: where the control groups are mounted.
        membership: the file that names the groups this process is in.
    """
    limits = []
    for group, version in _cgroups("memory", mounted_at, membership):
        names = _MEMORY_FILES[version]
        limit = _read_number(group / names.limit)
        used = _read_number(group / names.used)
        cached = re.search(rf"^{names.cached} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        if limit is not None and used is not None:
            limits.append((limit, used - (int(cached[1]) if cached else 0)))
    return limits


def _cgroup_cpus() -> Iterator[float]:
    """Yield the quota, in CPUs, of each control group around this process that has one."""
    for group, version in _cgroups("cpu", _CGROUPS, _MEMBERSHIP):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        else:
            quota = _read(group / "cpu.cfs_quota_us").strip()
            period = _read(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _cgroups(controller: str, mounted_at: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the control groups this process is in, innermost first, with the version of their interface.

    In a container the path may be the host's; then only the container's group is visible, mounted as the root.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (mounted_at / controller, 1) if controllers else (mounted_at, 2)
        group = root / path.strip("/")
        for around in (group, *group.parents):
            if around.is_relative_to(root) and around.is_dir():
                yield around, version


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _cpu_flags() -> frozenset[str]:
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def cpu_model() -> str:
    """Return the maker's name for the CPU."""
    model = re.search(r"^model name\s*: (.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()
