"""Parts that an installed package brings: they are found by name alone, and used as built-in ones are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_core import registry
from llama_core.adapters.registry import ADAPTERS
from llama_core.chain.environment import validate_environment
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.objectives.registry import OBJECTIVES
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.schedules.registry import SCHEDULES, searched_schedules
from llama_core.trackers.registry import TRACKERS

ROOT = Path(__file__).parents[1]

ROWS = """
from dataclasses import replace
from llama_core.adapters.lora import LORA
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.traits import OptimizerType, State
from llama_core.schedules.one_way import GPIPE
from llama_core.trackers.tensorboard import EventFile
from llama_core.trackers.traits import TrackerSettings, TrackerType

class Settings(TrackerSettings):
    folder: str = "outside"

def opened(run, settings):
    return EventFile(run.directory.tracker("outside") / settings.folder)

ADAPTER = replace(LORA, name="outside")
OBJECTIVE = replace(NEXT_TOKEN, name="outside", module="outside.loss")
OPTIMIZER = OptimizerType(
    "outside", module="outside.descent", states=(State("last"),), read_bytes=12, written_bytes=8, keys=()
)
SCHEDULE = replace(GPIPE, name="outside")
TRACKER = TrackerType("outside", "Outside", settings=Settings, open=opened, where=lambda run, settings: "look outside")
HIDDEN = ADAMW
"""
LOSS = """
from llama_core.models import next_token

def build(training):
    print("the objective of the package")
    return next_token.build(training)
"""
DESCENT = """
from llama_core.training.local import LocalOptimizer
from outside.rows import OPTIMIZER

class Descent(LocalOptimizer):
    def update(self, weight, gradient, states, group, happens):
        (last,) = states
        last.lerp_(gradient, happens)
        weight.addcmul_(last, happens, value=-group["lr"])

def build(groups, training):
    return Descent(OPTIMIZER, groups, lr=training.learning_rate)
"""
PARTS = ("adapters", "objectives", "optimizers", "schedules", "trackers")
ENTRIES = {name: f"outside.rows:{name.upper()[:-1]}" for name in PARTS}
CHOICES = {
    "adapters": (ADAPTERS, {"strategy": "lora", "lora": {"method": "outside"}}),
    "objectives": (OBJECTIVES, {"training": {"objective": "outside"}}),
    "optimizers": (OPTIMIZERS, {"training": {"optimizer": "outside"}}),
    "schedules": (SCHEDULES, {"parallel": {"gpus": 2, "pp": 2, "schedule": "outside"}, "launch": {"device": "cpu"}}),
    "trackers": (TRACKERS, {"tracking": {"trackers": {"outside": {"folder": "mine"}}}}),
}


def install(folder, name="outside", rows=ROWS, entries=None):
    """Write a package as pip would have installed it in ``folder``."""
    described = folder / f"{name}-1.2.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    groups = ENTRIES if entries is None else entries
    lines = [f"[llama_training_infra.{group}]\noutside = {value}\n" for group, value in groups.items()]
    (described / "entry_points.txt").write_text("".join(lines))
    package = folder / name
    package.mkdir()
    for module, text in {"__init__": "", "rows": rows, "loss": LOSS, "descent": DESCENT}.items():
        (package / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, which only this test has."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    yield tmp_path
    for parts, _ in CHOICES.values():
        parts.pop("outside", None)
    for module in [module for module in sys.modules if module.partition(".")[0] == "outside"]:
        del sys.modules[module]
    registry._entry_points.cache_clear()


@pytest.mark.parametrize("parts", CHOICES)
def test_a_part_of_a_package_is_chosen_by_its_name_and_only_then_imported(site, parts):
    install(site)
    rows, chosen = CHOICES[parts]
    assert "outside" in rows.names()
    RunConfig()
    assert "outside.rows" not in sys.modules
    assert RunConfig.from_mapping(chosen)
    assert rows.find("outside").name == "outside"
    assert rows.package_of("outside") == "outside 1.2"
    assert "outside.rows" in sys.modules


def test_the_form_and_the_errors_list_what_packages_bring(site):
    install(site)
    settings = RunConfig.model_json_schema()["$defs"]["TrainingConfig"]["properties"]
    assert settings["optimizer"]["enum"] == ["adamw", "muon", "outside"]
    with pytest.raises(ConfigError, match="choose one of adamw, muon, outside; did you mean 'outside'"):
        RunConfig.from_mapping({"training": {"optimizer": "outsid"}})


def test_a_search_does_not_choose_a_schedule_because_a_package_is_installed(site):
    install(site)
    before = searched_schedules()
    assert SCHEDULES.find("outside") is not None
    assert searched_schedules() == before


@pytest.mark.parametrize("named", ["outside.rows:OPTIMIZER", "outside.rows", "outside:rows", "os:system", "../outside"])
@pytest.mark.parametrize("setting", ["training.optimizer", "training.objective", "lora.method", "parallel.schedule"])
def test_a_configuration_cannot_name_a_module(site, named, setting):
    install(site)
    with pytest.raises(ConfigError, match="choose one of"):
        RunConfig.from_mapping({"strategy": "lora"}, [f"{setting}={named}"])
    assert "outside" not in sys.modules


@pytest.mark.parametrize("named", ["outside.rows:TRACKER", "outside.rows", "os:system", "../outside"])
def test_a_tracker_is_no_module_either(site, named):
    install(site)
    with pytest.raises(ConfigError, match=r"choose one of .*outside"):
        RunConfig.from_mapping({"tracking": {"trackers": {named: {}}}})
    assert "outside" not in sys.modules


BROKEN = {
    "no module": ("", {"optimizers": "elsewhere:ROW"}, "cannot be imported: ModuleNotFoundError: No module named"),
    "raises": ("1 / 0", ENTRIES, "cannot be imported: ZeroDivisionError: division by zero"),
    "no row": ("OPTIMIZER = print", ENTRIES, "is a builtin_function_or_method instead of a OptimizerType"),
    "another's": (ROWS, {"optimizers": "outside.rows:SCHEDULE"}, "is a ScheduleType instead of a OptimizerType"),
    "other name": (ROWS.replace('"outside"', '"inside"'), ENTRIES, "is called 'inside' in its row"),
}


@pytest.mark.parametrize(("rows", "entries", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_one_line_with_its_name_and_harms_no_other_run(site, rows, entries, problem):
    install(site, rows=rows, entries=entries)
    with pytest.raises(ConfigError) as refusal:
        RunConfig.from_mapping({"training": {"optimizer": "outside"}})
    assert problem in str(refusal.value)
    assert "outside of outside 1.2 (" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert RunConfig.from_mapping({"training": {"optimizer": "muon"}}).optimizer.name == "muon"


def test_a_part_with_the_name_of_another_is_a_warning(site):
    install(site)
    install(site, name="other")
    described = site / "other-1.2.dist-info" / "entry_points.txt"
    described.write_text(
        "[llama_training_infra.optimizers]\nadamw = other.rows:HIDDEN\noutside = other.rows:OPTIMIZER\n"
    )
    warnings = [line for line in validate_environment().warnings if "other 1.2" in line or "outside 1.2" in line]
    assert any("other 1.2 has optimizers called adamw, but the built-in one is used" in line for line in warnings)
    assert any("has optimizers called outside, but that of " in line for line in warnings)


def run(folder, *arguments, path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "training_infra", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_current_folder_is_no_place_of_packages(tmp_path):
    install(tmp_path, rows="print('executed')")
    ended = run(tmp_path, "estimate-memory", "--optimizer", "outside", path=[ROOT])
    assert ended.returncode == 2
    assert "choose one of adamw, muon" in ended.stderr
    assert "executed" not in ended.stdout


@pytest.mark.wide
def test_a_run_trains_and_goes_on_with_the_optimizer_and_the_objective_of_a_package(tmp_path):
    install(tmp_path / "site")
    path = [ROOT, tmp_path / "site"]
    sizes = ["--set=architecture.num_layers=1", "--set=architecture.hidden_size=32", "--seq-len=32", "--batch-size=2"]
    sizes += ["--set=architecture.num_heads=2", "--set=architecture.num_kv_heads=2", "--no-benchmark", "--device=cpu"]
    chosen = ["--optimizer=outside", "--objective=outside", "--set=tracking.trackers.outside.folder=mine"]
    ended = run(tmp_path, "train", *chosen, *sizes, "--steps=2", "--run-dir=mine", path=path)
    assert ended.returncode == 0, ended.stderr
    assert "package   training.optimizer=outside is of outside 1.2\n" in ended.stdout
    assert "package   tracking.trackers.outside is of outside 1.2\n" in ended.stdout
    assert "metrics   look outside\n" in ended.stdout
    assert "the objective of the package" in (tmp_path / "mine" / "logs" / "rank-00000.log").read_text()
    again = run(tmp_path, "train", "--resume", "--run-dir=mine", "--steps=4", path=path)
    assert again.returncode == 0, again.stderr
    assert "continues after step 2" in again.stdout
    assert len(list((tmp_path / "mine" / "logs" / "outside" / "mine").glob("events*"))) == 2
    gone = run(tmp_path, "train", "--resume", "--run-dir=mine", "--steps=6", path=[ROOT])
    assert gone.returncode == 2
    assert "training.optimizer='outside': choose one of adamw, muon" in gone.stderr
