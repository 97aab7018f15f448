"""Training: submit the job or find it again, follow it, and show how it ended."""

from contextlib import nullcontext
from uuid import UUID

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment

from llama_core.chain import steps
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import StepRecord, TrainingSummary
from tasks.announce import unless_the_server_is_away
from tasks.follow import cancellation_heeded


@task(name="submit", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[2, 10])
def submit(run: RunDirectory) -> JobHandle | None:
    """Start the job unless one is running or the run is finished; a retry finds the job of the previous attempt."""
    return steps.submit(run)


@task(name="train", cache_policy=NO_CACHE)
def train(run: RunDirectory) -> TrainingSummary | None:
    """Follow the job to its end; show the progress as a bar and the outcome as a page."""
    with cancellation_heeded(run) if deployment.id else nullcontext():
        try:
            return steps.follow(run, _Progress())
        finally:
            if run.outcome.exists():
                with unless_the_server_is_away():
                    create_markdown_artifact(_outcome_page(run), key="outcome")


class _Progress:
    """A Prefect progress artifact, updated at every whole percent."""

    def __init__(self) -> None:
        artifact = create_progress_artifact(0.0, key="training-progress")
        if not isinstance(artifact, UUID):
            raise TypeError("create_progress_artifact returned no UUID; call it in a synchronous task")
        self.artifact = artifact
        self.percent = 0

    def __call__(self, record: StepRecord) -> None:
        percent = record.step * 100 // record.total_steps
        if percent > self.percent:
            self.percent = percent
            with unless_the_server_is_away():
                update_progress_artifact(self.artifact, float(percent))


def _outcome_page(run: RunDirectory) -> str:
    outcome = read_outcome(run)
    return (
        f"# {run.name}: {outcome.status}\n\n{outcome.reason}\n\n"
        f"* last step: {outcome.step}\n* next: {outcome.next_action or 'nothing, the run is finished'}\n"
        f"* directory: `{run.path}`\n"
    )
