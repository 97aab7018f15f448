"""The mirror of a run's checkpoints: what a checkpoint that is complete on disk sets off on the first rank."""

import logging
import time

from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError, StorageError, TrainingFailedError
from llama_core.parallel.ranks import from_first_rank, has_lost_the_others, is_first_rank, most_over_ranks
from llama_core.records.directory import RunDirectory, command_to_resume
from llama_core.storage.mirror import Mirror, mirror_url
from llama_core.storage.upload import Uploads
from llama_core.training.checkpoint import SECONDS_BETWEEN_QUESTIONS, Checkpointer
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.part import LoopPart

logger = logging.getLogger(__name__)


class CheckpointMirror(LoopPart):
    """Copies checkpoints to ``training.checkpoint_mirror``. It ends after the part that saves them.

    Args:
        run: the run.
        config: its configuration.
        checkpointer: publishes the checkpoints.
        activity: is told when the end of the run waits for a copy.
    """

    def __init__(self, run: RunDirectory, config: RunConfig, checkpointer: Checkpointer, activity: ActivityLog) -> None:
        self._run = run
        self._config = config
        self._checkpointer = checkpointer
        self._activity = activity
        self._patience_s = float(config.launch.save_timeout_s)
        self._uploads: Uploads | None = None
        """On the first rank, once the loop has begun."""

    @property
    def _is_asked_for(self) -> bool:
        return self._config.training.checkpoint_mirror is not None

    def begin(self) -> None:
        """Make the mirror this job's on the first rank, and begin with what it lacks.

        A store that does not answer now may do so before the first checkpoint: the run goes on.

        Raises:
            RunDirectoryError: on every rank, if the mirror holds another run's checkpoints.
            StorageError: on every rank, if this machine cannot use the store.
        """
        if not self._is_asked_for:
            return
        refusal = from_first_rank(self._start() if is_first_rank() else None)
        if refusal is not None:
            raise refusal

    def _start(self) -> RunDirectoryError | StorageError | None:
        """Start copying, or return why not."""
        prefix = str(self._config.training.checkpoint_mirror)
        try:
            mirror = Mirror(mirror_url(prefix, self._run.name))
        except StorageError as error:  # a package is missing
            return error
        uploads = Uploads(self._run, mirror, fingerprint=self._config.fingerprint(), keep=self._config.retention)
        if (refusal := uploads.start()) is not None:
            return refusal
        self._checkpointer.on_published = uploads.wake
        self._checkpointer.is_held = uploads.holds
        self._uploads = uploads
        return None

    def end(self, error: BaseException | None) -> None:
        """Wait until the last checkpoint is on the mirror, at most ``launch.save_timeout_s``.

        A run that is stopped or fails waits a quarter of that: it may have as little time for all it does at its end.
        What is missing then is copied when the run is resumed.
        """
        if not self._is_asked_for or not (error is None or isinstance(error, Exception)):
            return
        uploads = self._uploads
        patience_s = self._patience_s if error is None else self._patience_s / 4
        until = time.monotonic() + patience_s
        if uploads is not None and not uploads.is_done:
            self._activity.tell("copying the last checkpoint to the mirror", "checkpoints")
            logger.info(
                "waiting for the last checkpoint to be on %s, at most %g s (by launch.save_timeout_s)",
                uploads.mirror,
                patience_s,
            )
        if error is None or isinstance(error, TrainingFailedError):  # on all ranks
            num_waiting = 1
            while num_waiting:
                (num_waiting,) = most_over_ranks(int(_is_waiting(uploads, until)))
        elif not has_lost_the_others(error):
            while _is_waiting(uploads, until):
                pass
        if uploads is None:
            return
        uploads.stop()
        if not uploads.has_all:
            logger.warning(
                "%s lacks the last checkpoint; it is copied by: %s",
                uploads.mirror,
                command_to_resume(self._run, from_python=self._checkpointer.from_python),
            )
        self._checkpointer.remove_others()


def _is_waiting(uploads: Uploads | None, until: float) -> bool:
    """Return whether the first rank goes on waiting, after a moment in which it does."""
    if uploads is None or time.monotonic() >= until:
        return False
    return not uploads.wait(SECONDS_BETWEEN_QUESTIONS)
