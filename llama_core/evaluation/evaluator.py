"""Evaluate the checkpoints of a run while it trains, each in a process or a job of its own.

``python -m llama_core.evaluation.evaluator RUN_DIR`` runs beside the first rank until its standard input ends, which is
when training does. With ``--step N`` it evaluates that checkpoint. Ranks never wait for either, and nothing that
happens to them reaches the ranks.
"""

import argparse
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.errors import RankFailedError, RunDirectoryError, TrainingInfraError, safe
from llama_core.evaluation.held_out import evaluate
from llama_core.evaluation.jobs import Evaluations, evaluations_of
from llama_core.evaluation.plan import evaluation_plan
from llama_core.evaluation.questions import Devices
from llama_core.evaluation.recording import UnrecordedError, recorded_losses, recorded_tasks
from llama_core.evaluation.score_trackers import show_scores
from llama_core.evaluation.tasks import Asked, evaluate_tasks
from llama_core.launch.jobs.handle import EVALUATOR
from llama_core.log_lines import warnings_on_stderr
from llama_core.machine.detect import detect_machine
from llama_core.records.checkpoints import checkpoint_name, checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import (
    EvaluationAttempt,
    identity,
    read_attempt,
    read_ending,
    waiting_checkpoints,
    write_attempt,
    write_ending,
)
from llama_core.records.evaluations import read_scores
from llama_core.records.progress import read_progress
from llama_core.runs.loading import load_config

LOOK_SECONDS = 2.0
"""Time between two looks at the checkpoints."""
Tell = Callable[[str], None]


class Evaluator:
    """Starts the evaluation of each checkpoint that waits for one, and tells how each has ended.

    Args:
        run: the run, with an absolute path.
        config: its configuration.
        evaluations: starts them.
        tell: called with a line about each that has ended, or has to be started again.
    """

    def __init__(self, run: RunDirectory, config: RunConfig, evaluations: Evaluations, tell: Tell) -> None:
        self.run = run
        self.config = config
        self.evaluations = evaluations
        self._tell = tell
        self._followed: dict[Path, EvaluationAttempt] = {}
        self._given_up: set[Path] = set()
        """Those of which nothing can be recorded."""

    def look(self, *, has_trained: bool = False) -> bool:
        """Start what can be started, tell what has ended, and return whether any evaluation has not ended.

        Args:
            has_trained: whether the newest checkpoint is the last, which is evaluated in any case.

        Raises:
            EnvironmentMismatchError: if the scheduler refuses a job.
        """
        asked = self.config.evaluation
        checkpoints = list_checkpoints(self.run)
        waiting = waiting_checkpoints(checkpoints, asked.every_tokens)[: asked.keep_waiting]
        if has_trained and checkpoints and checkpoints[-1] not in waiting:
            waiting += [path for path in checkpoints[-1:] if read_ending(self.run, path) is None]
        waiting = [path for path in waiting if path not in self._given_up]
        for path in waiting:
            try:
                self._see_to(path)
            except RunDirectoryError as error:
                self._given_up.add(path)
                self._tell(f"step {checkpoint_step(path):,}: not evaluated: {error}")
        for path in list(self._followed):
            self._tell_ending(path)
        return bool(waiting)

    def wait(self) -> None:
        """Evaluate what is left, after the end of training."""
        while self.look(has_trained=True):
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End the evaluations that nobody else could find again; the attempts at these do not count."""
        running = [path for path, attempt in self._followed.items() if self.evaluations.is_running(attempt.job_id)]
        self.evaluations.stop()
        for path in running:
            attempt = self._followed[path]
            if not self.evaluations.is_running(attempt.job_id):
                write_attempt(self.run, replace(attempt, attempt=attempt.attempt - 1, job_id=""))

    def _see_to(self, path: Path) -> None:
        """Start the evaluation of a checkpoint, or again if it was killed, unless it runs."""
        before = read_attempt(self.run, path)
        if before is not None and self.evaluations.is_running(before.job_id):
            self._followed[path] = before
            return
        if read_ending(self.run, path) is not None:  # it has just ended
            return
        number = 1 if before is None else before.attempt + 1
        step = checkpoint_step(path)
        most = self.config.evaluation.max_attempts
        if number > most:
            write_ending(self.run, path, f"all {most} evaluations were killed or crashed; see {self.run.logs}")
            return
        command = (*EVALUATOR, str(self.run.path), "--step", str(step), "--device", self.evaluations.device)
        job_id = self.evaluations.start(command, step)
        if job_id is None:
            return
        attempt = EvaluationAttempt(step, read_progress(path).tokens, identity(path), number, job_id)
        write_attempt(self.run, attempt)
        self._followed[path] = attempt
        if number > 1:
            self._tell(f"step {step:,}: its evaluation was killed or crashed; attempt {number} of {most}")

    def _tell_ending(self, path: Path) -> None:
        ending = read_ending(self.run, path)
        if ending is None:
            if not path.exists():  # deleted with its run's later steps
                del self._followed[path]
            return
        del self._followed[path]
        if ending.problem:
            self._tell(f"step {ending.step:,}: not evaluated: {ending.problem}")
            return
        for score in read_scores(self.run):
            if score.step == ending.step:
                self._tell(str(score))


def evaluate_checkpoint(run: RunDirectory, step: int, device: str | None, tell: Tell) -> str:
    """Evaluate a checkpoint on what the run's configuration names, and record the scores and the ending.

    Args:
        run: the run.
        step: the checkpoint's.
        device: cpu or cuda; by default cuda if present.
        tell: called with a line about what is evaluated.

    Returns:
        Why there are no scores; empty if there are.

    Raises:
        RankFailedError: if one of several processes was killed or crashed; the evaluation has not ended then.
        RunDirectoryError: if the scores or the ending cannot be recorded, with the same effect.
    """
    config = load_config(run)
    checkpoint = run.checkpoints / checkpoint_name(step)
    asked = config.evaluation
    given: dict[str, Any] = {"steps": step, "tell": tell}
    problem = ""
    try:
        shared = evaluation_plan(config, device or ("cuda" if detect_machine().gpus else "cpu"))
        given["devices"] = Devices.of(shared, device, asked.dtype)
        if asked.data:
            losses = evaluate(run.path, asked.data, num_sequences=asked.sequences, **given)
            for loss in recorded_losses(losses, num_sequences=asked.sequences, dtype=asked.dtype, tell=None):
                tell(loss.summary())
        if asked.tasks:
            how = Asked.of(asked)
            scores = evaluate_tasks(run.path, asked.tasks, folder=asked.include_path, asked=how, **given)
            for score in recorded_tasks(scores, how, dtype=asked.dtype, tell=None):
                for line in score.lines():
                    tell(line)
    except (RankFailedError, UnrecordedError):  # as if this process had crashed: it does not end the evaluation
        raise
    except TrainingInfraError as error:
        problem = str(error)
    write_ending(run, checkpoint, problem)
    if found := [score for score in read_scores(run) if score.step == step]:
        show_scores(run, config, found, tell)
    return problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate one checkpoint, or all while a run trains; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    run = RunDirectory(options.run_dir)
    try:
        if options.step is not None:
            device = None if options.device == "auto" else options.device
            problem = evaluate_checkpoint(run, options.step, device, _print)
            if problem:
                _print(problem)
            return 0  # it has ended, if without scores
        _evaluate_while_training(run)
    except TrainingInfraError as error:
        _print(f"ERROR {error}")
        return error.exit_code
    return 0


def _evaluate_while_training(run: RunDirectory) -> None:
    config = load_config(run)
    evaluations = evaluations_of(run, config, while_training=True)
    evaluator = Evaluator(run, config, evaluations, _print)
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        evaluator.look()
    evaluator.stop()


def _print(line: str) -> None:
    sys.stdout.write(f"{safe(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with warnings_on_stderr():
        sys.exit(main())
