"""The report of a run."""

from pathlib import Path

from prefect import task
from prefect.artifacts import create_link_artifact
from prefect.cache_policies import NO_CACHE

from llama_core.records.directory import RunDirectory
from tasks.announce import unless_the_server_is_away
from training_reports.page import write_report as write_page


@task(name="report", cache_policy=NO_CACHE)
def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` and link to it."""
    path = write_page(run)
    with unless_the_server_is_away():
        create_link_artifact(path.resolve().as_uri(), key="report", link_text=f"report of {run.name}")
    return path
