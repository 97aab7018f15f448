"""The network between hosts fails, or is slow."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from disks import needs, while_stopped
from faulty_run import NUM_RANKS, Fault, FaultyRun, where

from llama_core.launch.jobs import submission
from llama_core.preflight.checks import EXCHANGE_ACROSS
from llama_core.records.preflight import read_preflights
from llama_core.runs.diagnosis import diagnose

pytestmark = pytest.mark.root

IN_NAMESPACE = Path(__file__).with_name("in_namespace.py")


@pytest.fixture
def hosts(monkeypatch):
    """Return a context that starts the ranks of a run on hosts of their own, a network namespace each.

    Its argument is the number of hosts; a switch joins them. It gives what the names of all begin with: ``NAMEs`` is
    the switch, ``NAMEp0`` its port for the first host, and ``NAME-0`` the host.
    """

    @contextmanager
    def joined(num_hosts):
        name = f"ti{os.getpid()}"  # an interface has at most 15 characters
        worker = (sys.executable, str(IN_NAMESPACE), name)
        monkeypatch.setattr(submission, "submit", partial(submission.submit, worker=worker))
        try:
            needs("ip", "link", "add", f"{name}s", "type", "bridge")
            needs("ip", "link", "set", f"{name}s", "up")
            for rank in range(num_hosts):
                host, port = f"{name}-{rank}", f"{name}p{rank}"
                needs("ip", "netns", "add", host)
                needs("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
                needs("ip", "link", "set", port, "master", f"{name}s", "up")
                for command in ("address add 10.77.0.1{}/24 dev eth0", "link set eth0 up", "link set lo up"):
                    needs("ip", "-n", host, *command.format(rank).split())
            yield name
        finally:
            if shutil.which("ip"):
                for rank in range(num_hosts):
                    # first, because a namespace lives on with the last packets of its connections, and keeps its port
                    subprocess.run(["ip", "link", "del", f"{name}p{rank}"], check=False)
                    subprocess.run(["ip", "netns", "del", f"{name}-{rank}"], check=False)
                subprocess.run(["ip", "link", "del", f"{name}s"], check=False)

    return joined


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
    with hosts(NUM_RANKS) as name:
        cut = partial(needs, "ip", "link", "set", f"{name}s", "down")
        step = 5 if moment == "forward" else None
        outcome = run.train(Fault(moment, {"signal": "SIGSTOP"}, step=step), while_stopped(run, cut))
        assert outcome.status == "hang"
        assert "timed out waiting for the other ranks (silent ranks: none; the network between them" in outcome.reason
        assert not any(found.problem for found in diagnose(run.run).checkpoints)
        needs("ip", "link", "set", f"{name}s", "up")
        diagnosis = run.resume()
    run.equals(undisturbed)
    promise(f"hang, names the network; {where(diagnosis)}; equal")


@pytest.mark.fault("the link of one of three hosts has 50 Mbit/s", phase="preflight")
def test_a_host_behind_a_slow_link_is_named_before_the_first_step(hosts, tmp_path, texts, promise):
    run = FaultyRun(tmp_path, texts, "parallel.gpus=3", "training.batch_size=3", "training.steps=1")
    with hosts(3) as name:
        # the rank before it shares the slow link, but has a fast one as well
        needs(*f"tc qdisc add dev {name}p2 root tbf rate 50mbit burst 32kb latency 1s".split())
        assert run.train().status == "finished"
    (record,) = read_preflights(run.run)
    assert [(one.rank, one.host) for one in record.named] == [(2, f"{name}-2")], record
    times = [one.seconds[EXCHANGE_ACROSS] for one in record.ranks]
    assert times[2] > 0.1 > max(times[:2])  # 8 Mbit take 0.16 s
    promise("named with its host and both times; finished")
