"""The one rule for trackers that fail: a run goes on without them, since its own metrics hold the same values."""

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from threading import Thread

from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import how_to_install
from llama_core.trackers.traits import AskedTracker, TrackedRun, Tracker

KEEP_SECONDS = 30.0
"""How long the end of a run waits for a tracker that keeps a file."""


class GuardedTracker:
    """A tracker that is open until it fails, and then costs one warning.

    Args:
        asked: the tracker.
        run: the run that it is opened for.
        lost: what a failure means, after the tracker's title, such as ``gets no more steps``.
        tell: called with the warning.

    Raises:
        EnvironmentMismatchError: if its package is missing, or it refuses what it finds on this machine.
    """

    def __init__(self, asked: AskedTracker, run: TrackedRun, lost: str, tell: Callable[[str], None]) -> None:
        self._warning = f"{asked.kind.title} {lost}"
        self._tell = tell
        self._tracker: Tracker | None = None
        try:
            self._tracker = _opened(asked, run)
        except EnvironmentMismatchError:
            raise
        except Exception as error:  # of a disk, of a service elsewhere, or of its client
            self._give_up(error)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Hand on the values of a step."""
        self._hand_on(lambda tracker: tracker.write(step, values, time))

    def write_scores(self, step: int, tokens: int, scores: Mapping[str, float], time: float) -> None:
        """Hand on the scores of a checkpoint."""
        self._hand_on(lambda tracker: tracker.write_scores(step, tokens, scores, time))

    def flush(self) -> None:
        """Flush the tracker."""
        self._hand_on(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Close the tracker."""
        self._hand_on(lambda tracker: tracker.close())
        self._tracker = None

    def _hand_on(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._tell(f"{self._warning}: {type(error).__name__}: {error}")
        tracker = self._tracker
        self._tracker = None
        if tracker is not None:
            with suppress(Exception):  # what it still holds may be lost for the same reason
                tracker.close()


def _opened(asked: AskedTracker, run: TrackedRun) -> Tracker:
    try:
        return asked.kind.open(run, asked.settings)
    except ImportError as error:
        package = asked.kind.package or str(error.name)
        raise EnvironmentMismatchError(
            f"{asked.setting} needs the {package} package; {how_to_install(package)}, or do without it"
        ) from None


def keep_file(asked: AskedTracker, run: TrackedRun, file: Path, tell: Callable[[str], None]) -> None:
    """Let a tracker keep a file of a run that has ended, if it can; a failure costs one warning.

    Args:
        asked: the tracker.
        run: the run.
        file: the file.
        tell: called with the warning.
    """
    failures: list[Exception] = []

    def keep() -> None:
        try:
            asked.kind.keep(run, asked.settings, file)
        except Exception as error:  # of a disk, of a service elsewhere, or of its client
            failures.append(error)

    thread = Thread(target=keep, name=f"{file.name} for {asked.kind.title}", daemon=True)
    with redirect_stdout(StringIO()):  # what its client prints is not the output of our command
        thread.start()
        thread.join(KEEP_SECONDS)
    without = f"{asked.kind.title} does not get {file.name}"
    for error in failures:
        tell(f"{without}: {type(error).__name__}: {error}")
    if thread.is_alive():
        tell(f"{without}: it did not answer within {KEEP_SECONDS:g} s")
