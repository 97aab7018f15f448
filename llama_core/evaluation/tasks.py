"""Evaluate weights on tasks of lm-evaluation-harness, to compare them with published scores."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llama_core.config.evaluation import EvaluationConfig
from llama_core.config.run import RunConfig
from llama_core.data.end_tokens import end_of_turn, ends_of_texts
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.templates.rendering import TemplateRefusalError
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import ConfigError, DataError, EnvironmentMismatchError
from llama_core.evaluation.conversation import template_of
from llama_core.evaluation.generate import check_text, own_tokenizer
from llama_core.evaluation.harness.task_folder import check_task_folder
from llama_core.evaluation.questions import ONE_DEVICE, All, AskedModel, Devices, OnProgress, Tell, ask
from llama_core.imports import importing_torch
from llama_core.records.evaluations import TaskScore
from llama_core.records.held_out import TOLD_APART
from llama_core.runs.checkpoints import Best

if TYPE_CHECKING:
    from llama_core.evaluation.harness.model import HarnessModel
    from llama_core.evaluation.harness.named_tasks import NamedTasks

_SENDING_NOTHING = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Variables that keep the libraries of data sets and metrics from counting their use, and from drawing bars."""


@dataclass(frozen=True)
class Asked:
    """How tasks are asked.

    Raises:
        ConfigError: naming every value that is out of range or has no effect.
    """

    limit: int | None = None
    """The most questions of a task, the first ones; None for all."""
    num_fewshot: int | None = None
    """Solved examples before each question; None for as many as the task says."""
    chat: bool = False
    """Ask in the model's chat template."""
    system: str | None = None
    """The system prompt; None for none."""

    @classmethod
    def of(cls, evaluation: EvaluationConfig) -> Self:
        """Return how the checkpoints of a run are asked."""
        return cls(evaluation.limit, evaluation.num_fewshot, evaluation.chat, evaluation.system)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.limit is not None and self.limit < 1:
            yield f"limit={self.limit}: ask at least 1 question of each task, or drop it to ask all"
        if self.num_fewshot is not None and self.num_fewshot < 0:
            yield f"num_fewshot={self.num_fewshot}: give a number of solved examples, or 0 for none"
        if self.system is not None and not self.chat:
            yield "system has no effect without chat; add --chat, or drop --system"

    def __str__(self) -> str:
        """Return what differs from a task's own way to ask; empty if nothing does."""
        parts = [
            "" if self.num_fewshot is None else f"{self.num_fewshot}-shot",
            "" if self.limit is None else f"first {self.limit}",
            "chat" if self.chat else "",
            "" if self.system is None else f"system {self.system!r}",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class TaskEvaluation:
    """The scores of one model on one task, or on a group and its tasks."""

    weights: Path
    step: int | None
    """The step of the checkpoint; None for a folder."""
    scores: tuple[TaskScore, ...]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return a record for each score."""
        return [{"weights": str(self.weights), "step": self.step} | asdict(score) for score in self.scores]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TaskEvaluation":
        """Return what ``as_record`` describes."""
        return cls(Path(record["weights"]), record["step"], tuple(TaskScore(**score) for score in record["scores"]))

    def as_record(self) -> dict[str, Any]:
        """Return the evaluation as one record."""
        return {"weights": str(self.weights), "step": self.step, "scores": [asdict(score) for score in self.scores]}

    def lines(self) -> list[str]:
        """Return the scores as rows of a table."""
        of_step = "" if self.step is None else f"step {self.step:,}  "
        task_width = max((len(score.task) for score in self.scores), default=0)
        metric_width = max((len(score.metric) for score in self.scores), default=0)
        return [
            f"{of_step}{score.task:<{task_width}}  {score.metric:<{metric_width}}  {_value(score)}  "
            f"{score.num_fewshot}-shot  {score.examples:,} examples"
            for score in self.scores
        ]


def _value(score: TaskScore) -> str:
    spread = "" if score.standard_error is None else f" ± {TOLD_APART * score.standard_error:.4f}"
    direction = "higher" if score.higher_is_better else "lower"
    return f"{score.value:.4f}{spread}  ({direction} is better)"


def evaluate_tasks(
    source: Path,
    names: Sequence[str],
    *,
    folder: str | Path | None = None,
    steps: int | Best | All | None = None,
    asked: Asked | None = None,
    allow_code: bool = False,
    tokenizer: str | None = None,
    devices: Devices = ONE_DEVICE,
    tell: Tell = lambda text: None,
    on_progress: OnProgress = lambda name, done, total: None,
) -> Iterator[TaskEvaluation]:
    """Yield the scores on each of the tasks, for each of the checkpoints asked for.

    Args:
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face Llama or PEFT's adapters.
        names: names of tasks, of groups of tasks, or of tags.
        folder: a folder with the YAML files of further tasks.
        steps: the step of a run's checkpoint, ``best`` or ``all``; by default the newest intact one.
        asked: how the tasks are asked.
        allow_code: whether a task may execute Python code that comes with it, or programs that the model writes.
        tokenizer: 'bytes' or a path; by default the run's or the folder's.
        devices: what computes.
        tell: called with a line about what is evaluated, and about what a task or the model does not take.
        on_progress: called with the name of a task, and the number of its requests that are done and in all, of those
            of the first device.

    Raises:
        ConfigError: if a task is unknown, or has code that is not allowed.
        PlanError: if the devices cannot divide the model.
        RunDirectoryError: if the run has no such checkpoint.
        CheckpointError, WeightsError: if weights are damaged or cannot be read.
        DataError, HubError: if the data of a task, the tokenizer or the chat template cannot be used.
        EnvironmentMismatchError, DoesNotFitError: if the harness or a device is missing, or a device is too small.
    """
    question = ScoresOnTasks(
        tuple(names),
        _checked_folder(names, folder, allow_code=allow_code),
        asked or Asked(),
        allow_code=allow_code,
        tokenizer=tokenizer,
    )
    yield from ask(
        question,
        source,
        steps=steps,
        devices=devices,
        tell=tell,
        on_progress=on_progress,
    )


class ScoresOnTasks:
    """The question how models solve tasks.

    Args:
        names: see ``evaluate_tasks``, also for the others.
        folder: a folder of further tasks, which has been checked.
        asked: how the tasks are asked.
        allow_code: whether they may execute code.
        tokenizer: 'bytes' or a path.
    """

    kind: ClassVar[str] = "tasks"

    def __init__(
        self, names: Sequence[str], folder: Path | None, asked: Asked, *, allow_code: bool, tokenizer: str | None
    ) -> None:
        self.tokenizer = tokenizer
        self._names = names
        self._folder = folder
        self._asked = asked
        self._allow_code = allow_code
        self._tasks: NamedTasks | None = None

    def check(self, weights: Path, config: RunConfig) -> None:
        """Refuse a model that cannot be asked."""
        _Ways(weights, config, own_tokenizer(weights, config, self.tokenizer), self._asked)

    def prepare(self, weights: Path, config: RunConfig, tell: Tell) -> None:
        """Load the tasks and their data."""
        if self._tasks is None:
            self._tasks = _load_tasks(self._names, self._folder, self._asked, self._allow_code, tell)

    def answers(self, asked: AskedModel, tell: Tell, on_progress: OnProgress) -> Iterator[TaskEvaluation]:
        """Yield the scores on each task."""
        with importing_torch():
            from llama_core.evaluation.harness.model import HarnessModel

        assert self._tasks is not None
        how = self._asked
        ways = _Ways(asked.weights, asked.config, asked.tokenizer, how)
        answers = HarnessModel(asked.model, asked.tokenizer, ends=ways.ends, chat=ways.template, ranks=asked.ranks)
        for name in self._tasks.names:
            answers.on_progress = partial(on_progress, name)
            scores = self._tasks.run(name, answers, limit=how.limit, system=how.system, chat=how.chat)
            _tell_changes(name, answers, tell)
            yield TaskEvaluation(asked.weights, asked.step, scores)

    def as_record(self) -> dict[str, Any]:
        """Return the question for another process."""
        return {
            "names": list(self._names),
            "folder": None if self._folder is None else str(self._folder),
            "asked": asdict(self._asked),
            "allow_code": self._allow_code,
            "tokenizer": self.tokenizer,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ScoresOnTasks":
        """Return what ``as_record`` describes."""
        return cls(
            tuple(record["names"]),
            None if record["folder"] is None else Path(record["folder"]),
            Asked(**record["asked"]),
            allow_code=record["allow_code"],
            tokenizer=record["tokenizer"],
        )

    def answer(self, record: Mapping[str, Any]) -> TaskEvaluation:
        """Return the scores that a record describes."""
        return TaskEvaluation.from_record(record)


def find_tasks(
    names: Sequence[str], folder: str | Path | None, asked: Asked, *, allow_code: bool = False, tell: Tell
) -> "NamedTasks":
    """Return tasks with their data sets, which are downloaded if they are not in the cache.

    The arguments are those of ``evaluate_tasks``.

    Raises:
        ConfigError, DataError, HubError, EnvironmentMismatchError: as ``evaluate_tasks``.
    """
    return _load_tasks(names, _checked_folder(names, folder, allow_code=allow_code), asked, allow_code, tell)


def _checked_folder(names: Sequence[str], folder: str | Path | None, *, allow_code: bool) -> Path | None:
    """Return the folder of further tasks; refuse what can be refused without the harness."""
    if not names:
        raise ConfigError("no task is named; name tasks of lm-evaluation-harness, such as hellaswag")
    if find_spec("lm_eval") is None:
        raise EnvironmentMismatchError("tasks need lm-evaluation-harness; pip install 'llama-training-infra[eval]'")
    return None if folder is None else check_task_folder(folder, allow_code=allow_code)


def _load_tasks(names: Sequence[str], folder: Path | None, asked: Asked, allow_code: bool, tell: Tell) -> "NamedTasks":
    os.environ.update({name: os.environ.get(name, value) for name, value in _SENDING_NOTHING.items()})
    with importing_torch():
        from llama_core.evaluation.harness.named_tasks import NamedTasks

    return NamedTasks(names, folder=folder, num_fewshot=asked.num_fewshot, allow_code=allow_code, tell=tell)


class _Ways:
    """How a model talks: its chat template if it is asked for, and the ends of its texts."""

    def __init__(self, weights: Path, config: RunConfig, tokenizer: Tokenizer, asked: Asked) -> None:
        self.template: ChatTemplate | None = None
        self.ends = ends_of_texts(weights, config, tokenizer)
        if asked.chat:
            self.template = template_of(weights, config, tokenizer)
            self.ends |= end_of_turn(self.template, tokenizer)
            if asked.system is not None:
                _check_system_prompt(self.template, asked.system)


def _check_system_prompt(template: ChatTemplate, system: str) -> None:
    check_text(system, "system prompt")
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "?"}]
    try:
        template.render(turns, add_generation_prompt=True)
    except TemplateRefusalError as error:
        raise DataError(f"chat template {template.name!r} refuses the system prompt: {error}; drop --system") from None


def _tell_changes(name: str, model: "HarnessModel", tell: Tell) -> None:
    if model.num_truncated:
        tell(
            f"{name}: {model.num_truncated:,} texts lost their beginnings, because they are longer than the model's "
            f"context of {model.max_length:,} tokens"
        )
    if model.dropped_system_prompt:
        tell(f"{name}: the chat template takes no system prompt, so the task's own was left out")
    model.num_truncated = 0
    model.dropped_system_prompt = False
