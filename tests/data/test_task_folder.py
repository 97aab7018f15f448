"""A folder of tasks is read only if it executes nothing that the user has not allowed."""

import pytest

from llama_core.data.task_folder import check_task_folder
from llama_core.errors import ConfigError

PLAIN = "task: mine\ndataset_path: json\nunsafe_code: false\nmetadata: {version: 1}\n"


def folder_of(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_plain_tasks_may_be_read(tmp_path):
    shared = "test_split: &split test\nvalidation_split: *split\n"
    folder = folder_of(tmp_path, mine=f"include: shared.yaml\n{PLAIN}", shared=shared)
    assert check_task_folder(folder, allow_code=False) == folder


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("process_docs: !function utils.process", "!function utils.process"),
        ("group: all\ntask:\n- task: one\n  doc_to_text: !function utils.text", "!function utils.text"),
        ("metric_list: [{metric: !function m.f}]", "!function m.f"),
        ("? !function a.b\n: c", "!function a.b"),
        ("unsafe_code: true", "unsafe_code"),
        ("unsafe_code: 1", "unsafe_code"),
        ("class: some.where", "class"),
        ("a: !!python/name:os.system", "tag:yaml.org,2002:python/name:os.system"),
        ("a: !mine [b]", "!mine"),
        ("dataset_path: pandas", "dataset_path: pandas, which reads pickles"),
    ],
)
def test_code_is_refused_unless_it_is_allowed(tmp_path, text, code):
    folder = folder_of(tmp_path, mine=PLAIN, other=text)
    with pytest.raises(ConfigError) as refused:
        check_task_folder(folder, allow_code=False)
    assert str(refused.value) == (
        f"{folder}/other.yaml has code that would be executed ({code}); read it, and allow it with --allow-task-code"
    )
    assert check_task_folder(folder, allow_code=True) == folder


def test_code_in_an_included_file_elsewhere_is_refused(tmp_path):
    (tmp_path / "outside").write_text("include: [outside]\nprocess_docs: !function utils.process")
    (tmp_path / "tasks").mkdir()
    folder = folder_of(tmp_path / "tasks", mine=f"include: ../outside\n{PLAIN}")
    with pytest.raises(ConfigError, match=r"outside has code that would be executed \(!function utils.process\)"):
        check_task_folder(folder, allow_code=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no YAML file"),
        ({"mine": "a: [b"}, "mine.yaml is not YAML: "),
        ({"mine": "include: missing"}, "cannot read .*missing: No such file or directory"),
        ({"mine": "a: " + "[" * 3000}, "mine.yaml is not YAML: "),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_task_folder(folder_of(tmp_path, **files), allow_code=False)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'nowhere' is no folder"):
        check_task_folder("nowhere", allow_code=False)
