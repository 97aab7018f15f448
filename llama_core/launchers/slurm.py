"""Jobs of a Slurm cluster."""

from signal import Signals

from llama_core.launchers.traits import LauncherType, ToldNotToStart

SLURM = LauncherType(
    "slurm",
    module="llama_core.launch.jobs.slurm",
    title="Slurm",
    has_queue=True,
    can_requeue=True,
    can_exclude=True,
    takes_fewer_nodes=True,
    runs_tasks=True,
    announces_end_with=Signals.SIGUSR2,
    section="slurm",
    more_memory="launch.slurm.memory_gb_per_node",
    such_nodes="launch.slurm.constraint",
    other_nodes="launch.slurm.options.exclude={host}",
    allocates="salloc --nodes={num_nodes}",
    starts_a_script="srun --ntasks={num_ranks}",
    kept_from_starting=(
        # a lost node came back just as the job was about to start on it again
        ToldNotToStart(
            "Job credential revoked", "a node that Slurm had lost and got back did not accept the job again"
        ),
    ),
)
