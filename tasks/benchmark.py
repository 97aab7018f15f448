"""The timed steps of a run."""

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from llama_core.chain import steps
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import BenchmarkRecord
from tasks.announce import unless_the_server_is_away


@task(name="benchmark", cache_policy=NO_CACHE)
def benchmark(run: RunDirectory) -> BenchmarkRecord | None:
    """Return the steps timed inside the training job, and show them as a table; None if there are none."""
    record = steps.timed_steps(run)
    if record is None:
        return None
    rows = [{"timed step": number, "seconds": seconds} for number, seconds in enumerate(record.step_seconds, start=1)]
    with unless_the_server_is_away():
        create_table_artifact(rows, key="benchmark", description=record.summary())
    return record
