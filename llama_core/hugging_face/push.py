"""Push a folder of weights to a repository of the Hugging Face Hub, in one commit.

What is uploaded is kept there by its hash before the commit is made. So a push that was interrupted leaves the
repository as it was, and the next one sends only what is missing.
"""

import glob
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llama_core.errors import ConfigError, HubError
from llama_core.hub import CHAT_TEMPLATES, DESCRIPTION, HubName, explained, is_token_malformed
from llama_core.imports import how_to_install
from llama_core.redaction import one_line, redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_CAN_BE_CREATED = re.compile(r"(?=.{3,96}$)(?!.*\.git$)[^/]*\w/[^/]*\w")
"""A name, among those that ``HubName`` can read, that ``create_repo`` takes."""
_CARD = "README.md"
_AGAIN = "run the same command again: what has arrived is not sent twice"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write there"


def repository_to_push(text: str) -> HubName:
    """Return the repository that ``text`` names.

    Raises:
        ConfigError: if it names none, or a part or a revision of one.
    """
    name = HubName.parse(text)
    if name is None or name.repository != text or not _CAN_BE_CREATED.fullmatch(text):
        raise ConfigError(f"--push {text} is no repository of the Hugging Face Hub; write it as ORG/NAME or USER/NAME")
    return name


def open_repository(name: HubName, *, public: bool, tell: Callable[[str], None]) -> None:
    """Create a repository, unless there is one already that may take the weights.

    Args:
        name: the repository.
        public: whether everybody may see it.
        tell: called with a line if it cannot be as ``public`` says.

    Raises:
        EnvironmentMismatchError, HubError: if huggingface_hub is missing, nobody is logged in, the token may not write
            there, or a public repository would show weights that were not said to be public.
    """
    api = _api(name)
    with explained(name, _failure):
        api.create_repo(name.repository, private=not public, exist_ok=True)
        is_private = bool(api.repo_info(name.repository).private)
    if not public and not is_private:
        raise HubError(f"{name} is there already, and public; add --public to push to it, or name another")
    if public and is_private:
        tell(
            f"{name} is there already, and private: it stays so until its settings at {name.url}/settings say otherwise"
        )


def push_folder(folder: Path, name: HubName, *, message: str, tell: Callable[[str], None]) -> str:
    """Make a folder's files those of a repository, and return the address of the commit.

    Weights, settings and tokenizer files of the repository that the folder does not have are removed, since they belong
    to other weights. All other files stay, and what is replaced stays in the repository's history.

    Args:
        folder: an export; its ``README.md`` becomes the model card.
        name: an open repository.
        message: that of the commit.
        tell: called with a line about what is removed, and about a model card that is replaced.

    Raises:
        HubError: if something cannot be uploaded; the repository is as it was then.
    """
    api = _api(name)
    ours = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    with explained(name, _failure):
        there = api.list_repo_files(name.repository)
        stale = sorted(file for file in there if _is_of_weights(file) and file not in ours)
        if stale:
            tell(f"removes {', '.join(stale)} from {name}: of other weights")
        if _CARD in there and _CARD in ours:  # somebody may have written it by hand
            tell(f"replaces {_CARD} of {name}; the old one stays in the history of the repository")
        commit = api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=[glob.escape(file) for file in stale] or None,
        )
    return str(commit.commit_url)


def _is_of_weights(file: str) -> bool:
    """Return whether a file of a repository is one that an export writes, at its place."""
    in_folder, _, below = file.partition("/")
    if below:
        return in_folder == CHAT_TEMPLATES
    return file.endswith(_WEIGHTS) or file in DESCRIPTION


def _api(name: HubName) -> "HfApi":
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise HubError(
            f"a push to {name} needs the package 'huggingface_hub'; {how_to_install('huggingface_hub')}"
        ) from None
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it warns of, we say
    if not sys.stderr.isatty():
        disable_progress_bars()
    return huggingface_hub.HfApi()


def _failure(name: HubName, error: BaseException) -> str:
    return f"cannot push to {name}: {_reason(error)}"


def _reason(error: BaseException) -> str:
    """Return why a push has failed, and what to do."""
    from huggingface_hub import constants, errors

    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # it says which file it was in
        error = error.__cause__
    where = constants.ENDPOINT
    match error:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE forbids it; unset it"
        case _ if is_token_malformed():
            return f"the token has characters that no token has; {_LOG_IN}"
        case errors.HfHubHTTPError() if error.response.status_code in {401, 403}:
            return f"{where} refuses the token, if there is one; {_LOG_IN}"
        case errors.HfHubHTTPError():
            said = error.server_message or f"status {error.response.status_code}"
            return f"{where} answers: {one_line(said)}; {_AGAIN}"
        case ValueError():  # of the card, by the Hub's own check
            return f"{where} refuses a file: {one_line(str(error))}"
        case _:
            problem = f"{type(error).__name__}: {one_line(redacted(str(error)))}"
            return f"a request to {where} fails ({problem}); check the network, and {_AGAIN}"
