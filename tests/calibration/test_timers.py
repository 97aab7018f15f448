"""Times from any timer: warm-up runs do not count, short operations share a sample, and a limit leaves the rest out."""

import pytest
import torch

from llama_core.calibration import timing
from llama_core.calibration.grid import Grid, gpu_grids, in_order_of_need
from llama_core.calibration.machine import Calibration, calibrate
from llama_core.calibration.operations import Prepared, prepare
from llama_core.calibration.profile import MachineProfile
from llama_core.calibration.timing import CudaTimer, measure, time_passes
from llama_core.planning.time.measured import EAGER_KERNELS
from training_infra import cli

CPU = torch.device("cpu")
META = torch.device("meta")


class FakeDevice:
    """A device on which a run takes a second in its warm-up, and then as long as it is told; its timer."""

    warmup = 2

    def __init__(self, seconds, number):
        self.seconds = seconds
        self.number = number
        self.now = 0.0
        self.runs = 0

    def run(self):
        self.now += 1.0 if self.runs < self.warmup else self.seconds
        self.runs += 1
        return torch.zeros(1, requires_grad=True)

    def mark(self):
        return self.now

    def between(self, begin, end):
        return end - begin

    def in_sample(self, seconds):
        return self.number


@pytest.mark.parametrize("number", [1, 4])
def test_warm_up_runs_do_not_count_and_a_sample_counts_for_each_of_its_runs(number):
    device = FakeDevice(1e-3, number)
    (timed,) = time_passes(Prepared(device.run, repeats=6), CPU, device)
    assert timed.seconds == pytest.approx(1e-3)
    assert timed.spread == pytest.approx(0, abs=1e-9)
    assert device.runs == device.warmup + 5  # ranks that send take as many runs each
    device = FakeDevice(1e-3, number)
    (timed,) = time_passes(Prepared(device.run), CPU, device)
    assert timed.seconds == pytest.approx(1e-3)
    assert (device.runs - device.warmup) % number == 0


def test_a_sample_of_cuda_is_a_millisecond_or_as_many_runs_as_may_be_held():
    timer = CudaTimer(torch.device("cuda"))
    assert timer.in_sample(2e-4) == 5
    assert timer.in_sample(1e-9) == timing.MAX_IN_SAMPLE
    assert timer.in_sample(1.0) == 1


@pytest.mark.parametrize("kind", [kind for kind in gpu_grids(1) if not kind.startswith("update")])
def test_every_kernel_of_a_gpu_is_built_with_the_gradients_that_are_timed(kind):
    """On meta tensors; the optimizer's fused kernel has none."""
    prepared = prepare(kind, next(gpu_grids(1)[kind].points()), META)
    out = prepared.run()
    has_backward = kind.replace("forward", "backward") in gpu_grids(1) and kind.endswith("ward")
    assert bool(prepared.inputs) == (has_backward and "product" not in kind)
    gradients = torch.autograd.grad(out, prepared.inputs, torch.ones_like(out)) if prepared.inputs else ()
    assert [gradient.shape for gradient in gradients] == [held.shape for held in prepared.inputs]


def test_the_kernels_that_are_asked_for_by_elements_are_measured():
    assert {f"{kind} bf16 backward" for kind in EAGER_KERNELS} <= set(gpu_grids(1))


def test_once_the_time_is_up_the_rest_is_left_out():
    queries = [("cast bf16 fp32", (64,)), ("cast fp32 bf16", (64,)), ("sort int64", (64,))]
    answers = iter((True, True, False))
    assert list(measure(queries, CPU, lambda: next(answers)).found) == queries[:2]


def test_what_a_gpu_refuses_is_told_and_the_others_are_measured(monkeypatch):
    def prepare_some(kind, sizes, device):
        if "fp8" in kind:
            raise RuntimeError("no kernel for it\nand a stack")
        return prepare(kind, sizes, CPU)

    monkeypatch.setattr(timing, "prepare", prepare_some)
    monkeypatch.setattr(timing, "timer_of", lambda device: timing.CpuTimer())
    fp8 = ("product fp8 forward", (8, 8, 8))
    answer = measure([fp8, ("product fp32 forward", (8, 8, 8))], META)
    assert answer.failed == {fp8: "no kernel for it"}
    assert list(answer.found) == [("product fp32 forward", (8, 8, 8))]


def test_a_grid_of_which_points_are_missing_falls_back_to_its_corners_and_then_to_points():
    grid = Grid((1, 1), (1, 2, 4), (10, 100))
    assert grid.coarse().axes == ((1, 4), (10, 100))
    seconds = {sizes: 1e-6 * sizes[0] * sizes[1] for sizes in grid.points()}
    assert grid.measured(seconds).axes == grid.axes
    del seconds[2, 10]
    corners = grid.measured(seconds)
    assert corners.axes == grid.coarse().axes
    assert corners.points == {(2, 100): seconds[2, 100]}
    assert corners.seconds((2, 10)) == pytest.approx(2e-5)
    del seconds[1, 10]
    assert grid.measured(seconds).seconds((3, 50)) is None


def test_the_corners_of_all_kinds_come_before_the_rest_of_any():
    kinds = {"a": Grid((1,), (1, 2, 3)), "b": Grid((1,), (4, 5, 6))}
    assert in_order_of_need(kinds) == [("a", (1,)), ("a", (3,)), ("b", (4,)), ("b", (6,)), ("a", (2,)), ("b", (5,))]


def test_a_limited_calibration_keeps_what_an_earlier_one_measured_and_names_what_it_left_out():
    known = calibrate(MachineProfile.of_this_machine(), [1], ["sort"]).profile
    again = calibrate(known, [1], ["sort", "update"], minutes=1e-9)  # over before torch is imported
    assert again.profile.rates[1].kinds["sort int64"].grid
    assert "left out after 1e-09 minutes: " in again.lines(1e-9)[0]
    assert again.left_out
    assert Calibration(known).lines(1.0) == []


def test_without_a_cuda_device_calibrate_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr("llama_core.machine.detect.visible_gpus", tuple)
    assert cli.main(("calibrate", "--device", "cuda")) == 2
    errors = capsys.readouterr().err
    assert "there is no CUDA device here" in errors
    assert len(errors.strip().splitlines()) == 1
