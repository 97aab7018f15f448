"""End a run's job before its time, and turn the way a job ended into an error."""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_core.errors import CancelledError, RequestError, StoppedError, TrainingFailedError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import attach
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.job import Outcome
from llama_core.records.metrics import read_heartbeat
from llama_core.runs.console import count_down, say
from llama_core.runs.continuing import resume_command, resume_point
from llama_core.runs.loading import load_config
from llama_core.units import format_duration


@contextmanager
def stopping_on_interrupt(run: RunDirectory) -> Iterator[None]:
    """Stop the run's job if Ctrl-C interrupts the block; a second Ctrl-C kills the job.

    Raises:
        StoppedError: with the command that resumes the run.
    """
    try:
        yield
    except KeyboardInterrupt:
        handle = attach(run)
        if handle is None:
            raise
        _stop(run, handle)


def _stop(run: RunDirectory, handle: JobHandle) -> Outcome:
    try:
        with count_down(_what_stopping_takes(run, handle)) as on_second:
            outcome = handle.cancel(on_second=on_second)
    except KeyboardInterrupt:
        outcome = _stop_at_once(handle)
    if outcome.status == "cancelled":
        raise stopped(run, outcome) from None
    return check_outcome(outcome)  # the job had ended by itself


def _stop_at_once(handle: JobHandle) -> Outcome:
    say("stopping", "at once")
    try:
        return handle.cancel(grace_seconds=0)
    except KeyboardInterrupt:
        raise StoppedError(
            f"{handle.kind} {handle.record.job_id} may still run; look with {handle.listed_by}"
        ) from None


def _what_stopping_takes(run: RunDirectory, handle: JobHandle) -> str:
    """Return what an interrupt waits for, for how long at most, and what a second one would lose."""
    if handle.waits_for:
        return "taking the job out of the queue"
    newest = read_heartbeat(run)
    if newest is None:
        work = "a step"
    elif newest.step == newest.total_steps:
        work = f"the work after step {newest.step}"
    else:
        work = f"step {newest.step + 1} (the last took {format_duration(newest.step_seconds)})"
    return (
        f"waiting for the end of {work} and a checkpoint, at most {handle.record.grace_seconds:g} s; "
        f"Ctrl-C again stops at once: then --resume {resume_point(run)}"
    )


def cancel(run: RunDirectory) -> Outcome | None:
    """Let the run's job finish its step and save a checkpoint, then end it; None if no job is running.

    Raises:
        RunDirectoryError: if the directory holds no run, or its job cannot be reached from here.
    """
    load_config(run)
    handle = attach(run)
    return handle.cancel() if handle else None


def stopped(run: RunDirectory, outcome: Outcome, again: str | None = None) -> StoppedError:
    """Return the error for a stopped run, with the command that continues it; by default ``train --resume``."""
    again = again or resume_command(run, load_config(run).data.source)
    where = f"after step {outcome.step}" if outcome.step else "before the first step"
    saved = newest_step(run)
    if saved == 0:
        return StoppedError(f"stopped {where}, with no checkpoint yet; start over with: {again}")
    if saved < outcome.step:
        return StoppedError(f"stopped {where}; continue after step {saved}, the newest checkpoint, with: {again}")
    return StoppedError(f"stopped {where}, with a checkpoint of it; continue with: {again}")


def check_outcome(outcome: Outcome) -> Outcome:
    """Return ``outcome`` if the run finished.

    Raises:
        RequestError: if the request was wrong.
        TrainingFailedError: if the run ended in any other way.
    """
    if outcome.status == "finished":
        return outcome
    if outcome.status == "bad-config":
        raise RequestError(outcome.reason)
    error = CancelledError if outcome.status == "cancelled" else TrainingFailedError
    raise error(f"{outcome.status} after step {outcome.step}: {outcome.reason}; {outcome.next_action}")
