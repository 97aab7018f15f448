"""From a run directory to the trainer of a rank: what is checked, agreed on and loaded before the model is built."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from llama_core.config.recorded import load_recorded
from llama_core.config.run import RunConfig
from llama_core.data.datasets import BatchStream, Datasets, load_datasets, validation_batches
from llama_core.data.statistics import write_statistics
from llama_core.launch.rank.checks import (
    allow_open_files,
    check_data_agrees,
    check_own_device,
    check_ranks_agree,
    check_settings,
    find_room_for_temporary_files,
    limit_own_memory,
)
from llama_core.launch.rank.loader import loader_trainer, unpickled
from llama_core.launch.rank.machines import check_machines
from llama_core.models.batch import Batch
from llama_core.parallel.ranks import from_first_rank, is_first_rank, joined_ranks, one_per_machine_first, own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.activity import record_activity
from llama_core.records.data_changes import read_data_changes, record_data_change
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.training.reference import References
from llama_core.training.trainer import Trainer

logger = logging.getLogger(__name__)


def build_trainer(run: RunDirectory, ranks: ExitStack, should_stop: Callable[[], bool], loader: Path | None) -> Trainer:
    """Return the trainer of this rank.

    Args:
        run: the run.
        ranks: leaves the other ranks when it closes.
        should_stop: tells the trainer whether to stop.
        loader: the pickled dataloader of the user, if the run trains on one.

    Raises:
        TrainingInfraError: if the machine, the settings or the data are not what the run needs, on every rank.
    """
    config = load_recorded(run)
    plan = read_typed(run.plan, ParallelPlan)
    prepare_process(run, config, plan)
    _tell(run, "waiting for the other ranks")
    join_ranks(run, config, plan, ranks)
    if loader is not None:
        return loader_trainer(run, unpickled(loader) if is_first_rank() else None, should_stop)
    _tell(run, "reading the data")
    return DataOfRank(run, config, plan).trainer(should_stop)


def prepare_process(run: RunDirectory, config: RunConfig, plan: ParallelPlan) -> None:
    """Check this rank's machine, and set the limits of its process."""
    find_room_for_temporary_files(run)
    check_own_device(config, plan)
    limit_own_memory(config)
    allow_open_files()


def join_ranks(run: RunDirectory, config: RunConfig, plan: ParallelPlan, ranks: ExitStack) -> None:
    """Join the other ranks until ``ranks`` closes, and check that all of them have the same run before them."""
    joining = joined_ranks(
        config.launch.device,
        config.launch.collective_timeout_s,
        deterministic=config.training.deterministic,
        even_alone=plan.zero_backend == "deepspeed",
    )
    ranks.enter_context(joining)
    facts = check_ranks_agree(run, config)
    check_settings(run, config)
    if plan.world_size < config.parallel.gpus and is_first_rank():
        logger.warning(
            "on %d of %d ranks (launch.min_nodes): %s", plan.world_size, config.parallel.gpus, plan.summary()
        )
    if config.launch.preflight != "off":
        _tell(run, "checking the machines")
        check_machines(run, config, [of_rank.host for of_rank in facts])


class DataOfRank:
    """The data of a run, and this rank's share of its batches; all ranks load them together.

    Args:
        run: the run.
        config: its configuration.
        plan: how a batch is divided.

    Raises:
        DataError: on every rank, if the data cannot be read or differ between ranks.
    """

    datasets: Datasets
    """The rows that are trained on and held out: the same on every rank."""
    batches: BatchStream
    """This rank's share of the batches of training."""

    def __init__(self, run: RunDirectory, config: RunConfig, plan: ParallelPlan) -> None:
        self._run = run
        self._config = config
        self._plan = plan
        self._dp_rank = plan.dp_rank(own_rank())
        # a run that has accepted other data goes on from where it was in those before
        self._may_follow = from_first_rank(read_data_changes(run).may_follow if is_first_rank() else ())
        with one_per_machine_first():
            self.datasets = load_datasets(
                config.data,
                config.spec,
                seq_len=config.first_seq_len,
                num_sequences=None if self._may_follow else config.num_sequences,
                stages=config.stages,
                objective=config.objective,
            )
        check_data_agrees(self.datasets)
        if is_first_rank():
            statistics = self.datasets.statistics
            write_statistics(run, statistics, config.data)
            logger.info("data: %s", "; ".join((statistics.summary(), *statistics.notes)))
        self.batches = self._stream(may_follow=self._may_follow)

    def trainer(self, should_stop: Callable[[], bool]) -> Trainer:
        """Return the trainer on these data, gone on from the newest checkpoint."""
        config = self._config
        training = config.training
        statistics = self.datasets.statistics
        weights = training.init_from or f"drawn from seed {training.seed}"
        trainer = Trainer(
            self._run,
            config,
            self._plan,
            batches=self.batches,
            timed_batches=self._timed_batches(),
            validation=self._held_out(),
            total_steps=training.total_steps(statistics.num_sequences / config.first_batch_size),
            entropies=statistics.entropies,
            share_of_whole_rows=self.datasets.train.share_of_whole_rows,
            references=References.of(self._run, weights, config.objective, self.datasets),
            should_stop=should_stop,
        )
        self._tell_change(trainer.step)
        return trainer

    def _stream(self, may_follow: tuple[str, ...] = ()) -> BatchStream:
        return BatchStream(
            self.datasets.train,
            self._config.first_batch_size,
            self._config.training.seed,
            num_workers=self._config.data.num_workers or 0,
            rank=self._dp_rank,
            world_size=self._plan.dp,
            may_follow=may_follow,
        )

    def _timed_batches(self) -> BatchStream | None:
        """Return the batches of timed steps, if they are not those after the last step."""
        stage = self._config.timed_stage
        if stage is None:
            return None
        batches = self._stream()
        batches.go_to(stage.num_steps)
        return batches

    def _held_out(self) -> Mapping[str, Callable[[], Iterable[Batch]]]:
        """Return functions by name that return this rank's share of the held-out batches."""
        config = self._config
        held_out = self.datasets.validation
        make = partial(
            validation_batches,
            batch_size=self._plan.microbatch_size * config.seq_len // config.first_seq_len,
            max_rows=-(-config.training.eval_sequences // len(held_out)) if held_out else 0,
            fills_batches=self._plan.compile,
            rank=self._dp_rank,
            world_size=self._plan.dp,
        )
        return {name: partial(make, rows) for name, rows in held_out.items()}

    def _tell_change(self, step: int) -> None:
        """Record from which step on the run is on other data, if it is."""
        config = self._config
        if self._may_follow and config.num_sequences is not None:
            self.batches.check_epochs(config.data.limits, config.num_sequences)
        if self.batches.change is not None and is_first_rank():
            change = replace(self.batches.change, step=step)
            record_data_change(self._run, change)
            logger.info("%s", change)


def _tell(run: RunDirectory, doing: str) -> None:
    """Record what this rank does, if it is the first one: it may not have joined the others yet."""
    if os.environ.get("RANK", "0") == "0":
        record_activity(run, doing)
