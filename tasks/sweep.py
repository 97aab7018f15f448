"""A sweep: prepare its elements, submit them, follow them to the end, compare them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow, State, task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run as current_flow_run

from llama_core.launch.jobs.handle import JobHandle
from llama_core.records.directory import RunDirectory
from llama_core.sweep import steps as sweeps
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.judgement import Judgement, remember_sweep
from tasks.announce import log, unless_the_server_is_away
from tasks.follow import follow, followers
from training_reports.sweep import write_report as write_page


@task(name="prepare-sweep", cache_policy=NO_CACHE)
def prepare(config: SweepConfig, sweep_dir: Path | None, *, resume: bool) -> SweepDirectory:
    """Create the sweep's directory and runs, or find the sweep that this flow run started; show a table of elements."""
    flow_run_id = UUID(current_flow_run.get_id())
    begun = _sweep_of(flow_run_id, sweep_dir)
    sweep = sweeps.prepare(config, begun.path if begun else sweep_dir, resume=resume or begun is not None)
    follow(_as_run(sweep), flow_run_id)
    record = read_record(sweep)
    rows = [{"element": record.names[element.name], "skipped": element.skipped} for element in record.elements]
    create_table_artifact(rows, key="sweep")
    return sweep


@task(name="validate-environment", cache_policy=NO_CACHE)
def validate(sweep: SweepDirectory) -> None:
    """Check the machine, and the launchers, for all elements."""
    sweeps.validate(sweep)


@task(name="dry-run", cache_policy=NO_CACHE)
def rehearse(sweep: SweepDirectory) -> None:
    """Count the bytes of a step of every element on fake tensors; skip those that do not fit."""
    sweeps.rehearse(sweep)


@task(name="submit", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[2, 10])
def submit(sweep: SweepDirectory) -> list[JobHandle]:
    """Submit a job array for each group of elements with the same needs; a retry finds the running jobs."""
    return sweeps.submit(sweep)


@task(name="sweep", cache_policy=NO_CACHE)
def follow_elements(sweep: SweepDirectory, jobs: Sequence[JobHandle]) -> None:
    """Follow every element to the end."""
    sweeps.follow(sweep, jobs)


@task(name="history", cache_policy=NO_CACHE)
def remember(sweep: SweepDirectory) -> Judgement | None:
    """Keep the timed elements in the history, and show how they compare with earlier ones as a table."""
    judgement = remember_sweep(sweep)
    if judgement is None:
        return None
    rows = [
        {
            "element": one.element,
            "verdict": one.verdict,
            "tokens/s": f"{one.tokens_per_second:,.0f}",
            "compared": one.sentence(),
            "noise": "; ".join(one.notes),
        }
        for one in judgement.elements
    ]
    changes = "\n".join(f"* {change}" for change in judgement.changes)
    with unless_the_server_is_away():
        key = "regression" if judgement.of("slower") else "history"
        create_table_artifact(rows, key=key, description=changes and f"Changed since {judgement.since}:\n\n{changes}")
    return judgement


@task(name="report", cache_policy=NO_CACHE)
def write_report(sweep: SweepDirectory) -> Path:
    """Write the sweep's ``report.html`` and link to it."""
    path = write_page(sweep)
    with unless_the_server_is_away():
        create_link_artifact(path.resolve().as_uri(), key="sweep-report", link_text=f"report of {sweep.name}")
    return path


def cancel_sweep(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel every job of a cancelled flow run's sweep. Prefect calls this in its worker.

    Jobs that another flow run has taken over keep running.
    """
    sweep_dir = flow_run.parameters.get("sweep_dir")
    sweep = _sweep_of(flow_run.id, Path(sweep_dir) if sweep_dir else None)
    if sweep is not None and followers(_as_run(sweep))[-1] == flow_run.id:
        sweeps.cancel(sweep)
        write_page(sweep)
        end = sweeps.stopped(sweep, f"prefect flow-run retry {flow_run.id}")
        log.info(str(end), extra={"flow_run_id": flow_run.id})


def _sweep_of(flow_run_id: UUID, sweep_dir: Path | None) -> SweepDirectory | None:
    """Return the sweep that a flow run follows or has followed, or None if it has not started one."""
    paths = [sweep_dir] if sweep_dir else [path.parent for path in sweeps.SWEEPS.glob("*/flow_run.json")]
    found = map(SweepDirectory, paths)
    return next((sweep for sweep in found if flow_run_id in followers(_as_run(sweep))), None)


def _as_run(sweep: SweepDirectory) -> RunDirectory:
    """Return the sweep's directory as a run's, in whose ``flow_run.json`` the flow runs are recorded."""
    return RunDirectory(sweep.path)
