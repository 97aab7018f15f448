"""Look at a run from outside: its state, how its attempts ended, which checkpoints are good, and how to go on."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from llama_core.config.recorded import refuse_unrecorded_edits
from llama_core.config.run import RunConfig
from llama_core.errors import CheckpointError, ConfigError, RunDirectoryError
from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.submission import attach
from llama_core.launch.outcome import concluded, read_outcome
from llama_core.launch.verdict import RESUME
from llama_core.planning.plan import ParallelPlan
from llama_core.records.activity import read_activity
from llama_core.records.checkpoints import (
    STATE,
    checkpoint_name,
    checkpoint_step,
    complete_state,
    find_problem,
    list_checkpoints,
)
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import endings
from llama_core.records.evaluations import read_scores
from llama_core.records.file_owners import other_owner
from llama_core.records.files import checked_record, read_json, read_typed
from llama_core.records.job import JobRecord, Outcome, OutcomeStatus
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary
from llama_core.records.metrics import read_heartbeat, read_metrics, set_aside
from llama_core.records.preflight import read_preflights
from llama_core.records.references import read_reference
from llama_core.records.retention import by_held_out_loss
from llama_core.records.rollbacks import read_rollbacks
from llama_core.records.settings_changes import read_settings_changes
from llama_core.records.stragglers import read_stragglers, still_behind
from llama_core.redaction import shell_word
from llama_core.runs.continuing import resume_command
from llama_core.runs.loading import load_config
from llama_core.units import format_bytes, format_duration

State = Literal["new", "queued", "running", "finished", "stopped", "failed", "unknown"]
"""``stopped``: somebody cancelled it. ``unknown``: this machine cannot tell whether its job runs."""
FEW_INODES = 1000
"""A disk with fewer left is as good as full: a checkpoint has a file or more for each rank."""
_STATE_AFTER: dict[OutcomeStatus, State] = {"finished": "finished", "cancelled": "stopped"}


@dataclass(frozen=True)
class Fact:
    """One thing that was checked."""

    subject: str
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class CheckpointFinding:
    """A checkpoint on disk."""

    step: int
    num_bytes: int
    compared: Literal["checksums", "sizes"]
    """How its files were compared: by size alone if that was asked for."""
    problem: str
    """The damaged file, and how it differs from what was written; empty if the checkpoint is good."""
    is_best: bool = False
    """Whether its held-out loss is the lowest of all checkpoints'."""

    def fact(self) -> Fact:
        """Return this as a line."""
        verdict = f"damaged: {self.problem}" if self.problem else f"every file has its {self.compared[:-1]}"
        best = ", the best" if self.is_best else ""
        text = f"step {self.step}, {format_bytes(self.num_bytes)}{best}: {verdict}"
        return Fact("checkpoint", text, is_problem=self.problem != "")


@dataclass(frozen=True)
class _Counters:
    """The trainer's counters in a checkpoint that the metrics have too."""

    loss: float
    tokens: int


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run, and everything that was found."""

    run_dir: str
    state: State
    facts: tuple[Fact, ...]
    attempts: tuple[dict[str, Any], ...]
    """As in ``outcome.json``."""
    checkpoints: tuple[CheckpointFinding, ...]
    """Oldest first."""
    command: str
    """The command to go on with; empty if nothing is left to do, or if only another machine can tell."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not any(fact.is_problem for fact in self.facts)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return asdict(self) | {"healthy": self.is_healthy}


def diagnose(run: RunDirectory, *, read: bool = True) -> Diagnosis:
    """Look at everything that a run has left on disk, and at its job.

    If its job ended while nobody waited for it, its outcome is recorded now, unless the run belongs to somebody else.

    Args:
        run: the run.
        read: compare the checksums of all checkpoints, which reads every byte of them; otherwise only sizes.

    Raises:
        RunDirectoryError: if the directory holds no run.
        ConfigError: if its configuration is of another version.
    """
    config = load_config(run)
    owner = other_owner(run)
    state, found, outcome = _state(run, config, owner)
    checkpoints = tuple(_checkpoints(run, config.training.keep_best_by, read))
    good = [checkpoint for checkpoint in checkpoints if not checkpoint.problem]
    advice, command = _next(run, config, state, outcome, checkpoints)
    attempts = tuple(map(dict, outcome.attempts)) if outcome else ()
    facts = [
        found,
        *([Fact("owner", f"belongs to {owner}: nothing is recorded or ended here")] if owner else []),
        *(_attempt(number, attempt) for number, attempt in enumerate(attempts, start=1)),
        *([checkpoint.fact() for checkpoint in checkpoints] or [Fact("checkpoint", "none yet")]),
        _disk(run, config, state, good),
        _metrics(run, state, good),
        *_slow_ranks(run),
        *_wrong_devices(run),
        *_evaluations(run),
        *(list(_damaged_records(run)) or _edited_settings(run, config, state)),  # which reads some of them
        *([Fact("advice", advice)] if advice else []),
        Fact("next", command or "nothing to do"),
    ]
    return Diagnosis(str(run.path), state, tuple(facts), attempts, checkpoints, command)


def _state(run: RunDirectory, config: RunConfig, owner: str | None) -> tuple[State, Fact, Outcome | None]:
    try:
        job = attach(run)
        outcome = read_outcome(run) if run.outcome.exists() else None
        is_recorded = not run.job.exists() or concluded(run, read_typed(run.job, JobRecord)) is not None
    except RunDirectoryError as error:
        return "unknown", Fact("state", f"unknown: {error}", is_problem=True), None
    if job is not None:
        return ("queued" if job.is_queued else "running"), _of_job(run, config, job), outcome
    if not is_recorded:
        return "unknown", Fact("state", f"unknown: its job has ended, and only a command of {owner} records why"), None
    newest = read_heartbeat(run)
    ended = datetime.fromisoformat(outcome.ended_at).timestamp() + 1 if outcome else 0.0  # recorded to the second
    is_new = newest is not None and newest.time > ended and (outcome is None or newest.step != outcome.step)
    if is_new:  # ranks that no job of ours started, such as torchrun's, and not only a clock ahead of ours
        fact = _of_steps(run, config, "running: ranks started by hand", since=ended)
        return ("failed" if fact.is_problem else "running"), fact, outcome
    if outcome is None:
        return "new", Fact("state", "new: nothing has run yet"), None
    text = f"{outcome.status} after step {outcome.step}, at {outcome.ended_at}: {outcome.reason}"
    state = _STATE_AFTER.get(outcome.status, "failed")
    return state, Fact("state", text, is_problem=state == "failed"), outcome


def _of_job(run: RunDirectory, config: RunConfig, job: JobHandle) -> Fact:
    who = f"{job.kind} {job.record.job_id}"
    if job.is_queued:
        return Fact("state", f"{job.state}: {who}")
    submitted = datetime.fromisoformat(job.record.submitted_at).timestamp()
    return _of_steps(run, config, f"{job.state}: {who}", since=submitted)


def _of_steps(run: RunDirectory, config: RunConfig, state: str, *, since: float) -> Fact:
    """Return where a running job is; steps before ``since`` (seconds since the epoch) belong to an earlier one.

    Args:
        run: the run.
        config: its configuration.
        state: what is running, the beginning of the line.
        since: when it began, in seconds since the epoch.
    """
    newest = read_heartbeat(run)
    limit = config.launch.hang_timeout_s
    if newest is None or newest.time < since:
        activity = read_activity(run)
        if activity is None or activity.since < since:
            return Fact("state", f"{state}; its ranks have not said anything yet")
        return Fact("state", f"{state}; no step yet; rank 0 has been {activity.doing} for {_ago(activity.since)}")
    seen = newest.time
    with suppress(OSError):
        seen = max(seen, run.heartbeat.stat().st_mtime)  # timed steps touch it
    is_silent = time.time() - seen > limit
    text = f"{state}; step {newest.step} of {newest.total_steps}, {_ago(seen)} ago"
    return Fact("state", f"{text}: longer than launch.hang_timeout_s={limit}" if is_silent else text, is_silent)


def _ago(moment: float) -> str:
    return format_duration(max(0.0, time.time() - moment))


def _attempt(number: int, attempt: dict[str, Any]) -> Fact:
    first = attempt["first_step"]
    last = attempt["last_step"]
    steps = f"steps {first} to {last}" if first is not None else "no step"
    again = "; its job started again" if attempt["requeued"] else ""
    return Fact(f"attempt {number}", f"{steps}, {attempt['status']}: {attempt['reason']}{again}")


def _checkpoints(run: RunDirectory, best_by: str, read: bool) -> Iterator[CheckpointFinding]:
    found = list_checkpoints(run)
    best = by_held_out_loss(found, best_by)[:1]
    for path in found:
        problem = find_problem(path, read=read)
        num_bytes = 0
        with suppress(FileNotFoundError):
            num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        compared: Literal["checksums", "sizes"] = "checksums" if read else "sizes"
        if path.exists():  # a running job deletes the oldest
            yield CheckpointFinding(checkpoint_step(path), num_bytes, compared, problem, path in best and not problem)


def _disk(run: RunDirectory, config: RunConfig, state: State, good: Sequence[CheckpointFinding]) -> Fact:
    free = shutil.disk_usage(run.path).free
    needed = good[-1].num_bytes if good else config.checkpoint_bytes
    inodes = os.statvfs(run.path)
    if inodes.f_files and inodes.f_favail < FEW_INODES:
        text = f"{format_bytes(free)} free, but only {inodes.f_favail:,} of {inodes.f_files:,} inodes: remove files"
        return Fact("disk", text, is_problem=state != "finished")
    text = f"{format_bytes(free)} free; a checkpoint takes {format_bytes(needed)}"
    return Fact("disk", text, is_problem=free < needed and state != "finished")


def _metrics(run: RunDirectory, state: State, good: Sequence[CheckpointFinding]) -> Fact:
    """Compare the recorded steps with the newest good checkpoint, which was saved after one of them was recorded."""
    saved = good[-1].step if good else 0
    try:
        rows = {row["step"]: row for row in read_metrics(run).select(["step", "loss", "tokens"]).to_pylist()}
    except RunDirectoryError as error:
        return Fact("metrics", str(error), is_problem=True)
    last = max(rows, default=0)
    missing = next((step for step in range(1, max(last, saved) + 1) if step not in rows), None)
    if missing is not None:
        aside = ", ".join(path.name for path in set_aside(run))
        text = f"steps up to {last}, but step {missing} is missing{f' ({aside} was damaged)' if aside else ''}"
        return Fact("metrics", f"{text}; the newest good checkpoint is of step {saved}", is_problem=True)
    if not saved:
        return Fact("metrics", f"steps 1 to {last}" if last else "no step yet")
    there: dict[str, float] = {}
    checkpoint = run.checkpoints / checkpoint_name(saved)
    try:
        with suppress(CheckpointError):  # a running job may have deleted it
            there = asdict(checked_record(complete_state(checkpoint), _Counters, checkpoint / STATE))
    except RunDirectoryError as error:
        return Fact("metrics", str(error), is_problem=True)
    for name, saved_value in there.items():
        here = rows[saved][name]
        if saved_value != here and not (math.isnan(saved_value) and math.isnan(here)):
            text = f"{name} {here} at step {saved}, but the checkpoint of that step has {saved_value}"
            return Fact("metrics", text, is_problem=True)
    text = f"steps 1 to {last}, in agreement with the checkpoint of step {saved}"
    repeats = last > saved and state in {"stopped", "failed"}
    return Fact("metrics", f"{text}; resuming repeats what follows step {saved}" if repeats else text)


def _slow_ranks(run: RunDirectory) -> Iterator[Fact]:
    """Yield a line for each rank that fell behind, before the newest attempt or since; the run goes on with it."""
    with suppress(RunDirectoryError):  # a damaged record is told of below
        for newest in read_preflights(run)[-1:]:
            yield from (Fact("preflight", str(named)) for named in newest.named)
    with suppress(RunDirectoryError):
        yield from (Fact("straggler", str(one)) for one in still_behind(read_stragglers(run)))


def _wrong_devices(run: RunDirectory) -> Iterator[Fact]:
    """Yield a line for each time that a device, and not the data, made a step bad."""
    with suppress(RunDirectoryError):
        for rollback in read_rollbacks(run):
            if rollback.data is None:
                yield Fact("device", f"step {rollback.bad_step}: {rollback.reason}")


def _evaluations(run: RunDirectory) -> Iterator[Fact]:
    """Yield a line for each evaluation that has ended without scores."""
    try:
        scored = {score.step for score in read_scores(run)}
    except RunDirectoryError as error:
        yield Fact("evaluation", str(error), is_problem=True)
        return
    for ending in endings(run):
        if ending.problem:
            yield Fact("evaluation", f"step {ending.step:,}: not evaluated: {ending.problem}", is_problem=True)
        elif ending.step not in scored:
            text = f"step {ending.step:,}: its evaluation has ended, but its scores are in no file of {run.evaluations}"
            yield Fact("evaluation", text, is_problem=True)


def _damaged_records(run: RunDirectory) -> Iterator[Fact]:
    """Yield a line for each record that is there but cannot be read, besides those of the job and its end."""
    typed = {run.plan: ParallelPlan, run.training: TrainingSummary, run.benchmark: BenchmarkRecord}
    others = (
        run.choice,
        run.generation_config,
        run.estimate,
        run.environment,
        run.dry_run,
        run.data,
        run.checkpoint_interval,
        run.length,
        run.hub,
        run.samples,
        run.base,
    )
    readers: dict[Path, Callable[[], object]] = {path: partial(read_typed, path, kind) for path, kind in typed.items()}
    readers |= {path: partial(read_json, path) for path in others}
    readers |= {
        run.rollbacks: partial(read_rollbacks, run),
        run.data_changes: partial(read_data_changes, run),
        run.settings_changes: partial(read_settings_changes, run),
        run.preflights: partial(read_preflights, run),
        run.stragglers: partial(read_stragglers, run),
        run.reference: partial(read_reference, run),
    }
    for path, read in readers.items():
        try:
            if path.exists():
                read()
        except RunDirectoryError as error:
            yield Fact("record", str(error), is_problem=True)


def _edited_settings(run: RunDirectory, config: RunConfig, state: State) -> Iterator[Fact]:
    """Yield a line if an edited ``config.yaml`` would make ``train --resume`` refuse the run."""
    if state in {"running", "finished"}:
        return
    try:
        refuse_unrecorded_edits(run, config)
    except (ConfigError, RunDirectoryError) as error:
        yield Fact("settings", str(error), is_problem=True)


def _next(
    run: RunDirectory,
    config: RunConfig,
    state: State,
    outcome: Outcome | None,
    checkpoints: Sequence[CheckpointFinding],
) -> tuple[str, str]:
    """Return what to do first, if anything, and the command to go on with."""
    has_none_good = bool(checkpoints) and all(checkpoint.problem for checkpoint in checkpoints)
    again = resume_command(run, config.data.source)
    match state:
        case "unknown":
            return "", ""
        case "queued" | "running":
            return "", f"training-infra logs {shell_word(run.path)} --follow"
        case "finished" if has_none_good:
            return "no checkpoint is good: restore one from a backup", ""
        case "finished":
            advice = _restoring_the_end(run, checkpoints)
            return advice, again if advice else ""
    if has_none_good:
        return "no checkpoint is good: restore one from a backup, or move them away to start over", again
    return (outcome.next_action if outcome and outcome.next_action != RESUME else ""), again


def _restoring_the_end(run: RunDirectory, checkpoints: Sequence[CheckpointFinding]) -> str:
    """Return how a finished run gets its last checkpoint back; empty if that is good, or if there is none at all."""
    sound = max((checkpoint.step for checkpoint in checkpoints if not checkpoint.problem), default=0)
    damaged = [checkpoint.step for checkpoint in checkpoints if checkpoint.step > sound]
    if not damaged:
        return ""
    moved = [run.checkpoints / checkpoint_name(step) for step in damaged]
    move = " ".join(map(shell_word, ("mv", *moved, run.path)))
    steps = " and ".join(map(str, damaged))
    return (
        f"the checkpoint of step {steps} is damaged, and the newest sound one is of step {sound}, which generate and "
        f"export-hf take; to train the steps after it again, {move}, then"
    )
