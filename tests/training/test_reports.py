"""What parts of the loop report: reduced over ranks, in the record of the step that it belongs to."""

import pytest
import torch
from distributed import run_ranks
from test_trainer import trainer
from tiers import nightly

from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.training.parts.part import LoopPart
from llama_core.training.reports import Reports

CPU = torch.device("cpu")


def of_ranks():
    """Return what each of some ranks learns of two steps; the second rank reports less."""
    reports = Reports()
    names = ("largest", "total", "average")
    report = {name: reports.declare(name, kind) for name, kind in zip(names, ("max", "sum", "mean"), strict=True)}
    rank = own_rank()
    for name in names:
        report[name](-1.0 - rank)
    first = reports.received(reports.send(CPU).values.tolist())
    if rank == 0:
        report["average"](5.0)
    second = reports.received(reports.send(CPU).values.tolist())
    return first, second


def test_every_rank_learns_the_same_reduced_values_and_nothing_of_a_step_that_nobody_reported():
    expected = ({"largest": -1.0, "total": -3.0, "average": -1.5}, {"average": 5.0})
    assert run_ranks(2, of_ranks) == [expected, expected]


def some_of_every_rank(on_device):
    """Return what each of some ranks learns of the values of all, in three steps; some are reported as tensors."""
    reports = Reports()
    report = {name: reports.declare_of_ranks(name) for name in ("first", "second")}
    reports.declare("total", "sum")(1.0)
    rank = own_rank()
    learnt = []
    for names in (("first", "second"), (), ("second",)):
        for name in names:
            value = 10.0 * len(learnt) + rank
            report[name](torch.tensor(value, dtype=torch.float64) if name in on_device else value)
        values, of_ranks = reports.send(CPU)
        learnt.append((len(values), reports.of_ranks(values.tolist(), of_ranks)))
    return learnt


@pytest.mark.parametrize("on_device", [(), nightly(("first",)), ("second",)])
def test_only_the_steps_that_a_value_is_reported_for_carry_that_of_every_rank(on_device):
    few = len(("total", "how many have reported it"))
    expected = [
        (few + 4, {"first": (0.0, 1.0), "second": (0.0, 1.0)}),
        (few, {}),
        (few + 2, {"second": (20.0, 21.0)}),
    ]
    assert run_ranks(2, some_of_every_rank, on_device) == [expected, expected]


def test_a_name_is_declared_once():
    reports = Reports()
    reports.declare("waiting", "max")
    with pytest.raises(ValueError, match="two parts report waiting"):
        reports.declare("waiting", "sum")


class Counts(LoopPart):
    """Reports the number of the step: before it begins, once it has begun, and when it is finished."""

    def __init__(self, progress, reports):
        self.progress = progress
        self.before = reports.declare("before", "sum")
        self.begun = reports.declare("begun", "max", shown="begun {:.0f}")
        reports.declare("silent", "mean")

    def before_step(self):
        self.before(self.progress.step + 1)

    def step_begun(self):
        self.begun(self.progress.step)

    def after_step(self, step):
        step.measured["after"] = step.step


def counted(path):
    run = RunDirectory(path)
    told = []
    one = trainer(run, steps=3, plan=ParallelPlan(dp_replicate=2, microbatch_size=2))
    one.parts = (Counts(one.progress, one.reports), *one.parts)
    one.metrics.on_step = told.append
    one.fit()
    return [record.shown for record in told]


def test_a_metric_of_a_part_is_a_column_from_the_step_that_it_belongs_to(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    shown = run_ranks(2, counted, run.path)
    assert shown == [["begun 1", "begun 2", "begun 3"], []]
    table = read_metrics(run)
    assert table.column("before").to_pylist() == [2, 4, 6]  # the sum over two ranks
    assert table.column("begun").to_pylist() == table.column("after").to_pylist() == [1, 2, 3]
    assert table.column("silent").to_pylist() == [None, None, None]
