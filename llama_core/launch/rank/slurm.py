"""Ranks of a Slurm job: what they find in their environment, and what they ask Slurm."""

import os
import shutil
from collections.abc import Mapping, Sequence

from llama_core.launch.rank.surroundings import (
    JobStart,
    RankPlace,
    Step,
    Surroundings,
    export_torchrun,
    rendezvous_port,
)
from llama_core.launch.scheduler import JobStatus
from llama_core.launch.slurm import (
    earlier_states,
    exclude,
    failed_nodes,
    give_back,
    hosts,
    job_status,
    nears_limit,
    nodes_of,
    requeue,
)
from llama_core.launch.verdict import LESS_MEMORY, RESUME, Verdict
from llama_core.machine.node import NODE_VARIABLE
from llama_core.records.job import JobRecord

_LONGER_LIMIT = "raise launch.slurm.time_limit_min, then --resume"
VERDICT_OF_STATE = {
    "TIMEOUT": Verdict("timeout", "Slurm ended the job at its time limit", _LONGER_LIMIT),
    "DEADLINE": Verdict("timeout", "Slurm ended the job at its deadline", RESUME),
    "PREEMPTED": Verdict("preempted", "Slurm gave the job's nodes to another job", RESUME),
    "NODE_FAIL": Verdict("node-failure", "a node of the job failed", RESUME),
    "BOOT_FAIL": Verdict("node-failure", "a node of the job did not boot", RESUME),
    "OUT_OF_MEMORY": Verdict("oom", "the job used more host memory than it had asked Slurm for", LESS_MEMORY),
    "CANCELLED": Verdict("cancelled", "the job was cancelled in Slurm", RESUME),
}  # fmt: skip
"""Why a job ended, by Slurm's name for its final state."""
_INTERRUPTIONS = {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
_OF_THIS_STEP = ("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_MEM_")
"""Beginnings of the variables by which the ranks of a step would get the cores and the memory of this process's."""


class SlurmSurroundings(Surroundings):
    """Ranks that are tasks of a Slurm job."""

    def take_place(self) -> RankPlace:
        """Return the place that Slurm's variables tell."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        job = JobEnvironment()
        restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        # An elastic job may have more nodes than its plan needs; submitit counts ranks by those of the job.
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ["SLURM_JOB_NODELIST"])
        os.environ["SLURM_JOB_NODELIST"] = nodes
        os.environ["SLURM_JOB_NUM_NODES"] = os.environ.get("SLURM_STEP_NUM_NODES", str(job.num_nodes))
        os.environ.setdefault("MASTER_PORT", str(rendezvous_port(int(os.environ["SLURM_JOB_ID"]), restart)))
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        cores = os.environ.get("SLURM_CPUS_PER_TASK")
        return RankPlace(
            job.job_id,
            job.global_rank,
            job.num_tasks,
            job.num_tasks // job.num_nodes,
            restart=restart,
            nodes=nodes,
            host=os.environ.get("SLURMD_NODENAME", ""),
            cores=int(cores) if cores else None,
        )

    def interruption(self, job: JobRecord, nodes: str) -> Verdict:
        """Return why Slurm ended an attempt: from its accounting, else from the state of the attempt's nodes."""
        states = earlier_states(job.job_id, job.name)
        if states and states[-1] in _INTERRUPTIONS:
            return VERDICT_OF_STATE[states[-1]]
        failed = failed_nodes(nodes) if nodes else []
        if failed:
            return Verdict("node-failure", f"Slurm lost {', '.join(failed)}", RESUME)
        return Verdict("preempted", "Slurm stopped the job", RESUME)

    def lacks(self) -> str:
        """Return that the ranks have no command to queue the job again with, if so."""
        there = shutil.which("scontrol") is not None
        return "" if there else "the ranks have no scontrol to queue the job again with"

    def status(self, job: JobRecord) -> JobStatus | None:
        """Return the job's status; None if Slurm does not answer."""
        return job_status(job.job_id, job.name)

    def is_running(self, status: JobStatus) -> bool:
        """Return whether a job is at work, and has not been cancelled or queued again by Slurm itself."""
        return status.state == "RUNNING"

    def queue_again(self, job: JobRecord) -> bool:
        """Queue the job again, under the same id; return whether Slurm agreed."""
        return requeue(job.job_id)

    def exclude(self, job: JobRecord, nodes: Sequence[str]) -> bool:
        """Keep a job that was queued again off some nodes; return whether Slurm agreed."""
        return exclude(job.job_id, nodes)

    def nodes_now(self, job_id: str) -> list[str]:
        """Return the nodes that a running job has by now; empty if Slurm does not answer."""
        return nodes_of(job_id)

    def hosts(self, nodes: str) -> list[str]:
        """Return the names of nodes that Slurm abbreviates as ``nodes``; empty if it does not answer."""
        return hosts(nodes)

    def give_back(self, job: JobRecord, nodes: Sequence[str]) -> bool:
        """Let a running job go on without some of its nodes; return whether Slurm agreed."""
        return give_back(job.job_id, nodes)

    def nears_limit(self, job: JobRecord) -> bool:
        """Return whether Slurm has told the ranks of a running job of its time limit, or soon will."""
        return nears_limit(job.job_id, job.grace_seconds)

    def started_ranks(self) -> int:
        """Return how many ranks srun has started, this one included; 1 if it has not."""
        if "SLURM_STEP_ID" not in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
            return 1
        from submitit.slurm.slurm import SlurmJobEnvironment

        class StepEnvironment(SlurmJobEnvironment):
            """The step of srun, which may have fewer nodes and tasks than its job."""

            _env = SlurmJobEnvironment._env | {
                "num_tasks": "SLURM_STEP_NUM_TASKS",
                "nodes": "SLURM_STEP_NODELIST",
            }

        step = StepEnvironment()
        number = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + int(os.environ["SLURM_STEP_ID"])
        port = rendezvous_port(int(os.environ["SLURM_JOB_ID"]), number)
        export_torchrun(step.global_rank, step.local_rank, step.num_tasks, step.hostnames[0], port)
        os.environ[NODE_VARIABLE] = os.environ["SLURMD_NODENAME"]
        return int(step.num_tasks)

    def nodes_around(self) -> int:
        """Return the number of nodes of the Slurm job around this process; 0 if it is in none."""
        return int(os.environ.get("SLURM_JOB_NUM_NODES", "0"))

    def step(self, command: Sequence[str], num_ranks: int, num_nodes: int) -> Step:
        """Return the srun that starts ranks on nodes of the job around this process."""
        in_node = num_ranks // num_nodes
        cores = max(1, int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) // in_node)
        flags = {
            "nodes": num_nodes,
            "ntasks": num_ranks,
            "ntasks-per-node": in_node,
            "cpus-per-task": cores,
            "mem": 0,  # all that the job has
            "distribution": "block",
            "kill-on-bad-exit": 1,
        }
        options = [f"--{key}={value}" for key, value in flags.items()]
        return Step(
            ("srun", "--overlap", "--unbuffered", *options, *command),
            {name: value for name, value in os.environ.items() if not name.startswith(_OF_THIS_STEP)},
            cores,
            notes=("srun: ", "slurmstepd: "),
            errors="srun: error: ",
        )

    def job_start(self, environment: Mapping[str, str]) -> JobStart:
        """Return the start of a job, from the environment of its batch script."""
        restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
        return JobStart(environment["SLURM_JOB_ID"], restart, int(environment["SLURM_JOB_NUM_NODES"]))

    def with_ranks(self, num_ranks: int, num_nodes: int, restart: int) -> Mapping[str, int]:
        """Return the variables that tell srun how many ranks to start, on how many nodes, and ranks their start."""
        nodes = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), num_nodes)
        ranks = dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), num_ranks)
        return nodes | ranks | {"SLURM_RESTART_COUNT": restart}
