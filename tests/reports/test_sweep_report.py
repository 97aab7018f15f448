import json
import re
from dataclasses import replace

import pandas as pd
import pytest
from synthetic_sweep import (
    DOES_NOT_FIT,
    GRID_200,
    write_history,
    write_loss_sweep,
    write_planned_sweep,
    write_sweep,
)

from llama_core.errors import RunDirectoryError
from llama_core.planning.plan import ParallelPlan
from llama_core.records.files import read_json, write_json
from llama_core.sweep.best import best_lines
from llama_core.sweep.comparison import Comparison, ComparisonRow
from llama_core.sweep.directory import SweepDirectory, read_record, write_record
from llama_core.sweep.grid import SweepConfig
from llama_core.units import GIB, MIB
from training_reports.contents import RunContents
from training_reports.prediction import write_prediction
from training_reports.sweep import write_report
from training_reports.sweep_figures import (
    MAX_DRAWN,
    loss_curves,
    memory_by_element,
    throughput_against_memory,
    throughput_by_element,
)
from training_reports.sweep_pareto import are_alike, pareto_front
from training_reports.sweep_rows import measured_row
from training_reports.sweep_scaling import Sized, scaling_lines
from training_reports.sweep_trained import rank


def text_of(page, heading):
    """Return the text of the part of the page under ``heading``, tags replaced by spaces, without scripts."""
    part = page.split(f"<h2>{heading}", 1)[1].split("<h2>", 1)[0]
    part = re.sub(r"<script.*?</script>", "", part, flags=re.DOTALL)
    part = re.sub(r"</?span[^>]*>", "", part)
    return " ".join(re.sub(r"<[^>]+>", " ", part).split())


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "sweep", 3)


@pytest.fixture
def page(sweep):
    return write_report(sweep).read_text()


def test_the_fastest_element_comes_first_and_those_without_a_speed_last(page):
    table = text_of(page, "Every element")
    names = re.findall(r"microbatch size \d+, recompute \w+", table)
    assert names == [
        "microbatch size 2, recompute none",
        "microbatch size 1, recompute selective",
        "microbatch size 1, recompute none",
        "microbatch size 2, recompute selective",
        "microbatch size 4, recompute none",
        "microbatch size 4, recompute selective",  # skipped
    ]


def test_a_row_holds_speed_spread_and_memory_and_what_all_share_stands_above(page):
    row = re.search(r"microbatch size 2, recompute none (.*?) microbatch", text_of(page, "Every element"))[1]
    assert row == "finished 2,031 1,998 to 2,048 32.0% 8.067 s 2.25 GiB"
    assert "The same in all: memory estimated 1.70 GiB; memory rehearsed 1.70 GiB." in text_of(page, "Every element")


def test_the_predicted_step_stands_beside_the_measured_one_with_its_error(tmp_path):
    sweep = write_planned_sweep(tmp_path / "sweep", {"parallel.gpus": [1, 4]})
    timed = RunContents.read(sweep.run("gpus=1")).benchmark
    predicted = f"{0.9 * timed.median_seconds:.3f} s (-10.0%)"
    assert f"{predicted} {timed.median_seconds:.3f} s" in text_of(write_report(sweep).read_text(), "Every element")


def test_the_front_is_the_most_throughput_within_each_amount_of_memory():
    points = {f"p{n}": (float(37 * n % 101), float(53 * n % 97 + 1)) for n in range(60)}
    beaten = {
        name
        for name, (size, rate) in points.items()
        if any(s <= size and r >= rate and (s, r) != (size, rate) for s, r in points.values())
    }
    assert set(pareto_front(points)) == points.keys() - beaten
    assert len(pareto_front({"a": (1.0, 5.0), "b": (1.0, 5.0)})) == 1


def test_the_front_is_drawn_and_those_without_a_point_are_named_below(page):
    panel = text_of(page, "Throughput against memory")
    assert "(2,031 tokens/s, 2.25 GiB)" in panel
    assert "failed: microbatch size 2, recompute selective (oom)" in panel
    assert "skipped because they cannot run: microbatch size 4, recompute selective" in panel
    assert "without a result: microbatch size 4, recompute none (submitted)" in panel


def test_labels_overlap_neither_each_other_nor_a_dot():
    points = {f"p{n}": (1e9 * (1 + n % 7), 1000.0 + 3 * n) for n in range(40)}
    figure = throughput_against_memory(points, pareto_front(points), dict.fromkeys(points, "8, selective"), "measured")
    shown = [text for trace in figure.data for text in trace.text if text]
    assert 0 < len(shown) < 40
    close = {"a": (1e9, 1000.0), "b": (1e9, 1000.0), "c": (2e9, 9000.0)}
    (others, front) = throughput_against_memory(close, ["a", "c"], {"a": "1", "b": "2", "c": "3"}, "measured").data
    assert set(front.text) | set(others.text) == {"1", "2", "3"}


def test_scaling_is_measured_against_as_many_times_the_smallest(tmp_path):
    sweep = write_planned_sweep(tmp_path / "sweep", {"parallel.gpus": [1, 2, 4], "parallel.tp": [1, 2]})
    page = write_report(sweep).read_text()
    panel = text_of(page, "Scaling")
    assert f"data parallel: {2**-0.1:.1%} on 2, {4**-0.1:.1%} on 4" in panel
    assert f"data parallel, tp 2: {2**-0.1:.1%} on 4" in panel
    assert f"tensor parallel: {0.9 * 2**-0.1:.1%} on 2" in panel
    assert f"tensor parallel, dp 2: {0.9 * 2**-0.1:.1%} on 4" in panel
    assert "skipped" in text_of(page, "Every element")
    row = re.search(r"gpus 4, tp 2 (.*?) gpus", text_of(page, "Every element"))[1]
    assert f"{2**-0.1:.1%} data; {0.9 * 2**-0.1:.1%} tensor" in row


def test_elements_that_differ_in_more_than_ranks_are_on_no_line(tmp_path):
    assert "<h2>Scaling" not in write_report(write_sweep(tmp_path / "sweep", 4)).read_text()
    grid = {"parallel.gpus": [1, 2], "parallel.microbatch_size": [1, 2]}
    rows = [
        Sized(f"{gpus} {size}", dict(zip(grid, (gpus, size), strict=True)), ParallelPlan(dp_replicate=gpus), 1.0)
        for gpus, size in ((1, 1), (2, 2))
    ]
    assert scaling_lines(rows) == []


def test_the_fastest_element_stands_out_whether_measured_or_predicted(sweep, tmp_path):
    config = SweepConfig.from_mapping({"name": "x", "grid": {"parallel.tp": [1, 2]}})
    rows = [
        ComparisonRow(f"tp={tp}", {"parallel.tp": tp}, "predicted", "finished", tokens_per_second=rate)
        for tp, rate in ((1, 100.0), (2, 200.0))
    ]
    predicted = write_prediction(tmp_path / "predicted.html", config, Comparison(tuple(rows), None))
    for path, fastest in ((predicted, "tp 2"), (write_report(sweep), "microbatch size 2, recompute none")):
        table = path.read_text().split("<h2>Every element", 1)[1].split("</table>", 1)[0]
        (row,) = re.findall(r'class="emphasised">\s*<th scope="row">(.*?)</th>', table)
        assert re.sub(r"<[^>]+>", "", row) == fastest


def test_two_hundred_elements_make_one_light_page_with_a_row_for_each(tmp_path):
    sweep = write_planned_sweep(tmp_path / "sweep", GRID_200)
    write_history(sweep)
    path = write_report(sweep)
    page = path.read_text()
    table = page.split("<h2>Every element", 1)[1].split("</table>", 1)[0]
    assert table.count("<tr data-state=") == 200
    headings = [re.sub(r"<[^>]+>", "", row) for row in re.findall(r'<th scope="row">(.*?)</th>', table)]
    assert sorted(headings) == sorted(read_record(sweep).names.shown.values())
    assert path.stat().st_size < 5_000_000
    figures = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert len(figures) == 5
    for figure in figures:
        assert sum(trace.get("showlegend", True) for trace in figure["data"]) <= MAX_DRAWN
    assert max(int(height) for height in re.findall(r"height: (\d+)px", page)) < 4000
    summary = text_of(page, "In short")
    assert len(summary) < 3000


def test_skipped_and_failed_elements_are_listed_with_the_reason(page):
    assert f"microbatch size 4, recompute selective {DOES_NOT_FIT}" in text_of(page, "Skipped")
    failed = text_of(page, "Ended without being timed")
    assert "microbatch size 2, recompute selective oom: the step asked for 2.1 GiB where 1.3 GiB were free" in failed


def test_the_header_counts_the_timed_elements(page):
    assert "3 of 5 timed" in page
    assert "llama3_8b" in page


def test_elements_closer_than_their_spread_are_ranked_with_a_warning(tmp_path):
    sweep = write_sweep(tmp_path / "close", 2, failed=0, waiting=0, skipped=0)
    fast, slow = (sweep.run(f"microbatch_size=1,recompute={how}") for how in ("selective", "none"))
    assert "Not told apart" not in write_report(sweep).read_text()
    slow.benchmark.write_text(fast.benchmark.read_text())
    told = text_of(write_report(sweep).read_text(), "Fastest")
    assert "Not told apart from: " in told
    assert "Because the middle halves of their steps overlap." in told


def test_elements_timed_on_a_shared_machine_are_ranked_with_a_warning(tmp_path):
    sweep = write_sweep(tmp_path / "shared", 2, failed=0, waiting=0, skipped=0)
    slow = sweep.run("microbatch_size=1,recompute=none")
    write_json(slow.benchmark, read_json(slow.benchmark) | {"waiting_threads": 1.5, "num_threads": 2})
    told = text_of(write_report(sweep).read_text(), "Fastest")
    assert "Because threads waited for a core 75% of the time: the machine was shared." in told


def test_a_sweep_without_timed_elements_has_a_page(tmp_path):
    page = write_report(write_sweep(tmp_path / "new", 0)).read_text()
    assert "0 of 2 timed" in page
    assert "No element has been timed yet." in page


def test_trained_elements_are_ranked_by_their_held_out_loss(tmp_path):
    page = write_report(write_loss_sweep(tmp_path / "losses")).read_text()
    table = text_of(page, "Every element, lowest held-out loss first")
    assert re.findall(r"learning rate (\S+)", table) == ["0.001", "0.0001", "0.01", "0.1"]
    assert "learning rate 0.0001 finished 2.6000 0.2000 ± 0.0115 2.6750" in table
    assert "The same in all: steps 40; tokens 32.00K; tokens/s 1,346" in table
    assert "3 of 4 trained" in page
    assert re.search(r"In all elements\s*</dt>\s*<dd[^>]*>batch size 8<", page)
    assert "learning rate 0.001 0.2000 ± 0.0115 below the next." in text_of(page, "Lowest held-out loss")
    assert "non-finite: the loss is not finite" in text_of(page, "Ended without being trained")


def test_elements_are_ranked_by_the_held_out_loss_of_one_name(tmp_path):
    sweep = write_loss_sweep(tmp_path / "losses", objective="eval_loss/code")
    page = write_report(sweep).read_text()
    table = text_of(page, "Every element, lowest held-out loss of code first")
    assert re.findall(r"learning rate (\S+)", table) == ["0.01", "0.0001", "0.001", "0.1"]
    assert "learning rate 0.0001 finished 2.4000 0.3000 ± 0.0000 2.6750" in table
    assert "learning rate 0.01: held-out loss of code 2.1000." in text_of(page, "In short")
    assert "Held-out loss of code by learning rate" in page
    assert dict(best_lines(sweep))["best"].startswith("learning rate 0.01: held-out loss of code 2.1000, 0.3000")


def test_elements_are_ranked_by_the_score_of_their_last_checkpoint(tmp_path):
    sweep = write_loss_sweep(tmp_path / "scores", objective="evaluation/arc/acc", scores=(0.40, 0.55, None))
    page = write_report(sweep).read_text()
    table = text_of(page, "Every element, best arc/acc first")
    assert re.findall(r"learning rate (\S+)", table) == ["0.001", "0.0001", "0.01", "0.1"]
    assert "learning rate 0.0001 finished 0.4000 0.1500 ± 0.1000 2.6750" in table
    assert "learning rate 0.01 not evaluated" in table
    assert "3 of 4 trained, 1 not evaluated" in page
    assert "learning rate 0.01 the disk is full" in text_of(page, "Trained, but not evaluated")
    assert "non-finite: the loss is not finite" in text_of(page, "Ended without being trained")
    assert "learning rate 0.001 0.1500 ± 0.1000 ahead of the next." in text_of(page, "Best arc/acc")
    assert "The next (learning rate 0.0001) is 0.1500 ± 0.1000 behind." in text_of(page, "In short")
    assert dict(best_lines(sweep))["best"] == (
        "learning rate 0.001: arc/acc 0.5500, 0.1500 ± 0.1000 ahead of the next (learning rate 0.0001); "
        "3 elements trained, 1 of them not evaluated"
    )
    figure = panels(sweep)["arc/acc by learning rate"].figure
    assert figure.layout.yaxis.range[1] > 0.55 > 0.40 - 0.10 > figure.layout.yaxis.range[0]


def test_a_score_of_which_less_is_better_is_ranked_by_less(tmp_path):
    sweep = write_loss_sweep(
        tmp_path / "scores", objective="evaluation/arc/acc", scores=(0.40, 0.55, None), higher_is_better=False
    )
    table = text_of(write_report(sweep).read_text(), "Every element, best arc/acc first")
    assert re.findall(r"learning rate (\S+)", table)[:2] == ["0.0001", "0.001"]
    assert dict(best_lines(sweep))["best"].startswith("learning rate 0.0001: arc/acc 0.4000, 0.1500")


def test_a_lead_that_chance_explains_is_not_called_best_without_saying_so(tmp_path):
    page = write_report(write_loss_sweep(tmp_path / "noisy", (2.42, 2.4, 2.9), noise=0.05)).read_text()
    assert "below the next, within the spread" in text_of(page, "Lowest held-out loss")
    summary = text_of(page, "In short")
    assert "The next (learning rate 0.0001) is 0.0200 ± 0.0577 above, within the spread of the held-out rows" in summary
    assert "evaluate on more rows (training.eval_sequences, here 4), and add training.seed: [0, 1, 2]" in summary
    clear = text_of(write_report(write_loss_sweep(tmp_path / "clear", (2.6, 2.4, 2.9))).read_text(), "In short")
    assert "within the spread" not in clear
    assert "One seed each, 40 steps" in clear


def test_a_run_that_ended_far_above_its_start_diverged_and_is_not_ranked(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep", (2.6, 2.4, 2.2), last_loss=50.0)
    page = write_report(sweep).read_text()
    assert "3 of 4 trained, 1 diverged" in page
    assert "learning rate 0.01 diverged 2.2000 — 50.0000" in text_of(page, "Every element")
    assert "learning rate 0.001: held-out loss 2.4000" in text_of(page, "In short")
    assert "the training loss ended at 50, far above the 5.2 of its first step" in text_of(page, "Diverged")


def test_a_larger_model_that_wins_is_said_to_be_one(tmp_path):
    models = ("tiny_llama3_50m", "tiny_llama3_150m")
    losses = (2.6, 2.5, 2.7, 2.4)
    page = write_report(
        write_loss_sweep(tmp_path / "large", (*losses[:2], 2.9, *losses[2:]), models=models)
    ).read_text()
    summary = text_of(page, "In short")
    assert re.search(
        r"The best is the larger model \(1\d\d\.\d+M parameters\), which need not be a better setting", summary
    )
    assert "Of those with less, the best is tiny_llama3_50m, learning rate 0.001 (2.5000)" in summary
    assert re.search(r"Model\s*</dt>\s*<dd[^>]*>tiny_llama3_50m, tiny_llama3_150m<", page)


def test_a_run_on_more_tokens_that_wins_is_said_to_be_one(tmp_path):
    page = write_report(write_loss_sweep(tmp_path / "long", (2.6, 2.4), batch_sizes=(4, 8))).read_text()
    assert (
        "The best was trained on more tokens (32.00K), which need not be a better setting. Of those with less, the "
        "best is learning rate 0.001, batch size 4 (2.6000)."
    ) in text_of(page, "In short")


def test_the_page_says_how_to_go_on_with_the_best_element(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep")
    summary = text_of(write_report(sweep).read_text(), "In short")
    best = sweep.run("learning_rate=0.001,batch_size=8").path
    assert f"training-infra train --run-dir {best} --resume --steps 80" in summary
    assert f"training-infra export-hf {best} --out sweep-best" in summary


def test_the_title_is_the_name_of_the_sweep_whatever_its_folder(tmp_path):
    sweep = write_loss_sweep(tmp_path / "rates")
    sweep.path.rename(tmp_path / "rates-20261121")
    page = write_report(SweepDirectory(tmp_path / "rates-20261121")).read_text()
    assert "<h1>rates</h1>" in page


def test_memory_is_drawn_only_where_it_differs(tmp_path):
    assert "<h2>Peak memory" not in write_report(write_loss_sweep(tmp_path / "losses")).read_text()
    assert "<h2>Peak memory" in write_report(write_sweep(tmp_path / "sweep", 3)).read_text()


def test_peaks_are_alike_that_differ_by_no_more_than_measurements_of_one_step_do():
    assert are_alike([44.9 * MIB, 48.7 * MIB])
    assert are_alike([10.0 * GIB, 10.4 * GIB])
    assert not are_alike([10.0 * GIB, 10.6 * GIB])


def test_a_column_in_which_no_element_has_a_value_is_left_out(page):
    assert '<th scope="col">Plan' not in page
    assert '<th scope="col">MFU' in page


def test_the_page_begins_with_a_summary_in_words(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 4)
    write_history(sweep)
    summary = text_of(write_report(sweep).read_text(), "In short")
    assert summary.startswith("Compared. 8 elements: microbatch size (1, 2, 4, 8) x recompute (none, selective).")
    assert "Best. microbatch size 2, recompute selective: 2,370 tokens/s. The next (microbatch size 2" in summary
    assert f"2 of 8 could not run: microbatch size 8, recompute none ({DOES_NOT_FIT})" in summary
    assert "1 of 8 failed: microbatch size 4, recompute none (oom, the step asked for" in summary
    assert re.search(r"microbatch size 1, recompute none is slower: 14\.\d% below the 1,5\d\d tokens/s of 9", summary)
    assert "2 of 4 are as fast as before" in summary
    assert "git log ba9876543210..0123456789ab" in summary
    assert f"--sweep-dir {sweep.path} --resume" in summary


def test_a_best_value_at_the_end_of_the_grid_calls_for_more(tmp_path):
    summary = text_of(write_report(write_loss_sweep(tmp_path / "low", (2.4, 2.6, 2.9))).read_text(), "In short")
    assert "The best learning rate, 0.0001, is the smallest in the grid: try 1e-5." in summary
    middle = text_of(write_report(write_loss_sweep(tmp_path / "middle", (2.6, 2.4, 2.9))).read_text(), "In short")
    assert "in the grid" not in middle


def test_a_setting_that_only_an_element_without_a_result_has_is_no_advice(tmp_path):
    sweep = write_loss_sweep(tmp_path / "sweep", (2.6, 2.4, 2.9))
    record = read_record(sweep)
    elements = [
        replace(one, settings={"training.seed": 7 + (one == record.elements[-1])} | one.settings)
        for one in record.elements
    ]
    write_record(sweep, replace(record, elements=tuple(elements)))
    assert "in the grid" not in text_of(write_report(sweep).read_text(), "In short")


def test_the_history_is_a_table_with_verdicts_and_a_list_of_changes(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 4)
    write_history(sweep)
    page = write_report(sweep).read_text()
    table = text_of(page, "What changed since last time")
    assert re.search(r"microbatch size 1, recompute none slower 1,354 1,59\d \(of 9\) -14\.\d%", table)
    assert "microbatch size 2, recompute none no verdict" in table
    assert "torch 2.12.0 2.13.0 all" in table
    assert "Throughput since the first result" in page


def panels(sweep):
    """Return the panels of a sweep whose elements train, by title."""
    record = read_record(sweep)
    asked = (record.objective, record.sweep_config.base.evaluation)
    contents = [RunContents.read(sweep.run(one.name)) for one in record.elements]
    rows = [
        measured_row(record.names[one.name], one, of, *asked) for one, of in zip(record.elements, contents, strict=True)
    ]
    return {panel.title: panel for panel in rank(rows, record.objective).panels}


@pytest.mark.parametrize("last_loss", [None, 500.0])
def test_loss_curves_of_all_elements_share_a_figure_that_diverging_ones_do_not_flatten(tmp_path, last_loss):
    panel = panels(write_loss_sweep(tmp_path / "losses", last_loss=last_loss))["Training loss"]
    figure = panel.figure
    assert figure.data[0].name == "learning rate 0.001"
    assert len(figure.data) == 4
    low, high = figure.layout.yaxis.range
    sound = [line.y for line in figure.data if max(line.y) < 9]
    assert len(sound) == (3 if last_loss is None else 2)
    assert low < min(map(min, sound)) < max(map(max, sound)) < high < 7
    assert any("are cut off: those of" in note and "learning rate 0.1" in note for note in panel.notes)
    assert figure.layout.xaxis.title.text == "optimizer step"


def test_losses_of_unequal_batches_are_drawn_by_tokens(tmp_path):
    figure = panels(write_loss_sweep(tmp_path / "losses", (2.6, 2.4), batch_sizes=(4, 8)))["Training loss"].figure
    assert figure.layout.xaxis.title.text == "tokens"
    assert sorted(max(line.x) for line in figure.data[:2]) == [40 * 400, 40 * 800]


def test_a_name_that_holds_markup_is_text_in_a_figure():
    figure = loss_curves({"<b>a</b>": pd.Series([1.0], index=[1])}, x_title="tokens", unit="nats")
    bars = memory_by_element({"<b>a</b>": {"measured": GIB}})
    assert figure.data[0].name == bars.data[0].y[0] == "&lt;b&gt;a&lt;/b&gt;"


def test_the_steps_of_few_evaluations_have_whole_ticks():
    losses = {"a": pd.Series([3.0, 2.5], index=[3, 6])}
    assert loss_curves(losses, x_title="optimizer step", unit="nats").layout.xaxis.dtick == 1


def test_the_held_out_loss_is_drawn_against_each_setting(tmp_path):
    losses = (2.6, 2.4, 2.9, 2.5, 2.3, 2.8)
    sweep = write_loss_sweep(tmp_path / "losses", losses, models=("tiny_llama3_50m", "tiny_llama3_150m"), last_loss=90)
    drawn = panels(sweep)
    by_rate = drawn["Held-out loss by learning rate"].figure
    assert by_rate.layout.xaxis.type == "log"
    assert {line.name: (line.x, line.y) for line in by_rate.data} == {
        "tiny_llama3_50m": ((1e-4, 1e-3, 1e-2, 0.1), (2.6, 2.4, 2.9, 2.5)),
        "tiny_llama3_150m": ((1e-4,), (2.3,)),
        "diverged": ((1e-3,), by_rate.data[2].y),
    }
    assert by_rate.data[2].y[0] < by_rate.layout.yaxis.range[1] < 4
    by_model = drawn["Held-out loss by model"].figure
    assert by_model.layout.xaxis.categoryarray == ("tiny_llama3_50m", "tiny_llama3_150m")
    # the best has no bar: the others have two standard errors of their distance to it
    errors = {
        name: error
        for line in by_model.data[:4]
        for name, error in zip(line.hovertext, line.error_y.array, strict=True)
    }
    assert errors["tiny_llama3_150m, learning rate 0.0001"] == 0
    assert errors["tiny_llama3_50m, learning rate 0.0001"] == pytest.approx(2 * 0.04 / 3**0.5)


def test_names_and_reasons_are_text_not_markup(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 1)
    record = read_json(sweep.record)
    sweep.record.write_text(sweep.record.read_text().replace(DOES_NOT_FIT, "<script>alert(1)</script>"))
    assert record != read_json(sweep.record)
    assert "<script>alert(1)" not in write_report(sweep).read_text()


def test_a_directory_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError):
        write_report(SweepDirectory(tmp_path))


def test_bars_are_as_long_as_the_medians_and_lines_span_the_middle_half(sweep):
    name = "microbatch_size=1,recompute=none"
    timed = RunContents.read(sweep.run(name)).benchmark
    bars = throughput_by_element({name: timed}).data[0]
    assert bars.x == (timed.tokens_per_second,)
    spread = bars.error_x
    assert spread.array[0] == pytest.approx(16_384 / 12.0 - timed.tokens_per_second)
    assert spread.arrayminus[0] == pytest.approx(timed.tokens_per_second - 16_384 / 12.3)


def test_each_kind_of_peak_is_a_bar_in_one_unit():
    figure = memory_by_element({"a": {"estimated": 2 * GIB, "rehearsed": None, "measured": 3 * GIB}})
    assert {bars.name: bars.x for bars in figure.data} == {"estimated": (2,), "measured": (3,)}
