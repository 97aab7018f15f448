"""The evaluations of a sweep's elements: is the score asked for, and has the last checkpoint got its own?"""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from llama_core.chain import steps
from llama_core.errors import ConfigError, TrainingInfraError, did_you_mean
from llama_core.evaluation.evaluator import LOOK_SECONDS, Evaluator
from llama_core.evaluation.tasks import Asked, find_tasks
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluation_jobs import read_ending
from llama_core.records.evaluations import LOSS, SCORE
from llama_core.runs.console import say
from llama_core.runs.continuing import is_finished
from llama_core.runs.loading import load_config
from llama_core.sweep.directory import SweepDirectory, read_record
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.naming import ElementNames
from llama_core.sweep.objective import SweepObjective

MAX_LISTED = 12
"""Most tasks that an error lists."""


def check_score(config: SweepConfig) -> None:
    """Refuse to rank by a score that no evaluation of the elements gives, or of which nobody says what is better.

    The data sets of tasks are downloaded.

    Raises:
        ConfigError: if the tasks of the base have no such score, or a task of the base is unknown.
        DataError, HubError, EnvironmentMismatchError: if a task's data or the harness cannot be had.
    """
    objective = config.ranking
    if objective.kind != "score" or objective.metric == LOSS:
        return
    asked = config.base.evaluation
    tasks = find_tasks(asked.tasks, asked.include_path, Asked.of(asked), tell=partial(say, "note"))
    directions = {f"{task}/{metric}": higher for (task, metric), higher in tasks.directions().items()}
    if objective.name not in directions:
        raise ConfigError(f"objective={config.objective}: {_what_there_is(objective, list(directions))}")
    if directions[objective.name] is None:
        raise ConfigError(
            f"objective={config.objective}: the tasks of {objective.task} disagree whether a higher {objective.metric} "
            "is better; rank by one of its tasks"
        )


def _what_there_is(objective: SweepObjective, names: Sequence[str]) -> str:
    """Return which scores there are instead: those of the same task, or else those of which tasks."""
    near = did_you_mean(objective.name, names)
    if own := [f"{SCORE}{name}" for name in names if name.startswith(f"{objective.task}/")]:
        return f"choose one of {', '.join(own)}{near}"
    tasks = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    more = f" and {len(tasks) - MAX_LISTED} more" if len(tasks) > MAX_LISTED else ""
    return f"evaluation.tasks of the base gives scores of {', '.join(tasks[:MAX_LISTED])}{more}{near}"


def is_evaluated(run: RunDirectory) -> bool:
    """Return whether nothing is left to evaluate of a run that has trained, if with a failure."""
    checkpoints = list_checkpoints(run)
    return not checkpoints or read_ending(run, checkpoints[-1]) is not None


def unevaluated(sweep: SweepDirectory) -> Iterator[RunDirectory]:
    """Yield the runs of the elements that have trained, but whose last checkpoint still waits for its evaluation."""
    for element in read_record(sweep).runnable:
        run = sweep.run(element.name)
        if is_finished(run) and load_config(run).evaluation.is_asked_for and not is_evaluated(run):
            yield run


class ElementEvaluations:
    """Evaluates what is left of elements that have trained, their last checkpoints among it.

    What goes wrong is a line, and the element stays without a score.

    Args:
        names: what people call the elements.
    """

    def __init__(self, names: ElementNames) -> None:
        self._names = names
        self._left: dict[str, Evaluator] = {}

    def add(self, run: RunDirectory) -> None:
        """Evaluate the checkpoints of a run, from the next look on."""
        evaluator = steps.evaluator_of(run, partial(self._say, run.name))
        if evaluator is not None:
            self._left[run.name] = evaluator

    def look(self) -> bool:
        """Start what can be started, say what has ended, and return whether any evaluation has not ended."""
        for name, evaluator in list(self._left.items()):
            try:
                is_left = evaluator.look(has_trained=True)
            except TrainingInfraError as error:
                self._say(name, f"not evaluated: {error}")
                evaluator.stop()
                is_left = False
            if not is_left:
                del self._left[name]
        return bool(self._left)

    def wait(self) -> None:
        """Look until all have ended."""
        while self.look():
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End the evaluations that nobody else could find again; those in jobs of their own go on."""
        for evaluator in self._left.values():
            evaluator.stop()

    def _say(self, name: str, line: str) -> None:
        say("evaluate", f"{self._names[name]}: {line}")
