"""The ``train`` flow: one run from its configuration to its report."""

from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Failed

from llama_core.artifacts import RunDirectory
from llama_core.config.run import RunConfig
from llama_core.errors import TrainingFailedError, TrainingInfraError
from llama_core.launch.outcome import read_outcome
from llama_core.steps import stopping_on_interrupt
from tasks import benchmark, preflight, report
from tasks import train as training
from tasks.announce import lines_where_they_are_read
from tasks.follow import cancel_job


@flow(name="train", validate_parameters=True, on_cancellation=[cancel_job])
def train(config: RunConfig, run_dir: Path | None = None, resume: bool = False) -> Path | State[Any]:
    """Validate, estimate, rehearse, train, benchmark and report one run.

    Args:
        config: everything that defines the run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
    """
    with lines_where_they_are_read():
        run = preflight.prepare_run(config, run_dir, resume=resume)
        preflight.validate_environment(run)
        preflight.estimate_memory(run)
        preflight.dry_run(run)
        try:
            with stopping_on_interrupt(run):
                training.submit(run)
                training.train(run)
                benchmark.benchmark(run)
        except TrainingInfraError as error:
            report.write_report(run)
            return _ended(run, error)
        return report.write_report(run)


def _ended(run: RunDirectory, error: TrainingInfraError) -> State[Any]:
    """Return the state of a flow run that an expected error ends; it shows the reason in one line."""
    if isinstance(error, TrainingFailedError) and read_outcome(run).status == "cancelled":
        return Cancelled(message=str(error), data=error)
    return Failed(message=str(error), data=error)
