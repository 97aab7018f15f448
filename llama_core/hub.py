"""Repositories of the Hugging Face Hub: their names, and their files in the cache of ``huggingface_hub``.

``org/name`` is a repository, and ``org/name@revision`` a branch, a tag or a commit of it. The name of a data set may go
on with a folder, a file or a pattern in it, as in ``org/name/data/train-*``. What exists here under a name comes first.

A commit never changes, and the cache says which one a revision was when it was downloaded. That one is used until
somebody updates the cache, so that a request means the same every day, and needs no network.

All of huggingface_hub's variables apply, such as HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN.
"""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from json import JSONDecodeError
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

from llama_core.errors import HubError, TrainingInfraError
from llama_core.imports import how_to_install
from llama_core.records.files import is_disk_full, no_room, user_path
from llama_core.storage.copies import described_checkpoint
from llama_core.storage.stores import is_url

RepositoryKind = Literal["model", "dataset"]

DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a model that say what it is, and its tokenizer: all but the weights. None of them is run."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's other templates, such as the one for conversations with tools; they belong to it too."""
_CHAT_TEMPLATE = re.compile(rf"{CHAT_TEMPLATES}/[^/]+\.jinja")
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
_MAIN = "main"
_PART = "[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[A-Za-z0-9_.-]+|[A-Za-z0-9_.-]+))?"
    r"(?:/(?P<path>[^/].*))?"
)
_OF_FILES_HERE = (".json", ".model", ".jinja", ".yaml")
"""Endings of files that people name by their path; no repository is called so."""


@dataclass(frozen=True)
class HubName:
    """The name of a repository, or of a part of a data set."""

    repository: str
    revision: str = _MAIN
    path: str = ""
    """A folder, a file or a pattern of files in a data set; empty for all of it."""
    kind: RepositoryKind = "model"

    @classmethod
    def parse(cls, text: str, kind: RepositoryKind = "model") -> Self | None:
        """Return the name that ``text`` may be, whether or not there is something here under it; None if it is none."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        repository = found["repository"]
        path = found["path"] or ""
        is_legal = not re.search(r"--|\.\.", repository) and not repository.endswith(_OF_FILES_HERE)
        if not is_legal or (path and kind == "model") or ".." in Path(path).parts:
            return None
        return cls(repository, found["revision"] or _MAIN, path, kind)

    @classmethod
    def of(cls, text: str, kind: RepositoryKind = "model") -> Self | None:
        """Return the name that ``text`` is; None if there is something here under it, or if it is none."""
        name = cls.parse(text, kind)
        if name is None or user_path(text).exists():
            return None
        # A longer path in a folder that exists is one here that is misspelled, not a part of a data set.
        return None if name.path and Path(text.partition("/")[0]).is_dir() else name

    @property
    def url(self) -> str:
        """Where people look at the repository."""
        from huggingface_hub.constants import ENDPOINT

        return f"{ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repository}"

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        revision = "" if self.revision == _MAIN else f"@{self.revision}"
        return f"{self.repository}{revision}{f'/{self.path}' if self.path else ''}"


@dataclass(frozen=True)
class HubCommit:
    """One commit of a repository."""

    name: HubName
    folder: Path
    """Where its files are in the cache; those that have not been downloaded are missing."""
    sizes: Mapping[str, int]
    """Bytes of its files, by their paths."""

    @property
    def commit(self) -> str:
        """The hash of the commit."""
        return self.folder.name

    @property
    def description(self) -> list[str]:
        """The files that say what a model is."""
        return [file for file in self.sizes if file in DESCRIPTION or _CHAT_TEMPLATE.fullmatch(file)]

    def missing(self, files: Iterable[str]) -> list[str]:
        """Return those of ``files`` that are not in the cache."""
        return [file for file in files if not (self.folder / file).is_file()]


def folder_of(text: str) -> Path:
    """Return the folder that a path, the name of a model, or the address of a run stands for.

    That of a name or an address is in the cache, with its description but perhaps without weights.

    Raises:
        HubError: if a name stands for nothing, or its files cannot be downloaded.
        StorageError: the same for an address.
    """
    if is_url(text):
        return described_checkpoint(text)
    name = HubName.of(text)
    if name is None:
        return user_path(text)
    snapshot = look_up(name)
    download(snapshot, snapshot.description)
    return snapshot.folder


def at_revision(text: str, revision: object) -> str:
    """Return the name of a model at a revision, as PEFT writes the two apart; a path or a whole name as it is."""
    name = HubName.of(text)
    if name is None or name.revision != _MAIN or not isinstance(revision, str) or not revision:
        return text
    return str(replace(name, revision=revision))


def repository_in_cache(folder: Path) -> str | None:
    """Return the repository of the model whose snapshot ``folder`` is, as ``org/name``; None if it is none."""
    kind, *names = folder.parent.parent.name.split("--")
    return "/".join(names) if folder.parent.name == "snapshots" and kind == "models" else None


def look_up(name: HubName) -> HubCommit:
    """Return the commit that a name stands for, in the cache or else on the Hub.

    Raises:
        HubError: if there is none, or the Hub does not tell.
    """
    folder, sizes = _look_up(name.repository, name.revision, name.kind)
    return HubCommit(name, folder, sizes)


def download(snapshot: HubCommit, files: Iterable[str]) -> None:
    """Download those of ``files`` that are not in the cache, one after the other; a terminal shows a bar for each.

    Raises:
        HubError: if one cannot be downloaded.
    """
    name = snapshot.name
    for file in snapshot.missing(files):
        with explained(name, _failure):
            _package(name).hf_hub_download(name.repository, file, repo_type=name.kind, revision=snapshot.commit)


@cache
def _look_up(repository: str, revision: str, kind: RepositoryKind) -> tuple[Path, Mapping[str, int]]:
    """Return the folder of a commit in the cache, and the bytes of its files by their paths."""
    name = HubName(repository, revision, kind=kind)
    find = partial(_package(name).snapshot_download, repository, repo_type=kind, allow_patterns=[])
    with explained(name, _failure):
        folder = _cached(partial(find, revision=revision))
        if folder is None:
            folder = Path(find(revision=revision, tqdm_class=_no_bar()))  # also lists the commit's files in the cache
        elif _listed(name, folder.name) is None and _is_on_the_hub(name, folder.name):
            find(revision=folder.name, tqdm_class=_no_bar())
        sizes = _listed(name, folder.name)
    if sizes is None:  # other software has filled the cache: what is there must do
        files = (path for path in folder.rglob("*") if path.is_file())
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    return folder, sizes


def _cached(find: Callable[..., str]) -> Path | None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(find(local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _is_on_the_hub(name: HubName, commit: str) -> bool:
    """Return whether the Hub answers that it has a commit; asks once."""
    try:
        _package(name).repo_info(name.repository, repo_type=name.kind, revision=commit)
    except Exception:  # whatever the reason, the cache has the commit
        return False
    return True


def _listed(name: HubName, commit: str) -> dict[str, int] | None:
    """Return the bytes of a commit's files, by their paths, as the cache lists them; None if it does not."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = _package(name).get_cached_repo_tree(name.repository, repo_type=name.kind, revision=commit)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


def _package(name: HubName) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise HubError(
            f"{name} is not here, and names of the Hugging Face Hub need the package 'huggingface_hub'; "
            f"{how_to_install('huggingface_hub')}"
        ) from None
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it warns of, we say
    return huggingface_hub


def _no_bar() -> type[Any]:
    """Return a class of progress bars that are never shown."""
    import tqdm

    def begin(bar: Any, *positional: Any, **named: Any) -> None:
        tqdm.tqdm.__init__(bar, *positional, **(named | {"disable": True}))

    return type("NoBar", (tqdm.tqdm,), {"__init__": begin})


def is_token_malformed() -> bool:
    """Return whether no request can carry the user's token; the error of one would quote it."""
    from huggingface_hub import get_token

    token = get_token() or ""
    return not (token.isascii() and token.isprintable())


@contextmanager
def explained(name: HubName, reason: Callable[[HubName, BaseException], str]) -> Iterator[None]:
    """Turn the errors of ``huggingface_hub``, and those of the network below it, into one line about ``name``.

    Args:
        name: the repository.
        reason: returns that line.
    """
    try:
        yield
    except TrainingInfraError:
        raise
    except Exception as error:  # each version has another library for HTTP
        raise HubError(reason(name, error)) from None


def _failure(name: HubName, error: BaseException) -> str:
    if is_token_malformed():
        return f"{name} cannot be had: the token has characters that no token has; {_LOG_IN}"
    return _reason(name, error)


def _reason(name: HubName, error: BaseException) -> str:
    """Return why a repository or a file cannot be had, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # what became of the request
    where = constants.ENDPOINT
    cache = constants.HF_HUB_CACHE
    absent = f"is neither here nor whole in {cache}"
    match error:
        case errors.GatedRepoError():
            reason = f"is gated: ask for access at {name.url}, then {_LOG_IN}"
        case errors.RepositoryNotFoundError():
            reason = f"is neither here nor a {name.kind} of {where}; correct the name or, if it is private, {_LOG_IN}"
        case errors.RevisionNotFoundError():
            reason = f"is no revision of {name.url}; name a branch, a tag or a commit of it"
        case errors.OfflineModeIsEnabled():
            reason = f"{absent}, and HF_HUB_OFFLINE forbids to download it; name a folder here"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            remedy = f"the token is wrong: {_LOG_IN}" if status in {401, 403} else "try again later"
            reason = f"cannot be had: {where} answers {status}; {remedy}"
        case OSError(errno=errno.ENAMETOOLONG) | ValueError() if not isinstance(error, JSONDecodeError):
            what = error.strerror if isinstance(error, OSError) else str(error)
            reason = f"has a file whose name cannot be used here ({what}); name a folder here"
        case OSError() if is_disk_full(error):
            reason = f"cannot be kept: {no_room(Path(cache))}; set HF_HOME to a folder on a larger disk"
        case PermissionError():
            reason = f"cannot be kept: {error.filename}: {error.strerror}; set HF_HOME to a folder of your own"
        case _:
            problem = f"{type(error).__name__}: {error}"
            reason = f"{absent}, and {where} cannot be reached ({problem}); check the network, or name a folder here"
    return f"{name} {reason}"
