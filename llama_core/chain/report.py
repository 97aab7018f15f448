"""What becomes of a run's report once it is written."""

from functools import partial
from pathlib import Path

from llama_core.errors import RequestError
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_heartbeat
from llama_core.runs.console import say
from llama_core.runs.loading import load_config
from llama_core.trackers.guarded import keep_file
from llama_core.training.metrics import tracked_run


def say_report(run: RunDirectory, report: Path) -> None:
    """Print where the report is, and let the trackers that can keep it with the run's values."""
    say("report", str(report))
    try:
        config = load_config(run)
        newest = read_heartbeat(run)
    except RequestError:  # of a record that was edited meanwhile; the report says so
        return
    if newest is not None:
        tracked = tracked_run(run, config, resumed_at=newest.step)
        for asked in config.tracking.asked_trackers():
            keep_file(asked, tracked, report, partial(say, "warning"))
