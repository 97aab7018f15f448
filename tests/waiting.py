"""Waits for what other processes do: as long as a busy machine needs, and no longer than a test may take."""

import time

PATIENCE_SECONDS = 300


def eventually(condition, *, every=0.05):
    """Return the first true value of ``condition``, asked ``every`` so many seconds; fail if there is none in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it has not happened within {PATIENCE_SECONDS} s"
        time.sleep(every)
    return value
