"""What a run sends to MLflow, by MLflow's client."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key, read_file, read_typed, write_json
from llama_core.records.job import Outcome
from llama_core.records.metrics import read_heartbeat
from llama_core.redaction import redacted
from llama_core.trackers.background import Values
from llama_core.trackers.mlflow_record import MlflowRecord, record_path
from llama_core.trackers.traits import EVALUATIONS, TrackedRun

# The client reads these when it is imported or used. It would try a request again for minutes, in which nothing tells
# that the server is away; and it sends telemetry to its makers.
for _variable, _default in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_variable, _default)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

logger = logging.getLogger(__name__)

MAX_METRICS, MAX_PARAMS = 1000, 100
"""Most metrics and parameters of one request, of MLflow's REST API."""
MAX_VALUE = 6000
"""Most characters of a parameter, likewise."""
_OTHER_CHARACTERS = re.compile(r"[^\w./\- :]")  # than those of its names
_AGAIN = {408, 429}
"""HTTP's codes, besides those of errors of the server, after which the same request may succeed."""
T = TypeVar("T")


class MlflowService:
    """The run of MLflow that belongs to a run: the same one when it is resumed, evaluated or reported on.

    Args:
        run: the run.
        experiment: the name of MLflow's experiment.
    """

    def __init__(self, run: TrackedRun, experiment: str) -> None:
        self._run = run
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._is_over = False

    def send(self, values: Sequence[Values]) -> None:
        """Send values as metrics; MLflow keeps one of several that are equal in name, step, time and value."""
        client, run_id = self._begun()
        metrics = [
            Metric(_name(name), value, int(1000 * one.time), one.step)
            for one in values
            for name, value in one.values.items()
        ]
        for part in _parts(metrics, MAX_METRICS):
            client.log_batch(run_id, metrics=part)

    def keep(self, file: Path) -> None:
        """Send a file as an artifact."""
        client, run_id = self._begun()
        client.log_artifact(run_id, str(file))
        self._is_over = True

    def is_away(self, error: Exception) -> bool:
        """Return whether no answer came, or that of a server that cannot answer now."""
        if isinstance(error, MlflowException):
            code = int(error.get_http_status_code())  # type: ignore[no-untyped-call]
            return code >= 500 or code in _AGAIN
        return isinstance(error, OSError)  # of a connection or a disk

    def close(self) -> None:
        """Say how the run ended, as far as that is known."""
        if self._run_id and self._client is not None and self._run.part != EVALUATIONS:
            self._client.set_terminated(self._run_id, _status(self._run.directory, is_over=self._is_over))

    def _begun(self) -> tuple[MlflowClient, str]:
        """Return the client and the id of the run, which is made, or goes on, with the first request."""
        if self._client is None:
            self._client = MlflowClient()
        if not self._run_id:
            run_id = self._known(self._client) or self._created(self._client)
            if self._run.part != EVALUATIONS:
                self._describe(self._client, run_id)
            self._run_id = run_id
        return self._client, self._run_id

    def _known(self, client: MlflowClient) -> str:
        """Return the id of the run's run, which then counts as running; empty if there is none."""
        path = record_path(self._run.directory)
        if not path.exists():
            return ""
        run_id = read_typed(path, MlflowRecord, self._run.directory.path).run_id
        try:
            stage = client.get_run(run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stage = "none"  # it is on another server
        if stage != "active":
            path.unlink()
            return ""
        if self._run.part != EVALUATIONS:
            client.update_run(run_id, "RUNNING")
        return run_id

    def _created(self, client: MlflowClient) -> str:
        run = self._run.directory
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = str(found.experiment_id if found is not None else self._new_experiment(client))
        tags = {"group": self._run.group, "fingerprint": self._run.fingerprint(), "mlflow.source.name": str(run.path)}
        commit = self._run.records().get("environment", {}).get("commit")
        if commit:
            tags["mlflow.source.git.commit"] = commit
        made = client.create_run(experiment_id, run_name=run.name, tags=tags)
        created = MlflowRecord(str(made.info.run_id), experiment_id)
        # an evaluation may make one at the same time; the first that is recorded counts
        write_json(record_path(run), created, replaces=False)
        recorded = read_typed(record_path(run), MlflowRecord, run.path)
        if recorded != created:
            client.delete_run(created.run_id)
        return recorded.run_id

    def _new_experiment(self, client: MlflowClient) -> str:
        try:
            return str(client.create_experiment(self._experiment))
        except MlflowException:
            found = client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return str(found.experiment_id)  # another run has made it meanwhile

    def _describe(self, client: MlflowClient, run_id: str) -> None:
        """Send settings, plan and records. Parameters never change there, so those of the first attempt stay."""
        if not client.get_run(run_id).data.params:
            records = {name: record for name, record in self._run.records().items() if name != "environment"}
            params = list(_params({**self._run.configuration, **records}))
            for part in _parts(params, MAX_PARAMS):
                client.log_batch(run_id, params=part)
        versions = self._run.records().get("environment", {})
        tags = [RunTag(f"environment.{name}", str(value)) for name, value in versions.items()]
        for some in _parts(tags, MAX_PARAMS):
            client.log_batch(run_id, tags=some)
        run = self._run.directory
        try:
            for file in (run.config, run.plan, run.estimate, run.environment, run.settings_changes):
                if file.exists():
                    client.log_text(run_id, redacted(read_file(file, run.path).decode()), file.name)
        except Exception as error:
            if self.is_away(error):
                raise
            logger.warning("MLflow keeps no files of the run, only its values: %s: %s", type(error).__name__, error)


def _status(run: RunDirectory, *, is_over: bool) -> str:
    """Return how a run has ended, in MLflow's words."""
    # the loop of a run ends before its outcome is recorded; there may be that of an earlier attempt
    if is_over and run.outcome.exists():
        status = read_typed(run.outcome, Outcome, run.path).status
        return {"finished": "FINISHED", "cancelled": "KILLED"}.get(status, "FAILED")
    newest = read_heartbeat(run)
    return "FINISHED" if newest is not None and newest.step == newest.total_steps else "KILLED"


def _params(nested: Mapping[str, Any]) -> Iterator[Param]:
    for key, value in by_dotted_key(nested).items():
        text = value if isinstance(value, str) else json.dumps(value)
        cut = text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"  # the files there have all of it
        yield Param(_name(key), cut)


def _name(name: str) -> str:
    return _OTHER_CHARACTERS.sub("_", name)


def _parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]
