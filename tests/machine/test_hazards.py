"""The hazards that break runs in practice: each finding, and its warning if it has one."""

import resource
import socket
import time
from collections import namedtuple

import pytest

from llama_core.chain.environment import validate_environment
from llama_core.machine import hazards
from llama_core.machine.hazards import driver_problem, look_at_disk, look_at_machine
from llama_core.units import MIB


def found(num_gpus=1, nodes=1):
    return {finding.name: finding for finding in look_at_machine(num_gpus, nodes)}


def test_every_hazard_is_among_the_facts():
    facts = validate_environment().facts
    names = {"attention", "open files", "/dev/shm", "address", "prefect server", "slurm", "write speed", "clock"}
    assert names <= set(facts)


DRIVERS = [
    ("12.8", "570.86.10", ""),
    ("12.8", "470.82.01", "needs driver 525 or newer"),
    ("13.0", "570.86.10", "needs driver 580 or newer"),
]


@pytest.mark.parametrize(("cuda", "driver", "problem"), DRIVERS)
def test_a_driver_too_old_for_cuda_is_named(cuda, driver, problem):
    assert problem in driver_problem(cuda, driver)
    assert bool(problem) == bool(driver_problem(cuda, driver))


@pytest.mark.parametrize(("driver", "build"), [("570.86.10", "cu128"), ("535.161.08", "cu126")])
def test_an_old_driver_gets_the_index_of_builds_that_it_runs(driver, build):
    assert driver_problem("13.0", driver).endswith(f"--index-url https://download.pytorch.org/whl/{build}")
    assert driver_problem("13.0", "470.82.01").endswith("update the driver")


def test_a_low_open_file_limit_is_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    assert found()["open files"].warning.startswith("at most 512 open files are allowed here")
    for most, told in ((8192, "8192"), (resource.RLIM_INFINITY, "unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (256, most))
        assert found()["open files"] == ("open files", f"ulimit -Hn {told}", "")


def test_little_shared_memory_is_a_warning_for_several_ranks(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hazards.shutil, "disk_usage", lambda path: usage(64 * MIB, 0, 64 * MIB))
    assert not found()["/dev/shm"].warning
    assert "--shm-size=8g" in found(num_gpus=2)["/dev/shm"].warning


def test_an_address_that_other_nodes_cannot_reach_is_a_warning_for_several_nodes(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert not found()["address"].warning
    assert "which other nodes cannot reach" in found(nodes=2)["address"].warning


def test_several_interfaces_are_named_for_ranks_that_do_not_find_each_other(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    monkeypatch.setattr(hazards, "_interfaces", lambda: "eth0, ib0")
    assert "NCCL_SOCKET_IFNAME" not in found()["address"].fact
    assert "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface" in found(nodes=2)["address"].fact
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "NCCL_SOCKET_IFNAME" not in found(nodes=2)["address"].fact


def test_interfaces_of_this_machine_leave_out_the_loopback():
    assert "lo" not in hazards._interfaces().split(", ")


def test_a_prefect_server_that_does_not_answer_is_a_warning(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{listener.getsockname()[1]}/api")
        assert found()["prefect server"].fact.endswith("/api answers")
    assert "does not answer" in found()["prefect server"].fact
    assert "make serve" in found()["prefect server"].warning


def test_a_disk_is_timed_and_left_unchanged(tmp_path):
    speed, clock = look_at_disk(tmp_path, 0)
    assert speed.fact.endswith(f"/s in {tmp_path}")
    assert not (speed.warning or clock.warning)
    assert not list(tmp_path.iterdir())


def test_a_slow_checkpoint_is_a_warning(tmp_path):
    speed, _ = look_at_disk(tmp_path, 10**15)
    assert "raise training.checkpoint_every" in speed.warning


def test_a_file_system_with_another_clock_is_a_warning(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    _, clock = look_at_disk(tmp_path, 0)
    assert "from this machine's; synchronise both with NTP" in clock.warning
