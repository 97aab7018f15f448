import json
import re
from dataclasses import replace

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
from llama_core.records.files import read_json
from llama_core.sweep.comparison import Comparison, ComparisonRow
from llama_core.sweep.directory import SweepDirectory, read_record, write_record
from llama_core.sweep.grid import SweepConfig
from llama_core.units import GIB
from training_reports.contents import RunContents
from training_reports.prediction import write_prediction
from training_reports.sweep import write_report
from training_reports.sweep_figures import (
    MOST_DRAWN,
    memory_by_element,
    throughput_against_memory,
    throughput_by_element,
)
from training_reports.sweep_loss import rank
from training_reports.sweep_pareto import pareto_front
from training_reports.sweep_rows import measured_row, short_names
from training_reports.sweep_scaling import Sized, scaling_lines


def text_of(page, heading):
    """Return the text of the part of the page under ``heading``, tags replaced by spaces, without scripts."""
    part = page.split(f"<h2>{heading}", 1)[1].split("<h2>", 1)[0].replace("<wbr>", "")
    part = re.sub(r"<script.*?</script>", "", part, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", part).split())


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "sweep", 3)


@pytest.fixture
def page(sweep):
    return write_report(sweep).read_text()


def test_the_fastest_element_comes_first_and_those_without_a_speed_last(page):
    table = text_of(page, "Every element")
    names = re.findall(r"microbatch_size=\d+,recompute=\w+", table)
    assert names == [
        "microbatch_size=2,recompute=none",
        "microbatch_size=1,recompute=selective",
        "microbatch_size=1,recompute=none",
        "microbatch_size=2,recompute=selective",
        "microbatch_size=4,recompute=none",
        "microbatch_size=4,recompute=selective",  # skipped
    ]


def test_a_row_holds_speed_spread_and_the_three_peaks(page):
    row = re.search(r"microbatch_size=2,recompute=none (.*?) microbatch", text_of(page, "Every element"))[1]
    assert row == "finished 2,031 1,998 to 2,048 32.0% 8.067 s 1.70 GiB 1.70 GiB 2.25 GiB —"


def test_the_row_of_an_element_that_failed_holds_what_was_predicted_of_it(page):
    row = re.search(r"microbatch_size=2,recompute=selective (.*?) microbatch", text_of(page, "Every element"))[1]
    assert row == "oom — — — — 1.70 GiB — — —"


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
    assert "failed: microbatch_size=2,recompute=selective (oom)" in panel
    assert "skipped because they cannot run: microbatch_size=4,recompute=selective" in panel
    assert "without a result: microbatch_size=4,recompute=none (submitted)" in panel


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
    assert f"data parallel, tp=2: {2**-0.1:.1%} on 4" in panel
    assert f"tensor parallel: {0.9 * 2**-0.1:.1%} on 2" in panel
    assert f"tensor parallel, dp=2: {0.9 * 2**-0.1:.1%} on 4" in panel
    assert "skipped" in text_of(page, "Every element")
    row = re.search(r"gpus=4,tp=2 (.*?) gpus", text_of(page, "Every element"))[1]
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
    for path, fastest in ((predicted, "tp=2"), (write_report(sweep), "microbatch_size=2,recompute=none")):
        table = path.read_text().split("<h2>Every element", 1)[1].split("</table>", 1)[0].replace("<wbr>", "")
        (row,) = re.findall(r'class="emphasised">\s*<th scope="row">(?:<a [^>]*>)?([^<]*)<', table)
        assert row == fastest


def test_two_hundred_elements_make_one_light_page_with_a_row_for_each(tmp_path):
    sweep = write_planned_sweep(tmp_path / "sweep", GRID_200)
    write_history(sweep)
    path = write_report(sweep)
    page = path.read_text()
    table = page.split("<h2>Every element", 1)[1].split("</table>", 1)[0]
    assert table.count("<tr data-state=") == 200
    assert all(f"{one.name.replace(',', ',<wbr>')}<" in table for one in read_record(sweep).elements)
    assert path.stat().st_size < 5_000_000
    figures = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert len(figures) == 5
    for figure in figures:
        assert sum(trace.get("showlegend", True) for trace in figure["data"]) <= MOST_DRAWN
    assert max(int(height) for height in re.findall(r"height: (\d+)px", page)) < 4000
    summary = text_of(page, "In short")
    assert len(summary) < 3000


def test_skipped_and_failed_elements_are_listed_with_the_reason(page):
    assert f"microbatch_size=4,recompute=selective {DOES_NOT_FIT}" in text_of(page, "Skipped")
    failed = text_of(page, "Ended without being timed")
    assert "microbatch_size=2,recompute=selective oom: the step asked for 2.1 GiB where 1.3 GiB were free" in failed


def test_the_header_counts_the_timed_elements(page):
    assert "3 of 5 timed" in page
    assert "llama3_8b" in page


def test_elements_closer_than_their_spread_are_ranked_with_a_warning(tmp_path):
    sweep = write_sweep(tmp_path / "close", 2, failed=0, waiting=0, skipped=0)
    fast, slow = (sweep.run(f"microbatch_size=1,recompute={how}") for how in ("selective", "none"))
    assert "overlaps" not in write_report(sweep).read_text()
    slow.benchmark.write_text(fast.benchmark.read_text())
    assert "Its middle half overlaps that of" in text_of(write_report(sweep).read_text(), "Fastest")


def test_a_sweep_without_timed_elements_has_a_page(tmp_path):
    page = write_report(write_sweep(tmp_path / "new", 0)).read_text()
    assert "0 of 2 timed" in page
    assert "No element has been timed yet." in page


def test_trained_elements_are_ranked_by_their_held_out_loss(tmp_path):
    page = write_report(write_loss_sweep(tmp_path / "losses")).read_text()
    table = text_of(page, "Every element, lowest held-out loss first")
    assert re.findall(r"learning_rate=(\S+)", table) == ["0.001", "0.0001", "0.01", "0.1"]
    assert "learning_rate=0.0001 finished 2.6000 0.2000 2.6750 40 32.00K 1,346" in table
    assert "3 of 4 trained" in page
    assert re.search(r"In all elements\s*</dt>\s*<dd[^>]*>batch_size=8<", page)
    assert "learning_rate=0.001 0.2000 below the next" in text_of(page, "Lowest held-out loss")
    assert "non-finite: the loss is not finite" in text_of(page, "Ended without being trained")


def test_the_page_begins_with_a_summary_in_words(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 4)
    write_history(sweep)
    summary = text_of(write_report(sweep).read_text(), "In short")
    assert "microbatch_size=2,recompute=selective is the fastest, with 2,370 tokens/s." in summary
    assert f"2 of 8 could not run: microbatch_size=8,recompute=none ({DOES_NOT_FIT})" in summary
    assert "1 of 8 failed: microbatch_size=4,recompute=none (oom, the step asked for" in summary
    assert re.search(r"microbatch_size=1,recompute=none is slower: 14\.\d% below the 1,5\d\d tokens/s of 9", summary)
    assert "2 of 4 are as fast as before" in summary
    assert "git log ba9876543210..0123456789ab" in summary
    assert f"--sweep-dir {sweep.path} --resume" in summary


def test_a_best_value_at_the_end_of_the_grid_calls_for_more(tmp_path):
    summary = text_of(write_report(write_loss_sweep(tmp_path / "low", (2.4, 2.6, 2.9))).read_text(), "In short")
    assert "The best learning_rate, 0.0001, is the smallest in the grid: try smaller ones." in summary
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


def test_short_names_are_unique_and_keep_every_setting_in_which_elements_differ():
    names = ["model=a,tp=1,batch_size=8", "model=a,tp=2,batch_size=8", "model=a,tp=2,batch_size=8,run=2"]
    short, shared = short_names(names)
    assert (list(short.values()), shared) == (["tp=1", "tp=2", "tp=2,run=2"], ["model=a", "batch_size=8"])
    skipped = "model=a,tp=1,batch_size=9"
    assert short_names(names, [skipped])[0][skipped] == "tp=1,batch_size=9"
    assert short_names(names[1:]) == ({name: name for name in names[1:]}, [])  # the first would have no name
    assert short_names(names[:1]) == ({names[0]: names[0]}, [])


def test_the_history_is_a_table_with_verdicts_and_a_list_of_changes(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", 4)
    write_history(sweep)
    page = write_report(sweep).read_text()
    table = text_of(page, "What changed since last time")
    assert re.search(r"microbatch_size=1,recompute=none slower 1,354 1,59\d \(of 9\) -14\.\d%", table)
    assert "microbatch_size=2,recompute=none no verdict" in table
    assert "torch 2.12.0 2.13.0 all" in table
    assert "Throughput since the first result" in page


def curves(sweep):
    """Return the figure of the training losses of a sweep."""
    elements = read_record(sweep).elements
    rows = [measured_row(one.name, one, RunContents.read(sweep.run(one.name))) for one in elements]
    return rank(rows).panels[0].figure


def test_loss_curves_of_all_elements_share_a_figure_that_one_diverging_does_not_flatten(tmp_path):
    figure = curves(write_loss_sweep(tmp_path / "losses"))
    assert figure.data[0].name == "learning_rate=0.001,batch_size=8"
    assert len(figure.data) == 4
    assert max(figure.data[-1].y) == 9 * 23
    low, high = figure.layout.yaxis.range
    assert low < 2.4
    assert 6 < high < 12
    assert figure.layout.xaxis.title.text == "optimizer step"


def test_losses_of_unequal_batches_are_drawn_by_tokens(tmp_path):
    figure = curves(write_loss_sweep(tmp_path / "losses", (2.6, 2.4), batch_sizes=(4, 8)))
    assert figure.layout.xaxis.title.text == "tokens"
    assert sorted(max(line.x) for line in figure.data[:2]) == [40 * 400, 40 * 800]


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
