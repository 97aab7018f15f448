"""What ranks the elements of a sweep, and which keys cannot change it; each key says so itself (``Key.changes``)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from llama_core.config.evaluation import EvaluationConfig
from llama_core.config.run import RunConfig
from llama_core.config.section import Changes
from llama_core.config.settings import DataConfig
from llama_core.errors import Problem, did_you_mean
from llama_core.records.evaluations import LOSS, SCORE
from llama_core.records.measurements import NAMED_LOSS

Kind = Literal["throughput", "loss", "score"]

_CHANGES: dict[str, Changes] = {known.name: known.key.changes for known in RunConfig.known_keys()}
UNTIMED = frozenset(name for name, changes in _CHANGES.items() if changes in {"learning", "nothing"})
"""Keys that do not change how long a step takes."""
HELD_OUT = frozenset(name for name, changes in _CHANGES.items() if changes == "held-out")
"""Keys that change the tokens which the held-out loss is a mean over."""


@dataclass(frozen=True)
class SweepObjective:
    """What ranks the elements of a sweep."""

    kind: Kind
    part: str = ""
    """The name of the held-out tokens whose loss counts; empty for all of them."""
    task: str = ""
    """The name of the task, or of the data, whose score counts; empty unless a score ranks the elements."""
    metric: str = ""
    """The metric of the score."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the objective that a configuration spells as ``throughput``, ``loss`` or the name of a curve.

        The curves are held-out losses, ``eval_loss/NAME``, and scores of checkpoints, ``evaluation/TASK/METRIC``.

        Raises:
            ValueError: if it is none of them.
        """
        if text == "throughput":
            return cls("throughput")
        if text == "loss":
            return cls("loss")
        if text.startswith(NAMED_LOSS) and text != NAMED_LOSS:
            return cls("loss", text.removeprefix(NAMED_LOSS))
        if text.startswith(SCORE):
            task, _, metric = text.removeprefix(SCORE).rpartition("/")
            if task and metric:
                return cls("score", task=task, metric=metric)
        raise ValueError(f"choose one of throughput, loss, {NAMED_LOSS}NAME, {SCORE}TASK/METRIC")

    @property
    def trains(self) -> bool:
        """Whether each element trains, rather than only times some steps."""
        return self.kind != "throughput"

    @property
    def done(self) -> str:
        """What has been done to an element that has run."""
        return "trained" if self.trains else "timed"

    @property
    def ranked(self) -> str:
        """What has been done to an element that has a rank."""
        return "evaluated" if self.kind == "score" else self.done

    @property
    def name(self) -> str:
        """What is compared, in words, such as ``held-out loss of code`` or ``arc_easy/acc``."""
        match self.kind:
            case "throughput":
                return "throughput"
            case "loss":
                return f"held-out loss of {self.part}" if self.part else "held-out loss"
            case "score":
                return f"{self.task}/{self.metric}"

    @property
    def title(self) -> str:
        """The name as a title begins; that of a task stays as it is."""
        return self.name if self.kind == "score" else f"{self.name[0].upper()}{self.name[1:]}"

    @property
    def superlative(self) -> str:
        """What the value of the first element is; of a score, only the score itself says which is better."""
        return "best" if self.kind == "score" else "lowest"

    @property
    def ahead(self) -> str:
        """Where the first element is, seen from the next."""
        return "ahead of" if self.kind == "score" else "below"

    @property
    def behind(self) -> str:
        """Where the next element is, seen from the first."""
        return "behind" if self.kind == "score" else "above"


def problems_of_part(part: str, data: DataConfig) -> Iterator[Problem]:
    """Yield a problem if no held-out tokens of the run have the name by whose loss a sweep is ranked."""
    names = data.held_out_names
    if names and part not in names:
        known = ", ".join(f"{NAMED_LOSS}{name}" for name in names)
        yield Problem(f"objective={NAMED_LOSS}{part}: choose one of {known}{did_you_mean(part, names)}")
    elif not names:
        yield Problem(
            f"objective={NAMED_LOSS}{part}: the held-out documents have no names; give a mixture as data.sources, or "
            "name them in data.validation"
        )


def problems_of_throughput(compared: Iterable[str]) -> Iterator[Problem]:
    """Yield why a sweep over some keys cannot be ranked by throughput.

    Args:
        compared: the keys that have several values.
    """
    idle = [key for key in compared if key in UNTIMED]
    if idle:
        yield Problem(
            f"grid: {', '.join(idle)} cannot change the throughput, which ranks the elements; train each "
            "element and rank the held-out losses with --objective loss (objective: loss), or leave it out"
        )


def problems_of_training(objective: SweepObjective, compared: Iterable[str], base: RunConfig) -> Iterator[Problem]:
    """Yield why a sweep over some keys cannot be ranked by what its elements have learnt.

    Args:
        objective: what ranks the elements, not their throughput.
        compared: the keys that have several values.
        base: the configuration that all elements share.
    """
    compared = list(compared)
    idle = [key for key in compared if _cannot_change_learning(key, base)]
    if idle:
        yield Problem(
            f"grid: {', '.join(idle)} cannot change the {objective.name}, which ranks the elements; compare speeds "
            "with --objective throughput (objective: throughput), or leave it out"
        )
    changes_losses = [key for key in compared if key in HELD_OUT]
    if changes_losses and objective.metric in {"", LOSS}:  # questions of a task are the same whatever the model reads
        losses = "held-out losses" if objective.kind == "loss" else "losses on data"
        yield Problem(f"grid: with other {', '.join(changes_losses)}, {losses} cannot be compared; leave it out")
    if objective.kind == "score":
        yield from _problems_of_score(objective, base.evaluation)
    else:
        yield from _problems_of_loss(compared, base.data)


def _problems_of_loss(compared: Iterable[str], data: DataConfig) -> Iterator[Problem]:
    if "data.source" in compared and data.validation is None:
        yield Problem("grid: data.source also changes the held-out documents; set data.validation of the base")
    if data.validation is None and not data.validation_fraction:
        yield Problem(
            "objective=loss needs held-out documents: set data.validation, or a data.validation_fraction above 0"
        )


def _problems_of_score(objective: SweepObjective, evaluation: EvaluationConfig) -> Iterator[Problem]:
    """Yield why no checkpoint can get the score. What tasks there are, and their metrics, only the harness knows."""
    asked = f"objective={SCORE}{objective.name}"
    known = [f"{SCORE}{name}/{LOSS}" for name in evaluation.data]
    if not evaluation.is_asked_for:
        yield Problem(f"{asked}: no checkpoint is evaluated; set evaluation.tasks or evaluation.data of the base")
    elif (objective.metric == LOSS or not evaluation.tasks) and f"{SCORE}{objective.name}" not in known:
        which = f"choose one of {', '.join(known)}" if known else "a loss needs evaluation.data of the base"
        yield Problem(f"{asked}: {which}{did_you_mean(objective.task, evaluation.data)}")


def _cannot_change_learning(key: str, base: RunConfig) -> bool:
    changes = _CHANGES.get(key)  # None for an unknown key, which the grid refuses
    if changes == "batch":
        return base.training.batch_size is not None
    return changes in {"speed", "nothing"}
