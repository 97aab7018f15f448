"""A request to stop, which may reach any rank."""

from collections.abc import Callable

from llama_core.errors import StoppedError
from llama_core.parallel.ranks import most_over_ranks
from llama_core.training.parts.part import LoopPart, RunProgress
from llama_core.training.reports import Reports

ASKED_TO_STOP = "asked_to_stop"
"""The name under which a step tells all ranks that one of them was asked to stop when it began."""


class StopRequest(LoopPart):
    """Tells all ranks whether one of them was asked to stop: with every step, or where no step carries the answer.

    Args:
        should_stop: whether this rank was asked to.
        progress: how far the run is.
        reports: takes the answer of this rank.
    """

    def __init__(self, should_stop: Callable[[], bool], progress: RunProgress, reports: Reports) -> None:
        self.should_stop = should_stop
        self._progress = progress
        self._report = reports.declare(ASKED_TO_STOP, "max", recorded=False)

    def step_begun(self) -> None:
        """Report the answer with the step."""
        self._report(self.should_stop())

    def is_made(self) -> bool:
        """Return on all ranks whether any of them was asked to stop; all call it together."""
        (stop,) = most_over_ranks(int(self.should_stop()))
        return bool(stop)

    def stop_before(self, what: str) -> None:
        """End the run before ``what``, such as "the reference was computed", if any rank was asked to stop.

        Raises:
            StoppedError: on all ranks, which call it together.
        """
        if self.is_made():
            raise StoppedError(f"stopped after step {self._progress.step}, before {what}")
