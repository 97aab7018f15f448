"""The check of the machines before the first step, and the nodes that the job leaves out because of it."""

from collections.abc import Sequence
from dataclasses import replace

from llama_core.config.run import RunConfig
from llama_core.launch.attempts import own_job, own_restart
from llama_core.launch.rank.requeue import most_excluded
from llama_core.parallel.ranks import from_first_rank, is_first_rank, this_device
from llama_core.preflight.preflight import measured_machines, tell
from llama_core.records.directory import RunDirectory
from llama_core.records.job import JobRecord
from llama_core.records.preflight import PreflightRecord, read_preflights
from llama_core.units import counted


class OtherNodesError(Exception):
    """The job is to start again without some nodes, on all ranks."""


def check_machines(run: RunDirectory, config: RunConfig, hosts: Sequence[str]) -> None:
    """Name and record the ranks that fall behind; all ranks call it together.

    Args:
        run: the run.
        config: its configuration.
        hosts: the node of every rank, in order, as its scheduler names it.

    Raises:
        OtherNodesError: on every rank, if the job is to start again without their nodes.
    """
    record = measured_machines(run, this_device(config.launch.device), hosts)
    if config.launch.preflight == "exclude" and is_first_rank():
        record = _with_exclusion(record, config, own_job(run), own_restart(), read_preflights(run))
    if is_first_rank():
        tell(run, record)
    if config.launch.preflight == "exclude" and (nodes := from_first_rank(record.excluded)):
        raise OtherNodesError(f"the job starts again without {', '.join(nodes)}")


def _with_exclusion(
    record: PreflightRecord,
    config: RunConfig,
    job: JobRecord | None,
    restart: int,
    before: Sequence[PreflightRecord],
) -> PreflightRecord:
    """Return the record with the nodes that the job is to leave out, or with the reason why it keeps them.

    Args:
        record: what was measured.
        config: the configuration of the run.
        job: the job of these ranks; None if they are of none.
        restart: number of earlier starts of the job.
        before: the checks before earlier attempts.
    """
    nodes = tuple(dict.fromkeys(named.host for named in record.named if named.slows_training))
    if not nodes:
        return record
    if job is None:
        return replace(record, kept="no job of this run started these ranks")
    num_nodes = len({one.host for one in record.ranks})
    most = most_excluded(num_nodes)
    launch = config.launch
    kept = ""
    if len(nodes) > most:
        kept = f"{counted(len(nodes), 'node')} fell behind, and of {num_nodes} it may exclude {most}"
    elif any(one.excluded and (one.job_id, one.submitted_at) == (job.job_id, job.submitted_at) for one in before):
        kept = "it has started again for this before"
    elif restart + 1 >= launch.request.max_starts:
        kept = f"this is the last of {launch.request.max_starts} attempts ({launch.kind.prefix}max_attempts)"
    if kept:
        return replace(record, kept=kept)
    return replace(record, excluded=nodes, job_id=job.job_id, submitted_at=job.submitted_at)
