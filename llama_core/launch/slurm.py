"""Query and control Slurm's jobs with scontrol, squeue, sacct, sinfo and scancel, without a shell in between."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from llama_core.launch.scheduler import JobStatus
from llama_core.units import MIB

ANSWER_SECONDS = 60
"""Seconds that a controller shared by many users may take to answer."""
FRESH_SECONDS = 5.0
"""Seconds for which one answer about an array serves all of its elements."""
FIRST_POLL_SECONDS = 5.0
"""Time between the first two queries about a job; all users share Slurm's controller."""
FILES_SECONDS = 15.0
"""Time that records written on a node may take to appear on this machine through the shared file system."""
SOON_SECONDS = 120
"""Slurm may tell ranks of a time limit a minute early, and others take as long to start."""
ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
     "REVOKED", "SPECIAL_EXIT", "TIMEOUT", "UNKNOWN")
)  # fmt: skip
"""Final states of a job; a job that is queued again goes from COMPLETING to PENDING."""
_NONE = "(null)"
"""How ``scontrol`` writes a list without nodes."""


def job_status(job_id: str, name: str) -> JobStatus | None:
    """Return the status of a job, or None if Slurm does not answer.

    Its state is 'UNKNOWN' if Slurm has forgotten the job, or if the id now belongs to a job of another name.
    """
    shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    if shown is None:
        return None
    if shown.returncode == 0 and shown.stdout.strip():
        return _status(shown.stdout.splitlines()[0], name)
    if "Invalid job id" not in shown.stderr:
        return None
    state = _accounted(job_id, name)
    return JobStatus(state[-1] if state else "UNKNOWN")


def array_statuses(array_id: str, name: str) -> dict[str, JobStatus] | None:
    """Return the status by job id of each array element that Slurm still knows; None if Slurm does not answer."""
    shown = _slurm("scontrol", "--oneliner", "show", "job", array_id)
    if shown is None or (shown.returncode and "Invalid job id" not in shown.stderr):
        return None
    return {
        f"{array_id}_{index}": _status(line, name)
        for line in shown.stdout.splitlines()
        for indices in re.findall(r"\bArrayTaskId=([\d,:-]+)", line)
        for index in _indices(indices)
    }


def _status(shown: str, name: str) -> JobStatus:
    """Return the status in a line of ``scontrol show job``."""
    fields = _fields(shown, "JobName", "JobState", "Reason", "PreemptTime")
    if fields.get("JobName") != name:
        return JobStatus("UNKNOWN")
    is_preempted = fields.get("PreemptTime", "None") != "None"
    reason = fields.get("Reason", "").removeprefix("None")  # Slurm has not considered the job yet, or it runs
    script = re.search(r" Command=(.*?) WorkDir=", shown)  # a path may hold spaces
    return JobStatus(fields.get("JobState", "UNKNOWN"), reason, is_preempted, script[1] if script else "")


def _fields(shown: str, *names: str) -> dict[str, str]:
    """Return the values of some fields in a line of ``scontrol show job``, by name, without those that it lacks."""
    fields: dict[str, str] = {}
    for name, value in re.findall(rf"(?<!\S)({'|'.join(names)})=(\S+)", shown):
        fields.setdefault(name, value)  # a later match is part of a path
    return fields


def _indices(written: str) -> Iterator[int]:
    """Yield the elements that Slurm writes as ``3``, ``2-4``, ``0-8:2`` or a comma-separated list of these."""
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", written):
        yield from range(int(first), int(last or first) + 1, int(step or 1))


class SharedAnswers:
    """Works like ``job_status``, but asks about all elements of a job array at once."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[float, dict[str, JobStatus] | None]] = {}

    def __call__(self, job_id: str, name: str) -> JobStatus | None:
        """Return the status of a job; that of an element may be ``FRESH_SECONDS`` old."""
        array_id, is_element, _ = job_id.partition("_")
        if not is_element:
            return job_status(job_id, name)
        asked_at, statuses = self._arrays.get(array_id, (float("-inf"), None))
        if time.monotonic() - asked_at >= FRESH_SECONDS:
            statuses = array_statuses(array_id, name)
            self._arrays[array_id] = time.monotonic(), statuses
        if statuses is None:
            return None
        return statuses.get(job_id) or job_status(job_id, name)  # accounting may know of one the controller forgot


def earlier_states(job_id: str, name: str) -> list[str]:
    """Return the final states of a job's earlier attempts, as far as Slurm's accounting knows them; oldest first."""
    return _accounted(job_id, name, "--duplicates")[:-1]


def _accounted(job_id: str, name: str, *options: str) -> list[str]:
    asked = ("--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}", f"--name={name}")
    answer = _slurm("sacct", *asked, *options)
    return [line.split()[0] for line in answer.stdout.splitlines() if line.split()] if answer else []


def failed_nodes(nodes: str) -> list[str]:
    """Return those of ``nodes``, as Slurm abbreviates them, that are down, failing or not responding now."""
    answer = _slurm("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %t")
    lines = [line.split() for line in answer.stdout.splitlines()] if answer else []
    return sorted({name for name, state in lines if state.startswith(("down", "fail")) or state.endswith("*")})


def queued_job(user: int, name: str, comment: str) -> str | None:
    """Return the id of a job in the queue, by the name and comment it was submitted with; None if there is none."""
    asked = (f"--user={user}", f"--name={name}", "--noheader", "--array", "--format=%i|%k")
    answer = _slurm("squeue", *asked)
    rows = [line.strip().split("|", 1) for line in answer.stdout.splitlines()] if answer else []
    return next((row[0] for row in rows if len(row) == 2 and row[1] == comment), None)


def nodes_of(job_id: str) -> list[str]:
    """Return the nodes that a running job has now; empty if Slurm does not answer. Lost ones are no longer its own."""
    shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    nodes = _fields(shown.stdout, "NodeList").get("NodeList", _NONE) if shown else _NONE
    return [] if nodes == _NONE else hosts(nodes)


def hosts(abbreviated: str) -> list[str]:
    """Return the names of the nodes that Slurm abbreviates so; empty if it does not answer."""
    answer = _slurm("scontrol", "show", "hostnames", abbreviated)
    return answer.stdout.split() if answer else []


def give_back(job_id: str, nodes: Sequence[str]) -> bool:
    """Take some nodes from a running job, which keeps its others; return whether Slurm agreed.

    It is not asked for the first one, which runs the job's script.
    """
    with _outliving_sigterm():
        before = nodes_of(job_id)
        kept = [node for node in before if node not in nodes]
        if not kept or kept[0] != before[0]:
            return False
        return _agrees(_slurm("scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(kept)}"))


def announced_seconds(save_timeout_s: int, limit_seconds: int) -> int:
    """Return how long before its time limit Slurm tells the ranks of a job."""
    return min(save_timeout_s, limit_seconds // 4)


def nears_limit(job_id: str, save_timeout_s: float) -> bool:
    """Return whether Slurm has told the ranks of a running job of its time limit, which it does once, or soon will."""
    shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    fields = _fields(shown.stdout, "RunTime", "TimeLimit") if shown else {}
    seconds = {name: _seconds(written) for name, written in fields.items()}
    run = seconds.get("RunTime")
    limit = seconds.get("TimeLimit")
    if run is None or limit is None:
        return False
    return limit - run < announced_seconds(int(save_timeout_s), limit) + SOON_SECONDS


def _seconds(written: str) -> int | None:
    """Return a time that Slurm writes as ``[days-]hours:minutes:seconds``; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", written)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue(job_id: str) -> bool:
    """Queue a running job again, under the same id; return whether Slurm agreed."""
    with _outliving_sigterm():
        return _agrees(_slurm("scontrol", "requeue", job_id))


def exclude(job_id: str, nodes: Sequence[str]) -> bool:
    """Keep a job that was queued again off some nodes, and off those that it has excluded before.

    Slurm changes this only of jobs that wait, and one that was queued again waits at once, though its processes still
    end.

    Returns:
        Whether Slurm agreed.
    """
    with _outliving_sigterm():
        shown = _slurm("scontrol", "--oneliner", "show", "job", job_id)
        if shown is None or shown.returncode:  # what is excluded already would be lost
            return False
        before = _fields(shown.stdout, "ExcNodeList").get("ExcNodeList", _NONE)
        known = [] if before == _NONE else hosts(before)
        further = [node for node in nodes if node not in known]
        excluded = ",".join([*([] if before == _NONE else [before]), *further])
        return not further or _agrees(_slurm("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded}"))


@contextmanager
def _outliving_sigterm() -> Iterator[None]:
    """Let the block's questions to Slurm outlive SIGTERM, by which it ends processes on nodes that it takes away."""
    was_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, was_blocked)


def cancel(job_id: str) -> None:
    """End a job and every process of it."""
    _slurm("scancel", job_id)


def send_signal(job_id: str, name: str) -> None:
    """Send a signal such as ``TERM`` to every rank of a running job."""
    _slurm("scancel", f"--signal={name}", job_id)


@cache
def cores_per_gpu(partition: str | None) -> int | None:
    """Return a GPU's share of the cores that jobs get on a node; None if Slurm does not say, or no node has GPUs.

    Args:
        partition: a partition, or several separated by commas; the node with the smallest share counts. None means the
            cluster's default.
    """
    listed = _slurm("sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%G")
    wanted = partition.split(",") if partition else []
    shares = []
    for row in (line.split("|") for line in (listed.stdout.splitlines() if listed else ())):
        if len(row) == 4 and (row[0].rstrip("*") in wanted or (not wanted and row[0].endswith("*"))):
            gpus = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", row[3])))
            shares += [(int(row[2]) // gpus, row[1], gpus)] if gpus and row[2].isdigit() else []
    if not shares:
        return None
    share, node, gpus = min(shares)
    shown = _slurm("scontrol", "--oneliner", "show", "node", node)
    effective = re.search(r"\bCPUEfctv=(\d+)", shown.stdout) if shown else None  # without those kept for the system
    return max(1, int(effective[1]) // gpus if effective else share)


@cache
def largest_node_bytes(partition: str | None) -> int | None:
    """Return the memory of the largest node that a job may get; None if Slurm does not say.

    Args:
        partition: a partition, or several separated by commas; None for the cluster's default.
    """
    listed = _slurm("sinfo", "--noheader", "--Node", "--format=%P|%m")
    rows = [line.split("|") for line in (listed.stdout.splitlines() if listed else ())]
    wanted = partition.split(",") if partition else []
    sizes = [
        int(size.rstrip("+"))
        for name, size in (row for row in rows if len(row) == 2)
        if name.rstrip("*") in wanted or (not wanted and name.endswith("*"))
    ]
    return max(sizes) * MIB if sizes else None


@cache
def default_memory_bytes(partition: str | None, cores: int, gpus: int) -> float | None:
    """Return the memory on a node of a job that asks for none; infinite if it gets the node's, None if Slurm is silent.

    A partition's default takes precedence over the cluster's, and a default per GPU over one per core or node.

    Args:
        partition: a partition, or several separated by commas; the smallest default counts. None means the cluster's
            default.
        cores: cores of the job on a node.
        gpus: GPUs of the job on a node.
    """
    shown = _slurm("scontrol", "--oneliner", "show", "partition")
    cluster = _slurm("scontrol", "show", "config")
    wanted = partition.split(",") if partition else []
    if shown is None or cluster is None or cluster.returncode:
        return None
    granted: list[float] = []
    for line in shown.stdout.splitlines():
        name = re.match(r"PartitionName=(\S+)", line)
        if name and (name[1] in wanted or (not wanted and " Default=YES" in line)):
            granted.append(
                _default_memory(line, cores, gpus) or _default_memory(cluster.stdout, cores, gpus) or math.inf
            )
    return min(granted, default=None)


def _default_memory(settings: str, cores: int, gpus: int) -> int | None:
    """Return the bytes that the settings of a partition or a cluster give to a job that asks for none, if any."""
    for unit, count in (("GPU", gpus), ("CPU", cores), ("Node", 1)):
        found = re.search(rf"\bDefMemPer{unit} *= *(\d+)", settings)  # in MB, or UNLIMITED
        if found and int(found[1]) and count:
            return int(found[1]) * MIB * count
    return None


@cache
def cluster_name() -> str:
    """Return the name of the cluster that this machine belongs to; empty if Slurm does not say."""
    answer = _slurm("scontrol", "show", "config")
    found = re.search(r"^ClusterName\s*= (\S+)", answer.stdout, re.MULTILINE) if answer else None
    return found[1] if found else ""


def _agrees(answer: subprocess.CompletedProcess[str] | None) -> bool:
    return answer is not None and answer.returncode == 0


def _slurm(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a Slurm command and return its result; None if it gets no answer in time or is not installed."""
    # Within a job, scontrol would write two scripts into the working directory when it takes nodes from the job.
    environment = {name: value for name, value in os.environ.items() if name not in {"SLURM_JOBID", "SLURM_JOB_ID"}}
    environment["SLURM_BITSTR_LEN"] = "0"  # otherwise Slurm truncates the list of a long array
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS, env=environment
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
