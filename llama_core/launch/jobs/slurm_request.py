"""A job's request to Slurm, and a test of whether Slurm would grant it."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.launch.scheduler import cores_per_gpu

_CHECKED = (
    "partition", "account", "qos", "constraint", "time", "nodes", "ntasks_per_node", "cpus_per_task", "mem",
    "gpus_per_node",
)  # fmt: skip
_OF_THE_USER = {"SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_RESERVATION"}
"""Variables that select the cluster, or the account or reservation that jobs are charged to."""
_ONLY_NOW = "node not available (down, drained or reserved)"
"""Part of Slurm's refusal to predict the start of a job whose nodes are unavailable at the moment."""


def slurm_parameters(config: RunConfig, name: str, comment: str, num_ranks: int) -> dict[str, Any]:
    """Return the request for a job of ``num_ranks`` ranks, as submitit's parameters.

    Args:
        config: the resolved configuration.
        name: name of the run, by which people and scripts find the job in the queue.
        comment: identifies the submission in the queue.
        num_ranks: ranks over all nodes, a multiple of ``launch.nodes``.
    """
    slurm, nodes, on_cuda = config.launch.slurm, config.launch.nodes, config.launch.device == "cuda"
    share = cores_per_gpu(slurm.partition) if on_cuda and not slurm.cpus_per_rank else None
    cores = share or slurm.cores_of_a_rank(config.launch.device)
    limit_seconds = slurm.time_limit_min * 60
    asked = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "mem": f"{slurm.memory_gb_per_node}G" if slurm.memory_gb_per_node else None,
        "gpus_per_node": num_ranks // nodes if on_cuda else None,
        "setup": slurm.setup or None,
        "array_parallelism": slurm.max_parallel_jobs,
    }
    # Since Slurm 22.05 srun does not take the cores from sbatch; by default it lets the other ranks run on when one
    # fails. wait=0: it waits as long as the first rank needs to queue the job again.
    srun: dict[str, str | int] = {"cpus-per-task": cores, "kill-on-bad-exit": 1, "wait": 0}
    if on_cuda:  # neighbouring ranks on one socket, as their GPUs are; by default srun alternates between sockets
        srun["distribution"] = "block:block"
    srun |= slurm.srun_options
    return {
        "job_name": job_name(name),
        "comment": comment,
        "time": slurm.time_limit_min,
        "nodes": nodes,
        "ntasks_per_node": num_ranks // nodes,
        "cpus_per_task": cores,
        "signal_delay_s": min(config.launch.save_timeout_s, limit_seconds // 4),
        "stderr_to_stdout": True,
        "wckey": None,  # clusters that account by wckey refuse submitit's own
        "srun_args": [f"--{key}" if value is True else f"--{key}={value}" for key, value in srun.items()],
        "additional_parameters": {"requeue" if slurm.requeue else "no-requeue": True} | slurm.options,
    } | {name: value for name, value in asked.items() if value is not None}


def sbatch_script(config: RunConfig, name: str, folder: Path, num_ranks: int) -> str:
    """Return the script of a job as submitit writes it. Only submitting writes the pickle that it starts from.

    Args:
        config: the resolved configuration.
        name: name of the run.
        folder: where submitit would keep the job's files.
        num_ranks: ranks over all nodes.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])
    asked = slurm_parameters(config, name, comment_of(folder), num_ranks)
    return str(_make_sbatch_string(command=command, folder=folder, **asked))


def refusal(config: RunConfig) -> str | None:
    """Return why Slurm would refuse the job of ``config``, without submitting it; None if it would accept it."""
    asked = slurm_parameters(config, "test", "", config.parallel.gpus)
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
    lines = [line.rpartition("error: ")[2] for line in answer.stderr.splitlines() if "error: " in line]
    reasons = [line for line in dict.fromkeys(lines) if _ONLY_NOW not in line]
    return "; ".join(reasons) or None


@contextmanager
def submission_environment() -> Iterator[None]:
    """Hide variables that come from a job around the submitter, or that would override the job's configuration."""
    hidden = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SBATCH_", "SUBMITIT_", "MASTER_")) and name not in _OF_THE_USER
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
