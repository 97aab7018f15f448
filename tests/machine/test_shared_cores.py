"""OpenMP's threads sleep while other programs have the cores, and only then."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch  # noqa: F401 - loads its OpenMP

from llama_core.machine import shared_cores
from llama_core.machine.shared_cores import WAITED_SHARE, _libgomp, core_wait_seconds

PROBE = """
import sys, time
import torch
from llama_core.machine import shared_cores

torch.ones(1 << 20).add_(1)  # torch's own team

def threads():
    return len(list(shared_cores._THREADS.iterdir()))

def until(reached):
    deadline = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.02)
    return reached()

share = {share}
disturbed = share > shared_cores.WAITED_SHARE
shared_cores.LOOK_SECONDS = 0.05
shared_cores.core_wait_seconds = lambda: share * time.monotonic()
before = threads()
cores = shared_cores._libgomp().omp_get_num_procs()
with shared_cores.sleeping_beside_others():
    watcher = threads() - before
    # the team has a thread more than there are cores; one of them is Python's
    grew = until(lambda: threads() == before + 1 + cores + 1) if disturbed else False
    if not disturbed:
        time.sleep(0.5)
        grew = threads() > before + 1
print(watcher, grew, until(lambda: threads() == before))
"""

needs_libgomp = pytest.mark.skipif(
    _libgomp() is None or core_wait_seconds() is None, reason="needs libgomp, and a kernel that counts waiting"
)


def probe(share, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | variables
    code = PROBE.format(share=share)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@needs_libgomp
def test_a_team_sleeps_while_threads_wait_for_a_core_and_ends_with_the_block():
    assert probe(0.9, OMP_NUM_THREADS="2") == ["1", "True", "True"]


@needs_libgomp
@pytest.mark.parametrize("share", [0.0, 0.4 * WAITED_SHARE], ids=["nothing waits", "only its own threads wait"])
def test_without_others_there_is_no_team(share):
    assert probe(share, OMP_NUM_THREADS="2") == ["1", "False", "True"]


@needs_libgomp
@pytest.mark.parametrize(
    "variables", [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}]
)
def test_one_thread_and_a_chosen_policy_stay_as_they_are(variables):
    assert probe(0.0, **variables)[0] == "0"


class Clock:
    """Tells a time that passes only while somebody waits."""

    now = 0.0

    def __init__(self):
        self.waits = []

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def test_threads_sleep_longer_each_time_that_others_are_still_there_and_shortly_after_a_while_without(monkeypatch):
    clock = Clock()
    spins = iter([0.5, 0.5, 0.5, 9.0, 0.5])

    def disturbed(ended):
        clock.now += (seconds := next(spins, 0.0))
        return not seconds

    monkeypatch.setattr(shared_cores, "time", clock)
    monkeypatch.setattr(shared_cores, "_threads_asleep", lambda openmp: nullcontext())
    monkeypatch.setattr(shared_cores, "_waits_until_disturbed", disturbed)
    shared_cores._watch(None, clock)
    assert clock.waits == [2, 4, 8, 2, 4]
