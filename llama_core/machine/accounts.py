"""Accounts that only some runs need."""

import configparser
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_WANDB_HOST = "https://api.wandb.ai"


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
