"""Load what a run recorded about itself: its configuration and its plan."""

from llama_core.config.recorded import load_recorded
from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed


def load_config(run: RunDirectory) -> RunConfig:
    """Return the resolved configuration of ``run``.

    Raises:
        RunDirectoryError: if the directory holds no run.
        ConfigError: naming every problem in its ``config.yaml``, and how to get the settings back.
    """
    if not run.config.exists():
        raise RunDirectoryError(f"{run.path} holds no run (no {run.config.name})")
    return load_recorded(run)


def load_plan(run: RunDirectory) -> ParallelPlan:
    """Return the plan of ``run``."""
    return read_typed(run.plan, ParallelPlan)
