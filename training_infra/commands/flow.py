"""``train --flow``: the steps of a run as a Prefect flow."""

import os
import sys
import tomllib
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.records.file_owners import who_else_may_write
from llama_core.records.files import open_file, read_file

_REPOSITORY = Path(__file__).parents[2]


def run_flow(config: RunConfig, run_dir: Path | None, *, resume: bool, allow_data_change: bool, debug: bool) -> None:
    """Run the steps under Prefect, on the server of PREFECT_API_URL or on one that stops with the run.

    Args:
        config: what to run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
        allow_data_change: let the run in ``run_dir`` go on with other sources, weights or stages of its mixture.
        debug: let Prefect log too.

    Raises:
        EnvironmentMismatchError: if the flow is not installed, or Prefect would take the settings of somebody else.
        TrainingInfraError: if a step fails.
    """
    defaults = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",  # the server answers this while its database is away
    }
    if not debug:  # errors reach the user as one line, from main
        defaults |= dict.fromkeys(("PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_SERVER_LEVEL"), "CRITICAL")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    _refuse_settings_of_others()
    # Flows live in the repository, not in the installed package.
    sys.path.insert(0, str(_REPOSITORY))
    try:
        from flows.terminal import train_through_the_flow
    except ImportError:
        raise EnvironmentMismatchError(
            "--flow needs the repository's flows/ folder; install with pip install -e ."
        ) from None
    train_through_the_flow(config, run_dir, resume=resume, allow_data_change=allow_data_change)


def _refuse_settings_of_others() -> None:
    """Refuse to start Prefect in a folder where somebody else has put settings for it, which can make it run code."""
    for name in (".env", "prefect.toml", "pyproject.toml"):
        file = Path(name).absolute()
        others = _who_else_may_write(file)
        if others and (name != "pyproject.toml" or _has_table_for_prefect(file)):
            raise EnvironmentMismatchError(
                f"{file} {others}, and Prefect would take its settings; start the flow in another folder"
            )


def _who_else_may_write(file: Path) -> str:
    """Return who else may write a file, as a clause after its path; empty if nobody may, or there is no file."""
    try:
        with open_file(file) as opened:
            return who_else_may_write(opened.fileno())
    except OSError:  # Prefect cannot read it either
        return ""


def _has_table_for_prefect(file: Path) -> bool:
    try:
        return "prefect" in tomllib.loads(read_file(file).decode()).get("tool", {})
    except (OSError, ValueError):
        return True
