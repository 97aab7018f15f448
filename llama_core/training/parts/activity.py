"""What the first rank does besides steps, for whoever waits for the run and for its goodput."""

from llama_core.parallel.ranks import is_first_rank
from llama_core.records.activity import TimePart, record_activity
from llama_core.records.directory import RunDirectory
from llama_core.training.parts.part import RunProgress


class ActivityLog:
    """Records what this rank does, if it is the first one.

    Args:
        run: the run.
        progress: how far it is.
    """

    def __init__(self, run: RunDirectory, progress: RunProgress) -> None:
        self._run = run
        self._progress = progress

    def tell(self, doing: str, part: TimePart = "startup") -> None:
        """Record what this rank does from now on: ``doing`` completes "has been"."""
        if is_first_rank():
            record_activity(self._run, doing, part)

    def tell_step(self) -> None:
        """Record that this rank goes on with the next step."""
        self.tell(f"in step {min(self._progress.step + 1, self._progress.total_steps)}", "steps")
