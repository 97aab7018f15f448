"""The ``train`` flow: one run from its configuration to its report."""

import signal
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.exceptions import TerminationSignal

from llama_core.chain.chain import Steps, run_chain
from llama_core.config.run import RunConfig
from llama_core.errors import TrainingInfraError
from tasks import benchmark, evaluation, preflight, report
from tasks import train as training
from tasks.announce import lines_where_they_are_read
from tasks.endings import BeingCancelledError, ended_by, result_of
from tasks.follow import cancel_job
from tasks.run_page import RunPage


@flow(name="train", validate_parameters=True, on_cancellation=[cancel_job])
def train(
    config: RunConfig, run_dir: Path | None = None, resume: bool = False, allow_data_change: bool = False
) -> Path | State[Any]:
    """Validate, estimate, rehearse, train, evaluate, benchmark and report: ``run_chain`` with each step as a task.

    Args:
        config: everything that defines the run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
        allow_data_change: let the run in ``run_dir`` go on with other sources, weights or stages of its mixture.
    """
    steps = Steps(
        prepare=lambda: preflight.prepare_run(config, run_dir, resume=resume, allow_data_change=allow_data_change),
        validate=preflight.validate_environment,
        estimate=preflight.estimate_memory,
        rehearse=preflight.dry_run,
        submit=training.submit,
        train=lambda run: result_of(training.train(run, RunPage.open(run))),
        evaluate=evaluation.evaluate,
        benchmark=benchmark.benchmark,
        report=report.write_report,
    )
    try:
        with lines_where_they_are_read():
            return run_chain(steps).report
    except BeingCancelledError:
        raise TerminationSignal(signal.SIGTERM) from None  # sets no state: the job has not ended yet
    except TrainingInfraError as error:
        return ended_by(error)
