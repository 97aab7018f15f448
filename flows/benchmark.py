"""The ``benchmark`` flow: one sweep from its grid to the report that compares its elements."""

from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Failed

from llama_core.benchmark.sweep import SweepConfig
from llama_core.errors import StoppedError, TrainingInfraError
from tasks import sweep as sweep_tasks
from tasks.announce import lines_where_they_are_read


@flow(name="benchmark", validate_parameters=True, on_cancellation=[sweep_tasks.cancel_sweep])
def benchmark(sweep: SweepConfig, sweep_dir: Path | None = None, resume: bool = False) -> Path | State[Any]:
    """Time every element of a sweep and compare their throughput and memory.

    Args:
        sweep: the base configuration and the grid.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep in ``sweep_dir``, or the newest unfinished one of this name.
    """
    with lines_where_they_are_read():
        directory = sweep_tasks.prepare(sweep, sweep_dir, resume=resume)
        sweep_tasks.validate(directory)
        sweep_tasks.rehearse(directory)
        try:
            sweep_tasks.submit(directory)
            sweep_tasks.run(directory)
        except TrainingInfraError as error:
            sweep_tasks.write_report(directory)
            ended = Cancelled if isinstance(error, StoppedError) else Failed
            return ended(message=str(error), data=error)
        return sweep_tasks.write_report(directory)
