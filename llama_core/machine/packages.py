"""Packages and accounts that only some runs need."""

import configparser
import importlib.metadata
import netrc
import os
import re
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_PROJECT = "llama-training-infra"
_WANDB_HOST = "https://api.wandb.ai"


def how_to_install(package: str) -> str:
    """Return the command that installs an optional package, with the versions that this project asks for."""
    try:
        wanted = [text.partition(";")[0].strip() for text in importlib.metadata.requires(_PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        wanted = []
    requirement = next((text for text in wanted if re.match(rf"{package}\b(?!-)", text)), package)
    return f"pip install '{requirement}'"


def has_wandb_key() -> bool:
    """Return whether wandb will find an API key: in its environment variables, or where ``wandb login`` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    standard = (Path.home() / ".netrc", Path.home() / "_netrc")
    files = [Path(os.environ["NETRC"]).expanduser()] if os.environ.get("NETRC") else standard
    for file in files:
        try:
            if netrc.netrc(file).authenticators(urlsplit(_wandb_url()).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _wandb_url() -> str:
    """Return the server that wandb talks to: that of its variable, of its settings, or its own."""
    settings = configparser.ConfigParser()
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    with suppress(OSError, configparser.Error):
        settings.read(folder / "settings")
    return os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback=None) or _WANDB_HOST
