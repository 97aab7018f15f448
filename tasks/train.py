"""Training: submit the job or find it again, follow it, and show how it ended."""

from contextlib import nullcontext
from typing import Any

from prefect import State, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment

from llama_core.chain import steps
from llama_core.errors import TrainingInfraError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import attach
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import TrainingSummary
from tasks.announce import unless_the_server_is_away
from tasks.endings import ended_by
from tasks.follow import cancellation_heeded
from tasks.run_page import Renewal, RunPage


@task(name="submit", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[2, 10])
def submit(run: RunDirectory) -> JobHandle | None:
    """Start the job unless one is running or the run is finished; a retry finds the job of the previous attempt."""
    return steps.submit(run)


@task(name="train", cache_policy=NO_CACHE)
def train(run: RunDirectory, page: RunPage) -> TrainingSummary | State[Any] | None:
    """Follow the job to its end; show its progress on the flow run's page, and the outcome as a page of its own."""
    try:
        with cancellation_heeded(run) if deployment.id else nullcontext():
            return steps.follow(run, Renewal(page))
    except TrainingInfraError as error:
        return ended_by(error)
    finally:
        if run.outcome.exists() and attach(run) is None:  # else it is the outcome of an earlier job
            page.show_outcome()
            with unless_the_server_is_away():
                create_markdown_artifact(_outcome_page(run), key="outcome")


def _outcome_page(run: RunDirectory) -> str:
    outcome = read_outcome(run)
    return (
        f"# {run.name}: {outcome.status}\n\n{outcome.reason}\n\n"
        f"* last step: {outcome.step}\n* next: {outcome.next_action or 'nothing, the run is finished'}\n"
        f"* directory: `{run.path}`\n"
    )
