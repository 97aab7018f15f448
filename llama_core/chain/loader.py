"""Runs on batches from the caller's own dataloader.

* One device: train in this process.
* Under torchrun, or in a job's step: every rank calls this with the same arguments; rank 0 prepares the run and
  reports.
* Otherwise, several devices of this machine: start a job with one rank per device and send the loader to rank 0.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llama_core.chain import steps as chain_steps
from llama_core.chain.chain import Steps, run_chain
from llama_core.chain.planned import with_keys
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, TrainingConfig
from llama_core.errors import ConfigError, EnvironmentMismatchError, TrainingFailedError
from llama_core.launch.attempts import LOG_HEADER, log_path
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.handle import WORKER, JobHandle
from llama_core.launch.jobs.launcher import started_ranks
from llama_core.launch.outcome import record_outcome
from llama_core.launch.places import private_place
from llama_core.launch.verdict import RESUME
from llama_core.log_lines import LineFormatter
from llama_core.machine.defaults import resolve_machine_defaults
from llama_core.machine.detect import detect_machine
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now
from llama_core.records.measurements import StepRecord, TrainingSummary
from llama_core.runs.console import say, say_output, watch
from llama_core.runs.continuing import is_finished, resume_point
from llama_core.runs.loading import load_config, load_plan
from llama_core.runs.stopping import check_outcome, stopped

if TYPE_CHECKING:
    from llama_core.launch.rank.loader import Loaders

logger = logging.getLogger(__name__)


def run_loader_chain(
    config: RunConfig, train: Any, validation: Any, steps: Steps, run_dir: Path | None = None, *, resume: bool = False
) -> RunDirectory:
    """Run the chain on the caller's batches, and return the run.

    Args:
        config: the run.
        train: an iterable of global batches, or a function that makes one.
        validation: held-out batches in the same forms; None for none.
        steps: the usual steps, some of which are replaced.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.

    Raises:
        TrainingInfraError: if a step fails, or the loader cannot be sent to the ranks.
    """
    from llama_core.launch.rank.loader import Loaders, pickled

    loaders = Loaders(train, validation)
    gpus = config.parallel.gpus
    num_ranks = started_ranks()
    if num_ranks > 1:
        if num_ranks != gpus:
            raise ConfigError(f"gpus={gpus}, but {num_ranks} processes were started; use --gpus {num_ranks}")
        return _with_group(config, loaders, steps, run_dir, resume=resume)
    if not config.launch.is_here:
        launcher = config.launch.kind
        how = f": {launcher.starts_a_script.format(num_ranks=gpus)} {_script()}" if launcher.starts_a_script else ""
        raise ConfigError(
            f"launcher={launcher.name}: a job cannot read the dataloader of this process; start the script on every "
            f"rank{how}"
        )

    def prepare() -> RunDirectory:
        return prepare_loader_run(config, loaders, run_dir, resume=resume)

    if gpus == 1:
        own = replace(steps, submit=lambda run: None, train=lambda run: _train_alone(run, loaders))
        return run_chain(replace(own, prepare=prepare))
    resolve_machine_defaults(config, detect_machine())  # check for the devices before pickling
    try:
        content = pickled(loaders)
    except Exception as error:  # the caller's objects may raise anything
        raise ConfigError(
            f"the dataloader cannot be sent to {gpus} processes ({type(error).__name__}: {error}); pass a function "
            f"that makes it, or start the processes yourself: torchrun --nproc-per-node={gpus} {_script()}"
        ) from None

    def submit(run: RunDirectory) -> JobHandle | None:
        return None if is_finished(run) else _submit(run, content)

    return run_chain(replace(steps, prepare=prepare, submit=submit))


def refuse_started_ranks() -> None:
    """Refuse to start a job from one of several started processes: each of them would start one.

    Raises:
        ConfigError: if there are several, with their number.
    """
    num_ranks = started_ranks()
    if num_ranks > 1:
        raise ConfigError(
            f"this is one of {num_ranks} processes started by torchrun or srun, but without a dataloader a run starts "
            "its own ranks; start the script once, without torchrun or srun"
        )


def prepare_loader_run(
    config: RunConfig, loaders: "Loaders", run_dir: Path | None = None, *, resume: bool = False
) -> RunDirectory:
    """Create the directory of a run on the caller's batches; see ``prepare_run``.

    The first batch sets the batch size and the sequence length. The loader's length, if it has one, is the number of
    steps of an epoch.

    Raises:
        DataError, ConfigError: if the first batch is not usable, or the number of steps is unknown.
    """
    from llama_core.data.loaders import LoaderBatches, made

    resolve_machine_defaults(config, detect_machine())  # check for the devices before reading data
    train = made(loaders.train)
    validation = made(loaders.validation)
    if validation is not None:  # checked before training rather than after
        LoaderBatches(validation, config.spec.vocab_size).next_batch()
    else:
        _refuse_to_evaluate(config.training)
    num_sequences, seq_len = LoaderBatches(train, config.spec.vocab_size).next_batch().tokens_BS.shape
    num_steps = config.training.steps
    if num_steps is None and config.training.minutes is not None:
        raise ConfigError("training.minutes needs data.source; with your own dataloader, give training.steps")
    if num_steps is None:
        num_steps = config.training.total_steps(_length(train))
    if config.data.num_workers:
        logger.warning(
            "data.num_workers=%d has no effect on your own dataloader; give it workers of its own",
            config.data.num_workers,
        )
    sizes = {"batch_size": num_sequences, "seq_len": seq_len, "steps": num_steps}
    # Read in the training thread: the loader may draw from the process's random state or belong to one thread, and
    # rank 0 sends batches to the others with collectives, which must not cross those of a step.
    data = {"source": DATALOADER, "document_mask": False, "num_workers": 0}
    return prepare_run(with_keys(config, training=sizes, data=data), run_dir, resume=resume)


def _refuse_to_evaluate(training: TrainingConfig) -> None:
    """Refuse what needs held-out batches, since there are none."""
    for key in ("keep_best", "patience"):
        if value := getattr(training, key):
            raise ConfigError(f"training.{key}={value} needs held-out batches; give val_dataloader")


def train_in_process(run: RunDirectory, loaders: "Loaders") -> TrainingSummary:
    """Train in this process, alone or as one rank of a group; Ctrl-C saves a checkpoint and stops, twice just stops.

    Raises:
        TrainingFailedError: if the run ended without finishing; StoppedError if it was interrupted.
    """
    from llama_core.launch.rank.loader import loader_trainer
    from llama_core.launch.rank.worker import LostPeersError, run_to_end
    from llama_core.parallel.ranks import is_first_rank
    from llama_core.training.metrics import format_record

    if is_finished(run):
        return chain_steps.training_summary(run)
    with watch(run) as show, _own_log(run) as log:

        def on_step(record: StepRecord) -> None:
            if is_first_rank():
                show(record)
                log.write(f"{format_record(record)}\n")

        def on_signal() -> None:
            if is_first_rank():
                second = f"Ctrl-C again stops at once: then resume=True {resume_point(run)}"
                say("stopping", f"waiting for the end of this step and a checkpoint; {second}")

        try:
            outcome = run_to_end(
                run, lambda should_stop: loader_trainer(run, loaders, should_stop, on_step), on_signal=on_signal
            )
        except LostPeersError as error:
            raise TrainingFailedError(str(error)) from None
        except KeyboardInterrupt:
            outcome = record_outcome(run, "cancelled", reason="it was interrupted twice", next_action=RESUME)
    if outcome.status == "cancelled":
        raise stopped(run, outcome)
    check_outcome(outcome)
    return chain_steps.training_summary(run)


def _train_alone(run: RunDirectory, loaders: "Loaders") -> TrainingSummary:
    """Train in this process, the only rank of the run."""
    from llama_core.parallel.ranks import joined_ranks

    config = load_config(run)
    timeout_s = config.launch.collective_timeout_s
    with joined_ranks(config.launch.device, timeout_s, deterministic=config.training.deterministic):
        return train_in_process(run, loaders)


@contextmanager
def _own_log(run: RunDirectory) -> Iterator[TextIO]:
    """Yield the log that a supervisor would give this rank. The engine logs to it; the user also sees warnings."""
    rank = int(os.environ.get("RANK", "0"))

    class Notable(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say_output(rank, f"{record.levelname} {record.getMessage()}")

    engine = logging.getLogger("llama_core")
    with log_path(run, rank).open("a", buffering=1) as log:
        log.write(f"{LOG_HEADER}of this process, rank {rank}, {now()} ===\n")
        to_file = logging.StreamHandler(log)
        to_file.setFormatter(LineFormatter("%(levelname)s %(message)s"))
        handlers = [to_file] if engine.hasHandlers() else [to_file, Notable(logging.WARNING)]
        for handler in handlers:
            engine.addHandler(handler)
        try:
            yield log
        finally:
            for handler in handlers:
                engine.removeHandler(handler)


def _with_group(
    config: RunConfig, loaders: "Loaders", steps: Steps, run_dir: Path | None, *, resume: bool
) -> RunDirectory:
    """Run the chain as one rank of a group; rank 0 prepares the run while the others wait."""
    from llama_core.parallel.ranks import is_joined

    if is_joined():
        raise EnvironmentMismatchError("torch.distributed is already initialised; remove the init_process_group call")
    device = resolve_machine_defaults(config, detect_machine()).config.launch.device
    if os.environ["RANK"] != "0":
        return RunDirectory(Path(_as_a_rank(config, device, loaders, lambda: "")))

    def train(run: RunDirectory) -> TrainingSummary:
        _as_a_rank(config, device, loaders, lambda: str(run.path.resolve()))
        return chain_steps.training_summary(run)

    def prepare() -> RunDirectory:
        return prepare_loader_run(config, loaders, run_dir, resume=resume)

    return run_chain(replace(steps, prepare=prepare, submit=lambda run: None, train=train))


def _as_a_rank(config: RunConfig, device: str, loaders: "Loaders", path: Callable[[], str]) -> str:
    """Join the group, train, and return the run's directory, which rank 0 chooses."""
    from llama_core.launch.rank.checks import check_own_device, check_ranks_agree
    from llama_core.launch.rank.machines import check_machines
    from llama_core.parallel.ranks import from_first_rank, joined_ranks

    timeout_s = config.launch.collective_timeout_s
    with joined_ranks(device, timeout_s, deterministic=config.training.deterministic):
        run = RunDirectory(Path(from_first_rank(path())))
        own = load_config(run)
        check_own_device(own, load_plan(run))
        facts = check_ranks_agree(run, own)
        if own.launch.preflight != "off":
            check_machines(run, own, [of_rank.host for of_rank in facts])
        train_in_process(run, loaders)
    return str(run.path)


def _submit(run: RunDirectory, content: bytes) -> JobHandle:
    """Start a job with the plan's number of ranks; rank 0 reads the loader from a file."""
    file = private_place(RunDirectory(run.path.resolve()).logs) / "dataloader.pkl"
    file.write_bytes(content)
    worker = (*WORKER, "--loader", str(file))
    return submission.submit(run, load_config(run), load_plan(run).world_size, worker=worker)


def _script() -> str:
    return sys.argv[0] if sys.argv[0].endswith(".py") else "SCRIPT.py"


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # also from a DataLoader over an iterable dataset
        raise ConfigError("the dataloader has no length; set training.steps: configure(steps=...)") from None
