from dataclasses import replace

import pytest

from benchmarks import planner_choice
from benchmarks.calibration_ledger import Figures
from benchmarks.planner_choice import PLANS, choice, table

RUN = Figures(
    tensors_predicted=1.0,
    tensors=1.0,
    process_predicted=1.0,
    process=1.0,
    step_predicted=2.0,
    step=2.0,
    waiting_share=None,
)


def runs(steps, predicted):
    return {
        plan: [replace(RUN, step=step, step_predicted=told)]
        for plan, step, told in zip(PLANS, steps, predicted, strict=True)
    }


def test_a_choice_is_as_bad_as_its_own_step_is_long_whatever_was_predicted():
    made = choice(runs([2.0, 2.5, 3.0, 3.5, 1.6, 4.0], [1.0, 9.0, 9.0, 9.0, 5.0, 9.0]))
    assert (made.chosen, made.best) == ("dp 2", "pp 2")
    assert made.excess == pytest.approx(0.25)


def test_the_table_counts_choices_within_the_bound():
    steps = [2.0, 2.5, 3.0, 3.5, 1.97, 4.0]
    told = table({"far": runs(steps, steps[::-1]), "near": runs(steps, [1, 2, 3, 4, 5, 6])})
    assert "In 1 of 2 worlds" in told
    assert "| +1.5%, dp 2 over pp 2 |" in told.splitlines()[-1]


def test_every_plan_of_a_world_is_measured_and_put_on_the_page(tmp_path, monkeypatch):
    measured = []

    def measure(one, times):
        measured.append(one.arguments)
        return [RUN] * times

    monkeypatch.setattr(planner_choice, "measure", measure)
    page = tmp_path / "cost.md"
    page.write_text("<!-- planner choice -->\nold\n<!-- end of planner choice -->\n")
    planner_choice.main(["--only=150m", f"--out={tmp_path}", f"--page={page}"])
    assert len(set(measured)) == len(PLANS)
    assert "150m, 4 x 128" in page.read_text()
