"""Tasks of lm-evaluation-harness execute nothing that the user has not allowed, with the harness itself."""

import dataclasses
import json
import os
import random
import re
from contextlib import suppress
from datetime import date
from pathlib import Path

import datasets
import evaluate
import lm_eval.api.metrics
import lm_eval.filters
import lm_eval.utils
import pytest
import yaml
from harness_folders import TASKS, make_tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import filter_registry, metric_registry
from lm_eval.config.task import FewshotConfig, TaskConfig
from lm_eval.tasks._yaml_loader import load_yaml

from llama_core.data.templates import rendering
from llama_core.data.templates.rendering import TemplateRefusalError
from llama_core.errors import ConfigError, DataError
from llama_core.evaluation.harness import limits as harness_limits
from llama_core.evaluation.harness import named_tasks as harness_tasks
from llama_core.evaluation.harness import task_folder
from llama_core.evaluation.harness.limits import quiet
from llama_core.evaluation.harness.named_tasks import NamedTasks
from llama_core.evaluation.harness.task_code import INSTALLED, executing_line
from llama_core.evaluation.harness.task_data import checked_data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def mark(tmp_path):
    """A file that code of a stranger would make."""
    return tmp_path / "executed"


def code_that_makes(mark):
    return f"from pathlib import Path\n\nPath({str(mark)!r}).touch()\n\n\ndef process(docs):\n    return docs\n"


def test_the_metrics_filters_and_keys_that_a_folder_may_use_are_of_the_harness_itself():
    for name in task_folder.METRICS:
        assert metric_registry[name].__module__ == lm_eval.api.metrics.__name__, name
    for name in task_folder.FILTERS:
        assert filter_registry[name].__module__.startswith(f"{lm_eval.filters.__name__}."), name
    keys = {field.name for field in dataclasses.fields(TaskConfig)}
    assert (task_folder._PLAIN_OF_TASK | task_folder._CHECKED.keys()) - keys == {"task_list"}
    assert {field.name for field in dataclasses.fields(FewshotConfig)} >= task_folder._PLAIN_OF_SHOTS
    assert keys - task_folder._PLAIN_OF_TASK - task_folder._CHECKED.keys() == {
        *("custom_dataset", "process_docs", "process_results", "use_prompt"),
    }, "whoever allows a new key says why it executes nothing"


def test_the_harness_reads_what_was_checked_whatever_becomes_of_the_folder(tmp_path, mark, monkeypatch):
    folder = make_tasks(tmp_path / "tasks")
    read = task_folder.plain_tasks

    def read_and_swap(path):
        tasks = read(path)
        (path / "utils.py").write_text(code_that_makes(mark))
        for file in path.glob("*.yaml"):
            file.write_text(f"{file.read_text()}process_docs: !function utils.process\n")
        return tasks

    monkeypatch.setattr(harness_tasks, "plain_tasks", read_and_swap)
    assert NamedTasks(["toy_choice"], folder=folder).names == ("toy_choice",)
    assert not mark.exists()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"!function utils\.process may execute code"):
        NamedTasks(["toy_choice"], folder=folder)
    NamedTasks(["toy_choice"], folder=folder, allow_code=True)
    assert mark.exists()


def test_a_task_that_the_harness_leaves_out_does_not_lend_its_name_to_an_installed_one(tmp_path, monkeypatch):
    """A group would set a filter of the installed task, whose functions call eval."""
    name = "longproc_countdown_0.5k"
    steps = [{"function": "map", "default_value": "__import__('os').abort()"}]
    own = {"task": name, "dataset_path": "json"}
    group = {"group": "all", "task": [{"task": name, "filter_list": [{"name": "mine", "filter": steps}]}]}
    folder = tmp_path / "tasks"
    folder.mkdir()
    for file, values in (("own", own), ("group", group)):
        (folder / f"{file}.yaml").write_text(yaml.safe_dump(values))
    written = yaml.safe_dump
    monkeypatch.setattr(yaml, "safe_dump", lambda values, **_: written(values).replace("\ntask: l", "\n\0: l"))
    with pytest.raises(ConfigError, match=f"the harness cannot read '{re.escape(name)}'"):
        NamedTasks(["all"], folder=folder)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("longproc/countdown_0.5k.yaml", "lm_eval/tasks/longproc/metrics.py, line "),
        ("cruxeval/cruxeval_input.yaml", "lm_eval/tasks/cruxeval/utils.py, line "),
        ("score/math/prompt_robustness_math_algebra.yaml", "lm_eval/tasks/score/math/math_grader.py, line "),
        ("gsm8k/gsm8k.yaml", ""),
        ("hellaswag/hellaswag.yaml", ""),
    ],
)
def test_installed_tasks_that_execute_text_are_known_by_their_code(file, line):
    with quiet(allow_code=True):
        found = executing_line(load_yaml(INSTALLED / file))
    assert found.startswith(line)
    assert bool(found) is bool(line)


def test_a_document_that_is_an_object_is_given_to_no_template(tmp_path, mark):
    """An image would save itself as any file, such as ``~/.bashrc``."""

    class Picture:
        size = 3

        def save(self, path):
            Path(path).touch()

    with quiet(allow_code=False):
        render = lm_eval.utils.apply_template
        for template in (
            f"{{{{ image.save('{mark}') }}}}",
            f"{{{{ (image | attr('save'))('{mark}') }}}}",
            "{{ [image] | map(attribute='save') | first | string }}",
            "{{ '{0.size}'.format(image) }}",
            "{{ image.__class__ }}",
        ):
            with pytest.raises(TemplateRefusalError, match=r"holds a Picture, which no template is given|is unsafe"):
                render(template, {"image": Picture()})
        assert not mark.exists()
        plain = {"text": "a b", "answers": ["x"], "more": {"of": 1.5}, "nothing": None, "image": Picture()}
        template = "{{ text.split(' ')[1] ~ answers.index('x') ~ more.of ~ more.get('no') ~ nothing }}"
        assert render(template, plain) == "b01.5NoneNone"
        assert (
            render("{% set n = namespace(k=1) %}{% for a in answers %}{{ loop.index + n.k }}{% endfor %}", plain) == "2"
        )


def test_a_function_in_a_module_that_imports_one_that_executes_text_is_found(monkeypatch):
    trees = {
        INSTALLED / "mine" / "utils.py": "from .inner import helper\nfrom lm_eval.tasks.mine import other\n",
        INSTALLED / "mine" / "inner.py": "import lm_eval.tasks.mine.last\n",
        INSTALLED / "mine" / "last.py": "def f(x):\n    return eval(x)\n",
    }
    monkeypatch.setattr(Path, "is_file", lambda path: path in trees)
    monkeypatch.setattr(Path, "read_bytes", lambda path: trees[path].encode())
    modules = [INSTALLED / "mine" / "utils.py"]
    monkeypatch.setattr("llama_core.evaluation.harness.task_code._modules", lambda settings: modules)
    assert executing_line({}) == "lm_eval/tasks/mine/last.py, line 2"


def test_an_installed_task_that_executes_text_is_refused(tmp_path, monkeypatch):
    folder = make_tasks(tmp_path / "tasks")
    monkeypatch.setattr(harness_tasks, "executes_text", lambda task: "somewhere.py, line 3")
    with pytest.raises(ConfigError, match=r"'toy_choice' may execute what the model writes \(somewhere.py, line 3\)"):
        NamedTasks(["toy_choice"], folder=folder)
    assert NamedTasks(["toy_choice"], folder=folder, allow_code=True).names == ("toy_choice",)


def test_no_metric_is_taken_from_the_current_folder_though_code_is_allowed(tmp_path, mark, monkeypatch):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "planted.py").write_text(code_that_makes(mark))
    metric = {"metric": "planted", "hf_evaluate": True, "aggregation": "mean", "higher_is_better": True}
    choice = {**TASKS["toy_choice"], "metric_list": [metric]}
    folder = make_tasks(tmp_path / "tasks", {"toy_choice": choice})
    monkeypatch.chdir(tmp_path)
    NamedTasks(
        ["toy_choice"], folder=folder, allow_code=True
    )  # the harness takes a metric that it cannot load for none
    assert not mark.exists()
    with quiet(allow_code=True), pytest.raises(ConfigError, match="the current folder holds planted, which would be"):
        evaluate.load("planted")
    with suppress(TypeError):  # it holds no metric
        evaluate.load("planted")
    assert mark.exists(), "this test plants what evaluate finds"


def test_a_stranger_cannot_have_the_harness_read_a_file_into_its_errors(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key: [very: secret\n")
    folder = make_tasks(tmp_path / "tasks")
    (folder / "more.yaml").symlink_to(secret)
    with pytest.raises(ConfigError) as refused:
        NamedTasks(["toy_choice"], folder=folder)
    assert "very" not in str(refused.value)
    assert json.dumps(str(folder / "more.yaml"))[1:-1] in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_fewshot": float("nan")}, "num_fewshot=nan is no whole number"),
        ({"num_fewshot": float("-inf")}, "num_fewshot=-inf is no whole number"),
        ({"metadata": {"version": 16**5000}}, "task 'toy_choice' holds a value that cannot be written"),
    ],
)
def test_odd_numbers_are_one_line(tmp_path, values, message):
    folder = make_tasks(tmp_path / "tasks")
    choice = yaml.safe_load((folder / "toy_choice.yaml").read_text())
    monstrous = {**choice, **values}
    text = "".join(f"{key}: {_literal(value)}\n" for key, value in monstrous.items())
    (folder / "toy_choice.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        NamedTasks(["toy_choice"], folder=folder)


def _literal(value):
    """Return a value as YAML, also numbers of thousands of digits."""
    if isinstance(value, dict) and "version" in value and isinstance(value["version"], int):
        return f"{{version: {value['version']:#x}}}"
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def test_a_group_in_itself_is_one_line(tmp_path):
    folder = make_tasks(tmp_path / "tasks")
    (folder / "group.yaml").write_text("group: all\ntask: [toy_choice, other]")
    (folder / "other.yaml").write_text("group: other\ntask: [all]")
    with pytest.raises(ConfigError, match="group 'all' is in itself"):
        NamedTasks(["all"], folder=folder)


DOCUMENTS = {"question": ["a", "b"], "choices": [["x", "y"]] * 2, "answer": [0, 1]}
PIXELS = {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": None}


def parquet_with(folder, **columns):
    """Write documents with columns that are decoded, as the schema of a Parquet file says."""
    folder.mkdir()
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("int64")})
    features |= {name: feature for name, (feature, _) in columns.items()}
    values = {name: [value] * 2 for name, (_, value) in columns.items()}
    known = {name: DOCUMENTS[name] for name in ("question", "answer")}
    table = datasets.Dataset.from_dict(known | values, features=datasets.Features(features))
    table.to_parquet(folder / "test.parquet")
    return folder / "test.parquet"


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (datasets.Image(), PIXELS),
        (datasets.List(datasets.Image()), [PIXELS]),
        ({"inner": datasets.Image()}, {"inner": PIXELS}),
    ],
    ids=["image", "list", "dict"],
)
def test_data_that_libraries_would_decode_are_refused_before_they_do(tmp_path, monkeypatch, feature, value):
    """Pillow starts Ghostscript for some images; nothing of a document is looked at."""
    file = parquet_with(tmp_path / "data", more=(feature, value))
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("it was decoded"))
    data = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    texts = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(yaml.safe_dump({"task": "mine", **data, **texts}))
    with pytest.raises(ConfigError, match="'more' is Image, which the model cannot read and libraries would decode"):
        NamedTasks(["mine"], folder=tmp_path / "tasks")


def test_a_folder_here_does_not_take_the_place_of_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "allenai" / "sciq").mkdir(parents=True)
    (tmp_path / "json").mkdir()  # the reader of that name comes first
    for allow_code in (False, True):
        with (
            checked_data(allow_code=allow_code),
            pytest.raises(ConfigError, match=r"the current folder holds allenai/sc"),
        ):
            datasets.load_dataset("allenai/sciq")
    folder = make_tasks(tmp_path / "tasks")
    assert NamedTasks(["toy_choice"], folder=folder).names == ("toy_choice",)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml", "dataset_infos.json"])
@pytest.mark.parametrize("make", ["file", "pipe", "link"])
def test_a_folder_of_data_that_has_other_files_read_is_refused(tmp_path, name, make):
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / name
    {"file": file.touch, "pipe": lambda: os.mkfifo(file), "link": lambda: file.symlink_to("/nowhere")}[make]()
    with (
        checked_data(allow_code=False),
        pytest.raises(ConfigError, match=f"{re.escape(name)} may have other files read"),
    ):
        datasets.load_dataset(str(folder))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1,000,000 steps"),
        ("{{ 9**(9**9) }}", "the result of \\*\\* is too large"),
        ("{{ 'a' | center(10**11) }}", "it takes more than 2 GiB of memory"),
        ("{{ ('a' * 40 ~ 'b') | regex_replace('(a|a)*c', '') }}", "it takes more than 1 s"),
        ("{{ a.b }}", "'a' is undefined"),
        ("{{ a", "unexpected end of template"),
        ("{{ ''.__class__ }}", "attribute '__class__' of 'str' object is unsafe"),
    ],
)
def test_a_template_of_a_task_has_limits_of_time_and_memory(monkeypatch, template, says):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 1)
    with quiet(allow_code=False):
        with pytest.raises((TemplateRefusalError, rendering.InvalidTemplateError), match=says):
            lm_eval.utils.apply_template(template, {})
        document = {"day": date(2026, 1, 31), "answers": [b"x", 1.5, None], "by_number": {7: "seven"}}
        template = "{{ day.year ~ answers[1] ~ by_number[7] }}{{ ' a-b' | regex_replace('-', '+') }}\n"
        assert lm_eval.utils.apply_template(template, document) == "20261.5seven a+b\n"


def test_a_list_that_a_template_writes_is_short(tmp_path):
    own = {"doc_to_text": "x", "doc_to_target": "[{% for i in range(80) %}{{ '1,' * 100000 }}{% endfor %}1]"}
    folder = make_tasks(tmp_path / "tasks", {"long": {"output_type": "generate_until"} | own})
    with pytest.raises(DataError, match=r"a template gives a list of 16,000,003 characters, more than 1,048,576"):
        NamedTasks(["long"], folder=folder)


def test_random_choices_of_templates_are_those_of_the_harness():
    template = "{{ range(1000) | random }} {{ lipsum(1, false) }}"
    texts = []
    for confined in (False, True):
        random.seed(1234)
        with quiet(allow_code=not confined):
            texts.append([lm_eval.utils.apply_template(template, {}) for _ in range(3)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_the_patterns_of_a_task_have_a_limit_of_time(tmp_path, monkeypatch):
    """The harness searches with them in what the model writes, and in what the documents hold."""
    steps = [{"function": "regex", "regex_pattern": "(a|a)*c"}, {"function": "take_first"}]
    metric = {"metric": "exact_match", "regexes_to_ignore": ["(a|a)*c"]}
    asked = {"doc_to_text": "{{question}}", "doc_to_target": "aaaa", "output_type": "generate_until"}
    own = asked | {"filter_list": [{"name": "slow", "filter": steps}], "metric_list": [metric]}
    tasks = NamedTasks(["slow"], folder=make_tasks(tmp_path / "tasks", {"slow": own}))
    (task,) = tasks._by_name["slow"]["tasks"].values()
    answer = Instance("generate_until", {}, ("?", {}), 0, resps=["a" * 40])
    monkeypatch.setattr(harness_limits, "PATTERN_SECONDS", 0.2)
    for work in (task.apply_filters, lambda: task.process_results({"question": "?"}, ["a" * 40])):
        task._instances = [answer]
        with pytest.raises(DataError, match=r"task 'slow': its filters or metrics take more than 1\.2 s on an answer"):
            work()
