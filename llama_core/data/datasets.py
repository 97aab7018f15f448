"""From a data source to batches: token caches, the held-out split, and a resumable stream of batches per rank."""

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_core.config.models import ModelSpec
from llama_core.config.settings import SAMPLE, DataConfig
from llama_core.data.chat import ChatFormat, ConversationCounts, chat_format, notes
from llama_core.data.corpus import OnProgress, find_files
from llama_core.data.entropy import Entropies, token_entropies
from llama_core.data.packing import PackedConversations, PackedDataset, pack, row_order
from llama_core.data.sample import TEXT_FIELD, sample_file
from llama_core.data.token_cache import TokenCache, cached_tokens
from llama_core.data.tokenizer import BYTES, Tokenizer, check_fits, load_tokenizer
from llama_core.errors import ConfigError, DataError, RunDirectoryError
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.records.files import cache_directory, is_disk_full, no_room, read_typed, write_json
from llama_core.records.owners import own_folder

logger = logging.getLogger(__name__)

_SPLIT_SEED = 0  # held-out rows are the same, and in the same order, whatever the run's seed


class BatchStream:
    """An endless, resumable stream of one rank's share of the global batches.

    Every epoch visits all rows in its own order, a pure function of seed and epoch. Epochs follow each other without a
    gap, so a batch may take rows from two. Rank r has the r-th of ``world_size`` equal contiguous parts of each global
    batch. Joined in rank order, the parts are the batch that a single rank would get.

    Args:
        dataset: the rows.
        batch_size: rows of a global batch.
        seed: draws the order.
        rank: this rank among those that divide the batch.
        world_size: number of these ranks.
        num_workers: threads that gather the rows of a batch; with 0 or 1 the calling thread does.

    Raises:
        ConfigError: if the batch cannot be divided evenly.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        num_workers: int = 0,
    ) -> None:
        if batch_size % world_size:
            raise ConfigError(
                f"training.batch_size={batch_size} cannot be divided over {world_size} data-parallel ranks; "
                f"use {-(-batch_size // world_size) * world_size}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.rows_consumed = 0
        """Rows of the global batches so far."""
        share = batch_size // world_size
        self._share = range(rank * share, (rank + 1) * share)
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global batch, on the CPU."""
        rows = [self._row_at(self.rows_consumed + place) for place in self._share]
        self.rows_consumed += self.batch_size
        return _batch(self.dataset, rows, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, the same on every rank."""
        return {"rows_consumed": self.rows_consumed, "dataset": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state_dict`` returned, under any number of ranks.

        Raises:
            DataError: if it belongs to other data, or to another order of the data.
        """
        if state["dataset"] != self._digest():
            raise DataError(
                f"the checkpoint was made on other data (digest {state['dataset']}, now {self._digest()}): documents, "
                "tokenizer, sequence length or seed have changed; restore them or start a new run"
            )
        self.rows_consumed = state["rows_consumed"]

    def _row_at(self, place: int) -> int:
        epoch, index = divmod(place, len(self.dataset))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, row_order(len(self.dataset), self.seed, epoch)
        return int(self._order[index])

    def _digest(self) -> str:
        return f"{self.dataset.digest}-{self.seed}"


def validation_batches(
    dataset: PackedDataset,
    batch_size: int,
    max_rows: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    fills_batches: bool = False,
) -> Iterator[Batch]:
    """Yield one rank's share of at most ``max_rows`` rows spread evenly over ``dataset``, the same ones every time.

    Every rank gets the same number of batches, of ``batch_size`` rows except for the last. If the ranks do not divide
    the rows evenly, some ranks get a row without targets.

    Args:
        dataset: the rows.
        batch_size: rows of a batch.
        max_rows: most rows over all ranks.
        rank: this rank among those that divide the rows.
        world_size: number of these ranks.
        fills_batches: fill the last batch with rows without targets, so that compiled blocks see one size.
    """
    num_rows = min(max_rows, len(dataset))
    rows = [index * len(dataset) // num_rows for index in range(num_rows)][rank::world_size]
    share = -(-num_rows // world_size)
    if fills_batches:
        share = -(-share // batch_size) * batch_size
    padded = rows + [0] * (share - len(rows))
    for start in range(0, share, batch_size):
        batch = _batch(dataset, padded[start : start + batch_size])
        batch.targets_BS[len(rows) - start :] = IGNORE_INDEX
        yield batch


def _batch(dataset: PackedDataset, rows: list[int], num_workers: int = 0) -> Batch:
    import torch

    if num_workers > 1:  # a row may have to come from the disk; starting threads takes far less time
        with ThreadPoolExecutor(num_workers, "rows") as pool:
            gathered = list(pool.map(dataset.row, rows))
    else:
        gathered = [dataset.row(row) for row in rows]
    columns = zip(*gathered, strict=True)
    tokens_BS, targets_BS, positions_BS = (torch.from_numpy(np.stack(column)) for column in columns)
    return Batch(tokens_BS, targets_BS, positions_BS if dataset.document_mask else None)


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the training and held-out data."""

    num_documents: int
    """Documents trained on."""
    num_tokens: int
    """Their tokens, including BOS and EOS."""
    num_validation_documents: int
    """Documents held out."""
    num_validation_tokens: int
    """Their tokens."""
    num_shared_documents: int
    """Documents of the source left out of training because the validation source holds them too."""
    bad_lines: Mapping[str, int]
    """Unusable lines of the source by kind."""
    bad_line_examples: tuple[str, ...]
    """The first of them, as ``file:line: kind (reason)``."""
    entropies: Entropies | None
    """Entropies of the training tokens that count in the loss; only for the byte tokenizer."""
    num_targets: int
    """Training tokens that count in the loss."""
    conversations: ConversationCounts
    """The conversations among the documents, held-out ones included."""
    chat_template: str | None
    """The template that rendered the source's conversations; None if it holds none."""
    num_truncated: int
    """Conversations that ``training.seq_len`` truncates, held-out ones included."""
    num_left_out: int
    """Truncated conversations that are left out, because no token left in them counts in the loss."""
    notes: tuple[str, ...]
    """A sentence for each property of the data that may be unintended."""

    def summary(self) -> str:
        """Return the data in one line."""
        held_out = f"{self.num_validation_documents:,} held out" if self.num_validation_documents else "none held out"
        template = f", template: {self.chat_template}" if self.chat_template else ""
        conversations = f"; {self.conversations}{template}" if self.conversations.num_conversations else ""
        return (
            f"{self.num_documents:,} documents to train on, {held_out}{conversations}; "
            f"loss on {self.num_targets:,} of {self.num_tokens:,} tokens"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as a record."""
        return asdict(self) | {"summary": self.summary()}


@dataclass(frozen=True, eq=False)
class Datasets:
    """The packed data of a run."""

    train: PackedDataset
    validation: PackedDataset | None
    """Held-out documents; none of them is in ``train``."""
    statistics: DataStatistics


def load_datasets(
    data: DataConfig, spec: ModelSpec, *, seq_len: int, seed: int, on_progress: OnProgress | None = None
) -> Datasets:
    """Read, tokenise (the first time) and pack the data of a run.

    With several processes on one machine, let one go first: the others then open the cache that it made.

    Args:
        data: the data configuration.
        spec: the model. The tokenizer must fit its vocabulary; its family may have a format for conversations.
        seq_len: tokens per row.
        seed: draws the order of the training documents.
        on_progress: called during tokenisation; default: a progress bar, on a terminal.

    Raises:
        DataError: if the data or the tokenizer cannot be used, or the data make less than one row.
        EnvironmentMismatchError: if the tokenizer needs a package that is missing.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    check_fits(tokenizer, spec.vocab_size)
    cache, chat = _tokens(data.source, data, tokenizer, spec, on_progress)
    if data.validation is None:
        validation_cache = cache
        is_shared = np.zeros(cache.num_documents, np.bool_)
        is_held_out = held_out(cache.text_hashes, data.validation_fraction)
        validation_documents = np.flatnonzero(is_held_out)
    else:
        validation_cache, _ = _tokens(data.validation, data, tokenizer, spec, on_progress)
        validation_documents = np.arange(validation_cache.num_documents)
        is_held_out = is_shared = np.isin(cache.text_hashes, validation_cache.text_hashes)
    is_trained = ~is_held_out
    train = pack(cache, np.flatnonzero(is_trained), seq_len, seed=seed, document_mask=data.document_mask)
    _refuse_too_little(train, data.source, int(is_held_out.sum()))
    validation = pack(
        validation_cache, validation_documents, seq_len, seed=_SPLIT_SEED, document_mask=data.document_mask
    )
    if is_shared.any():
        logger.warning("%d documents of %s are also held out: not trained on", is_shared.sum(), data.source)
    if data.validation_fraction > 0 and not validation.num_documents:
        logger.warning("%s holds a single text, so nothing is held out", data.source)
    entropies = _entropies(cache, is_trained, tokenizer) if tokenizer.name == BYTES else None
    conversations = cache.conversations
    if validation_cache is not cache:
        conversations += validation_cache.conversations
    packed = [rows for rows in (train, validation) if isinstance(rows, PackedConversations)]
    statistics = DataStatistics(
        num_documents=train.num_documents,
        num_tokens=train.num_tokens,
        num_validation_documents=validation.num_documents,
        num_validation_tokens=validation.num_tokens,
        num_shared_documents=int(is_shared.sum()),
        bad_lines=cache.bad_lines.counts,
        bad_line_examples=tuple(cache.bad_lines.examples),
        entropies=entropies,
        num_targets=train.num_targets,
        conversations=conversations,
        chat_template=chat.template.name if cache.conversations.num_conversations else None,
        num_truncated=sum(rows.num_truncated for rows in packed),
        num_left_out=sum(rows.num_left_out for rows in packed),
        notes=(
            *notes(data, spec, chat, cache.conversations, cache.num_documents),
            *_losses(train, "conversations to train on"),
            *_losses(validation, "held-out conversations"),
        ),
    )
    return Datasets(train, validation if len(validation) else None, statistics)


def held_out(text_hashes: npt.NDArray[Any], fraction: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the documents to hold out: those with a hash in the lowest ``fraction`` of possible hashes.

    A document stays on its side when others come or go, and equal texts are on the same side. If chance would hold out
    none of two or more different texts, the one with the lowest hash is held out.
    """
    mask: npt.NDArray[np.bool_] = text_hashes < np.uint64(fraction * 2.0**64)
    if fraction > 0 and not mask.any() and text_hashes.min() < text_hashes.max():
        mask = text_hashes == text_hashes.min()
    return mask


def _refuse_too_little(train: PackedDataset, source: str, num_held_out: int) -> None:
    seq_len = train.seq_len
    if isinstance(train, PackedConversations):
        if not len(train):
            raise DataError(
                f"data source {source!r} leaves nothing to train on: none of {train.num_documents} conversations "
                f"({num_held_out} more are held out) has a token that counts in the loss among its first "
                f"{seq_len + 1}; add conversations, or raise training.seq_len"
            )
    elif train.num_tokens <= seq_len:
        raise DataError(
            f"data source {source!r} leaves {train.num_tokens} tokens in {train.num_documents} documents to train "
            f"on ({num_held_out} more are held out), fewer than the {seq_len + 1} that one sequence takes; "
            "add text, or lower training.seq_len or data.validation_fraction"
        )


def _losses(rows: PackedDataset, which: str) -> Iterator[str]:
    """Yield a sentence about conversations that do not fit into a row."""
    if isinstance(rows, PackedConversations) and rows.num_truncated:
        yield (
            f"{rows.num_truncated:,} of the {which} are longer than training.seq_len={rows.seq_len} and are truncated; "
            f"{rows.num_left_out:,} of them lose every token that counts and are left out"
        )


def _tokens(
    source: str, data: DataConfig, tokenizer: Tokenizer, spec: ModelSpec, on_progress: OnProgress | None
) -> tuple[TokenCache, ChatFormat]:
    """Return the token cache and the chat format of one source; log the lines that were left out."""
    directory = cache_directory(data.cache_dir)
    with _naming(source), _writing_to(directory), _progress(f"tokenising {source}", on_progress) as follow:
        directory = own_folder(directory)
        files = find_files(str(sample_file(directory)) if source == SAMPLE else source)
        chat = chat_format(data, tokenizer, spec, files)
        cache = cached_tokens(
            files,
            TEXT_FIELD if source == SAMPLE else data.text_field,
            tokenizer,
            directory,
            chat=chat,
            max_bad_lines=data.max_bad_lines,
            on_progress=follow,
        )
    if cache.bad_lines.total:
        logger.warning("left out of %s: %s", source, cache.bad_lines)
    return cache, chat


def _entropies(cache: TokenCache, documents: npt.NDArray[np.bool_], tokenizer: Tokenizer) -> Entropies:
    """Return the entropies of some documents, computed only once per cache and choice of documents."""
    digest = hashlib.sha256(np.packbits(documents).tobytes()).hexdigest()[:16]
    path = cache.path / f"entropy-{digest}.json"
    with suppress(RunDirectoryError):
        return read_typed(path, Entropies)
    entropies = token_entropies(cache.tokens, cache.offsets, documents, tokenizer.vocab_size, cache.ignored)
    with suppress(OSError):  # if the cache is not writable, the next run only has to count again
        write_json(path, entropies)
    return entropies


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Name the source in an error, because a run may have two."""
    try:
        yield
    except DataError as error:
        raise error if source in str(error) else DataError(f"data source {source!r}: {error}") from None


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
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

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
