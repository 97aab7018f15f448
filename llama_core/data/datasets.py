"""From a data source to batches: token caches, the held-out split, and a resumable stream of batches per rank."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Any

import numpy as np

from llama_core.config.models import ModelSpec
from llama_core.config.settings import DataConfig, DataSource
from llama_core.config.stages import TrainingStage, part_name, rows_before
from llama_core.data.corpus import OnProgress
from llama_core.data.mixture import Mixture
from llama_core.data.packing import PackedConversations, PackedDataset, pack
from llama_core.data.selection import Selection, Split, everything, hold_out_known, hold_out_lowest
from llama_core.data.statistics import DataStatistics, data_statistics
from llama_core.data.tokenising import TokenisedSource, tokenised
from llama_core.data.tokenizer import model_tokenizer
from llama_core.errors import ConfigError, DataError
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.traits import ObjectiveType
from llama_core.records.data_changes import DataChange
from llama_core.units import format_bytes

FP32_BYTES = 4

logger = logging.getLogger(__name__)

_ALLOW_CHANGE = ", or go on with --resume --allow-data-change: each source that is still the same goes on where it was"


class BatchStream:
    """An endless, resumable stream of one rank's share of the global batches.

    Every epoch of a source visits all of its rows in its own order, a pure function of seed and epoch. Epochs follow
    each other without a gap, so a batch may take rows from two. Rank r has the r-th of ``world_size`` equal contiguous
    parts of each global batch. Joined in rank order, the parts are the batch that a single rank would get.

    Args:
        dataset: the rows; a single source is a mixture of one.
        batch_size: rows of a global batch.
        seed: draws the order.
        rank: this rank among those that divide the batch.
        world_size: number of these ranks.
        num_workers: threads that gather the rows of a batch; with 0 or 1 the calling thread does.
        may_follow: digests of other data from whose positions a mixture may go on.

    Raises:
        ConfigError: if the batch cannot be divided evenly.
    """

    def __init__(
        self,
        dataset: Mixture,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        num_workers: int = 0,
        may_follow: Collection[str] = (),
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
        self.change: DataChange | None = None
        """What became of the sources at a position of other data; None unless it has gone on from one."""
        self._may_follow = may_follow
        self._num_batches = 0
        self._rank = rank
        self._world_size = world_size
        self._order = dataset.order(seed)

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global batch, on the CPU."""
        batch_size = self.dataset.batch_size(self.rows_consumed, self.batch_size)
        share = batch_size // self._world_size
        first = self.rows_consumed + self._rank * share
        rows = self._order(np.arange(first, first + share)).tolist()
        self.rows_consumed += batch_size
        self._num_batches += 1
        return _batch(self.dataset, rows, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, the same on every rank."""
        order = self._order.state_dict(self.rows_consumed) | {"num_batches": self._num_batches}
        return {"rows_consumed": self.rows_consumed, "dataset": self._digest(), "order": order}

    def go_to(self, num_batches: int) -> None:
        """Go to where a run that began with these data is after some batches."""
        self._num_batches = num_batches
        self.rows_consumed = rows_before(num_batches, self.batch_size, self.dataset.stages)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state_dict`` returned, under any number of ranks.

        Raises:
            DataError: if it belongs to other data, or to another order of the data.
        """
        trained_on = state["dataset"]
        if trained_on in self._may_follow and trained_on != self._digest():
            self.go_to(state["order"]["num_batches"])  # other stages may have read other numbers of rows until here
            self.change = self._order.change_data(self.rows_consumed, state["order"])
            return
        or_change = _ALLOW_CHANGE if self.dataset.is_named else ""
        refuse_other_data(trained_on, self.dataset, self.seed, f"start a new run{or_change}")
        self.rows_consumed = state["rows_consumed"]
        self._num_batches = state["order"]["num_batches"]
        self._order.load_state_dict(state["order"])

    def check_epochs(self, limits: Mapping[str, float | None], num_rows: int) -> None:
        """Refuse a run that reads a source more often than its limit; see ``Mixture``."""
        self.dataset.check_epochs(limits, self._order.rows_read(num_rows))

    def _digest(self) -> str:
        return _digest_of(self.dataset, self.seed)


def refuse_other_data(trained_on: str, dataset: Mixture, seed: int, remedy: str) -> None:
    """Refuse rows that are not those of a checkpoint.

    Args:
        trained_on: the digest that the checkpoint has.
        dataset: the rows.
        seed: draws their order.
        remedy: what helps if they cannot be restored.

    Raises:
        DataError: if the rows, their weights or the seed are others.
    """
    now = _digest_of(dataset, seed)
    if trained_on != now:
        raise DataError(
            f"the checkpoint was made on other data (digest {trained_on}, now {now}): documents, weights of sources, "
            f"tokenizer, its BOS (data.add_bos_token), sequence length or seed have changed; restore them or {remedy}"
        )


def _digest_of(dataset: Mixture, seed: int) -> str:
    return f"{dataset.digest}-{seed}"


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
    of_all = rows_spread_evenly(dataset, max_rows)
    rows = of_all[rank::world_size]
    share = -(-len(of_all) // world_size)
    if fills_batches:
        share = -(-share // batch_size) * batch_size
    padded = rows + [0] * (share - len(rows))
    for start, batch in zip(range(0, share, batch_size), batches_of_rows(dataset, padded, batch_size), strict=True):
        batch.targets_BS[len(rows) - start :] = IGNORE_INDEX
        yield batch


def rows_spread_evenly(dataset: PackedDataset, max_rows: int) -> list[int]:
    """Return the places of at most ``max_rows`` rows spread evenly over ``dataset``, the same ones every time."""
    num_rows = min(max_rows, len(dataset))
    return [index * len(dataset) // num_rows for index in range(num_rows)]


def batches_of_rows(dataset: PackedDataset, rows: Sequence[int], batch_size: int) -> Iterator[Batch]:
    """Yield rows of ``dataset``, given by their places, in batches of ``batch_size`` except for the last."""
    for start in range(0, len(rows), batch_size):
        yield _batch(dataset, rows[start : start + batch_size])


def _batch(dataset: PackedDataset | Mixture, rows: Sequence[int], num_workers: int = 0) -> Batch:
    import torch

    if num_workers > 1:  # a row may have to come from the disk; starting threads takes far less time
        with ThreadPoolExecutor(num_workers, "rows") as pool:
            gathered = list(pool.map(dataset.row, rows))
    else:
        gathered = [dataset.row(row) for row in rows]
    columns = zip(*gathered, strict=True)
    tokens_BS, targets_BS, positions_BS, *values = (torch.from_numpy(np.stack(column)) for column in columns)
    per_token = dict(zip(dataset.per_token, values, strict=True))
    return Batch(tokens_BS, targets_BS, positions_BS if dataset.document_mask else None, per_token=per_token)


@dataclass(frozen=True, eq=False)
class Datasets:
    """The packed data of a run."""

    train: Mixture
    """The rows to train on; a single source is a mixture of one, with the name ``UNNAMED``."""
    validation: Mapping[str, PackedDataset]
    """Held-out documents by name, or all as ``UNNAMED``; only those that make a row. None of them is in ``train``."""
    statistics: DataStatistics

    @property
    def digests(self) -> list[str]:
        """What two runs share exactly when they train and evaluate on the same rows."""
        return [self.train.digest, *(f"{name} {rows.digest}" for name, rows in self.validation.items())]


def load_datasets(
    data: DataConfig,
    spec: ModelSpec,
    *,
    seq_len: int,
    num_sequences: int | None = None,
    stages: Sequence[TrainingStage] = (),
    objective: ObjectiveType = NEXT_TOKEN,
    on_progress: OnProgress | None = None,
) -> Datasets:
    """Read, tokenise (the first time) and pack the data of a run.

    With several processes on one machine, let one go first: the others then open the cache that it made.

    Args:
        data: the data configuration.
        spec: the model. The tokenizer must fit its vocabulary; its family may have a format for conversations.
        seq_len: tokens per row.
        num_sequences: rows that the run reads, against which ``max_epochs`` is checked; None if unknown.
        stages: the stages of a mixture after the first.
        objective: what the model is trained for, which says what is read of a record. Until ``training.reference`` has
            computed them, the log-probabilities under a reference are 0.
        on_progress: called during tokenisation; default: a progress bar, on a terminal.

    Raises:
        DataError: if the data or the tokenizer cannot be used, the data make less than one row, or the run reads a
            source more often than its ``max_epochs``.
        EnvironmentMismatchError: if the tokenizer needs a package that is missing.
    """
    tokenizer = model_tokenizer(data, spec)

    def all_tokenised(sources: Mapping[str, DataSource], *, held_out: bool = False) -> dict[str, TokenisedSource]:
        return {
            name: tokenised(source, data, tokenizer, spec, on_progress, reads=objective.reads, held_out=held_out)
            for name, source in sources.items()
        }

    def in_rows(chosen: Selection, length: int) -> PackedDataset:
        rows = pack(chosen, length, document_mask=data.document_mask, reads=objective.reads)
        rows.expect_references(objective)
        return rows

    def packed(selections: Mapping[str, Selection]) -> dict[str, PackedDataset]:
        return {name: in_rows(chosen, seq_len) for name, chosen in selections.items()}

    sources = all_tokenised(data.training_sources)
    validation_sources = all_tokenised(data.validation_sources, held_out=True)
    splits = _split(sources, validation_sources, data.validation_fraction)
    held_out = {name: everything(source.cache) for name, source in validation_sources.items()}
    train = packed({name: split.train for name, split in splits.items()})
    validation = packed(held_out or {name: split.held_out for name, split in splits.items()})
    for name, source in sources.items():
        left_out = splits[name].held_out
        held = f"{left_out.num_documents} more, of {left_out.num_tokens:,} tokens, are held out"
        _refuse_too_little(train[name], source.name, held)
        if validation_sources and left_out.num_documents:
            logger.warning("%d documents of %s are also held out: not trained on", left_out.num_documents, source.name)
        if not validation_sources:
            _warn_of_uneven_split(source.name, data.validation_fraction, train[name].num_tokens, left_out.num_tokens)
    in_all_lengths = train | _in_other_lengths(stages, sources, splits, in_rows)
    mixture = Mixture(in_all_lengths, data.weights, stages)
    if num_sequences is not None:
        mixture.check_epochs(data.limits, mixture.rows_read(num_sequences))
    statistics = data_statistics(
        data,
        spec,
        sources,
        validation_sources,
        mixture=mixture,
        train=train,
        validation=validation,
        num_shared_documents=sum(split.held_out.num_documents for split in splits.values()) if held_out else 0,
        num_sequences=num_sequences,
        tokenizer=tokenizer,
    )
    if objective.reference is not None:
        num_rows = sum(len(rows) for rows in (*in_all_lengths.values(), *validation.values()))
        num_rows *= objective.reference.num_forwards
        note = f"before the first step, the {objective.reference.name} takes a forward over {num_rows:,} sequences"
        if objective.reference.weights:
            shapes = [rows.reference_shape for rows in (*in_all_lengths.values(), *validation.values())]
            num_bytes = FP32_BYTES * sum(map(prod, shapes))
            note += f", and what it makes of them takes {format_bytes(num_bytes)} in the run's directory"
        statistics = replace(statistics, notes=(*statistics.notes, note))
    about = import_module(objective.records.module).about(list(train.values()))
    statistics = replace(statistics, notes=(*statistics.notes, *about))
    return Datasets(mixture, {name: rows for name, rows in validation.items() if len(rows)}, statistics)


def _split(
    sources: Mapping[str, TokenisedSource], validation_sources: Mapping[str, TokenisedSource], fraction: float
) -> dict[str, Split]:
    """Return which documents of each source are trained on, and which are held out."""
    caches = {name: source.cache for name, source in sources.items()}
    if validation_sources:
        return hold_out_known(caches, [source.cache for source in validation_sources.values()])
    return hold_out_lowest(caches, fraction)


def _in_other_lengths(
    stages: Sequence[TrainingStage],
    sources: Mapping[str, TokenisedSource],
    splits: Mapping[str, Split],
    in_rows: Callable[[Selection, int], PackedDataset],
) -> dict[str, PackedDataset]:
    """Return the rows of the sources that stages read in another length than the first, by ``part_name``."""
    parts = {}
    for name, length in sorted({part for stage in stages for part in stage.parts_of_other_length}):
        rows = in_rows(splits[name].train, length)
        _refuse_too_little(rows, sources[name].name, f"in sequences of {length} tokens")
        parts[part_name(name, length)] = rows
    return parts


def _refuse_too_little(train: PackedDataset, source: str, held: str) -> None:
    """Refuse data that make less than one row.

    Args:
        train: the rows.
        source: the name of the source.
        held: a clause on the documents that are not trained on.

    Raises:
        DataError: if there is no row.
    """
    seq_len = train.seq_len
    if isinstance(train, PackedConversations):
        if not len(train):
            raise DataError(
                f"data source {source!r} leaves nothing to train on: none of {train.num_documents} {train.unit} "
                f"({held}) has a token that counts in the loss among its first "
                f"{seq_len + 1}; add {train.unit}, or raise training.seq_len"
            )
    elif train.num_tokens <= seq_len:
        raise DataError(
            f"data source {source!r} leaves {train.num_tokens} tokens in {train.num_documents} documents to train "
            f"on ({held}), fewer than the {seq_len + 1} that one sequence takes; "
            "add text, or lower training.seq_len or data.validation_fraction"
        )


def _warn_of_uneven_split(source: str, fraction: float, num_tokens: int, num_held_out: int) -> None:
    """Warn if nothing is held out although a fraction should be, or most tokens although it is less than half."""
    if fraction > 0 and not num_held_out:
        logger.warning("%s holds a single text, so nothing is held out", source)
    if fraction < 0.5 and num_held_out > num_tokens:
        logger.warning(
            "most of %s is held out: %s tokens, and %s to train on, because documents are held out whole and few are "
            "long; set data.validation_fraction=0, or name other data as data.validation",
            source,
            f"{num_held_out:,}",
            f"{num_tokens:,}",
        )
