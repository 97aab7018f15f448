"""Figures show every record they get, add up, and leave out missing values."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import BENCHMARK, DRY_RUN, ESTIMATE, step_record, step_records, table

from training_reports import by_step, figures, page
from training_reports.contents import RunContents
from training_reports.peak_memory import CATEGORY_COLORS, memory_comparison

PAGE_COLORS = ("#ffffff", "#1b1f25")
sizes = st.integers(min_value=0, max_value=2**42)
profiles = st.dictionaries(st.sampled_from([*CATEGORY_COLORS, "unforeseen"]), sizes, min_size=1).map(
    lambda stack: {"phases": {"backward": stack}, "peak_phase": "backward", "peak_bytes": sum(stack.values())}
)


@pytest.fixture
def steps():
    return table(step_records()).assign(
        expert_load=lambda table: 1 + 1 / table["step"],
        router_entropy=lambda table: 1.3 - 1 / table["step"],
        reward_chosen=lambda table: 0.1 * table["step"],
        reward_rejected=lambda table: -0.2 * table["step"],
        reward_margin=lambda table: 0.3 * table["step"],
        reward_accuracy=lambda table: 1 - 0.5 / table["step"],
        eval_reward_margin=lambda table: 0.2 * table["step"],
        eval_reward_accuracy=lambda table: 1 - 0.7 / table["step"],
        kl=lambda table: -0.4 * table["step"],
        **{"<b>": lambda table: 0.5 * table["step"]},
    )


def traces(figure):
    return {trace.name: trace for trace in figure.data}


def length_in_bytes(figure, row):
    unit = 2**30 if "GiB" in row else 2**20
    return unit * sum(x for bar in figure.data for x, y in zip(bar.x, bar.y, strict=True) if y == row)


def rows(figure):
    return {label.split("<br>")[0]: label for label in figure.layout.yaxis.categoryarray}


@pytest.mark.parametrize(
    ("draw", "shown"),
    [
        (by_step.loss, {"training": "loss"}),
        (
            by_step.learning_rate_and_gradient_norm,
            {"learning rate": "learning_rate", "gradient norm": "grad_norm"},
        ),
        (by_step.routing, {"busiest expert": "expert_load", "entropy": "router_entropy"}),
        (
            by_step.rewards,
            {
                "chosen": "reward_chosen",
                "rejected": "reward_rejected",
                "margin": "reward_margin",
                "accuracy": "reward_accuracy",
                "held-out margin": "eval_reward_margin",
                "held-out accuracy": "eval_reward_accuracy",
                "KL from the reference": "kl",
            },
        ),
        (lambda steps: by_step.other_metrics(steps, ["kl", "<b>"]), {"kl": "kl", "&lt;b&gt;": "<b>"}),
        (by_step.throughput, {"training steps": "tokens_per_second"}),
        (
            by_step.step_time,
            {
                "backward": "backward_seconds",
                "optimizer": "optimizer_seconds",
                "waiting for data": "data_seconds",
            },
        ),
    ],
)
def test_every_record_is_in_the_line_of_its_figure(draw, shown, steps):
    drawn = traces(draw(steps))
    for name, column in shown.items():
        np.testing.assert_array_equal(drawn[name].x, steps["step"])
        np.testing.assert_array_equal(drawn[name].y, steps[column])


def test_memory_by_step_shows_every_record_in_the_unit_of_its_axis(steps):
    figure = by_step.memory_by_step(steps)
    assert figure.layout.yaxis.title.text == "memory (GiB)"
    np.testing.assert_allclose(traces(figure)["held now"].y * 2**30, steps["memory_allocated_bytes"])
    np.testing.assert_allclose(traces(figure)["peak so far"].y * 2**30, steps["memory_peak_bytes"])


def test_memory_by_step_shows_what_is_taken(steps):
    taken = traces(by_step.memory_by_step(steps.assign(memory_reserved_bytes=2**32)))["taken so far"]
    np.testing.assert_allclose(taken.y, 4.0)


def test_held_out_points_are_the_steps_that_were_evaluated(steps):
    held_out = traces(by_step.loss(steps))["held-out"]
    assert list(held_out.x) == [10, 20, 30, 40]
    assert "held-out" not in traces(by_step.loss(steps.assign(eval_loss=math.nan)))


def test_skipped_steps_are_marked_at_the_last_finite_loss(steps):
    skipped = traces(by_step.loss(steps))["skipped step"]
    assert list(skipped.x) == [14]
    assert list(skipped.y) == [steps["loss"][12]]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_run_without_one_finite_loss_still_marks_its_skipped_steps(loss):
    steps = table([step_record(step, loss=loss, skipped=True) for step in (1, 2)])
    assert np.isfinite(traces(by_step.loss(steps))["skipped step"].y).all()


@pytest.mark.parametrize(("unigram", "bigram"), list(product((None, 3.1), (None, 2.3))))
def test_each_known_entropy_is_a_line_at_its_value(unigram, bigram, steps):
    levels = [shape.y0 for shape in by_step.loss(steps, unigram, bigram).layout.shapes]
    assert levels == [entropy for entropy in (unigram, bigram) if entropy is not None]


def test_the_benchmark_is_a_line_at_its_median_inside_the_band_of_its_middle_half(steps):
    band, line = by_step.throughput(steps, BENCHMARK).layout.shapes
    rates = [BENCHMARK.tokens_per_step / seconds for seconds in BENCHMARK.step_seconds]
    assert line.y0 == line.y1 == BENCHMARK.tokens_per_second
    assert band.y0 <= line.y0 <= band.y1
    assert [band.y0 <= rate <= band.y1 for rate in sorted(rates)] == [False, True, True, True, False]


@given(st.lists(st.tuples(*[st.floats(0, 1e4)] * 5), min_size=1, max_size=20))
def test_the_stacked_times_of_a_step_add_up_to_the_whole_step(times):
    steps = table(
        step_record(
            number,
            data_seconds=data,
            forward_backward_seconds=forward + backward,
            backward_seconds=backward,
            optimizer_seconds=optimizer,
            step_seconds=data + forward + backward + optimizer + rest,
        )
        for number, (data, forward, backward, optimizer, rest) in enumerate(times, start=1)
    )
    figure = by_step.step_time(steps)
    assert {trace.stackgroup for trace in figure.data} == {"step"}
    stack = sum(trace.y for trace in figure.data)
    np.testing.assert_allclose(stack, steps["step_seconds"], rtol=1e-9, atol=1e-9)


def test_parts_longer_than_their_step_by_clock_error_give_no_negative_time():
    steps = table([step_record(1, forward_backward_seconds=20.0, step_seconds=19.999)])
    assert all((trace.y >= 0).all() for trace in by_step.step_time(steps).data)


@given(estimated=profiles, rehearsed=profiles, measured=sizes)
def test_each_memory_bar_is_as_long_as_its_peak(estimated, rehearsed, measured):
    figure = memory_comparison(estimated, rehearsed, measured)
    labels = rows(figure)
    assert length_in_bytes(figure, labels["estimated"]) == pytest.approx(estimated["peak_bytes"])
    assert length_in_bytes(figure, labels["rehearsed"]) == pytest.approx(rehearsed["peak_bytes"])
    assert length_in_bytes(figure, labels["measured"]) == pytest.approx(measured)


@pytest.mark.parametrize(
    ("estimated", "rehearsed", "measured"), list(product((None, ESTIMATE), (None, DRY_RUN), (None, 2**30)))
)
def test_an_unknown_peak_has_no_memory_bar(estimated, rehearsed, measured):
    given_ones = {"estimated": estimated, "rehearsed": rehearsed, "measured": measured}
    labels = rows(memory_comparison(estimated, rehearsed, measured))
    assert list(labels) == [name for name, value in given_ones.items() if value is not None]


def test_categories_keep_their_colour_and_order():
    bars = memory_comparison(ESTIMATE, DRY_RUN, None).data
    expected = [category for category in CATEGORY_COLORS if category in ESTIMATE["phases"]["backward"]]
    assert [bar.name for bar in bars] == expected
    assert [bar.marker.color for bar in bars] == [CATEGORY_COLORS[category] for category in expected]


def test_every_figure_of_a_page_names_its_axes(run):
    contents = RunContents.read(run)
    for panel in page._panels(contents):
        assert list(panel.figure.select_xaxes())[-1].title.text, panel.title
    for panel in (*by_step.panels_of_learning(contents), *by_step.panels_of_running(contents)):
        assert all(axis.title.text for axis in panel.figure.select_yaxes()), panel.title
    assert memory_comparison(ESTIMATE, None, None).layout.xaxis.title.text == "peak memory per rank (GiB)"


def test_single_and_many_steps_are_both_visible():
    single = by_step.step_time(table([step_record(1)]))
    many = by_step.loss(table([step_record(step) for step in range(1, 200)]))
    assert {trace.mode for trace in single.data} == {"lines+markers"}
    assert traces(many)["training"].mode == "lines"


@pytest.mark.parametrize("color", sorted({*CATEGORY_COLORS.values(), *by_step.PART_COLORS.values(), figures.GREY}))
@pytest.mark.parametrize("background", PAGE_COLORS)
def test_series_stand_out_from_the_light_and_the_dark_page(color, background):
    light, dark = sorted((luminance(color), luminance(background)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3  # WCAG 2.2, success criterion 1.4.11


def luminance(color):
    """Return the relative luminance of an sRGB colour (WCAG 2.2)."""
    channels = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_the_named_held_out_losses_have_a_line_each_with_every_evaluation():
    recorded = {2: {"wiki": 3.0, "code": 2.0}, 4: {"wiki": 2.5, "code": 1.5}}
    steps = pd.DataFrame({"step": range(1, 5), "eval_losses": [recorded.get(step, {}) for step in range(1, 5)]})
    lines = {line.name: (list(line.x), list(line.y)) for line in by_step.named_losses(steps).data}
    assert lines == {"wiki": ([2, 4], [3.0, 2.5]), "code": ([2, 4], [2.0, 1.5])}
