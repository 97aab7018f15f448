from pathlib import Path

import pytest

from benchmarks.cost_ledger import cost_ledger, read_cases, read_rows, tables
from benchmarks.published.fitting import Measured, fit, left_out
from llama_core.planning.frameworks.registry import framework
from llama_core.planning.frameworks.traits import Efficiencies

PAGE = Path(__file__).parents[2] / "docs/cost.md"
CASES, UNMAPPED = read_cases(read_rows())
LEDGER = cost_ledger(CASES)


def of(name):
    return [case for case in CASES if case.framework == name]


def test_the_page_shows_the_current_ledger():
    assert tables(LEDGER, UNMAPPED) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("left_out_by", ["without_configuration", "without_source"])
def test_rows_left_out_are_predicted_within_10_percent_on_average(left_out_by):
    seconds = getattr(LEDGER, left_out_by)
    assert LEDGER.mean_absolute(seconds) < 0.10
    assert LEDGER.mean_absolute(seconds, [case for case in CASES if case.states_conditions]) < 0.08
    for name in ("torchtitan", "Megatron-LM", "fms-fsdp"):
        assert LEDGER.mean_absolute(seconds, of(name)) < 0.08


def test_efficiencies_predict_rows_that_they_have_not_seen_better_than_our_rates():
    for name in ("torchtitan", "Megatron-LM", "fms-fsdp"):
        left_out_error = LEDGER.mean_absolute(LEDGER.without_configuration, of(name))
        assert left_out_error < 0.7 * LEDGER.mean_absolute(LEDGER.own, of(name))


@pytest.mark.parametrize("name", ["torchtitan", "Megatron-LM", "nanotron", "fms-fsdp"])
def test_the_product_has_the_efficiencies_that_the_committed_rows_give(name):
    known = framework(name, month="", remarks="").efficiencies
    found = LEDGER.fitted[name]
    assert known.products == pytest.approx(found.products, abs=0.01)
    assert known.tensor_parallel == pytest.approx(found.tensor_parallel, abs=0.01)
    assert known.step_seconds == pytest.approx(found.step_seconds, abs=0.001)
    assert known.num_rows == len(of(name))
    assert known.left_out_error == pytest.approx(
        LEDGER.mean_absolute(LEDGER.without_configuration, of(name)), abs=0.001
    )


def test_a_framework_with_a_single_configuration_is_not_fitted():
    assert len({case.measured.configuration for case in of("torchtune")}) == 1
    assert LEDGER.fitted["torchtune"] == Efficiencies()


def made(efficiencies):
    rows = [case.measured for case in of("Megatron-LM")]
    return [Measured(row.name, row.configuration, row.source, row.time.total(efficiencies), row.time) for row in rows]


def test_a_fit_finds_the_efficiencies_that_made_the_rows():
    efficiencies = Efficiencies(products=1.2, tensor_parallel=0.6, step_seconds=0.05)
    found = fit(made(efficiencies))
    assert found.products == pytest.approx(1.2, rel=0.03)
    assert found.tensor_parallel == pytest.approx(0.6, rel=0.1)


def test_rows_made_by_our_rates_are_fitted_by_our_rates():
    found = fit(made(Efficiencies()))
    assert (found.products, found.tensor_parallel) == pytest.approx((1, 1), rel=1e-4)
    assert found.step_seconds == pytest.approx(0, abs=1e-6)


def test_the_prediction_of_a_row_does_not_depend_on_its_own_figure():
    rows = [case.measured for case in of("torchtitan")]
    wrong = [
        row if row.name != "M024" else Measured(row.name, row.configuration, row.source, 99.0, row.time) for row in rows
    ]
    first = left_out(rows, lambda row: row.configuration)
    second = left_out(wrong, lambda row: row.configuration)
    assert first["M024"] == second["M024"]
    assert first["M040"] != second["M040"]
