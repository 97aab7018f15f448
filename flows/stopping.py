"""Stop the flow runs of ``make serve`` without losing the progress of their jobs."""

import os
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import httpx
import psutil
from prefect import get_client

from flows.service import SERVE_VARIABLE, STOP_SECONDS
from llama_core.launch.jobs import submission
from llama_core.records.directory import RunDirectory
from llama_core.runs.console import say
from tasks.follow import followed_by, run_of

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


def stop_flow_runs() -> None:
    """End every flow run of this ``make serve``: jobs here save a checkpoint and stop, those elsewhere keep running."""
    while under_way := list(_flow_runs()):  # the worker may start another one meanwhile
        for process, flow_run_id in under_way:
            _stop(process, flow_run_id)
        psutil.wait_procs([process for process, _ in under_way], timeout=STOP_SECONDS)


def _stop(process: psutil.Process, flow_run_id: UUID) -> None:
    run = _run(flow_run_id)
    job = submission.attach(run) if run else None
    again = f"continue it with `prefect flow-run retry {flow_run_id}` once a worker is up again"
    if job is not None and job.launcher.is_here:
        say("stopping", f"{job.run.path} after this step, with a checkpoint; {again}")
        job.cancel()
        psutil.wait_procs([process], timeout=STOP_SECONDS)  # it still writes the report
    else:
        what = f"{job.kind} {job.record.job_id} keeps running" if job else f"flow run {flow_run_id}"
        say("stopping", f"{what}; {again}")
    with suppress(psutil.NoSuchProcess):
        process.terminate()


def _flow_runs() -> Iterator[tuple[psutil.Process, UUID]]:
    """Yield the Prefect processes that run a flow, even if their worker is gone."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            ours = environment.get(SERVE_VARIABLE) == str(os.getpid())
            # Jobs inherit the variables too.
            if ours and FLOW_RUN_VARIABLE in environment and any("prefect." in word for word in process.cmdline()):
                yield process, UUID(environment[FLOW_RUN_VARIABLE])


def _run(flow_run_id: UUID) -> RunDirectory | None:
    try:
        with get_client(sync_client=True) as client:
            return followed_by(client.read_flow_run(flow_run_id))
    except httpx.HTTPError:  # without the server, only runs in the default folder can be found
        return run_of(flow_run_id, None)
