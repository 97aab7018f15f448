"""Limits of lm-evaluation-harness and its libraries while they run tasks that may be somebody else's."""

import ast
import contextlib
import functools
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import datasets
import lm_eval.api.registry
import lm_eval.api.task
import lm_eval.utils

from llama_core.data.templates.confined import ConfinedTaskRenderer
from llama_core.errors import ConfigError, DataError
from llama_core.evaluation.harness.task_data import checked_data
from llama_core.replacing import replaced, replaced_item

PROGRAMS = "evaluate"
"""The package that fetches metrics from the Hub, and executes them."""
MAX_OF_A_LITERAL = 2**20
"""Most characters of a list that a template writes, as choices and targets of a task may be."""
PATTERN_SECONDS = 60
"""Most time of the filters and metrics of a task for one question."""


@contextlib.contextmanager
def quiet(*, allow_code: bool) -> Iterator[None]:
    """Inside the block, the harness and its libraries write nothing to the terminal.

    Without ``allow_code``, templates of tasks run in a process with limits, and metrics that are programs cannot be
    fetched. With it they can, but not from the current folder, where the libraries look first.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(replaced_item(os.environ, "DISABLE_MULTIPROC", "1"))  # a bootstrap in this process
            stack.enter_context(checked_data(allow_code=allow_code))
            if not allow_code:
                stack.enter_context(replaced(lm_eval.utils, "env", _Confined()))
                stack.enter_context(replaced(lm_eval.api.task, "ast", SimpleNamespace(literal_eval=_short_literal)))
                # the import of a module that is None is an ImportError
                stack.enter_context(replaced_item(sys.modules, PROGRAMS, None))
            elif find_spec(PROGRAMS) is not None:
                stack.enter_context(_no_metric_of_current_folder())
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


class _Confined:
    """Stands for the harness's Jinja environment, which it asks for a template, and that for a text."""

    def __init__(self) -> None:
        self._renderer = ConfinedTaskRenderer()

    def from_string(self, source: str) -> Any:
        """Return a template."""
        return SimpleNamespace(render=lambda **document: self._renderer.render(source, document))


def _short_literal(text: str) -> Any:
    """Evaluate a text as a literal for the harness, unless it is long: a list may take thousands of times as much."""
    if len(text) > MAX_OF_A_LITERAL:
        raise DataError(f"a template gives a list of {len(text):,} characters, more than {MAX_OF_A_LITERAL:,}")
    return ast.literal_eval(text)


class ProgramError(Exception):
    """A metric, by its name, that is not among those of the harness."""


@contextlib.contextmanager
def known_metrics_only() -> Iterator[None]:
    """Inside the block, a task with a metric that is not the harness's own raises ``ProgramError``."""
    find = lm_eval.api.task.get_metric

    def find_known(name: str, is_program: bool = False) -> Any:
        if is_program or name not in lm_eval.api.registry.metric_registry:
            raise ProgramError(name)
        return find(name)

    with replaced(lm_eval.api.task, "get_metric", find_known):
        yield


@contextlib.contextmanager
def _no_metric_of_current_folder() -> Iterator[None]:
    """Inside the block, a metric with the name of something in the current folder is refused."""
    import evaluate  # takes a second

    load = evaluate.load

    def load_of_hub(path: str, *args: Any, **settings: Any) -> Any:
        if not Path(path).is_absolute() and Path(path).exists():
            raise ConfigError(
                f"metric {path!r}: the current folder holds {path}, which would be executed in place of the Hub's; "
                "run the command in another folder"
            )
        return load(path, *args, **settings)

    with replaced(evaluate, "load", load_of_hub):
        yield


def limit_patterns(task: Any) -> None:
    """Give a task's filters and metrics a limit of time: their regular expressions may take for ever on some answer."""
    name = task.config.task
    for method in ("apply_filters", "process_results"):
        setattr(
            task, method, _limited(getattr(task, method), name, lambda: PATTERN_SECONDS + len(task.instances or ()))
        )


def _limited(work: Callable[..., Any], name: str, seconds: Callable[[], float]) -> Callable[..., Any]:
    """Return a function that raises a ``DataError`` if it takes too long in the main thread, where signals arrive."""

    @functools.wraps(work)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return work(*args, **kwargs)

        def end(signum: int, frame: FrameType | None) -> None:
            raise DataError(
                f"task {name!r}: its filters or metrics take more than {most:g} s on an answer; mend its patterns, or "
                "choose another task"
            )

        most = seconds()
        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, most)
        try:
            return work(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return limited
