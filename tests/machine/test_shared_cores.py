"""OpenMP's threads sleep while other programs have the cores, and only then."""

import os
import subprocess
import sys

import pytest
import torch  # noqa: F401 - loads its OpenMP

from llama_core.machine.shared_cores import _libgomp, core_wait_seconds

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

disturbed = {disturbed}
waited = iter(range(10**9))
shared_cores.LOOK_SECONDS = 0.05
shared_cores.core_wait_seconds = lambda: float(next(waited)) if disturbed else 0.0
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


def probe(disturbed, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | variables
    code = PROBE.format(disturbed=disturbed)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@needs_libgomp
def test_a_team_sleeps_while_threads_wait_for_a_core_and_ends_with_the_block():
    assert probe(True, OMP_NUM_THREADS="2") == ["1", "True", "True"]


@needs_libgomp
def test_without_others_there_is_no_team():
    assert probe(False, OMP_NUM_THREADS="2") == ["1", "False", "True"]


@needs_libgomp
@pytest.mark.parametrize(
    "variables", [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}]
)
def test_one_thread_and_a_chosen_policy_stay_as_they_are(variables):
    assert probe(False, **variables)[0] == "0"
