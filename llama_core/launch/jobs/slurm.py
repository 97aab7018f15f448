"""Jobs of a Slurm cluster: one task is one rank."""

import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.launch.attempts import current_attempt, read_rank_exits
from llama_core.launch.jobs.handle import JobHandle, Submission
from llama_core.launch.jobs.launcher import Launcher
from llama_core.launch.jobs.slurm_check import check_slurm, unused_allocation
from llama_core.launch.jobs.slurm_request import (
    asked_memory,
    comment_of,
    job_name,
    node_memory,
    sbatch_script,
    slurm_executor,
    slurm_parameters,
    submission_environment,
)
from llama_core.launch.jobs.slurm_tasks import TASKS
from llama_core.launch.outcome import conclude, concluded, record_refusal
from llama_core.launch.rank.requeue import most_excluded
from llama_core.launch.rank.slurm import VERDICT_OF_STATE, SlurmSurroundings
from llama_core.launch.rank.start import python_command
from llama_core.launch.rank.supervisor import Supervisor
from llama_core.launch.scheduler import Ask
from llama_core.launch.slurm import (
    ENDED,
    FILES_SECONDS,
    FIRST_POLL_SECONDS,
    SharedAnswers,
    cancel,
    cluster_name,
    job_status,
    queued_job,
    send_signal,
)
from llama_core.launchers.slurm import SLURM
from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json, timestamp, write_json
from llama_core.records.job import JobRecord, Outcome

SLOWEST_POLL_SECONDS = 30.0
"""Time between two queries about a job that has not changed for long."""


class SlurmJobHandle(JobHandle):
    """A job that Slurm runs or keeps in its queue."""

    kind = "Slurm job"
    listed_by = "squeue"
    poll_seconds = 1.0
    log_seconds = 5.0
    kill_seconds = 120.0

    def __init__(self, run: RunDirectory, record: JobRecord, ask: Ask = job_status) -> None:
        super().__init__(run, record)
        self._ask_slurm = ask
        self._state = "PENDING"
        self._script = ""
        self._asked_at = float("-inf")
        self._interval = FIRST_POLL_SECONDS

    def is_running(self) -> bool:
        """Return whether Slurm has not yet ended the job for good; no answer counts as no change."""
        if self._state not in ENDED and time.monotonic() - self._asked_at >= self._patience():
            self._ask()
        return self._state not in ENDED

    def _patience(self) -> float:
        """Return the time between two queries, which is short again once the job's outcome is recorded."""
        hurried = self._interval > FIRST_POLL_SECONDS and concluded(self.run, self.record) is not None
        return FIRST_POLL_SECONDS if hurried else self._interval

    def _ask(self) -> None:
        status = self._ask_slurm(self.record.job_id, self.record.name)
        self._asked_at = time.monotonic()
        self.is_answered = status is not None
        if status is not None:
            self._script = status.script
            self.waits_for = (status.reason or "Slurm to consider the job") if status.state == "PENDING" else ""
        if status is None or status.state == self._state:
            self._interval = min(SLOWEST_POLL_SECONDS, 1.5 * self._interval)
        else:
            self._state = status.state
            self._interval = FIRST_POLL_SECONDS

    def _why_not_own(self) -> str:
        # A run from an archive may name its own folder, but any job of the user's, with the name that the queue shows.
        if problem := super()._why_not_own():
            return problem
        if not self._script:
            return f"{self.kind} {self.record.job_id}, but Slurm does not say whose that is; try again"
        if Path(self._script).parent != Path(self.record.folder):
            return f"{self.kind} {self.record.job_id}, which was submitted for something else ({self._script})"
        return ""

    def _ask_to_stop(self) -> None:
        status = self._ask_slurm(self.record.job_id, self.record.name)
        if status is None or status.state == "RUNNING":
            send_signal(self.record.job_id, "TERM")
        else:
            cancel(self.record.job_id)
        self._interval = FIRST_POLL_SECONDS

    def _kill(self) -> None:
        cancel(self.record.job_id)
        self._interval = FIRST_POLL_SECONDS

    def _conclude(self) -> Outcome:
        deadline = time.monotonic() + FILES_SECONDS
        while self._state in {"COMPLETED", "FAILED"} and time.monotonic() < deadline:
            if concluded(self.run, self.record) or self._left_exits():
                break
            time.sleep(self.poll_seconds)
        return conclude(self.run, self.record, VERDICT_OF_STATE.get(self._state))

    def _left_exits(self) -> bool:
        attempt = current_attempt(self.run, self.record)
        return bool(read_rank_exits(self.run, self.record, attempt.restart if attempt else 0))


def _start(folder: Path, submissions: Sequence[Submission], name: str, lock: IO[str]) -> None:
    """Submit a job, or an array of jobs with the same resources, and record each in its run.

    Args:
        folder: where submitit keeps the jobs' files.
        submissions: the runs, one for each element of the array.
        name: name shown in the queue.
        lock: unused: the queue shows a job that nobody has recorded.

    Raises:
        EnvironmentMismatchError: if there is no Slurm here, or it refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    config = submissions[0].config
    num_ranks = submissions[0].num_ranks
    executor = slurm_executor(folder, python_command(), f"run directory {str(folder)!r}", "another --run-dir")
    host_bytes = max(_host_bytes(submission.run) for submission in submissions)
    elastic_run = submissions[0].run.path if submissions[0].is_elastic else None
    asked = slurm_parameters(config, name, comment_of(folder), num_ranks, host_bytes, elastic_run=elastic_run)
    executor.update_parameters(**asked)
    launch = config.launch
    supervisors = [
        Supervisor(
            submission.run.path,
            submission.command,
            launch.device,
            launch.hang_timeout_s,
            SlurmSurroundings(),
            max_attempts=launch.slurm.max_attempts,
            num_nodes=config.num_nodes if elastic_run and launch.spare_nodes else 0,
            max_excluded=most_excluded(config.num_nodes) if launch.stragglers == "exclude" else 0,
            companion=submission.companion,
        )
        for submission in submissions
    ]
    submitted_at = timestamp()
    try:
        with submission_environment():
            jobs = executor.submit_array(supervisors) if len(supervisors) > 1 else [executor.submit(supervisors[0])]
    except (FailedJobError, FailedSubmissionError) as error:
        reason = f"Slurm refused the job: {' '.join(str(error).split())}"
        remedy = "change launch.slurm or the request"
        for submission in submissions:
            record_refusal(submission.run, reason, remedy)
        raise EnvironmentMismatchError(f"{reason}; {remedy}") from None
    unnamed = _record("", submitted_at, folder, name, config)
    for submission, job in zip(submissions, jobs, strict=True):
        write_json(submission.run.job, replace(unnamed, job_id=job.job_id))


def _host_bytes(run: RunDirectory) -> int:
    """Return the estimated host memory of a node's ranks, however many nodes; 0 for a run without an estimate."""
    estimate = read_json(run.estimate) if run.estimate.exists() else {}
    with intact(run.estimate):
        on_all = int((estimate.get("host") or {}).get("node_bytes", 0))
        return max(on_all, int(estimate.get("host_bytes_on_fewest_nodes", 0)))


def _out_of_sight(record: JobRecord) -> str:
    """Return where a job was submitted if this machine cannot ask that cluster about it; else ""."""
    here = shutil.which("scontrol") is not None
    is_seen = here and (not record.cluster or cluster_name() in {record.cluster, ""})
    return "" if is_seen else f"on {record.host}"


def _find_unrecorded(folder: Path, name: str, config: RunConfig) -> JobRecord | None:
    """Return the queued job that was submitted from ``folder`` by a process that died before recording it, if any.

    Args:
        folder: the submission folder.
        name: name shown in the queue.
        config: the configuration of the run.
    """
    if shutil.which("squeue") is None:
        return None
    job_id = queued_job(os.getuid(), job_name(name), comment_of(folder))
    if job_id is None:
        return None
    return _record(job_id, timestamp(), folder, name, config)


def _record(job_id: str, submitted_at: str, folder: Path, name: str, config: RunConfig) -> JobRecord:
    host = socket.gethostname()
    grace_seconds = config.launch.save_timeout_s
    return JobRecord(SLURM.name, job_id, host, submitted_at, job_name(name), cluster_name(), grace_seconds, str(folder))


LAUNCHER = Launcher(
    SLURM,
    SlurmSurroundings(),
    _start,
    SlurmJobHandle,
    _out_of_sight,
    _find_unrecorded,
    check_slurm,
    ask=job_status,
    ask_once=SharedAnswers,
    tasks=TASKS,
    script=sbatch_script,
    unused=unused_allocation,
    node_memory=node_memory,
    asked_memory=asked_memory,
)
