"""Check whether this machine has everything a run needs, and whether anything will slow it down, without torch."""

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llama_core.config.hardware import recognise_gpu
from llama_core.config.run import RunConfig
from llama_core.config.settings import TrainingConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import how_to_install
from llama_core.machine.defaults import resolve_machine_defaults
from llama_core.machine.detect import (
    Machine,
    code_commit,
    cpu_model,
    detect_machine,
    package_version,
    visible_gpus,
)
from llama_core.machine.flash import describe_flash_attention
from llama_core.machine.hazards import Finding, look_at_disk, look_at_machine
from llama_core.notifications import problems
from llama_core.trackers.registry import TRACKERS
from llama_core.units import format_bytes

TESTED_TORCH = ("2.11", "2.13")
"""Oldest and newest torch versions that pass the tests."""
FIRST_FOR_SEVERAL_NODES = "2.13"
"""The first torch that splits a communicator into all groups at once and leaves gloo out."""

_REQUIRED = {
    "torch": "train",
    "submitit": "start jobs",
    "psutil": "watch jobs",
    "pyarrow": "write metrics",
    "prefect": "run the flows",
    "plotly": "draw the report",
}
_OPTIONAL = ("transformers", "tokenizers", "deepspeed")


@dataclass(frozen=True)
class EnvironmentReport:
    """The results of checking this machine."""

    errors: tuple[str, ...]
    """Problems that keep the run from starting, one line each, with the remedy."""
    warnings: tuple[str, ...]
    """Problems that make the run slower or worse."""
    facts: dict[str, str]
    """Versions, devices, memory."""
    problems: dict[str, str]
    """The warning or error about a fact, by the fact's name; the others are about the request."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a record for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """Return the report in one line."""
        machine = ", ".join(self.facts[name] for name in ("python", "torch", "devices", "memory") if name in self.facts)
        counts = {"error": len(self.errors), "warning": len(self.warnings)}
        found = [f"{count} {name}" if count == 1 else f"{count} {name}s" for name, count in counts.items() if count]
        return "; ".join([machine, *found])


@dataclass
class Findings:
    """Collects the results of the checks."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Add a finding's fact, and its warning if it has one."""
        self.facts[finding.name] = finding.fact
        if finding.warning:
            self.warnings.append(finding.warning)
            self.problems[finding.name] = finding.warning

    def fail(self, name: str, error: str) -> None:
        """Add an error about a fact."""
        self.errors.append(error)
        self.problems[name] = error

    def report(self) -> EnvironmentReport:
        """Return everything found so far."""
        return EnvironmentReport(tuple(self.errors), tuple(self.warnings), self.facts, self.problems)


def check_machine(found: Findings, config: RunConfig | None, run_dir: Path, *, saves: bool = True) -> None:
    """Collect the facts, errors and warnings about this machine; torch is not imported.

    Args:
        found: collects the results.
        config: the run to check for; without it, only the installation and the machine are checked.
        run_dir: where the run's files will go.
        saves: whether the run saves checkpoints there.
    """
    machine = detect_machine()
    _check_packages(found)
    if config is not None and config.num_nodes > 1 and config.launch.device != "cpu":
        _check_torch_of_several_nodes(found)
    _describe_machine(found, machine)
    gpus, nodes = (config.parallel.gpus, config.num_nodes) if config else (1, 1)
    for finding in look_at_machine(gpus, nodes):
        found.add(finding)
    found.facts["attention"] = describe_flash_attention(config)
    _check_disk(found, run_dir, config if saves else None)
    if config is not None:
        _check_request(found, config, machine)
        _check_extras(found, config)


def _check_packages(found: Findings) -> None:
    found.facts["python"] = f"Python {platform.python_version()}"
    found.facts["interpreter"] = sys.executable
    if (commit := code_commit()) is not None:
        found.facts["commit"] = commit
    for package, purpose in _REQUIRED.items():
        version = package_version(package)
        if version is None:
            found.errors.append(f"{package} is not installed but is needed to {purpose}; pip install {package}")
        else:
            found.facts[package] = f"{package} {version}"
    of_trackers = [kind.package for kind in TRACKERS.values() if kind.package]
    installed = {package: package_version(package) for package in (*of_trackers, *_OPTIONAL)}
    found.facts["optional packages"] = ", ".join(f"{name} {version or 'absent'}" for name, version in installed.items())
    _check_torch(found)


def _check_extras(found: Findings, config: RunConfig) -> None:
    """Check for the packages, and for what else trackers need, that only some runs need."""
    asked_trackers = list(config.tracking.asked_trackers())
    needed = {asked.kind.package: asked.setting for asked in asked_trackers if asked.kind.package}
    if config.parallel.zero_backend == "deepspeed":
        needed["deepspeed"] = "parallel.zero_backend=deepspeed"
    for package, setting in needed.items():
        if package_version(package) is None:
            found.errors.append(f"{setting} needs {package}, which is not installed; {how_to_install(package)}")
    for asked in asked_trackers:
        found.errors += asked.kind.problems(asked.settings)
        variables = [name for name in asked.kind.variables if os.environ.get(name)]
        if variables:  # their values may be secrets
            found.facts[asked.kind.title] = f"{', '.join(variables)} of the environment"
    found.errors += problems(config.notify)


def _check_torch(found: Findings) -> None:
    version = package_version("torch")
    if version is None:
        return
    oldest, newest = TESTED_TORCH
    if not _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        tested = f"{oldest} to {newest}"
        found.warnings.append(f"torch {version} is outside the tested range; pip install a version from {tested}")


def _check_torch_of_several_nodes(found: Findings) -> None:
    version = package_version("torch")
    if version is not None and _numbers(version) < _numbers(FIRST_FOR_SEVERAL_NODES):
        found.errors.append(
            f"a run on several nodes needs torch {FIRST_FOR_SEVERAL_NODES} or newer, but {version} is installed: it "
            "makes the groups of ranks one by one, which takes minutes"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def _describe_machine(found: Findings, machine: Machine) -> None:
    listed = [
        f"{gpu.name} ({gpu.memory_mib} MiB, driver {gpu.driver}, "
        f"{'known as ' + spec.name if (spec := recognise_gpu(gpu.name)) else 'not in the table of devices'})"
        for gpu in visible_gpus()
    ]
    found.facts["devices"] = "; ".join(listed) or "no CUDA device"
    if listed and not machine.gpus:
        found.warnings.append(
            f"torch {package_version('torch')} is built without CUDA and cannot use the {len(listed)} GPUs here; "
            "install a CUDA build (https://pytorch.org/get-started)"
        )
    found.facts["cpu"] = (
        f"{cpu_model()}, {machine.cores} cores, bf16 {'native' if machine.cpu_native_bf16 else 'emulated'}"
    )
    found.facts["memory"] = (
        f"{format_bytes(machine.memory_bytes)} of memory, {format_bytes(machine.available_memory_bytes)} available"
    )


def _check_request(found: Findings, config: RunConfig, machine: Machine) -> None:
    try:
        resolved = resolve_machine_defaults(config, machine).config
    except EnvironmentMismatchError as error:
        found.errors.append(str(error))
        return
    on_cpu = resolved.launch.device == "cpu"
    if on_cpu and resolved.training.precision == "bf16" and not machine.cpu_native_bf16:
        found.warnings.append("training.precision=bf16 is emulated on this CPU and slow; use fp32")
    if on_cpu and resolved.launch.is_here and resolved.parallel.gpus > machine.cores:
        found.warnings.append(
            f"gpus={resolved.parallel.gpus} CPU processes share {machine.cores} cores; use --gpus {machine.cores}"
        )


def _check_disk(found: Findings, run_dir: Path, config: RunConfig | None) -> None:
    existing = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.errors.append(f"cannot write to {existing}, where the run goes; choose another --run-dir")
        return
    free = shutil.disk_usage(existing).free
    found.facts["disk"] = f"{format_bytes(free)} free in {existing}"
    checkpoint_bytes = config.checkpoint_bytes if config else 0
    for finding in look_at_disk(existing, checkpoint_bytes):
        found.add(finding)
    if config is not None:
        _check_room(found, config, existing, free, checkpoint_bytes)


def _check_room(found: Findings, config: RunConfig, folder: Path, free: int, checkpoint_bytes: int) -> None:
    checkpoints = config.most_checkpoints
    there = f"{folder} has {format_bytes(free)} free"
    if free < checkpoint_bytes and not config.launch.force:
        found.fail(
            "disk",
            f"a checkpoint of {config.model} takes {format_bytes(checkpoint_bytes)} but {there}, so the run could not "
            "save anything; choose another --run-dir, free some space, or run it anyway with --force",
        )
    elif free < checkpoints * checkpoint_bytes:
        found.warnings.append(
            f"{checkpoints} checkpoints of {config.model} take {format_bytes(checkpoints * checkpoint_bytes)} but "
            f"{there}; {_fewer_checkpoints(config.training)}, free some space, or choose another --run-dir"
        )


def _fewer_checkpoints(training: TrainingConfig) -> str:
    """Return which settings to change to keep fewer checkpoints."""
    ways = ["lower training.keep_checkpoints"]
    if training.keep_best:
        ways.append("lower training.keep_best")
    if training.keep_every_tokens:
        ways.append("raise training.keep_every_tokens")
    return " or ".join(ways)
