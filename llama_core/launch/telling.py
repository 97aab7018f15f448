"""Tell people how a run's job ends, once, whichever of its processes is the first to know."""

import logging
from typing import TYPE_CHECKING

from llama_core.machine.node import own_host
from llama_core.records.directory import RunDirectory
from llama_core.records.job import OutcomeStatus
from llama_core.records.metrics import read_heartbeat

if TYPE_CHECKING:  # a supervisor starts without the schema of the configuration
    from llama_core.config.notify import NotifyConfig

logger = logging.getLogger(__name__)


def whom_to_tell(run: RunDirectory) -> "NotifyConfig | None":
    """Return whom the run's configuration asks to tell; None if nobody, or if it cannot be read, which is a warning."""
    from llama_core.config.commands import refuse_commands_of_others
    from llama_core.config.files import read_yaml
    from llama_core.config.notify import NotifyConfig
    from llama_core.errors import RequestError

    if not run.config.exists():
        return None
    try:
        file = read_yaml(run.config, "configuration", run.path)
        config = NotifyConfig.model_validate((file.keys or {}).get("notify", {}))
        refuse_commands_of_others(run.config, {"notify.command": config.command}, file.of_others)
    except (RequestError, ValueError) as error:
        logger.warning("nobody is told how the run ended: %s", error)
        return None
    return config if config.is_asked_for else None


def tell_ending(run: RunDirectory, attempt: int, status: OutcomeStatus, cause: str, *, requeued: bool = False) -> None:
    """Tell whom the run's configuration asks to tell how an attempt has ended, unless that has been told.

    Args:
        run: the run.
        attempt: the number of attempts before it.
        status: how it ended.
        cause: why, in one sentence.
        requeued: whether its job is started again.
    """
    config = whom_to_tell(run)
    if config is None:
        return
    from llama_core.notifications import Notice, notify

    ended = "end" if status in {"finished", "cancelled"} else "fault"
    event = "requeue" if requeued else ended
    if event in config.on and _is_first(run, f"{attempt}-{'requeue' if requeued else 'end'}"):
        newest = read_heartbeat(run)
        step, loss = (newest.step, newest.loss) if newest is not None else (0, None)
        notify(config, Notice(event, run.name, step, loss, f"{status}: {cause}", own_host()))


def finish_telling() -> None:
    """Wait a moment for what is being told, before a scheduler is asked for what ends this process."""
    from llama_core.notifications import finish_notices

    finish_notices()


def _is_first(run: RunDirectory, name: str) -> bool:
    """Return whether no other process has told of this; several ranks may fail, and whoever waits for the job looks."""
    folder = run.logs / "notices"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("x"):
            return True
    except FileExistsError:
        return False
    except OSError:  # a full disk is something to tell of
        return True
