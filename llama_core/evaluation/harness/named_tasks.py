"""Find tasks of lm-evaluation-harness, and run them on a model."""

import contextlib
import math
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from llama_core.data.templates.rendering import InvalidTemplateError, TemplateRefusalError
from llama_core.errors import ConfigError, DataError, HubError, TrainingInfraError, did_you_mean, safe
from llama_core.evaluation.harness.limits import PROGRAMS, ProgramError, known_metrics_only, limit_patterns, quiet
from llama_core.evaluation.harness.model import SEED, HarnessModel
from llama_core.evaluation.harness.task_code import executes_text
from llama_core.evaluation.harness.task_folder import Values, plain_tasks
from llama_core.records.evaluations import TaskScore

NUM_RESAMPLES = 100
"""Draws of the bootstrap, which gives the standard error of a metric that is no mean; a mean's is computed exactly."""
CODE = "which would be executed; read it, and allow it with --allow-task-code"
"""The end of every refusal to execute something from outside."""


class NamedTasks:
    """Tasks by the names that a user gave, with their data sets.

    Nothing that comes with a task from outside this machine's packages is executed unless ``allow_code``: templates run
    in a sandbox with limits, metrics that are programs of the Hub are refused, and of ``folder`` the harness gets the
    values that ``task_folder`` has checked. Installed tasks that execute text are refused, too.

    Args:
        names: names of tasks, groups or tags.
        folder: a folder of further tasks; None for none.
        num_fewshot: solved examples before each question; by default as the task says.
        allow_code: whether tasks may execute code of their own.
        tell: called with a line about each setting that a task does not take.

    Raises:
        ConfigError: if a name is unknown, or a task cannot be run with a model of text, or not without its code.
        DataError, HubError: if a task's data cannot be had.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        folder: Path | None = None,
        num_fewshot: int | None = None,
        allow_code: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._allow_code = allow_code
        with quiet(allow_code=allow_code), _as_read(folder, allow_code=allow_code) as read:
            manager = _manager(names, read)
            known = manager.all_tasks
            for name in names:
                if name not in known:
                    raise ConfigError(f"there is no task {name!r}{did_you_mean(name, known)}")
            self._by_name = {name: _load(manager, name, allow_code) for name in dict.fromkeys(names)}
        for name, loaded in self._by_name.items():
            for task in loaded["tasks"].values():
                self._check(name, task)
                _set_fewshot(task, num_fewshot, tell)
                if not allow_code:
                    limit_patterns(task)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in their order."""
        return tuple(self._by_name)

    def directions(self) -> dict[tuple[str, str], bool | None]:
        """Return whether a higher value is better of each score of the tasks and groups, by its task and metric.

        It is None if the tasks of a group disagree.
        """
        found: dict[tuple[str, str], bool | None] = {}
        for loaded in self._by_name.values():
            for name, task in loaded["tasks"].items():
                for metric, higher in task.higher_is_better().items():
                    filters = [one.name for one in task._filters]
                    found |= {(name, _metric(metric, how)): higher for how in filters}
            for name, group in loaded["groups"].items():
                found |= {(name, metric): higher for metric, higher in _directions_of_group(name, group, found)}
        return found

    def _check(self, name: str, task: Any) -> None:
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"task {name!r} has images or sound, which the model cannot read; choose another")
        if self._allow_code:
            return
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"task {name!r} executes what the model writes; allow it with --allow-task-code")
        if where := executes_text(task):
            raise ConfigError(
                f"task {name!r} may execute what the model writes ({where}); read it, and allow it with "
                "--allow-task-code"
            )

    def run(
        self, name: str, model: HarnessModel, *, limit: int | None = None, system: str | None = None, chat: bool = False
    ) -> tuple[TaskScore, ...]:
        """Return the scores of a model on a task, or of a group and its tasks.

        Args:
            name: one of the names.
            model: the model.
            limit: ask only this many questions, the first ones; None for all.
            system: the system prompt.
            chat: whether to ask in the model's chat template, and show solved examples as turns.

        Raises:
            DataError: if the task does not suit the model.
            WeightsError: if the model computes NaN or infinity.
        """
        loaded = self._by_name[name]
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=SEED)  # the same examples for every checkpoint
        with quiet(allow_code=self._allow_code), _seeded():
            try:
                results = evaluate(
                    lm=model,
                    task_dict=loaded,
                    limit=limit,
                    bootstrap_iters=NUM_RESAMPLES,
                    log_samples=False,
                    system_instruction=system,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                    confirm_run_unsafe_code=self._allow_code,
                )
            except TrainingInfraError:
                raise
            except Exception as error:  # of a task's templates, filters and metrics, which may raise anything
                raise DataError(f"task {name!r} does not work: {_in_words(error)}") from None
        return tuple(_scores(results))


def _directions_of_group(
    name: str, group: Any, of_tasks: Mapping[tuple[str, str], bool | None]
) -> Iterator[tuple[str, bool | None]]:
    """Yield each metric that a group aggregates, and whether a higher value is better."""
    members = {task.task_name for task in group.get_all_tasks()}
    for aggregated in group.aggregate_metric_list or ():
        filters = aggregated.filter_list
        for metric in dict.fromkeys(metric for task, metric in of_tasks if task in members):
            base, _, how = metric.partition(",")
            if base == aggregated.metric and (filters is None or (how or "none") in filters):
                own = {of_tasks[task, metric] for task in members if (task, metric) in of_tasks}
                yield metric, own.pop() if len(own) == 1 else None


def _metric(metric: str, how: str) -> str:
    """Return the name of a metric in a score, with the filter of the answers that it is over unless that is none."""
    return metric if how == "none" else f"{metric},{how}"


@contextlib.contextmanager
def _as_read(folder: Path | None, *, allow_code: bool) -> Iterator[Path | None]:
    """Yield the folder that the harness reads: one of our own with the checked values, if code is not allowed.

    The files may be somebody else's, and change after they were checked.
    """
    if folder is None or allow_code:
        yield folder
        return
    tasks = plain_tasks(folder)
    with tempfile.TemporaryDirectory(prefix="tasks-") as private:
        for number, values in enumerate(tasks):
            Path(private, f"{number:06}.yaml").write_text(_as_yaml(folder, values))
        _refuse_unread(folder, Path(private), tasks)
        yield Path(private)


def _as_yaml(folder: Path, values: Values) -> str:
    try:
        return yaml.safe_dump(dict(values), sort_keys=False)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        name = values.get("group", values.get("task"))
        raise ConfigError(f"{folder}: task {name!r} holds a value that cannot be written: {error}") from None


def _refuse_unread(folder: Path, written: Path, tasks: Sequence[Values]) -> None:
    """Refuse tasks that the harness leaves out: to a group, their names would mean installed tasks, with functions."""
    index = TaskManager(include_path=str(written), include_defaults=False).task_index
    for values in tasks:
        name = values.get("group", values.get("task"))
        if not isinstance(name, str) or name not in index:
            raise ConfigError(f"{folder}: the harness cannot read {name!r}; write it in plain characters")


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Return an index of tasks: only the folder's, if it has all of ``names`` and what is in them."""
    if folder is not None:
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if all(_is_whole(own, name) for name in names):
            return own
    return TaskManager(include_path=None if folder is None else str(folder))


def _is_whole(manager: TaskManager, name: object, above: Sequence[object] = ()) -> bool:
    """Return whether an index has a task, or a group and everything that it names; a tag may have other tasks too.

    Raises:
        ConfigError: if a group is in itself.
    """
    if name in above:
        raise ConfigError(f"group {name!r} is in itself; leave it out there")
    if name in manager.all_subtasks:
        return True
    if name not in manager.all_groups:
        return False
    members = manager.task_index[name].cfg.get("task") or []
    return all(isinstance(member, str) and _is_whole(manager, member, (*above, name)) for member in members)


def _load(manager: TaskManager, name: str, allow_code: bool) -> dict[str, Any]:
    with known_metrics_only() if not allow_code else contextlib.nullcontext():
        try:
            loaded: dict[str, Any] = manager.load([name])
        except TrainingInfraError:
            raise
        except (Exception, SystemExit) as error:  # of a task's files, and of the libraries that fetch its data
            raise _cannot_load(name, error, _data_of(manager, name)) from None
    return loaded


def _data_of(manager: TaskManager, name: str) -> str:
    """Return the data set that a task's file names, and its files, in parentheses; empty for a group."""
    described = manager.task_index[name].cfg or {}
    arguments = described.get("dataset_kwargs")
    files = arguments.get("data_files") if isinstance(arguments, dict) else None
    parts = [described.get("dataset_path"), described.get("dataset_name"), files]
    named = ", ".join(safe(str(part)) for part in parts if part)
    return f" (its data: {named})" if named else ""


def _cannot_load(name: str, error: BaseException, data: str) -> TrainingInfraError:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if isinstance(error, ProgramError) or any(isinstance(one, ImportError) and one.name == PROGRAMS for one in causes):
        which = f" {error.args[0]!r}" if isinstance(error, ProgramError) else ""
        return ConfigError(f"task {name!r} has a metric{which} that is a program of the Hub, {CODE}")
    kinds = {type(one).__module__.partition(".")[0] for one in causes}
    of_network = kinds & {"huggingface_hub", "httpx", "httpcore", "requests", "urllib3", "aiohttp"}
    if of_network or any(isinstance(one, ConnectionError) for one in causes):
        return HubError(
            f"the data of task {name!r} cannot be had from the Hub: {_in_words(error)}{data}; go online once, or "
            "name a folder of tasks with data here: --include-path"
        )
    return DataError(f"task {name!r} cannot be loaded: {_in_words(error)}{data}")


def _in_words(error: BaseException) -> str:
    """Return an error of a library and, if it was raised from others, the first of these: it says what was wrong."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    because = "" if first is error else f", because of {_in_words(first)}"
    text = safe(str(error).strip())
    if isinstance(error, TemplateRefusalError | InvalidTemplateError):
        return f"a template of it: {text}"
    if isinstance(error, KeyError):
        return f"there is nothing called {text} ({type(error).__name__}){because}"
    if not text and error.__traceback__ is not None:
        text = f"raised at {_place(error.__traceback__)}"
    return f"{type(error).__name__}: {text}{because}"


def _place(trace: TracebackType) -> str:
    """Return the last line of a traceback, as a file of its package and a number: all that a bare error tells."""
    *_, (frame, line) = traceback.walk_tb(trace)
    module = frame.f_globals.get("__name__", "")
    return f"line {line} of {module}"


def _set_fewshot(task: Any, asked: int | None, tell: Callable[[str], None]) -> None:
    """Set the number of solved examples, as the harness's own command does."""
    by_default = task.get_config("num_fewshot")
    if not isinstance(by_default, int | None):
        raise ConfigError(f"task {task.config.task!r}: num_fewshot={by_default} is no whole number")
    if asked is None:
        if by_default is None:
            task.set_config(key="num_fewshot", value=0)
    elif by_default == 0:
        if asked:
            tell(f"task {task.config.task} has no solved examples by its own settings, so --num-fewshot has no effect")
    else:
        task.set_config(key="num_fewshot", value=asked)


def _scores(results: Mapping[str, Any]) -> Iterator[TaskScore]:
    for name, found in results["results"].items():
        for key, value in found.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            error = found.get(f"{metric}_stderr,{how}")
            yield TaskScore(
                task=name,
                metric=_metric(metric, how),
                value=float(value),
                standard_error=float(error) if _is_number(error) else None,
                higher_is_better=results["higher_is_better"].get(name, {}).get(metric) is not False,
                examples=int(found.get("sample_len", 0)),
                version=str(results["versions"].get(name, "")),
                num_fewshot=int(results["n-shot"].get(name) or 0),
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Inside the block, Python's and numpy's generators begin as in the harness's own command."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
