"""The report links to the files of its run."""

from synthetic_run import write_run

from llama_core.trackers.registry import TRACKERS
from training_reports.files import run_files


def test_the_files_of_every_tracker_are_linked_beside_the_metrics(tmp_path):
    run = write_run(tmp_path / "run")
    assert [link.href for link in run_files(run)["Metrics"]] == ["metrics/"]
    names = [kind.name for kind in TRACKERS.built_in()]
    for name in names:
        run.tracker(name).mkdir(parents=True)
    assert [link.href for link in run_files(run)["Metrics"]] == ["metrics/", *(f"logs/{name}/" for name in names)]
