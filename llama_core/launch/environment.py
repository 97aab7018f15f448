"""What this machine offers, found without torch: enough to fill in defaults and to say early what is missing."""

import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, recognise_gpu
from llama_core.config.run import DATALOADER, SAMPLE, RunConfig
from llama_core.errors import EnvironmentMismatchError, did_you_mean
from llama_core.launch.slurm_request import refusal
from llama_core.units import format_bytes

TESTED_TORCH = ((2, 11), (2, 13))
"""Oldest and newest torch that the tests have passed on."""

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""

_REQUIRED = {
    "torch": "train",
    "submitit": "start jobs",
    "psutil": "watch jobs",
    "pyarrow": "write metrics",
    "prefect": "run the flows",
    "plotly": "draw the report",
}
_OPTIONAL = ("tensorboard", "transformers", "tokenizers", "wandb", "deepspeed", "flash-attn")
_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_SLURM_COMMANDS = ("sbatch", "srun", "scontrol", "scancel")


class _MemoryFiles(NamedTuple):
    limit: str
    used: str
    cached: str


_MEMORY_FILES = {
    1: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class Machine:
    """The devices, cores and memory that a process here may use."""

    gpus: tuple[str, ...]
    """Names of the CUDA devices that the installed torch can use."""
    gpu_type: DeviceSpec | None
    """The first of them, if it is in the table of devices."""
    cpu_native_bf16: bool
    """Whether the CPU multiplies bf16 matrices in hardware."""
    memory_bytes: int
    """Host memory, or the limit set on this process's control group where that is less."""
    available_memory_bytes: int
    """Part of it that is free or can be freed."""
    cores: int
    """Physical cores this process may use."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration without ``auto``, and how it came about."""

    config: RunConfig
    choices: tuple[str, ...]
    """One line for each default that was filled in, with its reason."""


@dataclass(frozen=True)
class EnvironmentReport:
    """What was found on this machine."""

    errors: tuple[str, ...]
    """What keeps the run from starting, one line each, with the remedy."""
    warnings: tuple[str, ...]
    """What will make it slower or poorer."""
    facts: dict[str, str]
    """Versions, devices, memory."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return asdict(self)

    def summary(self) -> str:
        """Return the report in one line."""
        machine = ", ".join(self.facts[name] for name in ("python", "torch", "devices", "memory") if name in self.facts)
        counts = [
            f"{len(found)} {name}" for name, found in (("errors", self.errors), ("warnings", self.warnings)) if found
        ]
        return "; ".join([machine, *counts])


@dataclass(frozen=True)
class Gpu:
    """A device as ``nvidia-smi`` lists it."""

    index: str
    uuid: str
    name: str
    memory_mib: str
    driver: str


def detect_machine() -> Machine:
    """Return what this process may use, cgroup limits and ``CUDA_VISIBLE_DEVICES`` included."""
    import psutil

    gpus = tuple(gpu.name for gpu in visible_gpus()) if torch_has_cuda() else ()
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in cgroup_memory():
        total, available = min(total, limit), min(available, limit - used)
    return Machine(
        gpus=gpus,
        gpu_type=recognise_gpu(gpus[0]) if gpus else None,
        cpu_native_bf16=not _BF16_FLAGS.isdisjoint(_cpu_flags()),
        memory_bytes=total,
        available_memory_bytes=max(0, available),
        cores=available_cores(),
    )


def resolve_machine_defaults(config: RunConfig, machine: Machine) -> ResolvedConfig:
    """Return ``config`` with device, precision and GPU type filled in from what ``machine`` has.

    Raises:
        EnvironmentMismatchError: if the request cannot run on this machine.
    """
    device, reason = _device(config, machine)
    overrides = {"launch.device": (device, reason)}
    if config.training.precision == "auto":
        native = device == "cuda" or machine.cpu_native_bf16
        overrides["training.precision"] = ("bf16", f"native on {device}") if native else ("fp32", "no native bf16 here")
    if config.launch.gpu_type is None and device == "cuda":
        overrides["launch.gpu_type"] = _gpu_type(machine)
    changed = {key: value for key, value in overrides.items() if value[1]}
    return ResolvedConfig(
        config.with_overrides(*(f"{key}={value}" for key, (value, _) in changed.items())),
        tuple(f"{key}={value} ({reason})" for key, (value, reason) in changed.items()),
    )


def _device(config: RunConfig, machine: Machine) -> tuple[str, str]:
    """Return the device to use and why it was chosen; the reason is empty where the configuration names it."""
    device, gpus = config.launch.device, config.parallel.gpus
    if config.launch.launcher == "slurm":
        return ("cuda", "the default on Slurm") if device == "auto" else (device, "")
    if config.launch.nodes > 1:
        raise EnvironmentMismatchError(
            f"launch.nodes={config.launch.nodes}: the local launcher has this machine only; use --launcher slurm"
        )
    if device == "cpu":
        return device, ""
    if not machine.gpus:
        if device == "cuda":
            raise EnvironmentMismatchError(
                "device=cuda: this machine has no CUDA device that torch can use; add --device cpu, or --launcher slurm"
            )
        if gpus > 1:
            raise EnvironmentMismatchError(
                f"gpus={gpus}: this machine has no CUDA device; add --device cpu for {gpus} CPU processes, "
                "or --launcher slurm"
            )
        return "cpu", "this machine has no CUDA device that torch can use"
    if gpus > len(machine.gpus):
        raise EnvironmentMismatchError(
            f"gpus={gpus}: this machine has {len(machine.gpus)}; use --gpus {len(machine.gpus)}, or --launcher slurm"
        )
    return "cuda", "" if device == "cuda" else f"this machine has {machine.gpus[0]}"


def _gpu_type(machine: Machine) -> tuple[str, str]:
    if machine.gpu_type is not None:
        return machine.gpu_type.name, "the device here"
    here = f"{machine.gpus[0]!r} is not in the table of devices" if machine.gpus else "no device here"
    return DEFAULT_GPU_TYPE, f"{here}: planned for this one; --gpu-type chooses another"


def device_label(device: str) -> str:
    """Return the name its maker gives to the device that ``'cuda'`` or ``'cpu'`` stands for here."""
    if device == "cuda":
        gpus = visible_gpus()
        return gpus[0].name if gpus else "unknown CUDA device"
    return _cpu_model()


@cache
def installed_gpus() -> tuple[Gpu, ...]:
    """Return the devices that NVIDIA's driver knows; none where it does not answer."""
    fields = "index,uuid,name,memory.total,driver_version"
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = csv.reader(listed.stdout.splitlines(), skipinitialspace=True)
    return tuple(Gpu(*row) for row in rows if len(row) == 5)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the installed devices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return installed_gpus() if chosen is None else tuple(_choose(installed_gpus(), chosen))


def _choose(gpus: tuple[Gpu, ...], chosen: str) -> Iterator[Gpu]:
    """Yield the devices named by index or by the beginning of their UUID, up to the first name that fits none."""
    for name in filter(None, map(str.strip, chosen.split(","))):
        match = next((gpu for gpu in gpus if gpu.index == name or gpu.uuid.startswith(name)), None)
        if match is None:
            return
        yield match


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA; True where none is installed, since that says nothing."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    # Importing torch takes seconds; its build is a line of text.
    version = (Path(found.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b[^=]*= *'", version, re.MULTILINE) is not None


def available_cores() -> int:
    """Return the physical cores that affinity and a CPU quota leave to this process."""
    import psutil

    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    cores = min(physical, -(-allowed * physical // logical))
    return max(1, min([cores, *(int(quota) for quota in _cgroup_cpus())]))


def cgroup_memory(mounted_at: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[tuple[int, int]]:
    """Return the limit and the use, in bytes, of each control group around this process that limits its memory.

    Memory that only caches files counts as unused: the kernel takes it back.

    Args:
        mounted_at: where the control groups are mounted.
        membership: the file that names the groups this process is in.
    """
    limits = []
    for group, version in _cgroups("memory", mounted_at, membership):
        names = _MEMORY_FILES[version]
        limit, used = _read_number(group / names.limit), _read_number(group / names.used)
        cached = re.search(rf"^{names.cached} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        if limit is not None and used is not None:
            limits.append((limit, used - (int(cached[1]) if cached else 0)))
    return limits


def _cgroup_cpus() -> Iterator[float]:
    """Yield the CPUs' worth of time that each control group around this process may use, where there is a quota."""
    for group, version in _cgroups("cpu", _CGROUPS, _MEMBERSHIP):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _cgroups(controller: str, mounted_at: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the control groups this process is in, innermost first, with the version of their interface.

    In a container the path may be the host's; what is visible then is the container's group, mounted as the root.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (mounted_at / controller, 1) if controllers else (mounted_at, 2)
        group = root / path.strip("/")
        for around in (group, *group.parents):
            if around.is_relative_to(root) and around.is_dir():
                yield around, version


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _cpu_flags() -> frozenset[str]:
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def _cpu_model() -> str:
    model = re.search(r"^model name\s*: (.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


@dataclass
class _Findings:
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def validate_environment(config: RunConfig | None = None, run_dir: Path = Path("runs")) -> EnvironmentReport:
    """Return what is missing here, what will hurt, and what was found; torch is not imported.

    Args:
        config: the run to check for; without it, only the installation and the machine are looked at.
        run_dir: where the run's files will go.
    """
    found = _Findings()
    machine = detect_machine()
    _check_packages(found)
    _describe_machine(found, machine)
    _check_disk(found, run_dir, config)
    if config is not None:
        _check_request(found, config, machine)
        _check_data(found, config)
        if config.launch.launcher == "slurm":
            _check_slurm(found, config)
        _check_extras(found, config)
    return EnvironmentReport(tuple(found.errors), tuple(found.warnings), found.facts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_packages(found: _Findings) -> None:
    found.facts["python"] = f"Python {platform.python_version()}"
    found.facts["interpreter"] = sys.executable
    for package, purpose in _REQUIRED.items():
        version = _version(package)
        if version is None:
            found.errors.append(f"{package} is not installed, and is needed to {purpose}; pip install {package}")
        else:
            found.facts[package] = f"{package} {version}"
    installed = {package: _version(package) for package in _OPTIONAL}
    found.facts["optional packages"] = ", ".join(f"{name} {version or 'absent'}" for name, version in installed.items())
    _check_torch(found)


def _check_extras(found: _Findings, config: RunConfig) -> None:
    """Find the packages that only some runs need."""
    uses = {
        "wandb": (config.tracking.wandb != "off", f"tracking.wandb={config.tracking.wandb}"),
        "deepspeed": (config.parallel.zero_backend == "deepspeed", "parallel.zero_backend=deepspeed"),
    }
    for package, (is_used, setting) in uses.items():
        if is_used and _version(package) is None:
            found.errors.append(
                f"{setting} needs {package}, which is not installed; pip install 'llama-training-infra[{package}]'"
            )


def _check_torch(found: _Findings) -> None:
    version = _version("torch")
    if version is None:
        return
    oldest, newest = TESTED_TORCH
    major, minor = (int(part) for part in version.split(".")[:2])
    if not oldest <= (major, minor) <= newest:
        tested = f"{_dotted(oldest)} to {_dotted(newest)}"
        found.warnings.append(f"torch {version} is outside the tested range; pip install a version from {tested}")
    # The model's attention is torch's own everywhere; an installed flash-attn is listed but not called.
    found.facts["attention"] = "torch scaled_dot_product_attention"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _describe_machine(found: _Findings, machine: Machine) -> None:
    listed = [
        f"{gpu.name} ({gpu.memory_mib} MiB, driver {gpu.driver}, "
        f"{'known as ' + spec.name if (spec := recognise_gpu(gpu.name)) else 'not in the table of devices'})"
        for gpu in visible_gpus()
    ]
    found.facts["devices"] = "; ".join(listed) or "no CUDA device"
    if listed and not machine.gpus:
        found.warnings.append(
            f"torch {_version('torch')} is built without CUDA and cannot use the {len(listed)} GPUs here; "
            "install a CUDA build (https://pytorch.org/get-started)"
        )
    found.facts["cpu"] = (
        f"{_cpu_model()}, {machine.cores} cores, bf16 {'native' if machine.cpu_native_bf16 else 'emulated'}"
    )
    found.facts["memory"] = (
        f"{format_bytes(machine.memory_bytes)} of memory, {format_bytes(machine.available_memory_bytes)} available"
    )


def _check_request(found: _Findings, config: RunConfig, machine: Machine) -> None:
    try:
        resolved = resolve_machine_defaults(config, machine).config
    except EnvironmentMismatchError as error:
        found.errors.append(str(error))
        return
    on_cpu = resolved.launch.device == "cpu"
    if on_cpu and resolved.training.precision == "bf16" and not machine.cpu_native_bf16:
        found.warnings.append("training.precision=bf16 is emulated on this CPU and slow; use fp32")
    if on_cpu and resolved.launch.launcher == "local" and resolved.parallel.gpus > machine.cores:
        found.warnings.append(
            f"gpus={resolved.parallel.gpus} CPU processes share {machine.cores} cores; use --gpus {machine.cores}"
        )


def _check_disk(found: _Findings, run_dir: Path, config: RunConfig | None) -> None:
    existing = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found.errors.append(f"cannot write to {existing}, where the run goes; choose another --run-dir")
        return
    free = shutil.disk_usage(existing).free
    found.facts["disk"] = f"{format_bytes(free)} free in {existing}"
    if config is not None:
        # One more than are kept: the oldest is removed only after the newest is complete.
        checkpoints = config.training.keep_checkpoints + 1
        needed = checkpoints * CHECKPOINT_BYTES_PER_PARAMETER * config.spec.num_parameters
        if free < needed:
            found.warnings.append(
                f"{checkpoints} checkpoints of {config.model} take {format_bytes(needed)} but {existing} has "
                f"{format_bytes(free)} free; lower training.keep_checkpoints or choose another --run-dir"
            )


def _check_data(found: _Findings, config: RunConfig) -> None:
    paths = {
        "data.source": config.data.source if config.data.source not in {SAMPLE, DATALOADER} else None,
        "data.validation": config.data.validation,
        "data.tokenizer": config.data.tokenizer if config.data.tokenizer != "bytes" else None,
    }
    for key, path in paths.items():
        if path is not None and not Path(path).exists():
            found.errors.append(f"{key}={path!r} does not exist; give the path of an existing file or folder")
        elif path is not None and not os.access(path, os.R_OK):
            found.errors.append(f"{key}={path!r} cannot be read by this user; change its permissions or choose another")


def _check_slurm(found: _Findings, config: RunConfig) -> None:
    missing = [command for command in _SLURM_COMMANDS if shutil.which(command) is None]
    if missing:
        found.errors.append(
            f"launch.launcher=slurm: this machine has no {', '.join(missing)}; "
            "log in to a node of the cluster, or use --launcher local"
        )
        return
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        found.errors.append(f"Slurm's controller does not answer ({str(detail).strip()}); ask its administrators")
        return
    partitions = sorted(set(answer.stdout.split()))
    found.facts["slurm partitions"] = ", ".join(partitions)
    wanted = config.launch.slurm.partition
    if wanted is not None and wanted not in partitions:
        nearest = did_you_mean(wanted, partitions) or f"; choose one of {', '.join(partitions)}"
        found.errors.append(f"launch.slurm.partition={wanted!r} is not a partition here{nearest}")
        return
    refused = refusal(config)
    if refused is not None:
        found.errors.append(f"Slurm would refuse the job: {refused}; change launch.slurm or launch.nodes")
