"""Checks for causes of failure on a fully installed machine: drivers, limits, disks, clocks, host names."""

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from llama_core.machine.detect import gpu_links, package_version, visible_gpus
from llama_core.redaction import redacted
from llama_core.units import GIB, MIB, format_bytes, format_duration

FEW_FILES = 1024
"""Warn below this limit on open files: many ranks, data files and sockets can exceed it."""
LITTLE_SHARED_MEMORY = GIB
"""Warn below this much free shared memory: the ranks of one machine, or their data loaders, can exceed it."""
PROBE_BYTES = 16 * MIB
"""Bytes written to a disk to measure its speed."""
SLOW_CHECKPOINT_SECONDS = 600.0
"""Warn if writing a checkpoint takes longer."""
CLOCK_SECONDS = 5.0
"""Largest accepted difference between the clock of a file system and this machine's."""
_THROUGH_THE_PROCESSOR = frozenset(("PHB", "NODE", "SYS"))
_OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest driver for each major version of CUDA. Source: NVIDIA, CUDA Compatibility, minor version compatibility."""
_DRIVER_OF_12_8 = 570


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    fact: str
    """What was found."""
    warning: str = ""
    """The problem and its remedy; empty if there is none."""


def look_at_machine(num_gpus: int, nodes: int) -> Iterator[Finding]:
    """Yield findings about drivers, links, limits, shared memory, the machine's name and Prefect.

    Args:
        num_gpus: devices that the run asks for.
        nodes: machines that the devices are on.
    """
    yield from _cuda()
    yield from _links(num_gpus)
    yield _open_files()
    yield from _shared_memory(num_gpus)
    yield _address(nodes)
    yield _prefect()


def look_at_disk(folder: Path, checkpoint_bytes: int) -> Iterator[Finding]:
    """Yield the write speed of ``folder``, and whether its clock agrees with this machine's.

    Args:
        folder: a writable folder.
        checkpoint_bytes: size of a checkpoint of the run; 0 without a run.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            began = time.perf_counter()
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
            seconds = time.perf_counter() - began
            written = os.fstat(probe.fileno()).st_mtime
    except OSError as error:
        yield Finding("write speed", "unknown", f"cannot write {PROBE_BYTES} bytes to {folder}: {error.strerror}")
        return
    rate = PROBE_BYTES / seconds
    takes = checkpoint_bytes / rate
    slow = takes > SLOW_CHECKPOINT_SECONDS
    yield Finding(
        "write speed",
        f"{format_bytes(int(rate))}/s in {folder}",
        f"a checkpoint of {format_bytes(checkpoint_bytes)} takes about {format_duration(takes)} there; raise "
        "training.checkpoint_every, or choose another --run-dir"
        if slow
        else "",
    )
    ahead = written - time.time()
    yield Finding(
        "clock",
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC",
        f"the clock of {folder} is {ahead:+.0f} s from this machine's; synchronise both with NTP"
        if abs(ahead) > CLOCK_SECONDS + seconds
        else "",
    )


def _cuda() -> Iterator[Finding]:
    built_for = _torch_cuda()
    gpus = visible_gpus()
    if built_for is None or not gpus:
        return
    nccl = next((v for p in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := package_version(p))), "torch's own")
    fact = f"torch is built for {built_for}, driver {gpus[0].driver}, NCCL {nccl}"
    yield Finding("cuda", fact, driver_problem(built_for, gpus[0].driver))


def driver_problem(cuda: str, driver: str) -> str:
    """Return the problem with a driver that is too old for a version of CUDA; empty if there is none."""
    oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    major = int(driver.partition(".")[0] or 0)
    if major >= oldest:
        return ""
    runs = max((found for found in _OLDEST_DRIVER if _OLDEST_DRIVER[found] <= major), default=0)
    fitting = fitting_build(runs, 8 if major >= _DRIVER_OF_12_8 else 0)
    return (
        f"torch is built for CUDA {cuda}, which needs driver {oldest} or newer, but this one is {driver}; update the "
        f"driver{fitting}"
    )


def fitting_build(major: int, minor: int) -> str:
    """Return how to install a torch that runs on a driver for this CUDA version, as a clause; empty if there is none.

    A build for CUDA 12 runs on every driver for CUDA 12. Blackwell and newer devices need the build for 12.8.
    """
    if major not in _OLDEST_DRIVER:
        return ""
    build = "cu126" if (major, minor) < (12, 8) else "cu128" if major == 12 else "cu130"
    return f", or pip install torch --index-url https://download.pytorch.org/whl/{build}"


def _links(num_gpus: int) -> Iterator[Finding]:
    links = gpu_links()
    if not links:
        return
    counts = Counter(links.values()).most_common()
    slow = [pair for pair, link in links.items() if link in _THROUGH_THE_PROCESSOR]
    yield Finding(
        "gpu links",
        ", ".join(f"{link} between {count} of {len(links)} pairs" for link, count in counts),
        f"GPU {slow[0][0]} and GPU {slow[0][1]} ({len(slow)} of {len(links)} pairs) are connected through the CPU, "
        "which makes tensor parallelism slow; choose others with CUDA_VISIBLE_DEVICES, or lower parallel.tp"
        if slow and num_gpus > 1
        else "",
    )


def _torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built for, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    version = re.search(
        r"^cuda\b[^=]*= *'([\d.]+)'", (Path(found.origin).parent / "version.py").read_text(), re.MULTILINE
    )
    return version[1] if version else None


def _open_files() -> Finding:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the ranks raise their limit to this
    return Finding(
        "open files",
        f"ulimit -Hn {'unlimited' if most < 0 else most}",
        f"at most {most} open files are allowed here, which many ranks and data files may exceed; raise nofile in "
        "/etc/security/limits.conf, or the container's --ulimit nofile"
        if 0 <= most < FEW_FILES
        else "",
    )


def _shared_memory(num_gpus: int) -> Iterator[Finding]:
    if sys.platform != "linux" or not Path("/dev/shm").is_dir():
        return
    total, _, free = shutil.disk_usage("/dev/shm")
    little = num_gpus > 1 and free < LITTLE_SHARED_MEMORY
    yield Finding(
        "/dev/shm",
        f"{format_bytes(free)} free of {format_bytes(total)}",
        f"/dev/shm has {format_bytes(free)} free, which several ranks may exceed; run the container with --shm-size=8g"
        if little
        else "",
    )


def _address(nodes: int) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        problem = f"the name of this machine, {name}, has no address, so other nodes cannot reach it; add it to DNS"
        return Finding("address", f"{name} has none", problem if nodes > 1 else "")
    fact = f"{name} is {address}"
    if nodes == 1:
        return Finding("address", fact)
    interfaces = _interfaces()
    choose = f"set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that the nodes share ({interfaces})"
    if address.startswith("127."):
        problem = "which other nodes cannot reach; make it resolve to the address of a network interface"
        return Finding("address", fact, f"{fact}, {problem}, or {choose}")
    if "," in interfaces and not os.environ.keys() >= _SOCKET_VARIABLES:
        fact += f"; if ranks do not find each other, {choose}"
    return Finding("address", fact)


_SOCKET_VARIABLES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def _interfaces() -> str:
    """Return the names of the network interfaces that are up and have an IPv4 address others may reach."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    reachable = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    )
    return ", ".join(name for name in dict.fromkeys(reachable) if name in up) or "none is up"


def _prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("prefect server", "PREFECT_API_URL is not set; --flow starts a server for the duration of a run")
    shown = redacted(url)
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=2).close()
    except (OSError, ValueError) as error:
        problem = f"PREFECT_API_URL={shown} does not answer ({error}); start it with make serve, or unset the variable"
        return Finding("prefect server", f"{shown} does not answer", problem)
    return Finding("prefect server", f"{shown} answers")
