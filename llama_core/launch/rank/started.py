"""The ranks that torchrun or srun started, told from their environment."""

import os
from collections.abc import Mapping

from llama_core.launch.rank.supervisor import rendezvous_port


def started_ranks() -> int:
    """Return how many processes torchrun or srun started, this one included; 1 if neither did.

    Under srun, also set the environment variables that torchrun sets.
    """
    variables: Mapping[str, str] = os.environ
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return int(variables["WORLD_SIZE"])
    if "SLURM_STEP_ID" not in variables or int(variables.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return 1
    from submitit.slurm.slurm import SlurmJobEnvironment

    class Step(SlurmJobEnvironment):
        """The step of srun, which may have fewer nodes and tasks than its job."""

        _env = SlurmJobEnvironment._env | {
            "num_tasks": "SLURM_STEP_NUM_TASKS",
            "nodes": "SLURM_STEP_NODELIST",
        }

    step = Step()
    number = int(variables.get("SLURM_RESTART_COUNT", "0")) + int(variables["SLURM_STEP_ID"])
    os.environ.setdefault("MASTER_ADDR", step.hostnames[0])
    os.environ.setdefault("MASTER_PORT", str(rendezvous_port(int(variables["SLURM_JOB_ID"]), number)))
    os.environ["RANK"] = str(step.global_rank)
    os.environ["LOCAL_RANK"] = str(step.local_rank)
    os.environ["WORLD_SIZE"] = str(step.num_tasks)
    return step.num_tasks
