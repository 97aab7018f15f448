"""Read a folder of tasks of lm-evaluation-harness without executing anything. Needs no torch, and not the harness.

A task is a YAML file. In the harness it may name functions in Python files beside it, take over the functions of an
installed task, or fetch a metric that is a program. Unless the user has allowed that, a folder may use only what is
listed here, which executes nothing, and the harness gets the values that were checked, not the files.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from llama_core.config.strict_yaml import MAX_BYTES_OF_YAML, refuse_endless
from llama_core.errors import ConfigError, did_you_mean
from llama_core.records.files import DAMAGE, read_file, user_path

ALLOW = "--allow-task-code"
METRICS = {
    *("acc", "acc_all", "acc_bytes", "acc_mutual_info", "acc_norm", "bits_per_byte", "bleu", "brier_score", "bypass"),
    *("byte_perplexity", "chrf", "chrf++", "exact_match", "f1", "likelihood", "mcc", "perplexity", "ter"),
    "word_perplexity",
}
"""Metrics that the harness itself computes."""
FILTERS = {
    *("format_span", "lowercase", "majority_vote", "map", "multi_choice_regex", "regex", "regex_pos"),
    *("remove_whitespace", "take_first", "take_first_k", "uppercase"),
}
"""Filters of answers that compare, cut and choose text."""
READERS = {"arrow", "csv", "json", "parquet", "text"}
"""Readers of ``datasets`` that read values from files, and execute nothing."""
OUTPUTS = {"generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice"}
SAMPLERS = {"default", "first_n"}
"""Ways to choose solved examples."""

_DOCUMENT = {"doc_to_choice", "doc_to_target", "doc_to_text", "fewshot_delimiter", "gen_prefix", "target_delimiter"}
_PLAIN_OF_TASK = _DOCUMENT | {
    *("dataset_name", "description", "doc_to_audio", "doc_to_decontamination_query", "doc_to_image", "fewshot_split"),
    *("generation_kwargs", "metadata", "num_fewshot", "repeats", "should_decontaminate", "tag", "task", "task_alias"),
    *("task_list", "test_split", "training_split", "validation_split"),
}
"""Keys whose values are texts, numbers and templates, whatever they are; templates run in a sandbox."""
_PLAIN_OF_SHOTS = _DOCUMENT | {"fewshot_indices", "samples", "split"}
_PLAIN_OF_DATASET = {
    *("column_names", "columns", "delimiter", "encoding", "field", "keep_linebreaks", "names", "quotechar", "revision"),
    *("sample_by", "sep"),
}
_OF_GROUP = {"aggregate_metric_list", "group", "group_alias", "metadata", "task"}
_OF_ANY_MEMBER = {"group", "group_alias", "num_fewshot", "tag", "task", "task_alias"}
"""Keys that a group may set of any task, also of one whose functions are not known here."""
_MAX_LETTERS = 200
"""Most letters of a setting that a line repeats."""
_IGNORED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}
_PLAIN_TAG = "tag:yaml.org,2002:"

Values = Mapping[str, Any]
Found = Iterator[str]
"""Settings that may execute code, as they are told."""


def check_task_folder(folder: str | Path, *, allow_code: bool) -> Path:
    """Return a folder of tasks, once all of its files can be read.

    Args:
        folder: the folder.
        allow_code: whether its tasks may execute code of their own.

    Raises:
        ConfigError: if there is no such folder, it has no tasks, a file is not YAML, or a task has code that is not
            allowed.
    """
    path = user_path(str(folder))
    if not path.is_dir():
        raise ConfigError(f"--include-path {str(folder)!r} is no folder; name one with the YAML files of tasks")
    files = _task_files(path)
    if not files:
        raise ConfigError(f"--include-path {str(folder)!r} holds no YAML file (*.yaml); name a folder of tasks")
    if allow_code:
        reader = _Reader(path, allow_code=True)
        for file in files:
            reader.flattened(file)
    else:
        plain_tasks(path)
    return path


def plain_tasks(folder: Path) -> list[Values]:
    """Return the tasks and groups of a folder that execute nothing, each with what its file includes.

    Raises:
        ConfigError: if a file cannot be read, is a link or not YAML, includes one outside ``folder``, or has a setting
            that may execute code.
    """
    folder = folder.resolve()  # of a relative one, any other would seem to be inside
    reader = _Reader(folder, allow_code=False)
    flattened = {file: reader.flattened(file) for file in _task_files(folder)}
    tasks = {file: values for file, values in flattened.items() if values.keys() & {"task", "group", "class"}}
    for file, values in tasks.items():
        _refuse_odd_names(file, values)
    own = _own_tasks(tasks.values())
    for file, values in tasks.items():
        for found in _of_group(values, own) if "group" in values else _of_task(values):
            raise _refusal(file, found)
    return list(tasks.values())


def _task_files(folder: Path) -> list[Path]:
    """Return the files in which the harness would look for tasks."""
    return [file for file in sorted(folder.rglob("*.yaml")) if _IGNORED_FOLDERS.isdisjoint(file.parts)]


def _refusal(file: Path, found: str) -> ConfigError:
    known = _PLAIN_OF_TASK | _CHECKED.keys()
    nearest = "" if re.split(r"[:.]", found)[0] in known else did_you_mean(found, known)
    found = found if len(found) <= _MAX_LETTERS else f"{found[:_MAX_LETTERS]}..."
    return ConfigError(f"{file}: {found} may execute code; read the file, and allow it with {ALLOW}{nearest}")


class _Reader:
    """Reads YAML files of a folder as plain values, each once."""

    def __init__(self, folder: Path, *, allow_code: bool) -> None:
        self._folder = folder
        self._allow_code = allow_code
        self._read: dict[Path, dict[str, Any]] = {}

    def flattened(self, file: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
        """Return the values of a file over those of the files that it includes, in the order of the harness.

        Args:
            file: the file.
            above: the files that include it.
        """
        if file in above:
            raise ConfigError(f"{file} includes itself; remove the include")
        if file not in self._read:
            own = self._values(file)
            values: dict[str, Any] = {}
            included = own.pop("include", None) or []
            for name in included if isinstance(included, list) else [included]:
                inner = dict(self.flattened(self._included(file, str(name)), (*above, file)))
                inner.pop("task_list", None)  # of that file alone
                values |= inner
            self._read[file] = values | own
        return self._read[file]

    def _included(self, file: Path, name: str) -> Path:
        included = Path(os.path.normpath(file.parent / name))
        if not self._allow_code and not included.is_relative_to(self._folder):
            raise ConfigError(
                f"{file} includes {name}, which is outside {self._folder}; copy it into the folder, or read it and "
                f"allow it with {ALLOW}"
            )
        return included

    def _values(self, file: Path) -> dict[str, Any]:
        try:
            if not self._allow_code and file.is_symlink():
                raise ConfigError(f"{file} is a link; copy the file itself, or read it and allow it with {ALLOW}")
            content = read_file(file, None if self._allow_code else self._folder, MAX_BYTES_OF_YAML)
            loader = yaml.SafeLoader(content)
            loader.name = str(file)
            try:
                root = loader.get_single_node()
                if root is None:
                    return {}
                refuse_endless(root, str(file))
                tag = next(_tags(root), None)
                if tag is not None and not self._allow_code:
                    raise _refusal(file, tag)
                # values of other tags are functions, which only the harness reads
                values = loader.construct_document(root) if tag is None else {}
            finally:
                loader.dispose()
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}; remove it, or copy it again") from None
        except (yaml.YAMLError, *DAMAGE) as error:
            raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}; fix it or remove it") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file} is no task: it holds no keys; fix it or remove it")
        return values


def _tags(root: yaml.Node) -> Iterator[str]:
    """Yield each tag of a document, with its text, that is not one of YAML's own values."""
    waiting = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if not node.tag.startswith(_PLAIN_TAG) or node.tag.startswith(f"{_PLAIN_TAG}python"):
            yield f"{node.tag} {node.value if isinstance(node, yaml.ScalarNode) else ''}".strip()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for entry in node.value for part in entry]


def _refuse_odd_names(file: Path, values: Values) -> None:
    """Refuse names that are no text: the harness would leave such a task out, and another could have its name."""
    tags = values.get("tag") or []
    names = (values.get("group", values.get("task")), *(tags if isinstance(tags, list) else [tags]))
    if odd := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"{file} has {odd[0]!r} as a name or a tag, which is no text; put it in quotes")
    if "group" in values and not isinstance(values.get("task"), list | str | None):
        raise ConfigError(f"{file} has {values['task']!r} as the tasks of a group; list their names")


def _own_tasks(files: Iterable[Values]) -> set[str]:
    """Return the names that mean a task of the folder alone: no group and no tag, which may have other tasks too."""
    tasks: set[str] = set()
    others: set[str] = set()
    for values in files:
        tags = values.get("tag") or []
        others.update([tags] if isinstance(tags, str) else tags)
        (others if "group" in values else tasks).add(values.get("group", values.get("task")))
    return tasks - others


def _of_task(values: Values) -> Found:
    for key, value in values.items():
        if key in _CHECKED:
            yield from _CHECKED[key](value)
        elif key not in _PLAIN_OF_TASK and (value is not None or key == "class"):
            yield str(key)


def _of_group(values: Values, own: Collection[str]) -> Found:
    """Yield what a group may execute: itself, and by what it sets of its members.

    A setting of a task that is not one of ``own`` may be one that the functions of that task execute.
    """
    if "class" in values:
        yield "class"
    members = values.get("task")
    members = members if isinstance(members, list) else []
    of_members = {key: value for key, value in values.items() if key not in _OF_GROUP}
    if all(_is_own(member, own) for member in members):
        yield from _of_task(of_members)
    else:
        yield from (f"{key} of a task that is not in the folder" for key in of_members if key not in _OF_ANY_MEMBER)
    for member in members:
        if not isinstance(member, dict):
            continue
        if "group" in member:
            yield from (f"{key} of a group" for key in member if key not in _OF_ANY_MEMBER | {"aggregate_metric_list"})
            yield from _of_group({"task": member.get("task")}, own)
        elif _is_own(member, own):
            yield from _of_task(member)
        else:
            others = [key for key in member if key not in _OF_ANY_MEMBER]
            yield from (f"{key} of {member.get('task')}, a task that is not in the folder," for key in others)


def _is_own(member: object, own: Collection[str]) -> bool:
    name = member.get("task") if isinstance(member, dict) and "group" not in member else member
    return _is_one_of(name, own)


def _of_switch(name: str) -> Callable[[Any], Found]:
    return lambda value: iter(() if value in (None, False) else (name,))


def _of_output(value: Any) -> Found:
    if not _is_one_of(value, OUTPUTS):
        yield f"output_type: {value}"


def _of_metrics(value: Any) -> Found:
    for metric in _entries(value):
        if not _is_one_of(metric.get("metric"), METRICS):
            yield f"metric: {metric.get('metric')}"
        yield from _of_switch("hf_evaluate")(metric.get("hf_evaluate"))


def _of_filters(value: Any) -> Found:
    for pipeline in _entries(value):
        for step in _entries(pipeline.get("filter")):
            if not _is_one_of(step.get("function"), FILTERS):
                yield f"filter: {step.get('function')}"


def _of_shots(value: Any) -> Found:
    for shots in _entries(value):
        for key, setting in shots.items():
            is_plain = key in _PLAIN_OF_SHOTS or (key == "sampler" and _is_one_of(setting, SAMPLERS))
            if not is_plain and setting is not None:
                yield f"fewshot_config.{key}"


def _of_dataset(value: Any) -> Found:
    """Yield a reader of ``datasets`` that is not known to execute nothing; other names are of the Hub, or folders."""
    if value is None or _is_one_of(value, READERS):
        return
    is_name = isinstance(value, str) and re.fullmatch(r"\w[\w-]*", value)
    if (is_name and find_spec(f"datasets.packaged_modules.{value}") is not None) or _is_outside_folder(value):
        yield f"dataset_path: {value}"


def _of_dataset_settings(value: Any) -> Found:
    for settings in _entries(value):
        for key, setting in settings.items():
            if key in {"data_files", "data_dir"}:
                yield from (f"{key}: {path}" for path in _leaves(setting) if _is_outside_folder(path))
            elif key not in _PLAIN_OF_DATASET and setting not in (None, False):
                yield f"dataset_kwargs.{key}"


def _is_outside_folder(path: object) -> bool:
    """Return whether a path is opened by a file system of fsspec that may do more than read: its kinds are many."""
    text = str(path)
    scheme, separator, _ = text.partition("://")
    return "::" in text or (bool(separator) and scheme not in {"hf", "https"})


def _is_one_of(value: object, names: Collection[str]) -> bool:
    return isinstance(value, str) and value in names


def _entries(value: Any) -> Iterator[Values]:
    """Yield the mappings in a list of them, or one; anything else is no task, which the harness says."""
    yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    else:
        yield value


_CHECKED: dict[str, Callable[[Any], Found]] = {
    "dataset_kwargs": _of_dataset_settings,
    "dataset_path": _of_dataset,
    "fewshot_config": _of_shots,
    "filter_list": _of_filters,
    "metric_list": _of_metrics,
    "output_type": _of_output,
    "unsafe_code": _of_switch("unsafe_code"),
}
"""Keys of a task of which some values may execute code."""
