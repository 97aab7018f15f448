"""Runs side by side, on the terminal and on a page."""

import json
import re
from dataclasses import replace

import pytest
from synthetic_run import FAILED, step_records, write_run
from synthetic_sweep import write_loss_sweep, write_sweep
from toy_objective import MASKED

from llama_core.config.run import RunConfig
from llama_core.objectives.registry import OBJECTIVES
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.records.measurements import ExpectedStep
from training_infra.cli import main
from training_reports.compare import write_comparison
from training_reports.run_comparison import compare_runs

SIZES = {"steps": 40, "batch_size": 8, "seq_len": 2048}


def write(path, *, rate=1.0, worse=0.0, steps=40, timed=True, **settings):
    records = [
        replace(
            record,
            loss=record.loss + worse,
            step_seconds=record.step_seconds / rate,
            tokens_per_second=record.tokens_per_second * rate,
        )
        for record in step_records(steps)
    ]
    run = write_run(path, records=records)
    config = {"training": SIZES, "launch": {"device": "cuda", "dollars_per_gpu_hour": 2.0}}
    run.config.write_text(
        RunConfig.from_mapping(config, [f"{key}={value}" for key, value in settings.items()]).to_yaml()
    )
    if not timed:
        run.benchmark.unlink()
    return path


@pytest.fixture
def pair(tmp_path):
    first = write(tmp_path / "first", timed=False)
    return [first, write(tmp_path / "second", rate=2, worse=0.25, timed=False, **{"parallel.gpus": 2})]


def measures(paths):
    return {one.name: one for one in compare_runs(paths).measures}


def test_only_settings_that_differ_are_listed_with_the_value_of_each_run(pair):
    assert compare_runs(pair).differences == (("parallel.gpus", ("1", "2")),)


def test_losses_are_compared_at_the_same_tokens_and_after_the_same_time(pair):
    found = measures(pair)
    at_the_end = found["loss at 655.36K tokens"].values
    assert at_the_end[1] - at_the_end[0] == pytest.approx(0.25)
    (after,) = (one for name, one in found.items() if name.startswith("loss after"))
    seconds = [record.step_seconds for record in step_records()]
    reached = next(step for step in range(1, 41) if sum(seconds[:step]) > sum(seconds) / 2) - 1
    assert after.values[1] == at_the_end[1]  # the second, twice as fast, is done by then
    assert after.values[0] == pytest.approx(step_records()[reached - 1].loss, abs=0.06)


def test_loss_is_compared_where_the_shortest_run_ends(tmp_path):
    paths = [write(tmp_path / "long"), write(tmp_path / "short", steps=20)]
    assert f"loss at {20 * 16_384 / 1000:.2f}K tokens" in measures(paths)


def test_cost_is_time_times_devices_times_price(pair):
    found, hours = measures(pair), sum(record.step_seconds for record in step_records()) / 3600
    assert found["device hours"].values == pytest.approx((hours, hours))
    assert found["cost"].values == pytest.approx((2 * hours, 2 * hours))
    assert found["cost of 1B tokens"].values[0] == pytest.approx(2 * hours / 655_360 * 1e9)


def test_processors_have_hours_but_no_price(tmp_path):
    paths = [write(tmp_path / name, **{"launch.device": "cpu"}) for name in ("a", "b")]
    assert "cost" not in measures(paths)


def test_the_best_is_marked_and_the_others_compared_with_the_first(pair):
    rates = measures(pair)["tokens/s"]
    assert rates.winner == 1
    assert rates.cells()[1].endswith("(+100.0%)")
    assert measures(pair)["held-out loss"].winner is None  # equal


def test_timed_steps_that_overlap_have_no_winner(tmp_path):
    paths = [write(tmp_path / name) for name in ("a", "b")]
    timed = read_json(paths[1] / "benchmark.json")
    for factor, winner in ((0.99, None), (0.5, 1)):
        seconds = [factor * value for value in timed["step_seconds"]]
        rate = timed["tokens_per_second"] / factor
        write_json(paths[1] / "benchmark.json", timed | {"step_seconds": seconds, "tokens_per_second": rate})
        found = measures(paths)["tokens/s"]
        assert found.winner == winner
        assert found.cells()[1].endswith("(+100.0%)" if winner else "(within the noise)")
        slower_last = measures(paths[::-1])["tokens/s"].cells()[1]
        assert slower_last.endswith("(-50.0%)" if winner else "(within the noise)")


def test_steps_that_use_the_peak_better_win_by_mfu_though_others_have_more_tokens_a_second(tmp_path):
    small, large = paths = [write(tmp_path / name) for name in ("small", "large")]
    timed = read_json(small / "benchmark.json")
    for path, factor in ((small, 0.9), (large, 2.0)):
        seconds = [factor * value for value in timed["step_seconds"]]
        rates = {"tokens_per_second": timed["tokens_per_second"] / factor, "mfu": 0.2 * factor}
        write_json(path / "benchmark.json", timed | {"step_seconds": seconds} | rates)
    found = measures(paths)
    assert (found["tokens/s"].winner, found["MFU"].winner) == (0, 1)
    assert found["MFU"].cells()[1].endswith("(+122.2%)")
    write_json(large / "benchmark.json", read_json(large / "benchmark.json") | {"mfu": 0.1801})
    assert measures(paths)["MFU"].winner is None


def test_a_speed_of_a_shared_machine_is_no_better_and_a_note_says_so(tmp_path):
    paths = [write(tmp_path / "a"), write(tmp_path / "b", rate=2)]
    assert measures(paths)["cost"].cells()[1].endswith("(-50.0%)")
    timed = read_json(paths[1] / "benchmark.json")
    faster = {
        "step_seconds": [0.4 * value for value in timed["step_seconds"]],
        "waiting_threads": 0.9,
        "num_threads": 2,
    }
    write_json(paths[1] / "benchmark.json", timed | faster | {"tokens_per_second": timed["tokens_per_second"] / 0.4})
    compared = compare_runs(paths)
    for name in ("tokens/s", "device hours", "cost", "cost of 1B tokens"):
        (measure,) = [one for one in compared.measures if one.name == name]
        assert measure.winner is None
        assert measure.cells()[1].endswith("(within the noise)")
    assert any("b was timed on a shared machine" in note and "45% of the time" in note for note in compared.notes)


def test_runs_without_timed_steps_are_compared_by_the_spread_of_their_training_steps(tmp_path):
    paths = [write(tmp_path / str(rate), rate=rate, timed=False) for rate in (1.0, 1.02, 3.0)]
    cells = measures(paths)["tokens/s"].cells()
    assert cells[1].endswith("(within the noise)")
    assert cells[2].endswith("(+200.0%)")


@pytest.mark.parametrize(("noise", "winner"), [(0.001, 0), (0.1, None)])
def test_a_held_out_loss_within_the_spread_of_its_rows_has_no_winner(tmp_path, noise, winner):
    sweep = write_loss_sweep(tmp_path / "sweep", (2.4, 2.42), noise=noise)
    runs = [sweep.run(f"learning_rate={rate},batch_size=8").path for rate in (0.001, 0.01)]
    assert measures(runs)["held-out loss"].winner == winner


@pytest.fixture
def named_pair(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep", (2.4, 2.6))
    return [sweep.run(f"learning_rate={rate},batch_size=8").path for rate in (0.001, 0.01)]


def test_held_out_losses_are_compared_by_name(named_pair):
    found = measures(named_pair)
    assert found["held-out loss"].winner == 0
    assert found["held-out loss of code"].values == pytest.approx((2.6, 2.4))
    assert found["held-out loss of code"].winner == 1
    assert found["held-out loss of wiki"].cells()[1] == "3.2000 (+0.4000)"


def test_a_named_loss_that_only_one_run_has_has_no_winner(named_pair, pair):
    found = measures([named_pair[0], pair[0]])["held-out loss of code"]
    assert found.values == (pytest.approx(2.6), None)
    assert found.winner is None


def test_a_run_that_goes_on_is_compared_by_its_newest_named_losses(named_pair):
    (named_pair[0] / "training.json").unlink()
    assert measures(named_pair)["held-out loss of code"].values == pytest.approx((2.6, 2.4))


def test_the_page_the_table_and_the_record_hold_the_losses_by_name(named_pair, capsys, tmp_path):
    command = ["compare", *map(str, named_pair), "--out", str(tmp_path / "page.html")]
    assert main(command) == 0
    assert re.search(r"^held-out loss of code +2\.6000 +2\.4000 \(-0\.2000\)\*$", capsys.readouterr().out, re.MULTILINE)
    page = (tmp_path / "page.html").read_text()
    assert "Held-out loss of code by tokens" in page
    assert '<th scope="row">held-out loss of wiki</th>' in page
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["measures"]["held-out loss of code"].values()) == pytest.approx([2.6, 2.4])


def test_mixtures_of_other_files_have_other_held_out_tokens_but_not_those_of_other_weights(tmp_path):
    sources = {"a": "{path: a, weight: 1}", "b": "{path: a, weight: 2}", "c": "{path: c, weight: 1}"}
    runs = {name: write(tmp_path / name, **{"data.sources.wiki": source}) for name, source in sources.items()}
    assert not compare_runs([runs["a"], runs["b"]]).notes
    (note,) = compare_runs([runs["a"], runs["c"]]).notes
    assert note == "Held-out losses are not over the same tokens: data.sources.wiki.path differ."


def test_an_element_of_a_sweep_is_named_as_in_its_report(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep")
    runs = [sweep.run(f"learning_rate={rate},batch_size=8").path for rate in (0.001, 0.01)]
    alone = write(tmp_path / "alone")
    assert [run.name for run in compare_runs([*runs, alone]).runs] == [
        "learning rate 0.001",
        "learning rate 0.01",
        "alone",
    ]


def test_what_makes_results_incomparable_is_said(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    one = write(tmp_path / "one")
    other = write(tmp_path / "other", **{"data.tokenizer": tmp_path / "tokenizer.json", "launch.device": "cpu"})
    write_json(other / "outcome.json", FAILED)
    said = " ".join(compare_runs([one, other]).notes)
    assert "losses per token cannot be compared" in said
    assert "The devices differ" in said
    assert "other has not finished: oom" in said


def test_losses_of_different_objectives_are_not_comparable_and_each_has_its_unit(tmp_path, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, MASKED.name, MASKED)
    runs = [write(tmp_path / name, **{"training.objective": name}) for name in ("next_token", "masked")]
    comparison = compare_runs(runs)
    assert "The objectives differ: losses cannot be compared." in comparison.notes
    text = write_comparison(tmp_path / "page.html", comparison).read_text()
    assert "nats per token or nats per kept token" in text


def test_the_page_begins_with_the_settings_and_has_losses_by_tokens_and_by_time(pair, tmp_path):
    page = write_comparison(tmp_path / "out" / "page.html", compare_runs(pair)).read_text()
    assert page.index("Settings that differ</h2>") < page.index("Training loss by tokens") < page.index("by time")
    text = " ".join(re.sub(r"<[^>]+>", " ", page.split("<h2>Results")[1]).split())
    assert "tokens/s 1,346 2,692 (+100.0%)" in text


def forget_steps(path):
    run = RunDirectory(path)
    for file in (run.heartbeat, *run.metrics.iterdir()):
        file.unlink()


def test_a_run_that_only_timed_steps_is_compared_by_them(tmp_path):
    paths = [write(tmp_path / "a"), write(tmp_path / "b")]
    forget_steps(tmp_path / "b")
    comparison = compare_runs(paths)
    assert {one.name: one.values[1] for one in comparison.measures}["tokens/s"] == pytest.approx(16_384 / 12.1)
    assert write_comparison(tmp_path / "page.html", comparison).exists()


def told(capsys, *paths):
    code = main(["compare", *map(str, paths)])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    return line


def test_wrong_directories_are_refused_in_one_line(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    untrained = write(tmp_path / "untrained", timed=False)
    forget_steps(untrained)
    (tmp_path / "empty").mkdir()
    write_sweep(tmp_path / "sweep", 1)
    assert "empty holds no run (no config.yaml)" in told(capsys, pair[0], tmp_path / "empty")
    assert "nowhere is not a directory" in told(capsys, pair[0], "nowhere")
    assert "has no metrics: no step was completed" in told(capsys, pair[0], untrained)
    assert "is given twice" in told(capsys, pair[0], pair[1], "first/../first")
    assert "only one run" in told(capsys, pair[0])
    assert "is a sweep" in told(capsys, pair[0], "sweep")


def test_the_command_prints_a_table_and_the_page_or_json(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, pair)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^parallel\.gpus +1 +2$", printed, re.MULTILINE)
    assert re.search(r"^tokens/s +1,346 +2,692 \(\+100\.0%\)\*$", printed, re.MULTILINE)
    assert printed.splitlines()[-1] == "comparison.html"
    assert (tmp_path / "comparison.html").exists()
    assert main(["compare", *map(str, pair), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["differences"] == {"parallel.gpus": {"first": "1", "second": "2"}}
    assert record["measures"]["cost"]["first"] == pytest.approx(record["measures"]["cost"]["second"])


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    paths = [write(tmp_path / place / "run") for place in ("a", "b")]
    assert [run.name for run in compare_runs(paths).runs] == list(map(str, paths))


def test_the_parts_of_a_step_are_compared_with_their_prediction(pair, tmp_path, capsys):
    parts = {"matrix products": 10.0, "optimizer": 0.7}
    write_json(RunDirectory(pair[0]).expected, ExpectedStep(10.7, 1e12, "from a table", parts, "operations"))
    assert main(["compare", *map(str, pair), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    of_first = record["step_parts"]["first"]["parts"]
    assert of_first["computing"]["predicted_seconds"] == 10.0
    assert of_first["optimizer"]["predicted_seconds"] == 0.7
    assert record["step_parts"]["second"] is None
    assert record["slower_steps"]["first"]["main"] == "computing"
    assert record["slower_steps"]["first"]["command"] == f"training-infra profile {pair[0]}"
    assert main(["compare", *map(str, pair), "--out", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^computing +1[01]\.?\d* s \(predicted 10 s\) +—$", told, re.MULTILINE)
    assert "step: first: A step took" in told
    assert "Step by part: measured and predicted" in (tmp_path / "page.html").read_text()


def test_runs_without_a_prediction_are_compared_without_their_parts(pair, tmp_path, capsys):
    assert main(["compare", *map(str, pair), "--out", str(tmp_path / "page.html")]) == 0
    assert "step by part" not in capsys.readouterr().out
    assert "Step by part" not in (tmp_path / "page.html").read_text()
