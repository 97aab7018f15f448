"""Train on batches from the user's own loader, in one process or on every rank of a group.

Only rank 0 reads its loader, even if other ranks have a copy, so that all ranks see the same batches in the same order
even with shuffling. Rank 0 sends each batch to the others, and every data-parallel rank takes its rows.
"""

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.config.run import RunConfig
from llama_core.config.settings import UNNAMED
from llama_core.data.loaders import LoaderBatches, as_batch, made
from llama_core.data.supply import BatchSource
from llama_core.errors import DataError, TrainingInfraError
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.parallel.ranks import from_first_rank, is_first_rank, own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.measurements import StepRecord
from llama_core.training.metrics import print_record
from llama_core.training.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Loaders:
    """The training and validation batches of a run: iterables of global batches, or functions that make them."""

    train: Any
    validation: Any = None


def loader_trainer(
    run: RunDirectory,
    loaders: Loaders | None,
    should_stop: Callable[[], bool],
    on_step: Callable[[StepRecord], None] = print_record,
) -> Trainer:
    """Return the trainer of this rank; with several ranks, the default process group must exist.

    Args:
        run: the run, prepared by ``prepare_loader_run``.
        loaders: the batches; only rank 0 reads them, and other ranks may pass None.
        should_stop: called after every step.
        on_step: called with the record of every step on rank 0.
    """
    config = RunConfig.load(run.config, below=run.path)
    plan = read_typed(run.plan, ParallelPlan)
    total_steps = config.training.steps
    if total_steps is None:
        raise ValueError(f"{run.config} has no training.steps; prepare the run with prepare_loader_run")
    vocab_size = config.spec.vocab_size
    train, validation = (made(loaders.train), made(loaders.validation)) if loaders else (None, None)
    source = LoaderBatches(train, vocab_size) if train is not None else None
    batches: BatchSource
    if source is not None and not dist.is_initialized():
        batches = source
    else:
        batches = SharedBatches(source, plan, config.batch_size)
    evaluates = from_first_rank(validation is not None)

    def held_out() -> Iterator[Batch]:
        items = iter(validation if validation is not None else ())
        while (batch := _of_first_rank(lambda: _next_batch(items, vocab_size))) is not None:
            yield from own_rows(batch, plan, len(batch.tokens_BS)).split(plan.microbatch_size)

    return Trainer(
        run,
        config,
        plan,
        batches=batches,
        validation={UNNAMED: held_out} if evaluates else {},
        total_steps=total_steps,
        should_stop=should_stop,
        on_step=on_step,
    )


class SharedBatches:
    """This rank's rows of the batches that rank 0 reads.

    Args:
        source: the loader's batches; used on rank 0 only.
        plan: how a batch is divided.
        batch_size: rows of every batch; the last one of a pass may have fewer.
    """

    def __init__(self, source: LoaderBatches | None, plan: ParallelPlan, batch_size: int) -> None:
        self.source = source
        self.plan = plan
        self.batch_size = batch_size

    def next_batch(self) -> Batch:
        """Return the rows of this rank.

        Raises:
            DataError: on every rank, if the loader yields anything but a batch, or more than ``batch_size`` rows.
        """
        batch: Batch = _of_first_rank(self._read)
        return own_rows(batch, self.plan, self.batch_size if self.plan.pp > 1 else len(batch.tokens_BS))

    def _read(self) -> Batch:
        if self.source is None:
            raise ValueError("rank 0 has no loader")
        batch = self.source.next_batch()
        if len(batch.tokens_BS) > self.batch_size:
            raise DataError(
                f"the dataloader gives a batch of {len(batch.tokens_BS)} sequences after one of {self.batch_size}; "
                "make all batches the same size; only the last may be smaller"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader; empty without one."""
        return {} if self.source is None else self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position that ``state_dict`` returned on rank 0."""
        if self.source is not None:
            self.source.load_state_dict(state)


def own_rows(batch: Batch, plan: ParallelPlan, num_rows: int) -> Batch:
    """Return this rank's rows of a batch padded to at least ``num_rows`` rows; padding has no targets.

    The loss is the mean over all targets of all ranks, so rows without targets do not change it.
    """
    share = -(-num_rows // plan.dp)
    missing = share * plan.dp - len(batch.tokens_BS)
    filled = replace(
        batch.each_token(lambda tensor: _filled(tensor, missing, 0)),
        targets_BS=_filled(batch.targets_BS, missing, IGNORE_INDEX),
        positions_BS=None,
        documents=None,
    )
    first = plan.dp_rank(own_rank()) * share
    return filled.each_token(lambda tensor: tensor[first : first + share])


def _filled(x_BS: Tensor, num_rows: int, value: int) -> Tensor:
    return torch.cat([x_BS, x_BS.new_full((num_rows, x_BS.shape[1]), value)]) if num_rows else x_BS


def _next_batch(items: Iterator[Any], vocab_size: int) -> Batch | None:
    for item in items:
        return as_batch(item, vocab_size)
    return None


def _of_first_rank(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0; return its result, or raise its ``TrainingInfraError``, on all ranks."""
    result: T | None = None
    error: TrainingInfraError | None = None
    if is_first_rank():
        try:
            result = make()
        except TrainingInfraError as caught:
            error = caught
    result, error = from_first_rank((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def pickled(loaders: Loaders) -> bytes:
    """Pickle loaders together with ``sys.path``, for another process on this machine.

    Raises:
        Exception: of any kind, if they cannot be pickled.
    """
    import cloudpickle

    return pickle.dumps((sys.path, cloudpickle.dumps(loaders)))


def unpickled(file: Path) -> Loaders:
    """Return the loaders from a file with the bytes of ``pickled``; nobody else may have write access to it."""
    places, content = pickle.loads(file.read_bytes())
    sys.path += [place for place in places if place not in sys.path]
    loaders: Loaders = pickle.loads(content)
    return loaders
