"""What a scheduler says of a job, whichever scheduler it is."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class JobStatus:
    """A job as its scheduler sees it."""

    state: str
    """The scheduler's word for it, such as Slurm's ``RUNNING``, ``PENDING`` or ``NODE_FAIL``."""
    reason: str = ""
    """Why it waits, such as ``Priority``; empty if the scheduler gives no reason."""
    is_preempted: bool = False
    """Whether it has been told to make room for another job."""
    script: str = ""
    """The path of the script that it was submitted with; empty if the scheduler does not say."""


Ask = Callable[[str, str], JobStatus | None]
"""Returns the status of a job, by its id and name; None if there is no answer."""
