"""Weights & Biases: the steps are one run there, and the scores of checkpoints another one in the same group."""

import configparser
import netrc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from llama_core.errors import EnvironmentMismatchError
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import SCORE
from llama_core.records.file_owners import who_else_may_write
from llama_core.redaction import shell_word
from llama_core.trackers.traits import TrackedRun, TrackerSettings, TrackerType

if TYPE_CHECKING:
    import wandb

NAME = "wandb"
_HOST = "https://api.wandb.ai"


class WandbSettings(TrackerSettings):
    """How Weights & Biases gets values."""

    mode: Literal["offline", "online"]
    """offline needs no account."""
    project: str
    """The project there."""


class WandbTracker:
    """A run of Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, run: "wandb.Run") -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values of a step; W&B takes the time itself."""
        self._run.log(dict(values), step=step)

    def write_scores(self, step: int, tokens: int, scores: Mapping[str, float], time: float) -> None:
        """Log the scores of a checkpoint over its tokens."""
        # An evaluation that was repeated ends after those of later steps, and W&B's own steps only go up.
        self._run.define_metric(f"{SCORE}*", step_metric="tokens")
        self._run.log({"tokens": tokens, "step": step, **scores})

    def flush(self) -> None:
        """Do nothing: W&B writes from its own process."""

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


def _open(run: TrackedRun, settings: WandbSettings) -> WandbTracker:
    import wandb

    directory = run.directory
    _refuse_settings_of_others(directory)
    name = f"{directory.name}-{run.part}" if run.part else directory.name
    return WandbTracker(
        wandb.init(
            project=settings.project,
            name=name,
            group=run.group,
            id=re.sub(r"[/\\#?%:]", "-", f"{name}-{run.fingerprint()}"),  # W&B refuses these characters
            resume="allow",
            mode=settings.mode,
            dir=directory.logs,
            config={**run.configuration, **run.records()},
            settings=wandb.Settings(console="off", silent=True),
        )
    )


def _refuse_settings_of_others(run: RunDirectory) -> None:
    """Refuse settings that wandb would take from the current folder, or from the run: they say where the key is sent.

    Raises:
        EnvironmentMismatchError: naming the file.
    """
    for folder in (".wandb", "wandb"):
        file = Path(folder, "settings").absolute()
        if file.exists() and (others := who_else_may_write(file) or who_else_may_write(file.parent)):
            raise EnvironmentMismatchError(
                f"{file} {others}, and wandb would send your key where it says; start the run in another folder"
            )
        of_run = run.logs / folder / "settings"
        if of_run.exists():  # nobody has made it on purpose
            raise EnvironmentMismatchError(f"wandb would send your key where {of_run} says; read it, and remove it")


def _where(run: RunDirectory, settings: WandbSettings | None) -> str:
    folder = run.tracker(NAME)
    if any(folder.glob("offline-run-*")):
        return f"wandb sync {shell_word(folder)}/offline-run-*"
    if not folder.exists():
        return ""
    project = f", project {settings.project}" if settings is not None else ""
    return f"Weights & Biases{project}; local files in {folder}"


def _problems(settings: WandbSettings) -> Iterator[str]:
    if settings.mode == "online" and not has_key():
        yield "tracking.wandb=online needs an API key; run wandb login, set WANDB_API_KEY, or use --wandb offline"


def has_key() -> bool:
    """Return whether wandb will find an API key: in its environment variables, or where ``wandb login`` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    standard = (Path.home() / ".netrc", Path.home() / "_netrc")
    files = [Path(os.environ["NETRC"]).expanduser()] if os.environ.get("NETRC") else standard
    for file in files:
        try:
            if netrc.netrc(file).authenticators(urlsplit(_url()).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _url() -> str:
    """Return the server that wandb talks to: that of its variable, of its settings, or its own."""
    settings = configparser.ConfigParser()
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    with suppress(OSError, configparser.Error):
        settings.read(folder / "settings")
    return os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback=None) or _HOST


WANDB = TrackerType(
    NAME,
    "Weights & Biases",
    settings=WandbSettings,
    open=_open,
    where=_where,
    package="wandb",
    problems=_problems,
    variables=("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL", "WANDB_CONFIG_DIR"),
    makes_links=True,
)
