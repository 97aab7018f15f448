"""The steps before anything is trained: prepare the run, validate, estimate, rehearse."""

from pathlib import Path
from uuid import UUID

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from llama_core import steps
from llama_core.artifacts import RunDirectory
from llama_core.config.run import RunConfig
from llama_core.launch.watch import say
from llama_core.planning.profile import MemoryProfile
from llama_core.units import format_bytes
from tasks.follow import follow, run_of


@task(name="prepare-run", cache_policy=NO_CACHE)
def prepare_run(config: RunConfig, run_dir: Path | None, *, resume: bool) -> RunDirectory:
    """Make the run's directory and plan, or find what this flow run has begun; a table shows the plan."""
    flow_run_id = UUID(flow_run.get_id())
    begun = run_of(flow_run_id, run_dir)
    run = steps.prepare_run(config, begun.path if begun else run_dir, resume=resume or begun is not None)
    follow(run, flow_run_id)
    plan = steps.load_plan(run).as_dict()
    reasons = "\n".join(f"* {reason}" for reason in steps.reasons(run))
    rows = [{"setting": key, "value": str(value)} for key, value in plan.items()]
    create_table_artifact(rows, key="plan", description=reasons or None)
    say("run", steps.describe(run))
    return run


@task(name="validate-environment", cache_policy=NO_CACHE)
def validate_environment(run: RunDirectory) -> None:
    """Check the machine; what it has becomes a table."""
    report = steps.validate(run)
    rows = [{"what": key, "found": str(value)} for key, value in report.facts.items()]
    create_table_artifact([*rows, *({"what": "warning", "found": text} for text in report.warnings)], key="environment")
    say("validate", report.summary())


@task(name="estimate-memory", cache_policy=NO_CACHE)
def estimate_memory(run: RunDirectory) -> None:
    """Estimate the bytes of a rank by arithmetic; they become a table."""
    estimate = steps.estimate(run)
    create_table_artifact(_profile_rows(estimate.profile), key="memory-estimate", description=estimate.summary())
    say("estimate", estimate.summary())


@task(name="dry-run", cache_policy=NO_CACHE)
def dry_run(run: RunDirectory) -> None:
    """Count the bytes of a real step on fake tensors; those of the fullest rank become a table."""
    rehearsed = steps.rehearse(run)
    if rehearsed is None:
        say("dry-run", steps.NOT_REHEARSED)
        return
    create_table_artifact(_profile_rows(rehearsed.profile), key="dry-run", description=rehearsed.summary())
    say("dry-run", rehearsed.summary())


def _profile_rows(profile: MemoryProfile) -> list[dict[str, str]]:
    categories = {category for phase in profile.phases.values() for category in phase}
    return [
        {"category": category}
        | {phase: format_bytes(counts.get(category, 0)) for phase, counts in profile.phases.items()}
        for category in sorted(categories)
    ]
