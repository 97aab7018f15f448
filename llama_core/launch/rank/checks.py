"""Checks on every rank before the model is built: the rank's own device, and that all ranks agree.

A login node can check neither. The ranks' facts go to ``environment.json``, beside those of the submitting machine.
"""

import hashlib
import logging
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import llama_core
from llama_core.config.hardware import gpu_spec
from llama_core.config.recorded import refuse_unrecorded_edits
from llama_core.config.run import RunConfig
from llama_core.data.datasets import Datasets
from llama_core.errors import DataError, EnvironmentMismatchError, RunDirectoryError, WeightsError
from llama_core.hugging_face.bases import refuse_other_base
from llama_core.hugging_face.pretrained import origin_of
from llama_core.machine.detect import detect_machine, device_label
from llama_core.machine.hazards import fitting_build
from llama_core.machine.node import own_host
from llama_core.machine.toolchain import check_can_compile, missing_for_kernels
from llama_core.machine.validate import FIRST_FOR_SEVERAL_NODES
from llama_core.parallel.ranks import first_complaint, from_first_rank, is_first_rank, own_rank, splits_without_gloo
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json
from llama_core.units import MIB, format_bytes

logger = logging.getLogger(__name__)

PLAN_TOLERANCE = 0.95
"""Share of the planned device's memory that a device must have: drivers reserve a few percent."""

FP8_CAPABILITY = (8, 9)
"""The oldest compute capability whose tensor cores multiply fp8: Ada's."""

TEMPORARY_BYTES = 64 * MIB
"""Room for temporary files that compiling a block can take."""


@dataclass(frozen=True)
class RankFacts:
    """The hardware and software of one rank."""

    rank: int
    host: str
    device: str
    """The vendor's name of the device."""
    device_bytes: int | None
    """Memory of the device; None for the CPU, whose memory the ranks of a machine share."""
    python: str
    torch: str
    nccl: str
    """Version of NCCL; empty on the CPU."""
    source: str
    """Digest of the installed ``llama_core``."""
    request: str
    """Digest of the run's configuration and plan, as this node sees them on the shared file system."""


MUST_AGREE = ("device", "python", "torch", "nccl", "source", "request")


def check_own_device(config: RunConfig, plan: ParallelPlan) -> None:
    """Refuse a node that cannot do what was planned for it, before the ranks meet.

    Raises:
        EnvironmentMismatchError: naming the rank and its node.
    """
    if config.launch.device != "cuda":
        return
    rank = os.environ.get("RANK", "0")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    where = f"rank {rank} on {socket.gethostname()}"
    if not torch.cuda.is_available():
        raise EnvironmentMismatchError(f"{where}: torch {torch.__version__} {_why_no_device()}")
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise EnvironmentMismatchError(
            f"{where}: local rank {local_rank} needs its own device, but there are only {count}"
        )
    device = torch.cuda.get_device_properties(local_rank % count)
    capability = device.major, device.minor
    if config.training.precision == "fp8" and (torch.version.hip or capability < FP8_CAPABILITY):
        raise EnvironmentMismatchError(
            f"{where}: training.precision=fp8 needs an NVIDIA GPU of compute capability 8.9 or newer, and this is "
            f"{device.name}; use bf16"
        )
    planned = gpu_spec(config.launch.gpu_type) if config.launch.gpu_type else None
    if planned and device.total_memory < PLAN_TOLERANCE * planned.memory_bytes and not config.launch.force:
        setting = config.launch.kind.such_nodes
        such_nodes = f"request such nodes ({setting}), or " if setting else ""
        raise EnvironmentMismatchError(
            f"{where}: {device.name} has {format_bytes(device.total_memory)}, but the run was planned for "
            f"{planned.label}; {such_nodes}plan for these (launch.gpu_type)"
        )
    if config.num_nodes > 1 and not splits_without_gloo():
        raise EnvironmentMismatchError(
            f"{where}: torch {torch.__version__} makes the groups of several nodes one by one, which takes minutes; "
            f"install torch {FIRST_FOR_SEVERAL_NODES} or newer"
        )
    if plan.compile:
        check_can_compile()
    elif missing := missing_for_kernels():
        logger.warning(
            "the loss runs in blocks, slower and in more memory than estimated, because %s lacks %s",
            *(socket.gethostname(), " and ".join(missing)),
        )


def _why_no_device() -> str:
    """Return why torch has no CUDA device, and what to do, after the name of torch."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        said = ""
    except (AssertionError, RuntimeError) as error:
        said = " ".join(str(error).split())
    old = re.search(r"driver on your system is too old \(found version (\d+)\)", said)
    if old:
        major, minor = divmod(int(old[1]) // 10, 100)
        return (
            f"is built for CUDA {torch.version.cuda}, but the node's driver runs CUDA {major}.{minor} at most; update "
            f"the driver{fitting_build(major, minor)}"
        )
    if torch.version.cuda is None:
        return "sees no CUDA device; install a CUDA build of torch on the nodes"
    return f"sees no CUDA device ({said.partition('. ')[0]}); make sure that the job requests GPUs"


def limit_own_memory(config: RunConfig) -> None:
    """Limit a rank on the CPU to its share of the machine's memory, so that the rank ends and not the machine."""
    if config.launch.device != "cpu" or sys.platform != "linux":
        return
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    data = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(data[1]) * 1024 if data else 0
    limit = held + detect_machine().memory_bytes // num_ranks
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most < 0 else min(limit, most), most))


def allow_open_files() -> None:
    """Raise the limit on open files as far as the system allows.

    The first rank keeps a connection to each other rank, and so does every rank in a group of gloo.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_room_for_temporary_files(run: RunDirectory) -> None:
    """Let this process, and those that it starts, keep temporary files in the run directory if TMPDIR cannot take them.

    Python finds another folder by itself; the C compiler that torch.compile and Triton start does not.

    Raises:
        OSError: if the run directory cannot take them either.
        EnvironmentMismatchError: if another user has made the folder there: compilers keep caches in it that run code.
    """
    usual = Path(os.environ.get("TMPDIR") or "/tmp")
    try:
        with tempfile.NamedTemporaryFile(dir=usual) as probe:
            probe.write(bytes(4096))
            probe.flush()
        free = shutil.disk_usage(usual).free
        problem = f"{format_bytes(free)} free" if free < TEMPORARY_BYTES else ""
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem:
        return
    folder = run.temporary(own_host()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EnvironmentMismatchError(
            f"{folder} belongs to another user; remove it, or free some space in {usual} on {own_host()}"
        )
    folder.chmod(0o700)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None  # None: look again
    logger.warning(
        "%s on %s cannot take temporary files (%s), which go to %s instead; free some space there, or set TMPDIR",
        *(usual, own_host(), problem, folder),
    )


def check_ranks_agree(run: RunDirectory, config: RunConfig) -> list[RankFacts]:
    """Gather, record and return the facts of all ranks, in order, and refuse to train if they differ.

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
    return ranks


def check_settings(run: RunDirectory, config: RunConfig) -> None:
    """Refuse to go on with other settings or another base than so far; all ranks call it together.

    Somebody may have edited or replaced them since the job was submitted, or since the attempt before this one.

    Raises:
        RunDirectoryError: on every rank, naming what differs.
    """
    problem = ""
    if is_first_rank():
        try:
            refuse_unrecorded_edits(run, config)
            if config.training.init_from is not None and run.base.exists():
                refuse_other_base(run, origin_of(Path(config.training.init_from)))
        except (RunDirectoryError, WeightsError) as error:
            problem = str(error)
    if problem := from_first_rank(problem):
        raise RunDirectoryError(problem)


def check_data_agrees(datasets: Datasets) -> None:
    """Refuse to train if the ranks have read different data.

    Raises:
        DataError: on every rank, naming one that differs from the first.
    """
    read = datasets.digests
    other = "" if from_first_rank(read) == read else f"rank {own_rank()} on {own_host()}"
    if other := first_complaint(other):
        raise DataError(
            f"{other} has read other data than rank 0: a file changed while the ranks started, or the nodes have "
            "different copies of it; make them the same and start again"
        )


def disagreements(ranks: Sequence[RankFacts]) -> list[str]:
    """Return one sentence for each fact that differs between ranks; CPUs may differ, GPUs may not."""
    sentences = []
    on_cuda = any(found.device_bytes is not None for found in ranks)
    for name in MUST_AGREE if on_cuda else MUST_AGREE[1:]:
        holders = defaultdict(list)
        for found in ranks:
            holders[getattr(found, name)].append(found)
        if len(holders) > 1:
            versions = (f"{value or 'none'} on {_places(found)}" for value, found in holders.items())
            sentences.append(f"the ranks differ in {name}: {', '.join(versions)}; make the nodes the same")
    return sentences


def _places(ranks: Sequence[RankFacts]) -> str:
    """Return the hosts of ``ranks``, naming at most three."""
    hosts = list(dict.fromkeys(found.host for found in ranks))
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return f"{', '.join(hosts[:3])}{more} (rank {ranks[0].rank}{', ...' if len(ranks) > 1 else ''})"


def _facts(run: RunDirectory, config: RunConfig) -> RankFacts:
    on_cuda = config.launch.device == "cuda"
    device = torch.cuda.get_device_properties(torch.cuda.current_device()) if on_cuda else None
    return RankFacts(
        rank=int(os.environ.get("RANK", "0")),
        host=own_host(),
        device=device.name if device else device_label("cpu"),
        device_bytes=device.total_memory if device else None,
        python=platform.python_version(),
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "",  # type: ignore[no-untyped-call]
        source=_digest(sorted(Path(llama_core.__file__).parent.rglob("*.py"))),
        request=_digest([run.config, run.plan]),
    )


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the contents of ``files`` in 12 hex digits."""
    total = hashlib.sha256()
    for path in files:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:12]
