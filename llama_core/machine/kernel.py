"""Where a process id and a lock count: under one kernel, in one process namespace, such as a container's."""

import hashlib
import os
from functools import cache
from pathlib import Path

_FIRST_NAMESPACE = 0xEFFFFFFC  # Linux gives the namespace that a machine starts with this inode: PROC_PID_INIT_INO


@cache
def process_namespace() -> str:
    """Return a name for the processes that this one can see; empty if the system has no process namespaces.

    Outside containers it stays the same when the machine starts again, which ends all of its processes. A container's
    namespace may only be numbered like one under another kernel, so its name holds the start of the kernel.
    """
    try:
        inode = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return ""
    machine = _text_of("/etc/machine-id")
    if inode == _FIRST_NAMESPACE and machine:
        # the id itself is to be kept from others: machine-id(5)
        return f"machine {hashlib.sha256(f'llama-training-infra {machine}'.encode()).hexdigest()[:16]}"
    return f"namespace {inode}, kernel {_boot_id()}"


def lock_domain(file: os.stat_result) -> str:
    """Return what knows of the locks on a file: this kernel and the file's device.

    A lock ends with the last process that has the locked file open. Other machines, and this one through a second mount
    of a network drive, may see none where there is one.
    """
    return f"kernel {_boot_id()}, device {file.st_dev}"


def _boot_id() -> str:
    """Return the id of this start of the kernel, which all containers of a machine share."""
    return _text_of("/proc/sys/kernel/random/boot_id")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
