"""Results are kept, and a new one is judged against the earlier ones by the noise between them."""

import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError, RegressionError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.job import Outcome
from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.history import Result, check_folder, read_history, work_fingerprint
from llama_core.sweep.judgement import Judgement, judge, refuse_regressions, remember_run
from llama_core.sweep.regression import ALARM_RATE, FEWEST, alarms, noise, p_value

TOKENS = 4096
VERSIONS = {"python": "3.11.9", "torch": "2.12.0", "llama-training-infra": "0.1.0", "commit": "aaa"}
RECORDED = (
    ((0.0871, 0.0923, 0.1371, 0.0882, 0.0887, 0.1002, 0.0902), 0.100),
    ((0.0903, 0.0835, 0.0896, 0.0923, 0.0900, 0.0931, 0.0931), 0.035),
    ((0.1038, 0.0873, 0.0818, 0.0840, 0.0849, 0.0827, 0.0837), 0.027),
    ((0.0922, 0.0784, 0.0952, 0.0809, 0.0800, 0.0802, 0.0794), 0.045),
    ((0.0912, 0.0954, 0.0842, 0.0793, 0.0897, 0.1219, 0.0909), 0.155),
    ((0.0992, 0.1080, 0.0988, 0.1050, 0.1136, 0.1091, 0.1091), 0.057),
    ((0.1176, 0.1443, 0.1360, 0.1538, 0.1108, 0.0908, 0.0877), 0.230),
    ((0.0866, 0.0978, 0.0891, 0.1140, 0.1145, 0.1124, 0.1234), 0.048),
    ((0.0780, 0.0948, 0.0990, 0.0796, 0.0846, 0.1022, 0.1048), 0.088),
    ((0.1051, 0.1048, 0.1052, 0.1021, 0.1709, 0.1085, 0.1023), 0.103),
)
"""Seconds of the steps, and the share of the time that threads waited, of ten benchmarks of a small model within three
minutes on a virtual machine of two cores that others kept busy; their medians are up to 50 % apart."""
STEADY = (
    (1.003, 1.011, 1.019, 1.008, 1.402),  # a burst of load in one step
    (1.021, 1.034, 1.027, 1.019, 1.030),
    (0.994, 1.000, 1.012, 0.991, 1.003),
    (1.318, 1.290, 1.007, 1.331, 1.302),  # a night under load
    (1.009, 1.015, 1.004, 1.022, 1.011),
    (1.017, 1.012, 1.025, 1.031, 1.013),
    (0.998, 1.003, 1.009, 0.997, 1.006),
    (1.006, 1.019, 1.013, 1.010, 1.004),
)
"""Made-up step times of eight nights on a machine of one's own, in seconds."""


def result(seconds, night, *, waiting=0.0, **changes):
    made = Result(
        source=f"night-{night}",
        element="",
        machine="A processor, 2 threads",
        host="node1",
        fingerprint="f",
        ended_at=f"2026-{1 + night // 28:02d}-{1 + night % 28:02d}T02:00:00+00:00",
        versions=VERSIONS,
        settings={"benchmark.steps": 5, "plan.tp": 1},
        tokens_per_step=TOKENS,
        tokens_per_second=tuple(TOKENS / value for value in seconds),
        memory_peak_bytes=2**30,
        waiting_share=waiting,
    )
    return replace(made, **changes)


def verdict(new, earlier):
    return judge([new], earlier, "", "").elements[0].verdict


def nights(rng, count, *, slower=0.0, drift=0.0):
    """Return results of a benchmark whose last one has only ``1 - slower`` of the speed.

    Nights differ by 1.5 %, and steps by 3 %. On one night of ten another program slows some or all steps by up to a
    factor of two, which the threads that wait for a core show. The machine gets slower by ``drift`` a night.
    """
    results = []
    for night in range(count):
        seconds = np.exp(rng.normal(0, 0.015) + rng.normal(0, 0.03, 5) + drift * night)
        shared = rng.random() < 0.1
        if shared:
            first = rng.integers(0, 5)
            seconds[first : first + rng.integers(1, 6)] *= rng.uniform(1.2, 2.0)
        if night == count - 1:
            seconds /= 1 - slower
        results.append(result(seconds, night, waiting=0.8 if shared else 0.02))
    return results


def share_slower(num_earlier, series=300, **changes):
    rng = np.random.default_rng(7)
    made = (nights(rng, num_earlier + 1, **changes) for _ in range(series))
    return sum(verdict(new, earlier) == "slower" for *earlier, new in made) / series


@pytest.mark.parametrize(("num_earlier", "least"), [(FEWEST, 0.5), (6, 0.65), (8, 0.75), (12, 0.75)])
def test_fifteen_percent_slower_is_flagged_more_often_the_more_is_known(num_earlier, least):
    assert share_slower(num_earlier, slower=0.15) >= least


@pytest.mark.parametrize("drift", [0.0, 0.001])
@pytest.mark.parametrize("num_earlier", [FEWEST, 8, 12])
def test_without_a_change_alarms_stay_rare_under_bursts_of_load_and_drift(num_earlier, drift):
    assert share_slower(num_earlier, drift=drift) <= 2 * ALARM_RATE


def test_a_recorded_series_on_a_busy_machine_has_no_alarm_until_its_steps_take_twice_as_long():
    series = [result(seconds, night, waiting=waiting) for night, (seconds, waiting) in enumerate(RECORDED)]
    told = [verdict(new, series[:night]) for night, new in enumerate(series)]
    assert told == ["first", *["too few"] * (FEWEST - 1), *["same"] * (len(series) - FEWEST)]
    assert verdict(result([2 * value for value in RECORDED[0][0]], 10), series) == "slower"


def test_a_change_on_a_steady_machine_is_found_despite_one_night_under_load():
    *earlier, last = (result(seconds, night) for night, seconds in enumerate(STEADY))
    assert verdict(last, earlier) == "same"
    later = [*earlier, last]
    assert verdict(result([1.15 * value for value in STEADY[-1]], 9), later) == "slower"
    assert verdict(result([0.85 * value for value in STEADY[-1]], 9), later) == "faster"
    assert verdict(result(STEADY[3], 9, waiting=0.9), later) == "disturbed"


def test_a_machine_with_two_speeds_is_not_called_slower_for_its_second_one():
    """The medians alone look steady, since seven of ten nights have one speed."""
    rng, alarms_found = np.random.default_rng(2), 0
    for _ in range(200):
        medians = np.exp(rng.normal(0, 0.01, 9) + 0.1 * (rng.random(9) < 0.3))
        alarms_found += p_value(medians[-1], medians[:-1]) <= ALARM_RATE
    assert alarms_found / 200 <= 0.06


def test_p_values_are_uniform_under_normal_noise():
    rng = np.random.default_rng(3)
    values = np.sort([p_value(row[-1], row[:-1]) for row in np.exp(rng.normal(0, 0.02, (400, 9)))])
    assert np.max(np.abs(values - (np.arange(400) + 0.5) / 400)) < 1.63 / 400**0.5  # Kolmogorov's 1 % bound


def test_a_night_under_load_does_not_set_the_noise():
    calm = list(np.exp(np.random.default_rng(1).normal(0, 0.01, 11)))
    assert noise([*calm, 1.6]) < 2 * noise(calm)


def test_the_noise_of_normal_results_is_their_standard_deviation():
    rows = np.exp(np.random.default_rng(4).normal(0, 0.02, (300, 12)))
    assert np.mean([noise(row) for row in rows]) == pytest.approx(0.02, rel=0.1)


def test_many_elements_raise_the_bar_so_that_a_sweep_keeps_its_rate():
    assert alarms({"a": 0.004, "b": 0.5}) == {"a"}
    assert alarms({"a": 0.004, "b": 0.5, "c": 0.6}) == set()
    assert alarms({"a": 0.001, "b": 0.004, "c": 0.6}) == {"a", "b"}


def test_three_results_at_a_new_speed_make_it_the_expected_one():
    past = [result(seconds, night) for night, seconds in enumerate(STEADY)]
    slow = [result([1.3 * value for value in STEADY[4 + night]], 10 + night) for night in range(4)]
    assert verdict(slow[0], past) == "slower"
    assert verdict(slow[3], [*past, *slow[:3]]) == "same"


@pytest.mark.parametrize(("num_earlier", "told"), [(0, "first"), (1, "too few"), (FEWEST - 1, "too few")])
def test_too_few_earlier_results_give_no_verdict(num_earlier, told):
    *earlier, new = (result([1 + night / 100] * 5, night) for night in range(num_earlier + 1))
    assert verdict(new, earlier) == told


def test_only_earlier_results_of_the_same_work_on_the_same_kind_of_machine_count():
    new = result([2.0] * 5, 20)
    past = [result(seconds, night) for night, seconds in enumerate(STEADY)]
    assert verdict(new, past) == "slower"
    for change in ({"machine": "another"}, {"fingerprint": "g"}, {"ended_at": "2027-01-01T00:00:00+00:00"}):
        assert verdict(new, [replace(one, **change) for one in past]) == "first"


def test_what_changed_since_the_latest_result_is_listed():
    past = [result([1.0] * 5, night) for night in range(2)]
    settings = {"benchmark.steps": 10, "plan.tp": 2, "benchmark.history": "/elsewhere"}
    new = result([1.0] * 5, 5, versions=VERSIONS | {"torch": "2.13.0"}, settings=settings)
    judged = judge([new], past, "", "")
    assert [str(change) for change in judged.changes] == [
        "torch 2.12.0 -> 2.13.0", "benchmark.steps 5 -> 10", "plan.tp 1 -> 2",
    ]  # fmt: skip
    assert judged.since == past[-1].ended_at


def test_files_that_are_not_committed_count_as_a_possible_change():
    dirty = VERSIONS | {"commit": "aaa-dirty"}
    judged = judge([result([1.0], 5, versions=dirty)], [result([1.0], 1, versions=dirty)], "", "")
    assert "not committed" in str(judged.changes[0])


def test_a_spread_and_threads_without_a_core_are_called_noise():
    new = result([1.0, 1.0, 1.3, 1.4, 1.5], 5, waiting=0.4)
    told = " ".join(judge([new], [], "", "").elements[0].notes)
    assert "spans 31% of their median" in told
    assert "waited for a core 40% of the time" in told


def timed_run(path, rate=1.0, night=0, **settings):
    run = RunDirectory(path)
    run.create()
    config = RunConfig.from_mapping({"launch": {"device": "cpu"}} | settings)
    run.config.write_text(config.to_yaml())
    write_json(run.plan, {"tp": 1})
    write_json(run.outcome, Outcome("finished", "timed", 0, "", f"2026-01-{1 + night:02d}T02:00:00+00:00"))
    seconds = tuple(value / rate for value in (0.99, 1.0, 1.01, 1.02, 1.03))
    write_json(
        run.benchmark,
        BenchmarkRecord(
            "A processor", 2, seconds, seconds[2], 0.02 / rate, TOKENS, TOKENS / seconds[2], None, 2**30,
            num_threads=2, waiting_threads=0.0, host="node1", versions=VERSIONS,
        ),
    )  # fmt: skip
    return run


def test_the_history_is_one_parquet_part_for_each_benchmark_and_a_repeat_replaces_its_own(tmp_path):
    runs = [timed_run(tmp_path / f"run-{night}", 1 + night / 100, night) for night in range(3)]
    for run in (*runs, runs[1]):
        remember_run(run)
    parts = sorted((tmp_path / "history").glob("*.parquet"))
    assert len(parts) == 3
    kept = read_history(tmp_path / "history")
    assert sorted(one.source for one in kept) == [run.name for run in runs]
    assert kept[0].versions == VERSIONS
    assert kept[0].median_rate == pytest.approx(TOKENS / 1.01 * (1 + int(kept[0].source[-1]) / 100))
    assert {"machine", "fingerprint", "versions", "tokens_per_second", "memory_peak_bytes", "ended_at"} <= set(
        pq.read_schema(parts[0]).names
    )


def test_a_benchmark_that_got_slower_is_refused_by_name_with_what_changed(tmp_path):
    for night in range(6):
        refuse_regressions(remember_run(timed_run(tmp_path / f"run-{night}", 1 + night % 3 / 200, night)))
    slow = timed_run(tmp_path / "slow", 0.85, 8, benchmark={"warmup_steps": 1})
    judged = remember_run(slow)
    assert judged == Judgement.read(slow.history)
    with pytest.raises(
        RegressionError, match=r"15\.\d% below .* of 6 earlier.*benchmark\.warmup_steps 2 -> 1"
    ) as found:
        refuse_regressions(judged)
    assert found.value.exit_code == 4


def test_a_damaged_part_is_left_out_with_a_warning(tmp_path, capsys):
    remember_run(timed_run(tmp_path / "run"))
    (tmp_path / "history" / "part-0.parquet").write_bytes(b"half a part")
    assert len(read_history(tmp_path / "history")) == 1
    assert "part-0.parquet is left out" in " ".join(capsys.readouterr().out.split())


NO_RESULTS = {
    "nothing": {field.name: None for field in fields(Result)},
    "no time": {"ended_at": "yesterday"},
    "a time of nowhere": {"ended_at": "2026-11-28T10:00:00"},
    "a time of elsewhere": {"ended_at": "2026-11-28T10:00:00+09:00"},
    "no rates": {"tokens_per_second": []},
    "a rate of nothing": {"tokens_per_second": [None, 1e5]},
    "no speed": {"tokens_per_second": [0.0]},
    "backwards": {"tokens_per_second": [-1e5]},
    "endless": {"tokens_per_second": [float("nan")]},
    "beyond light": {"tokens_per_second": [1e300]},
    "for ever": {"tokens_per_second": [5e-324]},
    "no tokens": {"tokens_per_step": 0},
    "no memory": {"memory_peak_bytes": -1},
    "waits for ever": {"waiting_share": float("inf")},
    "no settings": {"settings": "[]"},
    "half settings": {"settings": "{"},
    "no versions": {"versions": None},
    "no machine": {"machine": None},
}


@pytest.mark.parametrize("name", NO_RESULTS)
def test_a_row_that_is_no_result_is_left_out_and_named_and_the_others_count(tmp_path, capsys, name):
    for night in range(FEWEST):
        remember_run(timed_run(tmp_path / f"run-{night}", 1 + night % 3 / 200, night))
    folder = tmp_path / "history"
    first = sorted(folder.glob("part-*"))[0]
    table = pq.read_table(first)
    (row,) = table.to_pylist()
    pq.write_table(pa.Table.from_pylist([row, row | NO_RESULTS[name]], schema=table.schema), first)
    capsys.readouterr()
    judged = remember_run(timed_run(tmp_path / "new", 1.0, 27))
    assert len(judged.elements[0].earlier) == FEWEST
    told = " ".join(capsys.readouterr().out.split())
    if name == "nothing":  # it is of no work that is compared
        assert len(read_history(folder)) == FEWEST + 1
        told = " ".join(capsys.readouterr().out.split())
    assert f"1 of 2 results are left out of the comparison: {first} is damaged" in told


@pytest.mark.root
def test_a_verdict_says_whose_results_it_is_over(tmp_path):
    for night in range(FEWEST):
        remember_run(timed_run(tmp_path / f"run-{night}", 1 + night % 3 / 200, night))
    part = sorted((tmp_path / "history").glob("part-*"))[1]
    table = pq.read_table(part)
    pq.write_table(table.set_column(table.column_names.index("account"), "account", pa.array(["root"])), part)
    os.chown(part, 65534, 65534)  # whatever it says itself
    judged = remember_run(timed_run(tmp_path / "slow", 0.5, 27))
    assert judged.of("slower")
    assert f"of {FEWEST} earlier results (with those of nobody), which vary" in judged.elements[0].sentence()


def test_a_history_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "new" / "history")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for folder in (tmp_path / "file" / "history", Path("/proc/history")):  # the second one is refused even to root
        with pytest.raises(EnvironmentMismatchError, match="choose another --history"):
            check_folder(folder)


def test_work_is_the_same_whatever_is_learnt_and_wherever_it_is_tracked():
    config = RunConfig()
    same = ("training.learning_rate=1e-3", "training.steps=7", "tracking.run_name=mine", "benchmark.steps=50")
    other = (
        "benchmark.profile=true",
        "training.batch_size=16",
        "parallel.recompute=full",
        "training.precision=bf16",
        "training.seq_len=64",
    )
    assert all(work_fingerprint(config.with_overrides(one)) == work_fingerprint(config) for one in same)
    assert len({work_fingerprint(config.with_overrides(one)) for one in other} | {work_fingerprint(config)}) == 6
