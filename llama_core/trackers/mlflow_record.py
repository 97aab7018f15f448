"""Which run of MLflow a run has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from llama_core.records.directory import RunDirectory

NAME = "mlflow"


@dataclass(frozen=True)
class MlflowRecord:
    """The run of MLflow that a run has."""

    run_id: Annotated[str, StringConstraints(pattern=r"^\w[\w-]*$")]
    experiment_id: Annotated[str, StringConstraints(pattern=r"^\w[\w-]*$")]


def record_path(run: RunDirectory) -> Path:
    """Return the file that holds the ``MlflowRecord``, so that the run goes on there when it is resumed."""
    return run.tracker(NAME) / "run.json"
