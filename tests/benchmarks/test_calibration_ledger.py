from dataclasses import replace

from benchmarks import calibration_ledger
from benchmarks.calibration_ledger import SHAPES, Figures, memory_table, time_table
from llama_core.units import MIB

RUN = Figures(
    tensors_predicted=98 * MIB,
    tensors=100 * MIB,
    process_predicted=520 * MIB,
    process=500 * MIB,
    step_predicted=None,
    step=2.0,
    waiting_share=0.25,
)


def test_each_run_of_a_shape_has_its_error_beside_the_median():
    table = memory_table({"demo": [RUN, replace(RUN, process=400 * MIB)]})
    assert "1 of 2 runs are within it" in table
    assert "| demo | 98.0 MiB | 100.0 MiB | -2.0 %, -2.0 % | 520 MiB | 450 MiB | +4.0 %, +30.0 % |" in table


def test_a_step_that_nothing_predicts_has_its_measurement_and_no_error():
    table = time_table({"demo": [RUN]})
    assert "0 of 0 runs are within it" in table
    assert "| demo |  | 2.000 s |  | 25% |" in table
    assert "+50.0 %" in time_table({"demo": [replace(RUN, step_predicted=3.0)]})


def test_the_tables_are_put_on_their_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_ledger, "measure", lambda shape, times: [RUN] * times)
    pages = {name: tmp_path / name for name in ("memory.md", "cost.md")}
    for page in pages.values():
        page.write_text("before\n<!-- calibration ledger -->\nold\n<!-- end of calibration ledger -->\nafter\n")
    flags = [f"--memory-page={pages['memory.md']}", f"--time-page={pages['cost.md']}"]
    calibration_ledger.main([*flags, f"--out={tmp_path}", "--only=tp 2", "--times=2"])
    assert "98.0 MiB" in pages["memory.md"].read_text()
    assert "2.000 s" in pages["cost.md"].read_text()
    assert all("old" not in page.read_text() for page in pages.values())


def test_every_shape_has_its_own_name():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
