"""Check whether Slurm is available and would accept the job of a run."""

import os
import shutil
import socket
import subprocess

from llama_core.config.run import RunConfig
from llama_core.errors import did_you_mean
from llama_core.launch.jobs.slurm_request import refusal
from llama_core.machine.validate import Findings

_SLURM_COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")


def check_slurm(found: Findings, config: RunConfig | None = None) -> None:
    """Check whether this is a node of a cluster, and whether its Slurm would accept the job of ``config``.

    Args:
        found: collects the facts and errors.
        config: the run that Slurm is to start; None if Slurm is not used, and then nothing is an error.
    """
    found.facts["slurm"], problem = _look(config)
    if problem and config is not None:
        found.fail("slurm", problem)


def unused_allocation(config: RunConfig) -> str:
    """Return how a run leaves the Slurm job around this shell unused; empty if it does not, or there is none."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # srun has started the ranks
        return ""
    if not config.launch.is_here:
        return (
            f"this shell is inside Slurm job {job}, and the run gets a job of its own; leave this one so that it does "
            "not keep nodes from it, or use its node with --launcher local"
        )
    if "SLURMD_NODENAME" not in os.environ:
        return (
            f"this shell of Slurm job {job}, and so the run, is on {socket.gethostname()}, not on a node of the job; "
            "put srun --nodes=1 --ntasks=1 --pty before the command, with the GPUs and cores of the ranks"
        )
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if num_nodes != "1":
        return (
            f"Slurm job {job} has {num_nodes} nodes, and the ranks of a local run share this one; use --launcher slurm "
            "from outside of the job for more"
        )
    return ""


def _look(config: RunConfig | None) -> tuple[str, str | None]:
    """Return a description of Slurm on this machine, and the reason why it would not take the job, if any."""
    missing = ", ".join(command for command in _SLURM_COMMANDS if shutil.which(command) is None)
    if missing:
        return f"no {missing}: this is not a node of a cluster", (
            f"launch.launcher=slurm: this machine has no {missing}; "
            "log in to a node of the cluster, or use --launcher local"
        )
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        if isinstance(said, bytes):  # those of a timeout are, although text was asked for
            said = said.decode(errors="replace")
        detail = said.strip().rpartition("\n")[2]
        return "the controller does not answer", f"launch.launcher=slurm: {_silent(detail)}, or use --launcher local"
    partitions = sorted(set(answer.stdout.split()))
    return f"partitions {', '.join(partitions)}", None if config is None else _problem(config, partitions)


def _silent(detail: str) -> str:
    """Return why there is no answer from Slurm, and what to do, by what ``sinfo`` says."""
    if "configuration source" in detail:  # it has found neither slurm.conf nor, through the network, somebody who has
        return (
            "Slurm's commands are installed here, but no cluster is configured (no slurm.conf); log in to a node of one"
        )
    return f"Slurm's controller does not answer ({detail}); wait until `scontrol ping` finds it up"


def _problem(config: RunConfig, partitions: list[str]) -> str | None:
    wanted = config.launch.slurm.partition
    if wanted is not None and wanted not in partitions:
        nearest = did_you_mean(wanted, partitions) or f"; choose one of {', '.join(partitions)}"
        return f"launch.slurm.partition={wanted!r} is not a partition here{nearest}"
    refused = refusal(config)
    return refused and f"Slurm would refuse the job: {refused}; change launch.slurm or launch.nodes"
