"""A launcher of a package: jobs wait in a depot, a folder, and are detached processes that nobody starts again."""

import signal

from llama_core.launchers.traits import LauncherType

DEPOT = LauncherType(
    "depot",
    module="toy_launcher_jobs",
    title="the depot",
    has_queue=True,
    runs_tasks=True,
    announces_end_with=signal.SIGUSR2,
    starts_a_script="depot-run {num_ranks}",
)
