"""A thread that sends values to a service, so that a run neither waits for the service nor ends with it."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from threading import Condition, Event, Thread
from time import monotonic, sleep
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
"""Most steps that wait for a service; with 30 metrics each, they take some 300 MB of host memory."""
MAX_SENT = 100
"""Most steps that are sent at once."""
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for a service that takes nothing of what has not been sent."""
LONGEST_CLOSE_SECONDS = 60.0
"""How long it waits for a service that is slow, but takes values."""
FIRST_PAUSE_SECONDS = 1.0
"""Time before a service that does not answer is tried again; each further pause is twice as long."""
LONGEST_PAUSE_SECONDS = 60.0


class Values(NamedTuple):
    """The values of a step, or the scores of its checkpoint, by name."""

    step: int
    values: Mapping[str, float]
    time: float
    """Seconds since the epoch."""


class TrackerService(Protocol):
    """What values are sent to, by one thread. A method takes its time, and raises whatever it likes."""

    def send(self, values: Sequence[Values]) -> None:
        """Send values; some may have been sent before, when it did not answer."""

    def keep(self, file: Path) -> None:
        """Send a file."""

    def is_away(self, error: Exception) -> bool:
        """Return whether the same may succeed later, since the service does not answer now."""

    def close(self) -> None:
        """Say that the run has ended."""


class BackgroundTracker:
    """A tracker whose values wait for a thread, and stay there while the service does not answer.

    Args:
        service: gets the values.
        title: what people call it.
    """

    def __init__(self, service: TrackerService, title: str) -> None:
        self._service = service
        self._title = title
        self._waiting: deque[Values | Path] = deque()
        self._changed = Condition()
        self._closing = Event()
        self._abandoned = False
        self._num_sent = 0
        self._failure: Exception | None = None
        self._thread = Thread(target=self._send_all, name=f"values for {title}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Take the values of a step.

        Raises:
            Exception: what the service refused earlier values with.
            TimeoutError: if the service has been away for too many steps.
        """
        self._put(Values(step, values, time))

    def write_scores(self, step: int, tokens: int, scores: Mapping[str, float], time: float) -> None:
        """Take the scores of a checkpoint, as ``write``."""
        self._put(Values(step, scores, time))

    def keep(self, file: Path) -> None:
        """Take a file, as ``write``."""
        self._put(file)

    def flush(self) -> None:
        """Do nothing: a run does not wait for a service."""

    def close(self) -> None:
        """Wait a moment for what has not been sent.

        Raises:
            Exception: what the service refused values with.
            TimeoutError: if something is left; it is lost.
        """
        if self._failure is None:
            with self._changed:
                self._closing.set()
                self._changed.notify()
            self._wait_while_it_takes_values()
        self._abandoned = True
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"it took no values for {CLOSE_SECONDS:g} s at the end, or too few{self._left()}")

    def _put(self, item: Values | Path) -> None:
        if self._failure is not None:
            raise self._failure
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise TimeoutError(f"it has not answered for {MAX_WAITING:,} steps")
            self._waiting.append(item)
            self._changed.notify()

    def _wait_while_it_takes_values(self) -> None:
        deadline = monotonic() + LONGEST_CLOSE_SECONDS
        before = -1
        while self._thread.is_alive() and self._num_sent > before and monotonic() < deadline:
            before = self._num_sent
            self._thread.join(CLOSE_SECONDS)

    def _left(self) -> str:
        """Return what has not been sent, as the end of a sentence."""
        with self._changed:
            steps = [item.step for item in self._waiting if isinstance(item, Values)]
        return f", and lacks the values of steps {steps[0]:,} to {steps[-1]:,}" if steps else ""

    def _send_all(self) -> None:
        """Send what waits until the tracker is closed and nothing is left, the service refuses it, or it is given up.

        Only this thread takes anything out of what waits.
        """
        try:
            while batch := self._next_batch():
                if not self._send_until_answered(batch):
                    return
                with self._changed:
                    for _ in batch:
                        self._waiting.popleft()
                self._num_sent += len(batch)
            self._service.close()
        except Exception as error:
            self._failure = error

    def _next_batch(self) -> list[Values | Path]:
        """Return what to send next, all values or one file; empty if the tracker is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            first = list(self._waiting)[:MAX_SENT]
        return list(takewhile(lambda item: isinstance(item, Values), first)) or first[:1]

    def _send_until_answered(self, batch: Sequence[Values | Path]) -> bool:
        """Send a batch, again and again while the service is away; return False if the tracker is given up by then.

        Raises:
            Exception: what the service refuses it with.
        """
        pause = FIRST_PAUSE_SECONDS
        while not self._abandoned:
            try:
                self._send(batch)
            except Exception as error:
                if not self._service.is_away(error):
                    raise
                if pause == FIRST_PAUSE_SECONDS:
                    logger.warning("%s does not answer; its values wait until it does: %s", self._title, error)
                wakes_early = self._closing.wait(pause)
                if wakes_early:
                    sleep(FIRST_PAUSE_SECONDS)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                if pause > FIRST_PAUSE_SECONDS:
                    logger.info("%s answers again", self._title)
                return True
        return False

    def _send(self, batch: Sequence[Values | Path]) -> None:
        values = [item for item in batch if isinstance(item, Values)]
        if values:
            self._service.send(values)
        for file in batch:
            if isinstance(file, Path):
                self._service.keep(file)
