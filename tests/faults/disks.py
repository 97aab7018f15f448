"""Folders of a run on disks of their own, which can be full or read-only."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

BALLAST = "ballast"


def needs(*command):
    """Run a command of the system; where it is missing or not permitted, skip the test, or fail in CI."""
    said = f"{command[0]} is missing"
    if shutil.which(command[0]):
        made = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            return
        said = f"{' '.join(map(str, command))}: {made.stderr.strip()}"
    give_up(said)


def give_up(why):
    """Skip the test, or fail in CI, where everything that a test needs is there."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


class Disks:
    """Mounts that are gone after the test."""

    def __init__(self):
        self.mounted = []

    def mount(self, folder, size):
        """Put an empty disk of a size over a folder."""
        folder.mkdir(exist_ok=True)
        needs("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
        self.mounted.append(folder)

    def fill(self, folder):
        """Leave no room on the disk of a folder."""
        with (folder / BALLAST).open("wb", buffering=0) as ballast:
            for size in (2**16, 2**12, 1):
                try:
                    while ballast.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue

    def free(self, folder):
        """Make room again."""
        (folder / BALLAST).unlink()

    def freeze(self, folder):
        """Make a folder read-only for every file that is not open yet."""
        needs("mount", "--bind", folder, folder)
        self.mounted.append(folder)
        needs("mount", "-o", "remount,ro,bind", folder)

    def release(self, folder):
        """Take the newest mount away from a folder."""
        self.mounted.remove(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)

    def release_all(self):
        """Take all mounts away, the newest first."""
        for folder in reversed(self.mounted):
            subprocess.run(["umount", "--lazy", folder], check=True)


def while_stopped(run, *acts, rank=0):
    """Return what a run does while its job runs: an act each time a fault stops a rank, which then goes on.

    The fault is a SIGSTOP in as many steps as there are acts.
    """

    def act_and_go_on(handle):
        for number, act in enumerate(acts):
            while (pid := pid_of(run, number, rank)) is None or not is_stopped(pid):
                assert handle.is_running(), f"the job ended before it was stopped: {handle.wait()}"
                time.sleep(0.02)
            try:
                act()
            finally:
                with suppress(ProcessLookupError):  # the act has killed it
                    os.kill(pid, signal.SIGCONT)

    return act_and_go_on


def pid_of(run, number=0, rank=0):
    """Return the process of a rank on which a fault has acted more than ``number`` times; None before."""
    proof = run.folder / f"proof-{run.attempts}-{rank}"
    lines = proof.read_text().splitlines() if proof.exists() else []
    return json.loads(lines[number])["pid"] if len(lines) > number else None


def is_stopped(pid):
    """Return whether SIGSTOP has stopped a process."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
