"""What to tell someone who waits for a job: news from its scheduler, and word when no step comes for long."""

import time
from collections.abc import Callable, Iterator

from llama_core.records.activity import Activity, read_activity
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import StepRecord
from llama_core.units import format_duration

FIRST_NOTICE_SECONDS = 180.0
"""Silence after which the first line is due; the time between two lines then doubles."""
LONGEST_PAUSE_SECONDS = 1800.0
"""Most seconds between two lines."""
USUAL_STEPS = 3
"""Silence that is still normal, in durations of the last step."""


class SchedulerNotices:
    """Gives a line whenever a job waits for something else, or its scheduler stops or begins to answer.

    Args:
        title: what people call the scheduler.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._waits_for = ""
        self._is_answered = True

    def lines(self, waits_for: str, *, is_answered: bool) -> Iterator[str]:
        """Yield what has changed.

        Args:
            waits_for: why the job waits in a queue; empty if it does not.
            is_answered: whether the scheduler answered the last question about the job.
        """
        if is_answered != self._is_answered:
            self._is_answered = is_answered
            yield (
                f"{self._title}'s controller answers again"
                if is_answered
                else f"for {self._title}'s controller, which does not answer; a job that runs goes on without it"
            )
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            yield f"for {waits_for}" if waits_for else f"{self._title} has started the job"


class StallNotices:
    """Gives a line whenever a job has been silent for long: where the first rank is, and what to expect.

    Args:
        run: the run.
        submitted: when its job was submitted, in seconds since the epoch.
        expected: returns what is known of the length of a step; called when a line before the first step is due.
    """

    def __init__(self, run: RunDirectory, submitted: float, expected: Callable[[], str]) -> None:
        self.run = run
        self.expected = expected
        self._clock = time.time() - time.monotonic()
        self._started = submitted
        self._newest: StepRecord | None = None
        self._news_at: float | None = None
        self._has_looked = False
        self._queued = False
        self._due = FIRST_NOTICE_SECONDS

    def line(self, newest: StepRecord | None, waits_for: str) -> str | None:
        """Return the line that is due now, if any.

        Args:
            newest: the last step of this job.
            waits_for: why the job waits in a queue; empty if it does not.
        """
        now = self._clock + time.monotonic()  # nobody has been silent for an hour because a clock was set
        if self._queued and not waits_for:
            self._started = now
            self._due = FIRST_NOTICE_SECONDS
        self._queued = bool(waits_for)
        if newest is not None and newest != self._newest:
            self._newest = newest
            self._due = max(FIRST_NOTICE_SECONDS, USUAL_STEPS * newest.step_seconds)
            self._news_at = now if self._has_looked else min(now, newest.time)
        self._has_looked = True
        silent = now - (self._started if self._news_at is None or self._queued else self._news_at)
        if silent < self._due:
            return None
        self._due = silent + min(silent, LONGEST_PAUSE_SECONDS)
        if waits_for:
            return f"still for {waits_for}, {format_duration(silent)} after submission"
        return self._of_first_rank(now, silent)

    def _of_first_rank(self, now: float, silent: float) -> str:
        newest = self._newest
        if newest is None:
            activity = Activity("starting Python and torch", self._started)
            heading = f"no step yet after {format_duration(silent)}"
            ending = f"; {self.expected()}"
        else:
            activity = Activity(f"in step {newest.step + 1}", newest.time)
            heading = f"no step since step {newest.step}, which took {format_duration(newest.step_seconds)}"
            ending = ""
        recorded = read_activity(self.run)
        if recorded is not None and recorded.since >= activity.since:  # otherwise it was over before
            activity = recorded
        lasts = min(silent, max(0.0, now - activity.since))
        return f"{heading}: rank 0 has been {activity.doing} for {format_duration(lasts)}{ending}"
