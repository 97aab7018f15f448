"""The ``train`` flow: one run from its configuration to its report."""

from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Failed

from llama_core.chain.chain import Steps, run_chain
from llama_core.config.run import RunConfig
from llama_core.errors import CancelledError, TrainingInfraError
from tasks import benchmark, preflight, report
from tasks import train as training
from tasks.announce import lines_where_they_are_read
from tasks.follow import cancel_job


@flow(name="train", validate_parameters=True, on_cancellation=[cancel_job])
def train(config: RunConfig, run_dir: Path | None = None, resume: bool = False) -> Path | State[Any]:
    """Validate, estimate, rehearse, train, benchmark and report one run: ``run_chain`` with each step as a task.

    Args:
        config: everything that defines the run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
    """
    steps = Steps(
        prepare=lambda: preflight.prepare_run(config, run_dir, resume=resume),
        validate=preflight.validate_environment,
        estimate=preflight.estimate_memory,
        rehearse=preflight.dry_run,
        submit=training.submit,
        train=training.train,
        benchmark=benchmark.benchmark,
        report=report.write_report,
    )
    with lines_where_they_are_read():
        try:
            return run_chain(steps).report
        except CancelledError as error:
            return Cancelled(message=str(error), data=error)
        except TrainingInfraError as error:  # an expected error: the state shows its one line
            return Failed(message=str(error), data=error)
