"""Find the sources of a run, and tokenise them."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llama_core.config.models import ModelSpec
from llama_core.config.settings import SAMPLE, DataConfig, DataSource, name_of, paths_of
from llama_core.data.chat import ChatFormat, chat_format
from llama_core.data.corpus import OnProgress
from llama_core.data.find import FoundFiles, find_files
from llama_core.data.formats import FieldNames, formats_of
from llama_core.data.sample import sample_file
from llama_core.data.shards.store import Recipe
from llama_core.data.shards.token_cache import TokenCache, cached_tokens
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError, safe
from llama_core.objectives.records import DOCUMENTS, RECORD_KINDS
from llama_core.records.file_owners import own_folder
from llama_core.records.files import cache_directory, is_disk_full, no_room

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FoundSource:
    """A source whose files have been found."""

    given: DataSource
    """As the configuration names it."""
    found: FoundFiles
    recipe: Recipe
    directory: Path
    """Where its shards are."""

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return name_of(self.given)


@dataclass(frozen=True, eq=False)
class TokenisedSource:
    """A source of a run."""

    name: str
    cache: TokenCache
    chat: ChatFormat
    notes: tuple[str, ...]
    """A sentence on each thing about its files and records that may be unintended."""


def found_source(
    source: DataSource,
    data: DataConfig,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    *,
    reads: str = DOCUMENTS.name,
    held_out: bool = False,
) -> FoundSource:
    """Find the files of a source, and how they become tokens; ``held_out`` is as for ``find_files``.

    Raises:
        DataError: if there are none, or one cannot be used, or there is no place for their tokens.
    """
    directory = cache_directory(data.cache_dir)
    with naming(source), writing_to(directory):
        directory = own_folder(directory)
        is_sample = source == SAMPLE
        refuse_sample(source, reads)
        found = (
            find_files(str(sample_file(directory))) if is_sample else find_files(*paths_of(source), held_out=held_out)
        )
        names = FieldNames() if is_sample else FieldNames.of(data, reads)
        chat = chat_format(data, tokenizer, spec, found.files)
    return FoundSource(source, found, Recipe(names, tokenizer, chat, data.max_bad_lines, data.token_dtype), directory)


def tokenised(
    source: DataSource,
    data: DataConfig,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    on_progress: OnProgress | None,
    *,
    reads: str = DOCUMENTS.name,
    held_out: bool = False,
) -> TokenisedSource:
    """Return the tokens of one source, and make those that are missing; log the lines that were left out.

    ``held_out`` is as for ``find_files``.

    Raises:
        DataError: if the source cannot be used, or its tokens cannot be written.
    """
    here = found_source(source, data, tokenizer, spec, reads=reads, held_out=held_out)
    with (
        naming(source),
        writing_to(cache_directory(data.cache_dir)),
        _progress(f"tokenising {here.name}", on_progress) as follow,
    ):
        cache = cached_tokens(here.found.files, here.recipe, here.directory, on_progress=follow)
    if cache.bad_lines.total:
        logger.warning("left out of %s: %s", here.name, cache.bad_lines)
    about = (*here.found.notes(), *cache.formats.notes(here.recipe.names))
    return TokenisedSource(here.name, cache, here.recipe.chat, tuple(f"{here.name}: {note}" for note in about))


def refuse_sample(source: DataSource, reads: str) -> None:
    """Refuse to train on answers of the sample.

    Raises:
        DataError: if that is asked for.
    """
    if source == SAMPLE and RECORD_KINDS.named(reads).holds_answers:
        row = formats_of(reads)[0]
        fields = " and ".join(map(repr, row.fields))
        raise DataError(
            f"this training.objective reads {row.title}, and the sample holds texts; name a file of records with "
            f"{fields} as data.source (--data)"
        )


@contextmanager
def naming(source: DataSource) -> Iterator[None]:
    """Name the source in an error, because a run may have two."""
    try:
        yield
    except DataError as error:
        is_named = str(error).startswith("data source ") or any(path in str(error) for path in paths_of(source))
        raise error if is_named else DataError(f"data source {name_of(source)!r}: {error}") from None


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turn a failure to write the cache into one line; reading errors are already ``DataError``."""
    try:
        yield
    except OSError as error:
        cause = no_room(directory) if is_disk_full(error) else error.strerror or str(error)
        raise DataError(
            f"cannot write the token cache in {str(directory)!r}: {cause}; "
            "make room there or choose another data.cache_dir"
        ) from None


@contextmanager
def _progress(description: str, on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield ``on_progress``, or else a progress bar by bytes read, shown only on a terminal."""
    if on_progress is not None or not sys.stderr.isatty():
        yield on_progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(safe(description), total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
