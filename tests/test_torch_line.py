"""Planning, launching and reporting start in well under a second: they import no torch, not even indirectly."""

import json
import pkgutil
import subprocess
import sys

import pytest

import llama_core
import training_infra
import training_reports

HEAVY = (
    "llama_core.models",
    "llama_core.parallel",
    "llama_core.preflight",
    "llama_core.training",
    "llama_core.rehearsal",
    "llama_core.calibration.operations",
    "llama_core.calibration.timing",
    "llama_core.calibration.whole",
    "llama_core.calibration.worker",
    "llama_core.evaluation.harness",
    "llama_core.evaluation.inference",
    "llama_core.data.loaders",
    "llama_core.data.supply",
    "llama_core.launch.rank.worker",
    "llama_core.launch.rank.checks",
    "llama_core.launch.rank.building",
    "llama_core.launch.rank.loader",
    "llama_core.launch.rank.machines",
)
"""The modules that compute, and those a rank imports to compute: with torch."""
LIGHT = (
    "llama_core.preflight.checks",
    "llama_core.preflight.outliers",
    "llama_core.evaluation.harness.task_folder",
    "llama_core.training.rates",
    "llama_core.rehearsal.call_order",
)
"""Those of them that compute on plain data."""


def light_modules():
    for package in (llama_core, training_infra, training_reports):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name in LIGHT or not module.name.startswith(HEAVY):
                yield module.name


@pytest.mark.parametrize(
    ("packages", "modules"),
    [
        (("torch",), list(light_modules())),
        (("torch", "pydantic", "rich"), ["training_infra"]),
        (("torch",), ["flows.train"]),
        (("torch", "prefect", "training_infra"), ["training_reports.page"]),
        (("numpy", "yaml", "llama_core.config.settings"), ["llama_core.launch.jobs.controller"]),
    ],
    ids=["every-light-room", "facade", "flow", "reports", "supervisor-of-every-rank"],
)
def test_light_modules_import_no_heavy_package(packages, modules):
    code = (
        "import importlib, json, sys\n"
        f"packages, modules = {packages!r}, {modules!r}\n"
        "found = {}\n"
        "for name in modules:\n"
        "    importlib.import_module(name)\n"
        "    for package in packages:\n"
        "        if package in sys.modules: found.setdefault(package, name)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == {}, "package: the first module that imports it"
