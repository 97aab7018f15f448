"""Check whether Slurm is available and would accept the job of a run."""

import shutil
import subprocess

from llama_core.config.run import RunConfig
from llama_core.errors import did_you_mean
from llama_core.launch.jobs.slurm_request import refusal
from llama_core.machine.validate import Findings

_SLURM_COMMANDS = ("sbatch", "srun", "scontrol", "scancel")


def check_slurm(found: Findings, config: RunConfig | None = None) -> None:
    """Check whether this is a node of a cluster, and whether its Slurm would accept the job of ``config``.

    Args:
        found: collects the facts and errors.
        config: the run that Slurm is to start; None if Slurm is not used, and then nothing is an error.
    """
    missing = [command for command in _SLURM_COMMANDS if shutil.which(command) is None]
    if missing:
        found.facts["slurm"] = f"no {', '.join(missing)}: this is not a node of a cluster"
        if config is not None:
            found.errors.append(
                f"launch.launcher=slurm: this machine has no {', '.join(missing)}; "
                "log in to a node of the cluster, or use --launcher local"
            )
        return
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        found.facts["slurm"] = "the controller does not answer"
        if config is not None:
            detail = getattr(error, "stderr", None) or error
            found.errors.append(f"Slurm's controller does not answer ({str(detail).strip()}); ask its administrators")
        return
    partitions = sorted(set(answer.stdout.split()))
    found.facts["slurm"] = f"partitions {', '.join(partitions)}"
    if config is None:
        return
    wanted = config.launch.slurm.partition
    if wanted is not None and wanted not in partitions:
        nearest = did_you_mean(wanted, partitions) or f"; choose one of {', '.join(partitions)}"
        found.errors.append(f"launch.slurm.partition={wanted!r} is not a partition here{nearest}")
        return
    refused = refusal(config)
    if refused is not None:
        found.errors.append(f"Slurm would refuse the job: {refused}; change launch.slurm or launch.nodes")
