"""The defaults of a run that depend on the machine."""

from dataclasses import dataclass

from llama_core.config.hardware import DEFAULT_GPU_TYPE, GPUS_PER_NODE
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.launchers.registry import with_nodes
from llama_core.machine.detect import Machine

MAX_READING_THREADS = 4
"""Most threads that read data in a rank by default: a few hide the latency of a disk, and the cores have other work."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with the machine's defaults filled in, and their reasons."""

    config: RunConfig
    choices: tuple[str, ...]
    """One line for each default that was filled in, with its reason."""


def resolve_machine_defaults(config: RunConfig, machine: Machine) -> ResolvedConfig:
    """Return ``config`` with device, precision, GPU type and reading threads filled in for ``machine``.

    Raises:
        EnvironmentMismatchError: if the request cannot run on this machine.
    """
    device, reason = _device(config, machine)
    overrides: dict[str, tuple[str | int, str]] = {}
    if config.launch.device == "auto":
        overrides["launch.device"] = (device, reason)
    if config.training.precision == "auto":
        native = device == "cuda" or machine.cpu_native_bf16
        overrides["training.precision"] = ("bf16", f"native on {device}") if native else ("fp32", "no native bf16 here")
    if config.launch.gpu_type is None and device == "cuda":
        overrides["launch.gpu_type"] = _gpu_type(machine)
    if config.launch.is_here and config.launch.nodes is None and len(machine.gpus) > GPUS_PER_NODE:
        overrides["launch.nodes"] = (1, f"this machine has {len(machine.gpus)} GPUs")
    if config.data.num_workers is None:
        overrides["data.num_workers"] = _num_workers(config, machine, device)
    return ResolvedConfig(
        config.with_overrides(*(Override(key, value) for key, (value, _) in overrides.items())),
        tuple(f"{key}={value} ({reason})" for key, (value, reason) in overrides.items()),
    )


def _device(config: RunConfig, machine: Machine) -> tuple[str, str]:
    """Return the device to use, and the reason if the configuration leaves it to the machine."""
    device = config.launch.device
    gpus = config.parallel.gpus
    launcher = config.launch.kind
    if not launcher.is_here:
        return "cuda" if device == "auto" else device, f"the default on {launcher.title}"
    if config.launch.nodes is not None and config.launch.nodes > 1:
        raise EnvironmentMismatchError(
            f"launch.nodes={config.launch.nodes}: the {launcher.name} launcher uses only this machine; "
            f"use {with_nodes()}"
        )
    if device == "cpu":
        return device, ""
    if not machine.gpus:
        if device == "cuda":
            raise EnvironmentMismatchError(
                f"device=cuda: this machine has no CUDA device that torch can use; add --device cpu, or {with_nodes()}"
            )
        if gpus > 1:
            raise EnvironmentMismatchError(
                f"gpus={gpus}: this machine has no CUDA device; add --device cpu for {gpus} CPU processes, "
                f"or {with_nodes()}"
            )
        if config.training.precision == "fp8":
            raise EnvironmentMismatchError(
                "training.precision=fp8 needs a GPU, and this machine has no CUDA device that torch can use; "
                f"use bf16 or fp32, or {with_nodes()}"
            )
        return "cpu", "this machine has no CUDA device that torch can use"
    if gpus > len(machine.gpus):
        raise EnvironmentMismatchError(
            f"gpus={gpus}: this machine has {len(machine.gpus)}; use --gpus {len(machine.gpus)}, or {with_nodes()}"
        )
    return "cuda", f"this machine has {machine.gpus[0]}"


def _num_workers(config: RunConfig, machine: Machine, device: str) -> tuple[int, str]:
    here = machine.cores // config.parallel.gpus
    cores = here if config.launch.is_here else config.launch.request.cores_of_a_rank(device)
    return reading_threads(cores), f"{cores} core{'' if cores == 1 else 's'} per rank"


def reading_threads(cores: int) -> int:
    """Return how many threads of a rank with ``cores`` cores read data ahead: with a core or less to itself, none."""
    return min(MAX_READING_THREADS, cores // 2)


def _gpu_type(machine: Machine) -> tuple[str, str]:
    if machine.gpu_type is not None:
        return machine.gpu_type.name, "the device here"
    here = f"{machine.gpus[0]!r} is not in the table of devices" if machine.gpus else "no device here"
    return DEFAULT_GPU_TYPE, f"{here}, so the plan assumes this one; --gpu-type chooses another"
