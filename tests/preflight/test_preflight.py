"""Before the first step, ranks measure their machines, and those that fall behind are named."""

import contextlib
import logging
import random
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from llama_core.preflight import measure, preflight
from llama_core.preflight.checks import AMOUNTS, COPY, EXCHANGE_ACROSS, PRODUCT, WRITE
from llama_core.preflight.gpu_health import HealthReader
from llama_core.preflight.measure import partners_across, partners_inside
from llama_core.preflight.preflight import fallen_behind, measured_machines, tell
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import ExpectedProduct, ExpectedStep
from llama_core.records.preflight import RankMeasurements, read_preflights

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


class Lines(logging.Handler):
    """Keeps the warnings that it gets."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def check(run, hosts):
    """Measure this rank with the others, and let the first one tell and record it."""
    record = measured_machines(run, CPU, hosts)
    if measure.own_rank() == 0:
        tell(run, record)


def checked(run, hosts, disturb=contextlib.nullcontext):
    """Check the machines on this rank while it is disturbed; return the warnings."""
    heard = Lines()
    preflight.logger.addHandler(heard)
    with disturb():
        check(run, hosts)
    preflight.logger.removeHandler(heard)
    return heard.lines


@contextlib.contextmanager
def more_work():
    """Multiply ten times instead of once, on the last rank."""
    multiply = torch.mm

    def ten_times(left, right, out):
        for _ in range(10):
            multiply(left, right, out=out)

    with pytest.MonkeyPatch.context() as patch:
        if measure.own_rank() == measure.num_ranks() - 1:
            patch.setattr(torch, "mm", ten_times)
        yield


@contextlib.contextmanager
def a_slow_link():
    """Delay whatever the last rank sends or receives."""
    swap = measure._swap

    def late(*arguments):
        time.sleep(0.1)
        swap(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if measure.own_rank() == measure.num_ranks() - 1:
            patch.setattr(measure, "_swap", late)
        yield


@contextlib.contextmanager
def a_clock_ahead():
    """Set the clock of the last rank an hour ahead."""
    now = time.time
    with pytest.MonkeyPatch.context() as patch:
        if measure.own_rank() == measure.num_ranks() - 1:
            patch.setattr(time, "time", lambda: now() + 3600)
        yield


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_whose_products_are_slower_is_named_with_its_node_and_its_peers(run, num_ranks):
    warnings = run_ranks(num_ranks, checked, run, ["n0"] * (num_ranks - 1) + ["n1"], more_work)
    last = num_ranks - 1
    (line,) = [line for line in warnings[0] if "product" in line]
    assert line.startswith(f"preflight: rank {last} on n1 (")
    assert line.endswith(" on its peers")
    assert all(lines == [] for lines in warnings[1:])
    (record,) = read_preflights(run)
    (named,) = [one for one in record.named if "product" in str(one)]
    assert (named.rank, named.host, named.slows_training) == (last, "n1", True)
    assert record.ranks[last].seconds[PRODUCT] > 3 * record.ranks[0].seconds[PRODUCT]


def test_ranks_of_several_nodes_measure_all_that_they_share(run):
    run_ranks(4, checked, run, ["n0", "n0", "n1", "n1"])
    (record,) = read_preflights(run)
    everyone = {PRODUCT, COPY, EXCHANGE_ACROSS}
    assert [set(one.seconds) for one in record.ranks] == [everyone | {WRITE}, everyone] * 2
    assert all(seconds > 0 for one in record.ranks for seconds in one.seconds.values())
    assert all(abs(one.clock_ahead) < 1 for one in record.ranks)
    assert record.unmeasured == ()


def test_a_node_whose_link_is_slow_is_named_and_its_partners_are_not(run):
    run_ranks(4, checked, run, ["n0", "n1", "n2", "n3"], a_slow_link)
    (record,) = read_preflights(run)
    assert [named.host for named in record.named if "an exchange with a rank of another node" in str(named)] == ["n3"]


def test_a_host_whose_clock_is_off_is_named(run):
    warnings = run_ranks(2, checked, run, ["n0", "n1"], a_clock_ahead)[0]
    assert [line for line in warnings if "clock" in line and "n1" in line and "1 h 00 min ahead of" in line]
    (record,) = read_preflights(run)
    assert not any("clock" in str(one) for one in record.named if one.host == "n0")


def test_a_folder_that_cannot_be_written_is_one_line_and_stops_nothing(run, caplog):
    (run.logs).rmdir()
    check(run, ["n0"])
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"preflight: rank 0 on n0 could not measure a write to {run.logs}: No such file or directory",
        f"preflight: not recorded in {run.preflights}: No such file or directory",
    ]


def test_a_check_leaves_no_file_and_no_random_number_behind(run):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    random_before = random.getstate()
    check(run, ["n0"])
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == random_before
    assert [path.name for path in run.logs.iterdir()] == [run.preflights.name]


def test_each_attempt_adds_its_own_record(run):
    for _ in range(2):
        check(run, ["n0"])
    assert len(read_preflights(run)) == 2


def measured(rank, **seconds):
    return RankMeasurements(
        rank, f"n{rank // 2}", "a device", {name.replace("_", " "): s for name, s in seconds.items()}
    )


def test_a_rank_that_is_behind_in_several_ways_is_one_line():
    ranks = [measured(rank, product=0.001, exchange_inside=0.001) for rank in range(3)]
    ranks.append(measured(3, product=0.002, exchange_inside=0.004))
    (named,) = fallen_behind(ranks, AMOUNTS["cuda"].checks)
    assert str(named) == (
        "rank 3 on n1 (a device): a product of matrices took 2 ms, and 1 ms on its peers; an exchange with another "
        "rank of its node took 4 ms, and 1 ms on its peers"
    )


def test_a_slow_disk_of_a_node_does_not_count_as_slowing_training():
    ranks = [measured(rank, write=0.01) for rank in range(3)] + [measured(3, write=9.0)]
    (named,) = fallen_behind(ranks, AMOUNTS["cuda"].checks)
    assert (named.rank, named.slows_training) == (3, False)


def test_ranks_that_are_all_slower_than_expected_are_named():
    expected = ExpectedProduct(0.001, 0.0025, "data sheet of a GPU")
    ranks = [measured(0, product=0.0026), measured(1, product=0.0024)]
    (named,) = fallen_behind(ranks, AMOUNTS["cuda"].checks, expected)
    assert named.findings == ("a product of matrices took 2.6 ms, where 1 ms is expected (data sheet of a GPU)",)
    assert named.slows_training


def test_the_expected_product_of_a_run_is_compared(run):
    product = ExpectedProduct(1e-9, 1e-8, "a profile")
    write_json(run.expected, ExpectedStep(1.0, 1.0, "a test", product=product))
    check(run, ["n0"])
    (record,) = read_preflights(run)
    assert [one.findings[0].endswith("is expected (a profile)") for one in record.named] == [True]


def test_what_a_device_reports_of_itself_names_its_rank():
    ranks = [measured(0), RankMeasurements(1, "n0", "a device", {}, faults=("its clocks are lowered",))]
    (named,) = fallen_behind(ranks, AMOUNTS["cuda"].checks)
    assert (named.rank, named.findings, named.slows_training) == (1, ("its clocks are lowered",), True)


class Nvml:
    """A stand-in for pynvml, with a GPU that reports what it is told to."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVMLError = RuntimeError

    def nvmlInit(self):
        """Begin."""

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-4f-2"

    def __init__(self, reasons=0, errors=0, rows=(0, 0, False, False)):
        self.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: reasons
        self.nvmlDeviceGetTotalEccErrors = lambda handle, kind, counter: errors
        self.nvmlDeviceGetRemappedRows = lambda handle: rows


@pytest.fixture
def looked_at(monkeypatch):
    """Look at the state of a GPU through a stand-in for pynvml, or None for none installed."""

    def look(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="4f-2"))
        reader = HealthReader(torch.device("cuda", 0))
        reader.look_at_clocks()
        reader.look_at_memory()
        return reader

    return look


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"reasons": 0x40}, "its clocks are lowered by a thermal slowdown by its hardware"),
        ({"errors": 3}, "3 uncorrected memory errors (ECC) since its driver was loaded"),
        ({"rows": (0, 1, True, False)}, "a faulty row of its memory is replaced only when the GPU is reset"),
        ({"rows": (0, 1, False, True)}, "a faulty row of its memory could not be replaced"),
    ],
)
def test_a_gpu_that_reports_a_fault_is_told_of(looked_at, state, fault):
    assert looked_at(Nvml(**state)).faults == [fault]


def test_a_gpu_at_its_power_cap_or_idle_is_well(looked_at):
    assert looked_at(Nvml(reasons=0x1 | 0x2 | 0x4 | 0x10)).faults == []


def test_a_gpu_without_such_counters_is_well(looked_at):
    def refuse(*arguments):
        raise Nvml.NVMLError("Not Supported")

    nvml = Nvml()
    nvml.nvmlDeviceGetTotalEccErrors = nvml.nvmlDeviceGetRemappedRows = refuse
    assert looked_at(nvml).faults == []


def test_a_machine_without_nvml_says_what_is_not_looked_at_and_what_to_install(looked_at):
    reader = looked_at(None)
    assert reader.faults == []
    assert reader.unread == (
        "memory errors and lowered clocks, because NVML's package is missing (pip install nvidia-ml-py)"
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_partners_meet_in_turn_and_nobody_waits_for_ever(ranks_of_nodes):
    hosts = [f"n{node}" for node, count in enumerate(ranks_of_nodes) for _ in range(count)]
    for partners_of in (partners_inside, partners_across):
        left = {rank: list(partners_of(hosts, rank)) for rank in range(len(hosts))}
        for rank, partners in left.items():
            inside = partners_of is partners_inside
            assert all((hosts[other] == hosts[rank]) is inside for other in partners)
            assert len(partners) <= 2
            assert partners or sum(host == hosts[rank] for host in hosts) == 1 or not inside
        while any(left.values()):
            pairs = [(a, b[0]) for a, b in left.items() if b and left[b[0]][:1] == [a]]
            assert pairs, f"ranks wait for each other: {left}"
            for rank, _ in pairs:
                del left[rank][0]
