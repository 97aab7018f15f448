"""Whether other programs have this process's cores, and how its OpenMP threads wait for each other meanwhile.

At the end of each operation torch's threads meet at a barrier. A thread that spins there is fastest while every thread
has a core to itself. Beside other programs it keeps the scheduler from moving the thread that it waits for to its own
core, and a step takes up to ten times as long; a thread that sleeps at once then costs hardly more than the lost core
(``benchmarks/busy_machine.py``).

libgomp, the OpenMP of torch's packages, knows both ways. It stops spinning by itself while its process has more
threads than there are cores, and looks at their number each time it waits; but it does not see the threads of other
processes. So while they have the cores, a team of threads that only sleep makes the number true. Which threads compute
what does not change, and neither do the results.
"""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

LOOK_SECONDS = 0.5
"""How often ``sleeping_beside_others`` looks."""
WAITED_SHARE = 0.25
"""Seconds per second for which threads waited for a core, above which others have it. On two idle cores it is up to
0.1, because the process has more threads than those that compute; beside a program that takes one of them, 0.5 to 1.
Sleeping without need costs 40 % of a small model's rate."""
SHORTEST_SLEEP_SECONDS = 2.0
"""How long threads sleep before they try to spin again: twice as long whenever others come back sooner than that."""
LONGEST_SLEEP_SECONDS = 60.0

_MAPS = Path("/proc/self/maps")
_THREADS = Path("/proc/self/task")
_OWN = Path("/proc/self/schedstat")
_NO_FLAGS = 0


def core_wait_seconds() -> float | None:
    """Return how long the threads of this process have been ready to run without a core, in all; None if unknown.

    Source: the second field of ``schedstat``, Documentation/scheduler/sched-stats.rst in Linux.
    """
    waited = 0
    try:
        for thread in _THREADS.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
                waited += int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return 1e-9 * waited


def own_core_wait_seconds() -> float | None:
    """Return the same of this process's first thread alone, which computes; None if unknown."""
    try:
        return 1e-9 * int(_OWN.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def sleeping_beside_others() -> Iterator[None]:
    """Have OpenMP's threads sleep, not spin, while other programs have the cores, for the duration of the block.

    Does nothing where libgomp is not loaded, has one thread or has been told how to wait by ``OMP_WAIT_POLICY``, or
    where the system does not say who waits for a core.
    """
    openmp = _libgomp()
    chosen = "OMP_WAIT_POLICY" in os.environ
    if openmp is None or chosen or openmp.omp_get_max_threads() == 1 or core_wait_seconds() is None:
        yield
        return
    ended = Event()
    watcher = Thread(target=_watch, args=(openmp, ended), name="shared cores", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(openmp: ctypes.CDLL, ended: Event) -> None:
    """Look for others on the cores until the end, and let threads sleep while there are some."""
    slept = 0.0
    spun_since = time.monotonic()
    while not _waits_until_disturbed(ended):
        others_had_gone = time.monotonic() - spun_since > slept
        slept = SHORTEST_SLEEP_SECONDS if others_had_gone else min(2 * slept, LONGEST_SLEEP_SECONDS)
        with _threads_asleep(openmp):
            ended.wait(slept)
        spun_since = time.monotonic()


def _waits_until_disturbed(ended: Event) -> bool:
    """Return once others have the cores; True if the end came first."""
    waited, since = core_wait_seconds(), time.monotonic()
    while not ended.wait(LOOK_SECONDS):
        waited_now, now = core_wait_seconds(), time.monotonic()
        if waited is None or waited_now is None:
            continue
        # a thread that has ended takes its time along, so that the sum may fall
        if (waited_now - waited) / (now - since) > WAITED_SHARE:
            return False
        waited, since = waited_now, now
    return True


@contextmanager
def _threads_asleep(openmp: ctypes.CDLL) -> Iterator[None]:
    """Keep more threads of libgomp than there are cores, all asleep, so that no thread spins."""
    ready, ended = Event(), Event()
    holder = Thread(target=_hold_team, args=(openmp, ready, ended), name="sleeping team", daemon=True)
    holder.start()
    ready.wait()
    try:
        yield
    finally:
        ended.set()
        holder.join()  # libgomp ends a team with the thread that it belongs to


def _hold_team(openmp: ctypes.CDLL, ready: Event, ended: Event) -> None:
    """Start a team that does nothing, and live until it is to end."""
    nothing = ctypes.CDLL(None).free  # of a null pointer; a function of Python's would need its lock in each thread
    openmp.GOMP_parallel(nothing, None, ctypes.c_uint(openmp.omp_get_num_procs() + 1), ctypes.c_uint(_NO_FLAGS))
    ready.set()
    ended.wait()


def _libgomp() -> ctypes.CDLL | None:
    """Return the libgomp of this process; None if it has loaded none."""
    try:
        paths = [line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "libgomp" in line]
        return ctypes.CDLL(paths[0].strip()) if paths else None
    except OSError:
        return None
