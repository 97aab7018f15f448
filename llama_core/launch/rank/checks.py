"""What every rank checks on its node before the model is built: its own device, and that all ranks see the same.

A login node knows neither. What the ranks found goes to ``environment.json``, beside what the submitting side found.
"""

import hashlib
import os
import platform
import re
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import llama_core
from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.machine.detect import detect_machine, device_label
from llama_core.parallel.ranks import is_first_rank
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.units import format_bytes

PLAN_TOLERANCE = 0.95
"""Share of the planned device's memory that a device may have less than: drivers keep a few percent back."""


@dataclass(frozen=True)
class RankFacts:
    """What one rank runs on."""

    rank: int
    host: str
    device: str
    """The device as its maker calls it."""
    device_bytes: int | None
    """Memory of the device; None for the CPU, whose memory the ranks of a machine share."""
    python: str
    torch: str
    nccl: str
    """Version of NCCL; empty on the CPU."""
    source: str
    """Digest of the installed ``llama_core``."""
    request: str
    """Digest of the run's configuration and plan, as this node's side of the shared file system shows them."""


MUST_AGREE = ("device", "python", "torch", "nccl", "source", "request")


def check_own_device(config: RunConfig) -> None:
    """Refuse a node whose device is not the one planned for, before the ranks meet.

    Raises:
        EnvironmentMismatchError: naming the rank and its node.
    """
    if config.launch.device != "cuda":
        return
    rank, local_rank = os.environ.get("RANK", "0"), int(os.environ.get("LOCAL_RANK", "0"))
    where = f"rank {rank} on {socket.gethostname()}"
    if not torch.cuda.is_available():
        raise EnvironmentMismatchError(
            f"{where}: torch {torch.__version__} sees no CUDA device; install a CUDA build of torch on the nodes, "
            "or see that the job asks for GPUs"
        )
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise EnvironmentMismatchError(
            f"{where}: local rank {local_rank} needs a device of its own, but there are {count}"
        )
    device = torch.cuda.get_device_properties(local_rank % count)
    planned = gpu_spec(config.launch.gpu_type) if config.launch.gpu_type else None
    if planned and device.total_memory < PLAN_TOLERANCE * planned.memory_bytes and not config.launch.force:
        raise EnvironmentMismatchError(
            f"{where}: {device.name} has {format_bytes(device.total_memory)}, but the run was planned for "
            f"{planned.label}; ask Slurm for such nodes (launch.slurm.constraint), or plan with their launch.gpu_type"
        )


def limit_own_memory(config: RunConfig) -> None:
    """Have a rank on the CPU that would take more than its share of the machine's memory end, and not the machine."""
    if config.launch.device != "cpu" or sys.platform != "linux":
        return
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    data = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(data[1]) * 1024 if data else 0
    limit, most = held + detect_machine().memory_bytes // num_ranks, resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most < 0 else min(limit, most), most))


def check_ranks_agree(run: RunDirectory, config: RunConfig) -> None:
    """Have all ranks tell what they run on, record it, and refuse to train where they differ.

    Raises:
        EnvironmentMismatchError: on every rank, naming what differs and where.
    """
    facts = _facts(run, config)
    everyone: list[RankFacts | None] = [facts]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, facts)
    ranks = [found for found in everyone if found is not None]
    if is_first_rank():
        submitted = read_json(run.environment) if run.environment.exists() else {}
        write_json(run.environment, submitted | {"ranks": [asdict(found) for found in ranks]})
    differences = list(disagreements(ranks))
    if differences:
        raise EnvironmentMismatchError("; ".join(differences))


def disagreements(ranks: Sequence[RankFacts]) -> list[str]:
    """Return one sentence for each fact that is not the same on all ranks; processors may differ, devices may not."""
    sentences = []
    on_cuda = any(found.device_bytes is not None for found in ranks)
    for name in MUST_AGREE if on_cuda else MUST_AGREE[1:]:
        holders = defaultdict(list)
        for found in ranks:
            holders[getattr(found, name)].append(found)
        if len(holders) > 1:
            versions = (f"{value or 'none'} on {_places(found)}" for value, found in holders.items())
            sentences.append(f"the ranks differ in {name}: {', '.join(versions)}; make the nodes alike")
    return sentences


def _places(ranks: Sequence[RankFacts]) -> str:
    """Return the machines of ``ranks``, the first of them where they are many."""
    hosts = list(dict.fromkeys(found.host for found in ranks))
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return f"{', '.join(hosts[:3])}{more} (rank {ranks[0].rank}{', ...' if len(ranks) > 1 else ''})"


def _facts(run: RunDirectory, config: RunConfig) -> RankFacts:
    on_cuda = config.launch.device == "cuda"
    device = torch.cuda.get_device_properties(torch.cuda.current_device()) if on_cuda else None
    return RankFacts(
        rank=int(os.environ.get("RANK", "0")),
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        device=device.name if device else device_label("cpu"),
        device_bytes=device.total_memory if device else None,
        python=platform.python_version(),
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "",  # type: ignore[no-untyped-call]
        source=_digest(sorted(Path(llama_core.__file__).parent.rglob("*.py"))),
        request=_digest([run.config, run.plan]),
    )


def _digest(files: Sequence[Path]) -> str:
    """Return 12 hex digits that two lists of files share exactly when their contents are the same."""
    total = hashlib.sha256()
    for path in files:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:12]
