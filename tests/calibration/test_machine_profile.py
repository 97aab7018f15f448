"""The profile of a machine: what it tells, for which machine, and what is wrong with one."""

import json
from dataclasses import replace

import pytest

from llama_core.calibration import demand, machine
from llama_core.calibration.grid import Grid, grids
from llama_core.calibration.profile import MachineProfile, read_profile, write_profile
from llama_core.calibration.ranks import RankTimes
from llama_core.config.measured_rates import Measured, MeasuredRates
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, RequestError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.kernels import Pass
from llama_core.planning.time.step_time import step_time_of

KNOWN = MachineProfile(
    "a CPU", 2, {"torch": "2.13.0"}, "2026-11-29T01:02:03Z", {1: MeasuredRates({"sort int64": Measured({(8,): 0.5})})}
)
CONFIG = RunConfig.from_mapping(
    {
        "model": "tiny_llama3_50m",
        "training": {"precision": "bf16", "seq_len": 64, "batch_size": 2, "steps": 4},
        "launch": {"device": "cpu"},
    }
)
PLAN = ParallelPlan(microbatch_size=2)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Ranks that answer at once: an operation takes a microsecond, layers and ends as a whole twice their sum."""
    asked = []

    def answer(num_ranks, queries, whole=None, rows=1, device="cpu", seconds=None):
        asked.append((num_ranks, list(queries), whole))
        parts = (None, None) if whole is None else (Pass(1e-3, 2e-3), Pass(1e-3, 1e-3))
        return RankTimes(dict.fromkeys(queries, 1e-6), dict.fromkeys(queries, 0.1), *parts)

    monkeypatch.setattr(demand, "measure_on_ranks", answer)
    monkeypatch.setattr(machine, "measure_on_ranks", answer)
    monkeypatch.setattr(demand, "own_profile_path", lambda kind="cpu": tmp_path / "own.json")
    return asked


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile = replace(KNOWN, whole={"a model": ((1.1, 1.2), (1.0, 1.5))}, spread={"sort int64 8": 0.05}, host="here")
    write_profile(tmp_path / "folder" / "one.json", profile)
    assert read_profile(tmp_path / "folder" / "one.json") == profile


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"device": "another CPU"}, "it is of another CPU, and this is a CPU"),
        ({"cores": 4}, "it was measured with 4 cores, and this process may use 2"),
        ({"versions": {"torch": "2.11.0"}}, "it was measured with torch 2.11.0, and this is 2.13.0"),
        ({"versions": {"torch": "2.13.0", "python": "3.14"}, "host": "elsewhere"}, ""),
    ],
)
def test_a_profile_of_something_else_says_of_what(change, problem):
    assert replace(KNOWN, **change).misfit(KNOWN) == problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "another version"),
        ({"seconds": {"1": {"sort int64": {}}}}, "'points' is missing"),
        ({"seconds": {"1": {"sort int64": {"points": {"8": -1}, "axes": [], "grid": [], "growth": []}}}}, "no time"),
        ({"whole": {"a": [[1, 2]]}}, "no shares of layers and ends"),
    ],
)
def test_a_damaged_profile_is_named_in_a_line(tmp_path, content, problem):
    path = tmp_path / "one.json"
    if not isinstance(content, str):
        write_profile(path, KNOWN)
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_profile(path)
    assert problem in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_run_measures_what_its_step_asks_for_once(measured):
    first = demand.measured_cpu(CONFIG, PLAN, may_measure=True)
    (num_ranks, queries, whole), *more = measured
    assert (num_ranks, more) == (1, [])
    assert whole is CONFIG
    assert ("linear bf16 forward", (128, 256, 256)) in queries
    again = demand.measured_cpu(CONFIG, PLAN, may_measure=True)
    assert len(measured) == 1
    assert step_time_of(CONFIG, PLAN, again).total == step_time_of(CONFIG, PLAN, first).total > 0
    assert first.source.startswith("measured here on ")


def test_layers_and_ends_are_scaled_to_what_they_take_whole(measured):
    """The whole passes of two layers take 1 and 2 ms, those of the ends 1 ms each: so do they, times eight, of all."""
    device = demand.measured_cpu(CONFIG, PLAN, may_measure=True)
    parts = step_time_of(CONFIG, PLAN, device).parts
    assert parts["compute"] == pytest.approx(CONFIG.spec.num_layers / 2 * 3e-3 + 2e-3)


def test_what_is_not_known_is_not_told_without_measuring(measured):
    assert demand.measured_cpu(CONFIG, PLAN, may_measure=False) is None
    demand.measured_cpu(CONFIG, PLAN, may_measure=True)
    assert demand.measured_cpu(CONFIG, PLAN, may_measure=False) is not None
    assert demand.measured_cpu(CONFIG, ParallelPlan(microbatch_size=1), may_measure=False) is None
    assert len(measured) == 1


def test_a_profile_that_is_not_used_says_why_in_one_line(measured):
    path = demand.own_profile_path()
    fresh = MachineProfile.of_this_machine()
    told = []
    write_profile(path, replace(fresh, versions={"torch": "1.0"}))
    assert demand.known_profile(told.append).versions == fresh.versions
    path.write_text("{")
    demand.known_profile(told.append)
    old, damaged = told
    assert "it was measured with torch 1.0, and this is" in old
    assert "calibrate" in old
    assert "cannot be read" in damaged


def test_calibration_measures_every_point_and_keeps_what_runs_have_asked_for(measured):
    known = MachineProfile.of_this_machine()
    known = known.with_rates(2, MeasuredRates({"sort int64": Measured({(99,): 0.5})}))
    profile = machine.calibrate(known, [1, 2]).profile
    assert [num_ranks for num_ranks, *_ in measured] == [1, 2]
    assert profile.rates[2].seconds("sort int64", (99,)) == 0.5
    assert profile.rates[1].seconds("sort int64", (2**12,)) == pytest.approx(1e-6)
    assert profile.rates[1].seconds("link all_reduce", (2, 2**12)) is None
    assert profile.rates[2].seconds("link all_reduce", (2, 2**12)) == pytest.approx(1e-6)
    assert profile.spread["sort int64 1024"] == pytest.approx(0.1)


def test_some_kinds_are_measured_again_and_an_unknown_one_is_named(measured):
    known = machine.calibrate(MachineProfile.of_this_machine(), [1]).profile
    machine.calibrate(known, [1], ["sort"])
    assert {kind for kind, _ in measured[-1][1]} == {"sort int64"}
    with pytest.raises(RequestError, match="there is no kind of operation 'sorts' to measure; the kinds are update, "):
        machine.calibrate(known, [1], ["sorts"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training": {"precision": "fp32"}},
        {"strategy": "lora"},
        {"strategy": "lora", "lora": {"base": "nf4"}},
        {"strategy": "moe", "moe": {"num_experts": 4}},
        {"training": {"optimizer": "muon"}},
    ],
)
def test_the_grids_answer_all_that_a_step_asks_for(measured, monkeypatch, settings):
    """So a plan has a time on a calibrated machine without another measurement."""
    demand.write_profile(demand.own_profile_path(), machine.calibrate(MachineProfile.of_this_machine(), [1]).profile)
    training = {"precision": "bf16", "seq_len": 64, "batch_size": 2, "steps": 4} | settings.get("training", {})
    config = RunConfig.from_mapping(CONFIG.model_dump(exclude_unset=True) | settings | {"training": training})
    device = demand.measured_cpu(config, PLAN, may_measure=False)
    assert device is not None
    assert step_time_of(config, PLAN, device).total > 0


def test_every_kind_of_a_grid_has_as_many_powers_as_sizes():
    for kind, grid in grids(2).items():
        assert isinstance(grid, Grid)
        assert len(grid.growth) == len(grid.axes), kind
