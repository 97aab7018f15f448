"""A job's request to Slurm, and a test of whether Slurm would grant it."""

import hashlib
import math
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.launch.attempts import IN_PLACE_VARIABLE
from llama_core.launch.jobs.handle import PLANNER
from llama_core.launch.rank.start import python_command
from llama_core.launch.slurm import announced_seconds, cores_per_gpu, default_memory_bytes, largest_node_bytes
from llama_core.launchers.slurm import SLURM
from llama_core.machine.node import NODE_VARIABLE
from llama_core.units import MIB

if TYPE_CHECKING:
    from submitit import SlurmExecutor

_CHECKED = (
    "partition", "account", "qos", "constraint", "time", "nodes", "ntasks_per_node", "cpus_per_task", "mem",
    "gpus_per_node",
)  # fmt: skip
_OF_A_JOB_AROUND = ("SLURM_", "SBATCH_", "SUBMITIT_", "MASTER_", NODE_VARIABLE)
"""Beginnings of the variables that come from a job around the submitter, or override what the job asks for."""
_OF_THE_USER = {"SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_RESERVATION"}
"""Variables that select the cluster, or the account or reservation that jobs are charged to."""
HOST_MARGIN = 1.25
"""Requested over estimated memory: the estimate's constants are allowances, and the page cache needs some too."""
_NAMED_OTHERWISE = {"mem-per-cpu", "mem-per-gpu"}
"""Options by which a user names the memory of a job without ``launch.slurm.memory_gb_per_node``."""
_ONLY_NOW = "node not available (down, drained or reserved)"
"""Part of Slurm's refusal to predict the start of a job whose nodes are unavailable at the moment."""


def slurm_parameters(
    config: RunConfig,
    name: str,
    comment: str,
    num_ranks: int,
    host_bytes: int = 0,
    *,
    elastic_run: Path | None = None,
) -> dict[str, Any]:
    """Return the request for a job of ``num_ranks`` ranks, as submitit's parameters.

    Args:
        config: the resolved configuration.
        name: name of the run, by which people and scripts find the job in the queue.
        comment: identifies the submission in the queue.
        num_ranks: ranks over all nodes, a multiple of the nodes.
        host_bytes: the estimated host memory of a node's ranks; 0 if it is unknown.
        elastic_run: the directory of a run whose job may start with ``launch.min_nodes`` nodes or more; None if it
            needs all of its nodes.
    """
    slurm = config.launch.slurm
    nodes = config.num_nodes
    on_cuda = config.launch.device == "cuda"
    cores = _cores_of_a_rank(config)
    ranks = num_ranks // nodes
    options = slurm.options_with_gpus(ranks) if on_cuda else slurm.options
    asked = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "mem": memory_request(config, num_ranks, host_bytes),
        "gpus_per_node": ranks if on_cuda and slurm.gres_gpus is None else None,  # Slurm refuses types beside it
        "setup": slurm.setup or None,
        "array_parallelism": slurm.max_parallel_jobs,
    }
    # Since Slurm 22.05 srun does not take the cores from sbatch; by default it lets the other ranks run on when one
    # fails. wait=0: it waits as long as the first rank needs to queue the job again.
    srun: dict[str, str | int] = {"cpus-per-task": cores, "kill-on-bad-exit": 1, "wait": 0}
    if on_cuda:  # neighbouring ranks on one socket, as their GPUs are; by default srun alternates between sockets
        srun["distribution"] = "block:block"
    srun |= slurm.srun_options
    request: dict[str, Any] = {
        "job_name": job_name(name),
        "comment": comment,
        "time": slurm.time_limit_min,
        "nodes": nodes,
        "ntasks_per_node": ranks,
        "cpus_per_task": cores,
        "signal_delay_s": announced_seconds(config.launch.save_timeout_s, 60 * slurm.time_limit_min),
        "stderr_to_stdout": True,
        "wckey": None,  # clusters that account by wckey refuse submitit's own
        "srun_args": [f"--{key}" if value is True else f"--{key}={value}" for key, value in srun.items()],
        "additional_parameters": {"requeue" if slurm.requeue else "no-requeue": True} | options,
    } | {name: value for name, value in asked.items() if value is not None}
    return request if elastic_run is None else _for_any_nodes(request, config, elastic_run)


def _for_any_nodes(request: dict[str, Any], config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Return the request for a job that takes the nodes that are free, and plans its run for them at each start.

    With spares, it outlives the loss of a node, unless that is its first one, and then starts its ranks again.

    Slurm is not told how many tasks a node has: it remembers the tasks of the first start, and then gives neither fewer
    nodes nor, before 22.05.9, more nodes than tasks. Only srun is told.
    """
    ranks = request.pop("ntasks_per_node")
    cores = request.pop("cpus_per_task")
    planner = shlex.join([*PLANNER, str(run_dir), SLURM.name])
    planning = [f'ranks="$({planner})" || exit 1', 'eval "$ranks"']
    # submitit needs one number of nodes, too
    further = {"nodes": f"{config.fewest_nodes}-{config.most_nodes}", "mincpus": ranks * cores}
    again: dict[str, Any] = {}
    if config.launch.spare_nodes:
        planning = ["set +e", "while :; do", *planning]  # the user's lines may end the script where srun fails
        in_place = f"export {IN_PLACE_VARIABLE}=1"
        again = {"teardown": ["ended=$?", f'{planner} --again || exit "$ended"', in_place, "done"]}
        further["no-kill"] = True
    changed = {
        "setup": [*request.get("setup", ()), *planning],
        "srun_args": [f"--ntasks-per-node={ranks}", *request["srun_args"]],
        "additional_parameters": request["additional_parameters"] | further,
    }
    return request | again | changed


def in_one_task(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request for a job whose only task starts its ranks itself.

    It is on the first node, and gets the cores and GPUs of that node's ranks.
    """
    cores = request["ntasks_per_node"] * request["cpus_per_task"]
    alone = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={cores}"]
    srun_args = [*request["srun_args"], *alone]  # the last ones count
    return request | {"ntasks_per_node": 1, "cpus_per_task": cores, "srun_args": srun_args}


def slurm_executor(folder: Path, python: str, what: str, other: str) -> "SlurmExecutor":
    """Return what submits jobs.

    Args:
        folder: where submitit keeps the jobs' files.
        python: the shell's words for the Python that a job starts.
        what: what the folder is, for an error.
        other: what to choose in place of it.

    Raises:
        EnvironmentMismatchError: if there is no Slurm here, or it cannot use the folder.
    """
    from submitit import SlurmExecutor

    if SlurmExecutor.affinity() < 0:
        raise EnvironmentMismatchError(
            "launch.launcher=slurm: this machine has no Slurm commands (srun, sbatch); "
            "log in to a node of the cluster, or use --launcher local"
        )
    if not str(folder).isprintable() or set("%\\") & set(str(folder)):
        raise EnvironmentMismatchError(
            f"{what}: Slurm alters paths with '%', a backslash or a line break; choose {other}"
        )
    return SlurmExecutor(folder, python=python)


def asked_memory(config: RunConfig, host_bytes: int) -> str:
    """Return how much memory the job asks for by default, and why; empty if it does not do so.

    Args:
        config: the resolved configuration.
        host_bytes: the estimated host memory of a node's ranks.
    """
    if config.launch.slurm.memory_gb_per_node is not None:
        return ""
    asked = memory_request(config, config.parallel.gpus, host_bytes)
    if asked is None:
        return ""
    if asked == "0":  # Slurm's word for all of a node's memory
        why = "all of the nodes it has to itself"
    else:
        why = "the partition's default is too little for the estimate"
    return f"the job asks for --mem={asked}: {why}; launch.slurm.memory_gb_per_node chooses another value"


def node_memory(config: RunConfig) -> tuple[str, int] | None:
    """Return a name for the memory of the largest node that a job may get, and its bytes; None if it is unknown."""
    largest = largest_node_bytes(config.launch.slurm.partition)
    return None if largest is None else ("the largest node of the partition", largest)


def memory_request(config: RunConfig, num_ranks: int, host_bytes: int) -> str | None:
    """Return the value of ``--mem``; None for the partition's default.

    If the configuration names no memory, a job of whole nodes asks for all of theirs. Any other job asks for the
    estimate times ``HOST_MARGIN``, or for the largest node's memory if that is less but holds the estimate. If the
    partition's default is enough, it asks for nothing.

    Args:
        config: the resolved configuration.
        num_ranks: ranks over all nodes.
        host_bytes: the estimated host memory of a node's ranks; 0 if it is unknown.
    """
    slurm = config.launch.slurm
    nodes = config.num_nodes
    if slurm.memory_gb_per_node:
        return f"{slurm.memory_gb_per_node}G"
    if _NAMED_OTHERWISE & slurm.options.keys():
        return None
    if slurm.options.get("exclusive") is True:
        return "0"
    if not host_bytes:
        return None
    ranks = num_ranks // nodes
    gpus = ranks if config.launch.device == "cuda" else 0
    largest = largest_node_bytes(slurm.partition) or math.inf
    needed = min(HOST_MARGIN * host_bytes, max(host_bytes, largest))
    granted = default_memory_bytes(slurm.partition, ranks * _cores_of_a_rank(config), gpus)
    return f"{math.ceil(needed / MIB)}M" if granted is not None and granted < needed else None


def _cores_of_a_rank(config: RunConfig) -> int:
    slurm = config.launch.slurm
    on_cuda = config.launch.device == "cuda"
    share = cores_per_gpu(slurm.partition) if on_cuda and not slurm.cpus_per_rank else None
    return share or slurm.cores_of_a_rank(config.launch.device)


def sbatch_script(config: RunConfig, name: str, folder: Path, num_ranks: int, host_bytes: int, *, run_dir: Path) -> str:
    """Return the script of a job as submitit writes it. Only submitting writes the pickle that it starts from.

    Args:
        config: the resolved configuration.
        name: name of the run.
        folder: where submitit would keep the job's files.
        num_ranks: ranks over all nodes.
        host_bytes: the estimated host memory of a node's ranks.
        run_dir: the run's directory.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{python_command()} {shlex.join(['-u', '-m', 'submitit.core._submit', str(folder)])}"
    elastic_run = run_dir if config.is_elastic else None
    asked = slurm_parameters(config, name, comment_of(folder), num_ranks, host_bytes, elastic_run=elastic_run)
    return str(_make_sbatch_string(command=command, folder=folder, **asked))


def refusal(config: RunConfig, host_bytes: int = 0) -> str | None:
    """Return why Slurm would refuse the job of ``config``, without submitting it; None if it would accept it."""
    asked = slurm_parameters(config, "test", "", config.parallel.gpus, host_bytes)
    options = {key: asked[key] for key in _CHECKED if key in asked} | asked["additional_parameters"]
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in options.items()]
    try:
        with submission_environment():
            answer = subprocess.run(
                ["sbatch", "--test-only", *flags, "--wrap=true"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if answer.returncode == 0:
        return None
    # an "allocation failure" is no refusal: it is told of nodes that are drained for a while, too
    lines = [line.rpartition("error: ")[2] for line in answer.stderr.splitlines() if "error: " in line]
    reasons = [line for line in dict.fromkeys(lines) if _ONLY_NOW not in line]
    return "; ".join(reasons) or None


@contextmanager
def submission_environment() -> Iterator[None]:
    """Hide variables that come from a job around the submitter, or that would override the job's configuration."""
    hidden = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_OF_A_JOB_AROUND) and name not in _OF_THE_USER
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def job_name(name: str) -> str:
    """Return ``name`` without the characters that Slurm's commands split at."""
    return re.sub(r"[^\w.-]", "-", name)


def comment_of(folder: Path) -> str:
    """Return the comment that identifies a job in the queue as submitted from ``folder``."""
    return f"llama-training-infra:{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
