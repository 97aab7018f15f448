"""The network between two hosts fails."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from disks import needs, while_stopped
from faulty_run import NUM_RANKS, Fault, FaultyRun, where

from llama_core.launch.jobs import submission
from llama_core.runs.diagnosis import diagnose

pytestmark = pytest.mark.root

IN_NAMESPACE = Path(__file__).with_name("in_namespace.py")


@pytest.fixture
def hosts():
    """Make a network namespace for each rank, joined by a switch; return the name that theirs begin with."""
    name = f"ti{os.getpid()}"  # an interface has at most 15 characters
    try:
        needs("ip", "link", "add", f"{name}s", "type", "bridge")
        needs("ip", "link", "set", f"{name}s", "up")
        for rank in range(NUM_RANKS):
            host, port = f"{name}-{rank}", f"{name}p{rank}"
            needs("ip", "netns", "add", host)
            needs("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            needs("ip", "link", "set", port, "master", f"{name}s", "up")
            for command in ("address add 10.77.0.1{}/24 dev eth0", "link set eth0 up", "link set lo up"):
                needs("ip", "-n", host, *command.format(rank).split())
        yield name
    finally:
        if shutil.which("ip"):
            for rank in range(NUM_RANKS):
                # first, because a namespace lives on with the last packets of its connections, and keeps its interface
                subprocess.run(["ip", "link", "del", f"{name}p{rank}"], check=False)
                subprocess.run(["ip", "netns", "del", f"{name}-{rank}"], check=False)
            subprocess.run(["ip", "link", "del", f"{name}s"], check=False)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=[pytest.mark.fault("the link is cut", phase=moment), *also], id=moment)
        for moment, also in {"forward": [pytest.mark.wide], "checkpoint: writing": []}.items()
    ],
)
def test_ranks_that_cannot_reach_each_other_end_and_go_on_once_they_can(
    moment, hosts, tmp_path, texts, token_cache, undisturbed, monkeypatch, promise
):
    run = FaultyRun(tmp_path, texts, "launch.collective_timeout_s=15", token_cache=token_cache)
    worker = (sys.executable, str(IN_NAMESPACE), hosts)
    monkeypatch.setattr(submission, "submit", partial(submission.submit, worker=worker))
    cut = partial(needs, "ip", "link", "set", f"{hosts}s", "down")
    step = 5 if moment == "forward" else None
    outcome = run.train(Fault(moment, {"signal": "SIGSTOP"}, step=step), while_stopped(run, cut))
    assert outcome.status == "hang"
    assert "timed out waiting for the other ranks (silent ranks: none; the network between them" in outcome.reason
    assert not any(found.problem for found in diagnose(run.run).checkpoints)
    needs("ip", "link", "set", f"{hosts}s", "up")
    diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"hang, names the network; {where(diagnosis)}; equal")
