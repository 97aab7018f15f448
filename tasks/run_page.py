"""The artifact at the top of a flow run's page: how far its run is, where it is, and its report."""

import re
import time
from dataclasses import dataclass
from uuid import UUID

from prefect import get_client
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import StepRecord
from llama_core.records.metrics import read_heartbeat
from llama_core.runs.console import describe_step
from tasks.announce import unless_the_server_is_away

RENEWAL_SECONDS = 5.0
"""Least time between two renewals: each is an event in Prefect's feed."""
NO_STEP = "no step yet"


@dataclass(frozen=True)
class RunPage:
    """What a flow run's page shows of its run."""

    run: RunDirectory
    artifact: UUID

    @classmethod
    def open(cls, run: RunDirectory) -> "RunPage":
        """Show the run. Call it outside of tasks: a flow run's own artifacts are listed before those of its tasks."""
        artifact = create_progress_artifact(0.0, key=artifact_key(run), description=_description(run, NO_STEP))
        if not isinstance(artifact, UUID):
            raise TypeError("create_progress_artifact returned no UUID; call it in a synchronous flow")
        return cls(run, artifact)

    @classmethod
    def of(cls, run: RunDirectory, flow_run_id: UUID) -> "RunPage | None":
        """Return the page that a flow run of ``run`` has opened last; None if it has opened none."""
        opened = ArtifactFilter(
            key=ArtifactFilterKey(any_=[artifact_key(run)]),
            flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
        )
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(artifact_filter=opened, sort=ArtifactSort.CREATED_DESC, limit=1)
        return cls(run, found[0].id) if found else None

    def show_step(self, record: StepRecord) -> None:
        """Show the newest step; a renewal that fails is left to the next one."""
        self._show(describe_step(record), record, retries=0)

    def show_outcome(self) -> None:
        """Show why the job has ended."""
        outcome = read_outcome(self.run)
        newest = read_heartbeat(self.run)
        step = describe_step(newest) if newest else NO_STEP
        self._show(f"{outcome.status}: {step}", newest, outcome.reason)

    def _show(self, headline: str, newest: StepRecord | None, why: str = "", **options: int) -> None:
        percent = 100 * newest.step / newest.total_steps if newest else 0.0
        with unless_the_server_is_away(**options):
            update_progress_artifact(self.artifact, percent, _description(self.run, headline, why))


class Renewal:
    """Shows steps on a page, at most one every ``RENEWAL_SECONDS``."""

    def __init__(self, page: RunPage) -> None:
        self._page = page
        self._next = 0.0

    def __call__(self, record: StepRecord) -> None:
        """Show a step, unless the last one was shown just now."""
        if time.monotonic() >= self._next:
            self._page.show_step(record)
            self._next = time.monotonic() + RENEWAL_SECONDS


def artifact_key(run: RunDirectory) -> str:
    """Return the key of a run's artifact: its name in Prefect's alphabet, lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", run.name.lower()).strip("-") or "run"


def _description(run: RunDirectory, headline: str, why: str = "") -> str:
    """Return the headline, which is all that a card shows, and a list of the run's files, as Markdown."""
    report = run.report.resolve()
    lines = [
        f"* run directory: `{run.path.resolve()}`",
        f"* report, written at the end: [{report}]({report.as_uri()})",
    ]
    if why:
        lines.insert(0, f"* why: {why}")
    return "\n".join([headline, "", *lines])
