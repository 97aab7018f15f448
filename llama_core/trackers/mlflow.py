"""MLflow: a run there has the steps, the scores of checkpoints, the configuration, the records and the report.

The server is that of MLflow's own variables, since a configuration may be a stranger's.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from llama_core.errors import EnvironmentMismatchError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.redaction import redacted, shell_word
from llama_core.trackers.background import BackgroundTracker
from llama_core.trackers.mlflow_record import NAME, MlflowRecord, record_path
from llama_core.trackers.traits import TrackedRun, TrackerSettings, TrackerType

TITLE = "MLflow"
_URI = "MLFLOW_TRACKING_URI"


class MlflowSettings(TrackerSettings):
    """Where MLflow keeps the run; the server is that of the variable MLFLOW_TRACKING_URI."""

    experiment: str = Field("llama-training-infra", min_length=1, max_length=256)
    """The experiment there, which is made if it is missing."""


def _open(run: TrackedRun, settings: MlflowSettings) -> BackgroundTracker:
    from llama_core.trackers.mlflow_service import MlflowService

    for problem in _problems(settings):
        raise EnvironmentMismatchError(problem)
    return BackgroundTracker(MlflowService(run, settings.experiment), TITLE)


def _keep(run: TrackedRun, settings: MlflowSettings, file: Path) -> None:
    if record_path(run.directory).exists():  # otherwise it has nothing of the run
        tracker = _open(run, settings)
        tracker.keep(file)
        tracker.close()


def _where(run: RunDirectory, settings: MlflowSettings | None) -> str:
    if not record_path(run).exists():
        return ""
    there = read_typed(record_path(run), MlflowRecord, run.path)
    uri = redacted(os.environ.get(_URI, f"${_URI}"))
    server = urlsplit(uri)
    if server.scheme in {"http", "https"}:
        address = f"{server.scheme}://{server.netloc.rpartition('@')[2]}{server.path.rstrip('/')}"
        return f"{address}/#/experiments/{there.experiment_id}/runs/{there.run_id}"
    return f"mlflow ui --backend-store-uri {shell_word(uri)}, run {there.run_id}"


def _problems(settings: MlflowSettings) -> Iterator[str]:
    if not os.environ.get(_URI):
        yield f"tracking.trackers.{NAME} needs the address of a server; export {_URI}=https://..., or do without it"


MLFLOW = TrackerType(
    NAME,
    TITLE,
    settings=MlflowSettings,
    open=_open,
    where=_where,
    package="mlflow-skinny",
    imports=("llama_core.trackers.mlflow_service",),
    problems=_problems,
    keep=_keep,
    variables=(
        _URI,
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
        "MLFLOW_TRACKING_INSECURE_TLS",
    ),
)
