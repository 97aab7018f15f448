"""A folder of tasks is read only if it executes nothing that the user has not allowed."""

import pytest
import yaml

from llama_core.errors import ConfigError
from llama_core.evaluation.harness.task_folder import check_task_folder, plain_tasks

PLAIN = "task: mine\ndataset_path: json\nunsafe_code: false\nmetadata: {version: 1}\n"


def folder_of(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def refusal(folder):
    with pytest.raises(ConfigError) as refused:
        check_task_folder(folder, allow_code=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_plain_tasks_are_read_with_what_they_include(tmp_path):
    shared = "test_split: &split test\nvalidation_split: *split\nrepeats: 2\ntask_list: [a]\n"
    first = f"include: shared\n{PLAIN}repeats: 3\nprocess_docs: null\n"
    folder = folder_of(tmp_path, first=first, more="include: [first.yaml, shared]\ntask: more")
    (folder / "shared").write_text(shared)
    assert check_task_folder(folder, allow_code=False) == folder
    first, more = plain_tasks(folder)
    assert (first["task"], first["test_split"], first["validation_split"], first["repeats"]) == (
        *("mine", "test", "test"),
        3,
    )
    assert more == {key: value for key, value in first.items() if key != "task_list"} | {"task": "more", "repeats": 2}


CODE = {
    "process_docs: !function utils.process": "!function utils.process",
    "group: all\ntask:\n- task: one\n  doc_to_text: !function utils.text": "!function utils.text",
    "metric_list: [{metric: !function m.f}]": "!function m.f",
    "? !function a.b\n: c": "!function a.b",
    "a: !!python/name:os.system": "tag:yaml.org,2002:python/name:os.system",
    "a: !mine [b]": "!mine",
}
TASK = {
    "unsafe_code: true": "unsafe_code",
    "unsafe_code: 1": "unsafe_code",
    "class: some.where": "class",
    "class: null": "class",
    "process_docs: utils.process": "process_docs",
    "process_results: [a]": "process_results",
    "custom_dataset: a.b": "custom_dataset",
    "use_prompt: prompts.yaml:mine": "use_prompt",
    "metric_list: [{metric: acc}, {metric: rouge}]": "metric: rouge",
    "metric_list: [{metric: acc, hf_evaluate: true}]": "hf_evaluate",
    "metric_list: [{metric: [acc]}]": "metric: ['acc']",
    "filter_list: [{name: mine, filter: [{function: custom, filter_fn: os.system}]}]": "filter: custom",
    "filter_list: [{name: mine, filter: [{function: decontaminate, path: ngrams.pkl}]}]": "filter: decontaminate",
    "output_type: mine": "output_type: mine",
    "fewshot_config: {sampler: mine}": "fewshot_config.sampler",
    "fewshot_config: {process_docs: a.b}": "fewshot_config.process_docs",
    "dataset_path: pandas": "dataset_path: pandas",
    "dataset_path: sql": "dataset_path: sql",
    "dataset_path: generator": "dataset_path: generator",
    "dataset_path: s3://bucket/x": "dataset_path: s3://bucket/x",
    "dataset_kwargs: {data_files: {test: ['reference::https://a.b/c.json']}}": "data_files: reference::https://a.b/c.json",
    "dataset_kwargs: {data_files: 'ssh://a.b/c.json'}": "data_files: ssh://a.b/c.json",
    "dataset_kwargs: {data_dir: 'git://a/b'}": "data_dir: git://a/b",
    "dataset_kwargs: {trust_remote_code: true}": "dataset_kwargs.trust_remote_code",
    "dataset_kwargs: {storage_options: {fo: x}}": "dataset_kwargs.storage_options",
    "new_key: 1": "new_key",
}


@pytest.mark.parametrize("text", CODE | {f"task: other\n{text}": code for text, code in TASK.items()})
def test_what_may_execute_code_is_refused_unless_it_is_allowed(tmp_path, text):
    code = CODE.get(text) or TASK[text.removeprefix("task: other\n")]
    folder = folder_of(tmp_path, mine=PLAIN, other=text)
    assert refusal(folder) == (
        f"{folder}/other.yaml: {code} may execute code; read the file, and allow it with --allow-task-code"
    )
    assert check_task_folder(folder, allow_code=True) == folder


@pytest.mark.parametrize("text", TASK)
def test_neither_does_a_group_set_it_of_a_task_of_the_folder(tmp_path, text):
    inner = yaml.safe_load(text)
    for group in ({"task": ["mine"], **inner}, {"task": [{"task": "mine", **inner}]}):
        folder = folder_of(tmp_path, mine=PLAIN, other=yaml.safe_dump({"group": "all", **group}))
        assert f"{TASK[text]} may execute code" in refusal(folder)


MAP = {"filter_list": [{"name": "mine", "filter": [{"function": "map", "default_value": "print(1)"}]}]}


@pytest.mark.parametrize(
    ("group", "code"),
    [
        ({"task": ["longproc_x"], **MAP}, "filter_list of a task that is not in the folder"),
        ({"task": ["mine", {"task": "longproc_x", **MAP}]}, "filter_list of longproc_x, a task that is not in the"),
        ({"task": ["a_tag"], **MAP}, "filter_list of a task that is not in the folder"),
        ({"task": [{"group": "inner", "task": ["longproc_x"], **MAP}]}, "filter_list of a group"),
        ({"task": [{"group": "inner", "task": [{"task": "longproc_x", **MAP}]}]}, "filter_list of longproc_x, a task"),
        ({"task": [{"group": "inner", "metadata": {"pretrained": "a/b"}}]}, "metadata of a group"),
        ({"task": [{"task": "ruler", "metadata": {"pretrained": "a/b"}}]}, "metadata of ruler, a task that is not"),
        ({"task": [{"group": "inner", "task": ["mine"]}], **MAP}, "filter_list of a task that is not in the folder"),
        ({"task": ["again"], **MAP}, "filter_list of a task that is not in the folder"),
    ],
)
def test_a_group_sets_nothing_that_the_functions_of_other_tasks_may_execute(tmp_path, group, code):
    again = "group: again\ntask: [longproc_x]"
    other = yaml.safe_dump({"group": "all", **group})
    folder = folder_of(tmp_path, mine=f"{PLAIN}tag: a_tag", again=again, other=other)
    assert f"other.yaml: {code}" in refusal(folder)


def test_a_group_may_set_what_executes_nothing(tmp_path):
    members = ["mine", {"task": "mine", **MAP}, {"task": "arc_easy", "num_fewshot": 3, "task_alias": "arc"}]
    group = {"group": "all", "task": members, "aggregate_metric_list": [{"metric": "acc"}], "num_fewshot": 2}
    own = {"group": "own", "task": ["mine"], **MAP, "repeats": 2}
    folder = folder_of(tmp_path, mine=PLAIN, other=yaml.safe_dump(group), own=yaml.safe_dump(own))
    assert check_task_folder(folder, allow_code=False) == folder


def test_code_in_an_included_file_is_refused_with_its_name(tmp_path):
    folder = folder_of(tmp_path, mine=f"include: outside\n{PLAIN}")
    (folder / "outside").write_text("process_docs: !function utils.process")
    assert refusal(folder).startswith(f"{folder}/outside: !function utils.process may execute code")


@pytest.mark.parametrize("name", ["../outside", "{tmp_path}/outside", "../tasks/../outside"])
def test_a_file_outside_the_folder_is_not_included(tmp_path, name):
    (tmp_path / "outside").write_text("repeats: 2")
    (tmp_path / "tasks").mkdir()
    name = name.format(tmp_path=tmp_path)
    folder = folder_of(tmp_path / "tasks", mine=f"include: {name}\n{PLAIN}")
    assert f"mine.yaml includes {name}, which is outside {folder}" in refusal(folder)
    assert check_task_folder(folder, allow_code=True) == folder


@pytest.mark.parametrize("folder", [".", "../tasks", "link"])
def test_inside_is_inside_however_the_folder_is_named(tmp_path, monkeypatch, folder):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "outside").write_text("repeats: 2")
    (tmp_path / "tasks" / "shared").write_text("repeats: 2")
    (tmp_path / "tasks" / "link").symlink_to(tmp_path / "tasks")
    monkeypatch.chdir(folder_of(tmp_path / "tasks", mine=f"include: shared\n{PLAIN}"))
    check_task_folder(folder, allow_code=False)
    folder_of(tmp_path / "tasks", mine=f"include: ../outside\n{PLAIN}")
    assert "mine.yaml includes ../outside, which is outside" in refusal(folder)


def test_links_are_refused_since_what_they_include_is_elsewhere_for_the_harness(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "one.yaml").write_text("include: two\ntask: one")
    (tmp_path / "secret" / "two").write_text("process_docs: !function utils.process")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "two").write_text("repeats: 1")
    (tmp_path / "tasks" / "one.yaml").symlink_to(tmp_path / "secret" / "one.yaml")
    assert "one.yaml is a link; copy the file itself" in refusal(tmp_path / "tasks")
    (tmp_path / "tasks" / "one.yaml").unlink()
    (tmp_path / "tasks" / "folder").symlink_to(tmp_path / "secret")
    (tmp_path / "tasks" / "one.yaml").write_text("include: folder/one.yaml\ntask: one")
    assert "cannot read" in refusal(tmp_path / "tasks")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no YAML file"),
        ({"mine": "a: [b"}, "mine.yaml is not YAML: "),
        ({"mine": "include: missing"}, "cannot read .*missing: No such file or directory"),
        ({"mine": "a: " + "[" * 3000}, "mine.yaml is not YAML: "),
        ({"mine": "[a]"}, "mine.yaml is no task"),
        ({"mine": "include: [mine.yaml]"}, "mine.yaml includes itself"),
        ({"mine": "task: 5"}, "mine.yaml has 5 as a name or a tag"),
        ({"mine": "task: a\ntag: 5"}, "mine.yaml has 5 as a name or a tag"),
        ({"mine": "task: a\ntag: [b, {c: d}]"}, "mine.yaml has {'c': 'd'} as a name or a tag"),
        ({"mine": "group: null\ntask: [b]"}, "mine.yaml has None as a name or a tag"),
        ({"mine": "class: a"}, "mine.yaml has None as a name or a tag"),
        ({"mine": "group: a\ntask: 5"}, "mine.yaml has 5 as the tasks of a group; list their names"),
        ({"mine": "group: a\ntask: .nan"}, "mine.yaml has nan as the tasks of a group"),
        ({"mine": "task: a\nmetadata: !!bool zz"}, "mine.yaml is not YAML: "),
        ({"mine": "task: a\nmetadata: !!timestamp zz"}, "mine.yaml is not YAML: "),
        ({"mine": f"task: a\ninclude: {'a' * 5000}"}, "cannot read .*: File name too long"),
        ({"mine": f"task: a\nmetric_list: [{{metric: {'a' * 5000}}}]"}, "metric: a{100,200}\\.\\.\\. may execute"),
        ({"mine": "include: 3"}, "cannot read .*3: No such file"),
        ({"mine": "task: &a {b: *a}"}, "an alias stands for something that holds it"),
        ({"mine": "task: mine\ndoc_to_txt: a"}, "mine.yaml: doc_to_txt may execute .*; did you mean 'doc_to_text'"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_task_folder(folder_of(tmp_path, **files), allow_code=False)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'nowhere' is no folder"):
        check_task_folder("nowhere", allow_code=False)
