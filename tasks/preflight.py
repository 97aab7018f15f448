"""The steps before training: prepare the run, validate, estimate, rehearse."""

from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from llama_core.chain import prepare, steps
from llama_core.config.run import RunConfig
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.runs.loading import load_plan
from llama_core.units import format_bytes
from tasks.follow import follow, run_of

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


@task(name="prepare-run", cache_policy=NO_CACHE)
def prepare_run(
    config: RunConfig, run_dir: Path | None, *, resume: bool, allow_data_change: bool = False
) -> RunDirectory:
    """Create the run's directory and plan, or find the run that this flow run started; show the plan as a table."""
    flow_run_id = UUID(flow_run.get_id())
    begun = run_of(flow_run_id, run_dir)
    run = prepare.prepare_run(
        config,
        begun.path if begun else run_dir,
        resume=resume or begun is not None,
        allow_data_change=allow_data_change,
    )
    follow(run, flow_run_id)
    plan = load_plan(run).as_dict()
    reasons = "\n".join(f"* {reason}" for reason in steps.reasons(run))
    rows = [{"setting": key, "value": str(value)} for key, value in plan.items()]
    create_table_artifact(rows, key="plan", description=reasons or None)
    return run


@task(name="validate-environment", cache_policy=NO_CACHE)
def validate_environment(run: RunDirectory) -> EnvironmentReport:
    """Check the machine and show the findings as a table."""
    report = steps.validate(run)
    rows = [{"what": key, "found": str(value)} for key, value in report.facts.items()]
    create_table_artifact([*rows, *({"what": "warning", "found": text} for text in report.warnings)], key="environment")
    return report


@task(name="estimate-memory", cache_policy=NO_CACHE)
def estimate_memory(run: RunDirectory) -> MemoryEstimate:
    """Return the memory estimate of a rank and show it as a table."""
    estimate = steps.read_estimate(run)
    create_table_artifact(_profile_rows(estimate.profile), key="memory-estimate", description=estimate.summary())
    return estimate


@task(name="dry-run", cache_policy=NO_CACHE)
def dry_run(run: RunDirectory) -> "DryRunResult | None":
    """Count the bytes of a real step on fake tensors, and show those of the fullest rank as a table."""
    rehearsed = steps.rehearse(run)
    if rehearsed is not None:
        create_table_artifact(_profile_rows(rehearsed.profile), key="dry-run", description=rehearsed.summary())
    return rehearsed


def _profile_rows(profile: MemoryProfile) -> list[dict[str, str]]:
    categories = {category for phase in profile.phases.values() for category in phase}
    return [
        {"category": category}
        | {phase: format_bytes(counts.get(category, 0)) for phase, counts in profile.phases.items()}
        for category in sorted(categories)
    ]
