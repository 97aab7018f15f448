"""A machine is slow, or cannot write, before the first step; or a rank falls behind while the run trains."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import give_up, pid_of
from faulty_run import Fault, FaultyRun
from waiting import eventually

from llama_core.launch.attempts import log_path
from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.stragglers import CORE_WAIT
from llama_core.records.preflight import read_preflights
from llama_core.records.stragglers import read_stragglers
from llama_core.runs.diagnosis import Fact, diagnose


def warnings(run):
    return [line for line in log_path(run.run, 0).read_text().splitlines() if line.startswith("WARNING preflight: ")]


@pytest.mark.fault("a rank whose processor multiplies three times as slowly", phase="preflight")
def test_a_rank_that_multiplies_more_slowly_is_named_before_the_first_step(undisturbed, tmp_path, texts, promise):
    run = FaultyRun(tmp_path, texts)
    # MKL then leaves out all newer instructions
    fault = Fault("start of the rank", {"environment": {"MKL_CBWR": "COMPATIBLE"}}, rank=1)
    assert run.train(fault).status == "finished"
    (record,) = read_preflights(run.run)
    assert [one.rank for one in record.named] == [1], record
    times = [one.seconds[PRODUCT] for one in record.ranks]
    assert times[1] > 2.5 * times[0]
    (line,) = warnings(run)
    assert re.fullmatch(r"WARNING preflight: rank 1 on \S+ \(.+\): .+ took [\d.]+ ms, and [\d.]+ ms on its peers", line)
    assert undisturbed.outcome.status == run.outcome.status
    promise("named with both times; finished")


@pytest.mark.fault("the run's folder cannot be written", phase="preflight")
def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(
    undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    # a folder in the place of the file, as root may write everywhere else
    (run.run.logs / ".preflight-0.tmp").mkdir()
    assert run.train().status == "finished"
    (line,) = warnings(run)
    assert "rank 0 on " in line and f"could not measure a write to {run.run.logs}: Is a directory" in line
    run.equals(undisturbed)
    promise("named; finished; equal")


@pytest.mark.fault("no fault", phase="preflight")
def test_a_healthy_start_names_nobody(undisturbed, promise):
    (record,) = read_preflights(undisturbed.run)
    assert (record.named, record.unmeasured) == ((), ())
    assert warnings(undisturbed) == []
    promise("no line")


@pytest.mark.fault("a rank whose processor multiplies three times as slowly", phase="steps")
def test_a_rank_that_multiplies_more_slowly_is_named_while_the_run_trains(tmp_path, texts, promise):
    run = FaultyRun(tmp_path, texts, "training.steps=1000000", "launch.preflight=off", "training.checkpoint_every=0")
    fault = Fault("start of the rank", {"environment": {"MKL_CBWR": "COMPATIBLE"}}, rank=1)

    def until_named(handle):
        eventually(lambda: read_stragglers(run.run))
        handle.cancel()

    assert run.train(fault, until_named).status == "cancelled"
    named = read_stragglers(run.run)[0]
    assert (named.rank, named.is_over, named.since_step > 0) == (1, False, True)
    times = re.fullmatch(r"a product of matrices takes ([\d.]+) ms, and ([\d.]+) ms on its peers", named.finding)
    assert float(times[1]) > 1.6 * float(times[2])
    told = [line for line in log_path(run.run, 0).read_text().splitlines() if " stragglers: " in line]
    assert told[0] == f"WARNING stragglers: {named}"
    assert Fact("straggler", str(named)) in diagnose(run.run).facts
    promise("named with both times and the step since when")


@contextmanager
def limited_by_its_cgroup(pid):
    """Give a process 30 % of a core."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # the versions of cgroups
    group = (first if first.is_dir() else second) / f"slow-{pid}"
    try:
        group.mkdir()
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("30000")
        else:
            (second / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text("30000 100000")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        give_up(f"no control group for a process: {error}")
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@pytest.mark.fault("a rank has 30 % of a core", phase="steps")
def test_a_rank_that_waits_for_its_core_is_named_until_it_has_caught_up(tmp_path, texts, promise):
    run = FaultyRun(tmp_path, texts, "training.steps=1000000", "launch.preflight=off", "training.checkpoint_every=0")

    def found():
        return [one for one in read_stragglers(run.run) if one.rank == 1]

    def until_it_has_caught_up(handle):
        pid = eventually(lambda: run.run.heartbeat.exists() and pid_of(run, rank=1))
        with limited_by_its_cgroup(pid):
            eventually(found)
        eventually(lambda: len(found()) > 1)
        handle.cancel()

    told = Fault("start of the rank", {"sleep": 0}, rank=1)  # tells its process
    assert run.train(told, until_it_has_caught_up).status == "cancelled"
    assert [(one.signal, one.is_over) for one in found()[:2]] == [(CORE_WAIT, False), (CORE_WAIT, True)]
    promise("named with the share of the time and the step since when, and once it has caught up")


def test_a_healthy_run_names_nobody_while_it_trains(undisturbed):
    assert read_stragglers(undisturbed.run) == []
