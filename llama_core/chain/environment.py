"""Check whether a run can start here: the machine, its data and weights, and its launcher."""

from pathlib import Path

from llama_core.adapters.registry import ADAPTERS
from llama_core.chain.downloads import DOCUMENTS, INITIAL_WEIGHTS, resolve
from llama_core.chain.prepare import check_initial_weights, other_tokenizer
from llama_core.config.run import RunConfig
from llama_core.data.check import check_data
from llama_core.errors import RequestError
from llama_core.evaluation.jobs import refusal_of_jobs
from llama_core.launch.jobs.launcher import known_launchers
from llama_core.launchers.registry import LAUNCHERS
from llama_core.machine.validate import EnvironmentReport, Findings, check_machine
from llama_core.objectives.registry import OBJECTIVES
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.records.directory import RunDirectory
from llama_core.runs.continuing import RUNS
from llama_core.schedules.registry import SCHEDULES
from llama_core.storage.mirror import Mirror, explained, mirror_url
from llama_core.storage.upload import newer_than_here, refuse_foreign_mirror
from llama_core.trackers.registry import TRACKERS


def validate_environment(
    config: RunConfig | None = None, run_dir: Path = RUNS, *, saves: bool = True
) -> EnvironmentReport:
    """Return the errors, warnings and facts found on this machine. Imports no torch.

    Args:
        config: the run to check for; None checks only the installation and the machine.
        run_dir: where the run's files will go.
        saves: whether the run saves checkpoints there.
    """
    found = Findings()
    for registry in (OPTIMIZERS, OBJECTIVES, ADAPTERS, SCHEDULES, LAUNCHERS, TRACKERS):
        found.warnings += registry.hidden()
    check_machine(found, config, run_dir, saves=saves)
    if config is not None:
        _check_files(found, config, RunDirectory(run_dir))
        _check_mirror(found, config, RunDirectory(run_dir))
    for launcher in known_launchers():
        starts_it = config is not None and config.launch.kind == launcher.kind
        launcher.check(found, config if starts_it else None)
        if config is None:
            continue
        would_take_it = starts_it and launcher.kind.name not in found.problems
        if would_take_it and (refused := refusal_of_jobs(config)):
            found.fail(launcher.kind.name, refused)
        if warning := launcher.unused(config):
            found.warnings.append(warning)
    return found.report()


def _check_files(found: Findings, config: RunConfig, run: RunDirectory) -> None:
    """Check a run's data and initial weights, as far as they are here."""
    try:
        asked = resolve(config)
    except RequestError as error:
        found.errors.append(str(error))
        return
    no_data = asked.waits_for(*DOCUMENTS)
    no_weights = asked.waits_for(INITIAL_WEIGHTS)
    found.warnings += [*asked.notes, *no_data, *no_weights]
    try:
        if not no_data:
            check = check_data(asked.config.data, asked.config.spec, reads=asked.config.objective.reads)
            found.facts["data"] = "; ".join((check.summary, *check.notes))
    except RequestError as error:
        found.errors.append(str(error))
    try:
        if not no_weights:
            found.warnings += check_initial_weights(asked.config, run)
            found.warnings += other_tokenizer(asked.config, run)
    except RequestError as error:
        found.errors.append(str(error))


def _check_mirror(found: Findings, config: RunConfig, run: RunDirectory) -> None:
    """Check that the checkpoints of a run may go to its mirror, and that it goes on from the newest one there."""
    prefix = config.training.checkpoint_mirror
    if prefix is None:
        return
    try:
        mirror = Mirror(mirror_url(prefix, run.name))
        contents = refuse_foreign_mirror(mirror, run)
    except RequestError as error:
        found.errors.append(str(error))
        return
    except OSError as error:
        problem = str(explained(prefix, error))
        # the nodes of a job may reach what this machine does not
        (found.errors if config.launch.is_here else found.warnings).append(problem)
        return
    if newer := newer_than_here(contents, run):
        found.errors.append(
            f"{mirror} has {newer}, which is newer than what {run.path} has; go on from there with: training-infra "
            f"train --resume --run-dir {mirror}"
        )
