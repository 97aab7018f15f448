"""Record in a run's directory which Prefect flow runs follow it, for retries and cancellation; give them its name.

A flow run that Prefect restarts after its process or worker was killed continues the run it had started.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow, State, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run as current_flow_run

from llama_core.errors import CancelledError, RunDirectoryError, StoppedError
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.runs.continuing import RUNS
from llama_core.runs.stopping import cancel, stopped
from tasks.announce import log, unless_the_server_is_away
from tasks.endings import BeingCancelledError
from tasks.run_page import RunPage
from training_reports.page import write_report

CANCELLATION_POLL_SECONDS = 15.0
"""Time between two checks with Prefect's server whether the flow run is being cancelled."""


def follow(run: RunDirectory, flow_run_id: UUID) -> None:
    """Record that a flow run now follows ``run``, in place of the previous one, and name it after the run."""
    earlier = [other for other in followers(run) if other != flow_run_id]
    write_json(run.flow_run, {"flow_runs": [str(follower) for follower in (*earlier, flow_run_id)]})
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run_id, name=run.name)


def followers(run: RunDirectory) -> list[UUID]:
    """Return the flow runs that have followed ``run``, newest last."""
    with suppress(RunDirectoryError):
        return [UUID(follower) for follower in read_json(run.flow_run)["flow_runs"]]
    return []


def run_of(flow_run_id: UUID, run_dir: Path | None) -> RunDirectory | None:
    """Return the run that a flow run follows or has followed, or None if it has not started one.

    Args:
        flow_run_id: Prefect's id of the flow run.
        run_dir: the flow run's parameter of that name; None looks through all runs.
    """
    paths = [run_dir] if run_dir else [path.parent for path in RUNS.glob("*/flow_run.json")]
    return next((run for run in map(RunDirectory, paths) if flow_run_id in followers(run)), None)


def followed_by(flow_run: FlowRun) -> RunDirectory | None:
    """Return the run that a flow run follows, or None if there is none or another flow run has taken it over."""
    run_dir = flow_run.parameters.get("run_dir")
    run = run_of(flow_run.id, Path(run_dir) if run_dir else None)
    return run if run and followers(run)[-1] == flow_run.id else None


def cancel_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the job of a cancelled flow run; it saves a checkpoint first. Prefect calls this in its worker.

    A job that another flow run has taken over keeps running.
    """
    run = followed_by(flow_run)
    if run is None:
        return
    cancel(run)
    write_report(run)
    log.info(_how_it_stopped(run, flow_run.id), extra={"flow_run_id": flow_run.id})
    page = RunPage.of(run, flow_run.id)
    if page is not None and run.outcome.exists():
        page.show_outcome()


@contextmanager
def cancellation_heeded(run: RunDirectory) -> Iterator[None]:
    """End the block if its flow run is cancelled.

    The worker interrupts this process, stops the job of ``run`` after a step and lets it save a checkpoint. If the
    worker is gone, this process stops the job.

    Raises:
        BeingCancelledError: if the worker interrupts.
        StoppedError: if this process has stopped the job.
        TerminationSignal: if somebody else ends this process: the job keeps running.
    """
    flow_run_id = UUID(current_flow_run.get_id())
    over = threading.Event()
    has_cancelled = threading.Event()
    arguments = (run, flow_run_id, over, has_cancelled)
    threading.Thread(target=copy_context().run, args=(_heed_cancellation, *arguments), daemon=True).start()
    try:
        yield
    except TerminationSignal:
        with unless_the_server_is_away(retries=0):
            if _is_being_cancelled(flow_run_id):
                raise BeingCancelledError("the flow run is being cancelled; its job ends after this step") from None
        raise
    except CancelledError:
        if has_cancelled.is_set():
            raise StoppedError(_how_it_stopped(run, flow_run_id)) from None
        raise
    finally:
        over.set()


def _heed_cancellation(
    run: RunDirectory, flow_run_id: UUID, over: threading.Event, has_cancelled: threading.Event
) -> None:
    while not over.wait(CANCELLATION_POLL_SECONDS):
        with suppress(httpx.HTTPError):
            if _is_being_cancelled(flow_run_id):
                has_cancelled.set()
                cancel(run)
                return


def _is_being_cancelled(flow_run_id: UUID) -> bool:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    return state is not None and state.is_cancelling()


def _how_it_stopped(run: RunDirectory, flow_run_id: UUID) -> str:
    """Return after which step a cancelled flow run's job has ended, and the command that continues it."""
    again = f"prefect flow-run retry {flow_run_id}"
    if not run.outcome.exists():
        return f"stopped before the job had started; start over with: {again}"
    outcome = read_outcome(run)
    if outcome.status == "cancelled":
        return str(stopped(run, outcome, again))
    return f"{outcome.status} after step {outcome.step}: {outcome.reason}"  # by itself, before it could be cancelled
