"""Tasks as Slurm jobs: several are a job array."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import safe_python
from llama_core.launch.jobs.slurm_request import (
    comment_of,
    in_one_task,
    job_name,
    refusal,
    slurm_executor,
    slurm_parameters,
    submission_environment,
)
from llama_core.launch.jobs.tasks import TaskJobs, TaskRequest
from llama_core.launch.rank.start import python_command
from llama_core.launch.slurm import ENDED, FILES_SECONDS, FIRST_POLL_SECONDS, array_statuses, cancel, job_status


@dataclass(frozen=True)
class _Repeated:
    """A task that submitit queues again when Slurm stops its job."""

    task: Callable[[], None]

    def __call__(self) -> None:
        self.task()

    def checkpoint(self) -> Any:
        """Return what submitit queues."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _submit(request: TaskRequest) -> list[str]:
    """Submit a job, or an array of jobs, and return their ids.

    Raises:
        EnvironmentMismatchError: if there is no Slurm here, or it refuses the jobs.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    # submitit itself has to hear of a signal if it is to queue a task again
    python = shlex.join(safe_python()) if request.can_repeat else python_command()
    executor = slurm_executor(request.folder, python, f"{request.what} {str(request.folder)!r}", request.instead)
    asked = slurm_parameters(
        request.config, request.name, comment_of(request.folder), request.num_ranks, request.host_bytes
    )
    executor.update_parameters(**in_one_task(asked))
    tasks = [_Repeated(task) if request.can_repeat else task for task in request.tasks]
    try:
        with submission_environment():
            jobs = executor.submit_array(tasks) if len(tasks) > 1 else [executor.submit(tasks[0])]
    except (FailedJobError, FailedSubmissionError) as error:
        raise EnvironmentMismatchError(
            f"Slurm refused the job: {' '.join(str(error).split())}; change launch.slurm or the request"
        ) from None
    return [str(job.job_id) for job in jobs]


def _states(job_ids: Sequence[str], name: str) -> list[str] | None:
    """Return the states of a job, or of the elements of one array; None if Slurm does not answer."""
    if len(job_ids) == 1:
        status = job_status(job_ids[0], job_name(name))
        return None if status is None else [status.state]
    statuses = array_statuses(_array(job_ids[0]), job_name(name))
    return None if statuses is None else [status.state for status in statuses.values()]


def _cancel(job_ids: Sequence[str]) -> None:
    for array in {_array(job_id) for job_id in job_ids}:
        cancel(array)


def _array(job_id: str) -> str:
    return job_id.partition("_")[0]


TASKS = TaskJobs(
    _submit,
    _states,
    ENDED,
    _cancel,
    poll_seconds=FIRST_POLL_SECONDS,
    files_seconds=FILES_SECONDS,
    refusal=refusal,
)
