"""Plan an elastic run (``launch.min_nodes``, ``launch.spare_nodes``) for the nodes that its job has got.

``python -m llama_core.chain.elastic RUN_DIR LAUNCHER`` runs on the job's first node before the ranks of an attempt
start. It writes the plan, and prints the variables that tell the launcher how many ranks to start on how many nodes.
With ``--again``, it runs after the ranks of a job with spare nodes have ended; its exit code is 0 if they start again.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama_core.chain.planned import on_nodes, planned_as
from llama_core.chain.prepare import refuse_unfit
from llama_core.errors import ConfigError, PlanError, TrainingInfraError
from llama_core.launch.attempts import JOB_ID_VARIABLE, RESTART_VARIABLE, current_attempt, recorded_job
from llama_core.launch.jobs.launcher import launcher_of
from llama_core.launch.outcome import record_outcome
from llama_core.launch.rank.requeue import goes_on
from llama_core.launch.rank.surroundings import Surroundings
from llama_core.machine.detect import detect_machine
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.job import JobRecord
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import counted


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Plan the run for the job in ``environment``, and return the exit code; an error is also the job's outcome."""
    run_dir, name, *again = sys.argv[1:] if arguments is None else arguments
    run = RunDirectory(Path(run_dir))
    surroundings = launcher_of(name).surroundings
    start = surroundings.job_start(environment)
    job = recorded_job(run, start.job_id)
    if again:
        return 0 if job is not None and _starts_again(run, job, start.restart, surroundings) else 1
    last = current_attempt(run, job)
    restart = start.restart
    granted = start.num_nodes
    if last is not None:  # the job may have lost nodes since it began, and have started ranks without being queued
        restart = max(restart, last.restart + 1)
        granted = len(surroundings.nodes_now(start.job_id)) or granted
    try:
        num_nodes, num_ranks = plan_attempt(run, granted)
    except TrainingInfraError as error:
        os.environ[JOB_ID_VARIABLE] = start.job_id
        os.environ[RESTART_VARIABLE] = str(restart)
        record_outcome(run, "bad-config", reason=str(error), next_action="correct the request and start again")
        sys.stderr.write(f"ERROR {error}\n")
        return error.exit_code
    counts = surroundings.with_ranks(num_ranks, num_nodes, restart)
    sys.stdout.write(f"export {' '.join(f'{name}={count}' for name, count in counts.items())}\n")
    return 0


def _starts_again(run: RunDirectory, job: JobRecord, restart: int, surroundings: Surroundings) -> bool:
    config = load_config(run)
    return goes_on(
        run,
        job,
        restart,
        num_nodes=config.num_nodes,
        max_attempts=config.launch.request.max_starts,
        surroundings=surroundings,
    )


def plan_attempt(run: RunDirectory, granted: int) -> tuple[int, int]:
    """Plan an elastic run for as many of the ``granted`` nodes as a fitting plan can use; return the nodes and ranks.

    The plan and its estimate are recorded, unless the run already has a plan for that many nodes. ``config.yaml`` stays
    as it is, so that the next start may get all nodes again.

    Raises:
        PlanError: if there is no plan for ``launch.min_nodes`` nodes or more, or for all of them if that is not set.
    """
    config = load_config(run)
    planned_before = load_plan(run)
    machine = detect_machine()
    ranks_of_node = config.parallel.gpus // config.num_nodes
    refusal = "the job got no more"
    for num_nodes in range(min(granted, config.num_nodes), config.fewest_nodes - 1, -1):
        num_ranks = num_nodes * ranks_of_node
        if planned_before.world_size == num_ranks:
            return num_nodes, num_ranks
        try:
            planned = planned_as(on_nodes(config, num_nodes), machine)
            refuse_unfit(planned.estimate, planned.config, "estimated")
        except (ConfigError, PlanError) as error:
            refusal = str(error)
            continue
        write_json(run.plan, planned.plan.as_dict())
        write_json(run.estimate, planned.estimate.as_dict())
        if planned.choice is not None:
            write_json(run.choice, planned.choice.as_dict())
        return num_nodes, num_ranks
    key = "nodes" if config.launch.min_nodes is None else "min_nodes"
    raise PlanError(f"launch.{key}={config.fewest_nodes}: no plan for {counted(granted, 'node')} or fewer: {refusal}")


if __name__ == "__main__":
    sys.exit(main())
