"""The worker of every rank: read the run directory, train, time some steps, and record how it ended.

``python -m llama_core.launch.rank.worker RUN_DIR [--only train|benchmark]`` needs only torch and the run directory, so
it can also be started by hand on any machine that sees the directory.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, get_args

from llama_core.errors import (
    BadStepError,
    CheckpointError,
    LossSpikeError,
    NonFiniteError,
    RequestError,
    RunDirectoryError,
    StoppedError,
    TrainingInfraError,
    WrongDeviceError,
)
from llama_core.imports import importing_torch
from llama_core.launch.attempts import IN_PLACE_VARIABLE, current_attempt, own_job, own_restart
from llama_core.launch.outcome import record_outcome
from llama_core.launch.verdict import (
    LESS_MEMORY,
    LOST_PEERS_EXIT,
    MORE_DISK,
    OTHER_NODES_EXIT,
    RESUME,
    STOPPED_EXIT,
    Evidence,
    find_evidence,
    on_other_nodes,
    read_log,
)
from llama_core.log_lines import LineFormatter
from llama_core.machine.detect import device_label
from llama_core.machine.node import own_host
from llama_core.machine.shared_cores import sleeping_beside_others
from llama_core.notifications import finish_notices
from llama_core.records.activity import IN_PLACE, QUEUED, Activity, append_activities
from llama_core.records.directory import RunDirectory
from llama_core.records.files import no_room, now, remove_temporaries, write_json
from llama_core.records.job import Outcome, OutcomeStatus, Part
from llama_core.records.reserve import reserve_room

with importing_torch():
    import torch
    import torch.distributed as dist

    from llama_core.launch.rank.building import build_trainer
    from llama_core.launch.rank.machines import OtherNodesError
    from llama_core.parallel.ranks import (
        has_lost_the_others,
        is_first_rank,
        own_rank,
    )
    from llama_core.training.checkpoint import lacks_room
from llama_core.training.trainer import Trainer

logger = logging.getLogger(__name__)


STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

Build = Callable[[Callable[[], bool]], Trainer]
"""Builds the trainer; its argument is the function that the trainer calls after each step to learn whether to stop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank and return the process's exit code.

    0 finished, 1 failed, 2 wrong request, 75 other ranks gone, 76 stopped when asked to, with a checkpoint, 77 the job
    is to start again on other nodes.
    """
    parser = argparse.ArgumentParser(prog="python -m llama_core.launch.rank.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--loader", type=Path, metavar="FILE", help="train on the dataloader pickled in FILE")
    parser.add_argument("--only", choices=get_args(Part), help="do only this part of the work")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)  # the supervisor sends it to get the stacks of a hanging worker
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[console])
    run = RunDirectory(options.run_dir)
    with ExitStack() as ranks:
        try:
            outcome = run_to_end(
                run, lambda should_stop: build_trainer(run, ranks, should_stop, options.loader), options.only
            )
        except LostPeersError as error:
            logger.error("%s", error)
            code = LOST_PEERS_EXIT
        except OtherNodesError as error:
            logger.info("the attempt ended: %s", error)
            code = OTHER_NODES_EXIT
        else:
            code = {"finished": 0, "bad-config": 2, "cancelled": STOPPED_EXIT}.get(outcome.status, 1)
            if arguments is None:  # the process is this rank's own
                _ignore_stopping_signals()
        if code and dist.is_initialized():
            finish_notices()
            logging.shutdown()
            os._exit(code)  # threads that still wait for the other ranks would keep this process from ending
    return code


def _ignore_stopping_signals() -> None:
    """Ignore signals that would stop the run: it has ended, and Slurm would restart a finished job that is stopped."""
    for number in STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class LostPeersError(Exception):
    """The other ranks are gone or do not answer; the process that sees all ranks end records why."""


def run_to_end(
    run: RunDirectory, build: Build, only: Part | None = None, on_signal: Callable[[], None] = lambda: None
) -> Outcome:
    """Train and time some steps; return the outcome, which is also written to ``outcome.json``.

    With several ranks, the first one records an ending that all share; a rank that fails alone records it itself.

    Args:
        run: the run.
        build: builds the trainer.
        only: do only this part of the work.
        on_signal: called when a signal asks the run to stop after its step.

    Raises:
        LostPeersError: if it ended because other ranks are gone; nothing is recorded.
        OtherNodesError: if the job is to start again on other nodes; the same.
        KeyboardInterrupt: at a second SIGINT; nothing is recorded.
    """
    if os.environ.get("RANK", "0") == "0":
        reserve_room(run)
        _record_start(run)
    try:
        with _stop_on_signal(on_signal) as should_stop, sleeping_beside_others():
            trainer = build(should_stop)
            trained = run.training.exists() and trainer.is_over
            if only != "benchmark" and not trained:
                summary = trainer.fit()
                if is_first_rank():
                    write_json(run.training, summary)
            if only != "train" and trainer.config.benchmark.steps:
                record = trainer.benchmark(device_label(trainer.device.type))
                if is_first_rank():
                    write_json(run.benchmark, record)
    except OtherNodesError:
        raise
    except Exception as error:
        proof = _evidence(run, error)
        status, next_action = _classify(run, error, proof)
        expected = isinstance(error, TrainingInfraError) or status != "crashed"
        if status == "crashed" and has_lost_the_others(error):
            raise LostPeersError(f"lost the other ranks: {_first_line(error)}") from error
        level = logging.INFO if isinstance(error, StoppedError) else logging.ERROR
        logger.log(level, "the run ended: %s", error, exc_info=not expected)
        own = status in {"oom", "crashed"} and not expected
        reason = _of_rank(proof.line if proof else _first_line(error) if expected else _named(run, error))
        return _ended(run, status, reason=reason, next_action=next_action, everywhere=not own)
    reason = f"{trainer.step} steps"
    if trainer.ended_early:
        reason = f"{reason} of {trainer.total_steps}: {trainer.ended_early}"
    return _ended(run, "finished", reason=reason, step=trainer.step, next_action="", everywhere=True)


def _record_start(run: RunDirectory) -> None:
    """Record when this attempt was submitted and started, for the run's goodput; tidy up after the one before."""
    job = own_job(run)
    attempt = current_attempt(run, job)
    started = datetime.fromisoformat(attempt.started_at).timestamp() if attempt else time.time()
    if os.environ.get(IN_PLACE_VARIABLE):
        before = Activity(IN_PLACE, started, "queue")
    elif own_restart():
        before = Activity(QUEUED, 0.0, "queue")  # since the attempt before
    else:
        submitted = datetime.fromisoformat(job.submitted_at).timestamp() if job else started
        before = Activity(QUEUED, submitted, "queue")
    append_activities(run, before, Activity("starting", started))
    for folder in (run.path, run.metrics, run.checkpoints, run.logs):
        remove_temporaries(folder, before=started)


def _ended(run: RunDirectory, status: OutcomeStatus, *, everywhere: bool, **details: Any) -> Outcome:
    """Record an ending, unless all ranks share it and this is not the first rank."""
    if is_first_rank():
        append_activities(run, Activity("ended", time.time(), "stopped"))
    if not (everywhere and not is_first_rank()):
        try:
            return record_outcome(run, status, **details)
        except (OSError, RunDirectoryError) as error:
            logger.error("%s (its outcome cannot be recorded: %s)", details["reason"], error)
            status = "crashed" if status == "finished" else status
    return Outcome(status, details["reason"], 0, details["next_action"], now(), ())


def _of_rank(reason: str) -> str:
    return f"rank {dist.get_rank()}: {reason}" if dist.is_initialized() else reason


@contextmanager
def _stop_on_signal(on_signal: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Turn the signals that end a job into a flag that the training loop checks between steps.

    A user who presses Ctrl-C twice does not want to wait for the step: a second SIGINT raises ``KeyboardInterrupt``.
    With SIGUSR2 Slurm announces the end of the time limit and, on some clusters, preemption.
    """
    received: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and signum in received:
            raise KeyboardInterrupt
        received.append(signum)
        on_signal()

    stopping = STOPPING_SIGNALS if current_thread() is main_thread() else ()
    before = {number: signal.signal(number, remember) for number in stopping}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDINGS: tuple[tuple[type[Exception], OutcomeStatus, str], ...] = (
    (RequestError, "bad-config", "correct the request and start again"),
    (StoppedError, "cancelled", RESUME),
    (NonFiniteError, "non-finite", "start a new run with a lower training.learning_rate or other data"),
    (LossSpikeError, "loss-spike", "look at the data of the steps before it, or lower training.learning_rate"),
    (torch.OutOfMemoryError, "oom", LESS_MEMORY),
    (MemoryError, "oom", LESS_MEMORY),
    (CheckpointError, "crashed", "check that the disk can be read and written, then --resume"),
)
_CPU_OUT_OF_MEMORY = "can't allocate memory"  # in the RuntimeError of torch's CPU allocator


def _classify(run: RunDirectory, error: Exception, proof: Evidence | None) -> tuple[OutcomeStatus, str]:
    """Return the outcome of a run that ended by ``error``, which proves ``proof``, and the next thing to try."""
    if lacks_room(error):
        return "crashed", MORE_DISK
    if _CPU_OUT_OF_MEMORY in str(error):
        return "oom", LESS_MEMORY
    if isinstance(error, WrongDeviceError):
        return "node-failure", on_other_nodes(",".join(error.hosts), own_job(run))
    for kind, status, next_action in _ENDINGS:
        if isinstance(error, kind):
            return status, (error.next_action if isinstance(error, BadStepError) else "") or next_action
    if proof:
        return proof.status, proof.next_action
    return "crashed", read_log(own_rank())


def _evidence(run: RunDirectory, error: Exception) -> Evidence | None:
    """Return what an error of CUDA or NCCL proves; their messages have several lines, and the first may say little."""
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingInfraError):
        return None
    job = own_job(run)
    return find_evidence(str(error), host=own_host(), job=job)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _named(run: RunDirectory, error: Exception) -> str:
    """Return an unexpected error in one line: its type and message, or those of the process that it comes from."""
    if lacks_room(error):
        name = getattr(error, "filename", None)
        return no_room(Path(name).parent if isinstance(name, str) else run.path)
    lines = str(error).strip().splitlines()
    if any(line.startswith("Original Traceback") for line in lines):  # of a worker of torch's DataLoader
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
