"""The facts about a launcher that others need. Each states its own, so no other code asks for its name."""

from dataclasses import dataclass
from signal import Signals


@dataclass(frozen=True)
class ToldNotToStart:
    """Words in a job's output outside its ranks by which a rank was kept from starting, for a cause that passes."""

    words: str
    reason: str
    """The cause, as a sentence."""


@dataclass(frozen=True)
class LauncherType:
    """A way to start jobs. The defaults are those of processes on this machine that nobody looks after."""

    name: str
    """Value of ``launch.launcher``."""
    module: str
    """The module whose ``LAUNCHER`` starts its jobs; a string, so that a configuration knows nothing of jobs."""
    title: str
    """What runs its jobs, as people say it: Slurm."""
    is_here: bool = False
    """Whether ranks are processes of this machine. Otherwise a job has nodes of its own, of which this is none."""
    has_queue: bool = False
    """Whether several jobs may be submitted at once, because they wait until they get what they ask for."""
    can_requeue: bool = False
    """Whether a job can be started again under its own id, after it has lost a node or its time was over."""
    can_exclude: bool = False
    """Whether a job that starts again can be kept off some nodes."""
    takes_fewer_nodes: bool = False
    """Whether a job may start with fewer nodes than it asks for, and plans for them on the first one
    (``launch.min_nodes``, ``launch.spare_nodes``)."""
    runs_tasks: bool = False
    """Whether it also runs jobs that are no run's: those that evaluate a checkpoint, or build shards of tokens."""
    announces_end_with: Signals | None = None
    """The signal by which the ranks of a job learn that its time is nearly over, which workers must know
    (``HELD_SIGNALS``); None if nobody tells them."""
    section: str = ""
    """The section of ``launch`` in which a job says what it asks for; empty for none."""
    more_memory: str = ""
    """The setting by which a job gets more host memory; empty for none."""
    such_nodes: str = ""
    """The setting by which a job gets nodes of another kind; empty for none."""
    other_nodes: str = ""
    """The setting by which a job avoids ``{host}``; empty if it cannot."""
    allocates: str = ""
    """The command that makes a job of ``{num_nodes}`` nodes around another command; empty if there is none."""
    starts_a_script: str = ""
    """The command that starts a script on ``{num_ranks}`` ranks of a job; empty if there is none."""
    kept_from_starting: tuple[ToldNotToStart, ...] = ()

    @property
    def prefix(self) -> str:
        """What the names of its settings begin with; empty if it has none."""
        return f"launch.{self.section}." if self.section else ""
