"""Record in a run's directory which Prefect flow runs follow it, for retries and cancellation.

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
from prefect.runtime import flow_run as current_flow_run

from llama_core.chain.runs import RUNS
from llama_core.chain.stopping import cancel
from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from training_reports.page import write_report

CANCELLATION_POLL_SECONDS = 15.0
"""Time between two checks with Prefect's server whether the flow run is being cancelled."""


def follow(run: RunDirectory, flow_run_id: UUID) -> None:
    """Record that a flow run now follows ``run``, in place of the previous one."""
    earlier = [other for other in followers(run) if other != flow_run_id]
    write_json(run.flow_run, {"flow_runs": [str(follower) for follower in (*earlier, flow_run_id)]})


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
    if run is not None:
        cancel(run)
        write_report(run)


@contextmanager
def cancellation_heeded(run: RunDirectory) -> Iterator[None]:
    """Cancel the job of ``run`` if its flow run is cancelled inside the block, even if its worker is gone."""
    over = threading.Event()
    arguments = (run, UUID(current_flow_run.get_id()), over)
    threading.Thread(target=copy_context().run, args=(_heed_cancellation, *arguments), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _heed_cancellation(run: RunDirectory, flow_run_id: UUID, over: threading.Event) -> None:
    while not over.wait(CANCELLATION_POLL_SECONDS):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.is_cancelling():
                cancel(run)
                return
