"""Every package that the README's commands install has one version, and CI runs only what it names by its contents."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OF_TORCH = ("nvidia-", "cuda-")  # a CUDA build of torch names its packages itself
PYTHONS = ("3.11", "3.12", "3.13")


def constraints(python):
    """Return the constraint of each package under a version of Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    applied = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    names = [canonicalize_name(pin.name) for pin in applied]
    assert len(names) == len(set(names))
    return dict(zip(names, applied, strict=True))


def requirements(name, extras=frozenset()):
    """Yield what an installed package requires here."""
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:  # left out on purpose, such as a package that an image brings under another name
        return
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def test_every_package_that_is_installed_here_has_a_version_in_the_constraints():
    waiting, seen = [("llama-training-infra", frozenset({"dev"}))], set()
    while waiting:
        package = waiting.pop()
        if package not in seen:
            seen.add(package)
            found = requirements(*package)
            waiting += [(canonicalize_name(one.name), frozenset(one.extras)) for one in found]
    names = {name for name, _ in seen if not name.startswith(OF_TORCH)} - {"llama-training-infra"}
    assert len(names) > 100
    assert names <= set(constraints(PYTHONS[0]))


@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_meet_every_requirement_of_the_project(python):
    pins = constraints(python)
    extras = PROJECT["optional-dependencies"]
    names = ("cloud", "deepspeed", "eval", "hf", "mlflow", "wandb", "dev")
    lines = [*PROJECT["dependencies"], *(line for name in names for line in extras[name])]
    for one in (one for one in map(Requirement, lines) if one.name != PROJECT["name"]):
        (pin,) = pins[canonicalize_name(one.name)].specifier
        assert pin.operator == "=="
        assert pin.version in one.specifier, one


def test_no_constraint_names_a_build_of_torch():
    """``torch==2.13.0`` also takes 2.13.0+cpu and every CUDA build of it."""
    assert not any("+" in str(pin.specifier) for python in PYTHONS for pin in constraints(python).values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_every_action_by_its_commit(workflow):
    used = re.findall(r"uses: *(.*)", workflow.read_text())
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action) for action in used), used


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_that_runs_packages_has_no_token_that_may_write(workflow):
    found = yaml.safe_load(workflow.read_text())
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        checkouts = [step for step in job["steps"] if "actions/checkout" in step.get("uses", "")]
        keeps_token = any(step.get("with", {}).get("persist-credentials") is not False for step in checkouts)
        is_trusted = "permissions" in job or keeps_token
        assert not (is_trusted and re.search(r"\b(make|pip|python|uv|bash)\b", commands)), name


def test_ci_runs_the_suite_under_every_python_that_is_supported():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["run"]["strategy"]["matrix"]["python"] == list(PYTHONS)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
