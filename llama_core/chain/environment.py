"""Check whether a run can start here: the machine, its data and weights, and Slurm."""

from pathlib import Path

from llama_core.chain.prepare import check_initial_weights
from llama_core.chain.runs import RUNS
from llama_core.config.run import RunConfig
from llama_core.data.check import check_data
from llama_core.errors import RequestError
from llama_core.launch.jobs.submission import LAUNCHERS
from llama_core.machine.validate import EnvironmentReport, Findings, check_machine
from llama_core.records.directory import RunDirectory


def validate_environment(
    config: RunConfig | None = None, run_dir: Path = RUNS, *, saves: bool = True
) -> EnvironmentReport:
    """Return the errors, warnings and facts found on this machine. Imports no torch.

    Args:
        config: the run to check for; None checks only the installation and the machine.
        run_dir: where the run's files will go.
        saves: whether the run saves checkpoints there.
    """
    found = Findings()
    check_machine(found, config, run_dir, saves=saves)
    if config is not None:
        try:
            check = check_data(config.data, config.spec)
            found.facts["data"] = "; ".join((check.summary, *check.notes))
        except RequestError as error:
            found.errors.append(str(error))
        try:
            found.warnings += check_initial_weights(config, RunDirectory(run_dir))
        except RequestError as error:
            found.errors.append(str(error))
    for name, launcher in LAUNCHERS.items():
        launcher.check(found, config if config is not None and config.launch.launcher == name else None)
    return found.report()
