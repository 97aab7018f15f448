"""The ``benchmark`` flow: one sweep, from its grid to the report."""

from pathlib import Path
from typing import Any

from prefect import State, flow

from llama_core.errors import TrainingInfraError
from llama_core.sweep.chain import SweepSteps, run_sweep
from llama_core.sweep.directory import SweepDirectory
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.judgement import read_judgement, refuse_regressions
from tasks import sweep as sweep_tasks
from tasks.announce import lines_where_they_are_read
from tasks.endings import ended_by


@flow(name="benchmark", validate_parameters=True, on_cancellation=[sweep_tasks.cancel_sweep])
def benchmark(
    sweep: SweepConfig, sweep_dir: Path | None = None, resume: bool = False, fail_on_regression: bool = False
) -> Path | State[Any]:
    """Time or train every element of a sweep, and rank them by their throughput, a held-out loss or a score.

    Args:
        sweep: the base configuration, the grid, and the objective that ranks its elements.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep in ``sweep_dir``, or the newest unfinished one of this name.
        fail_on_regression: end as Failed if an element is slower than in earlier sweeps.
    """
    steps = SweepSteps(
        validate=sweep_tasks.validate,
        rehearse=sweep_tasks.rehearse,
        submit=sweep_tasks.submit,
        follow=sweep_tasks.follow_elements,
        remember=sweep_tasks.remember,
        report=sweep_tasks.write_report,
    )
    try:
        with lines_where_they_are_read():
            report = run_sweep(sweep_tasks.prepare(sweep, sweep_dir, resume=resume), steps)
            if fail_on_regression:
                refuse_regressions(read_judgement(SweepDirectory(report.parent)))
            return report
    except TrainingInfraError as error:
        return ended_by(error)
