"""The ranks of a job: how they find each other, and small things they agree on."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan

T = TypeVar("T")
N = TypeVar("N", int, float)

CONNECTS_TO_ALL = 1024
"""Most ranks of a job in which gloo connects each to every other when they join, so that all see at once that one is
lost. With 8,192 ranks that takes longer than ranks wait for each other; there, two connect when they first talk."""

_groups = count()
"""Numbers the groups that a process joins; the numbers agree on all ranks, because ranks join together."""

PATIENCE = timedelta(days=1)
"""How long ranks wait for work that may take hours, such as tokenising a data set or writing a checkpoint."""

_THREADS = Path("/proc/self/task")
_MAX_SECONDS_AWAKE = 10
"""How long a rank that has ended waits for gloo's threads, some of which a lost rank may keep busy."""


@contextmanager
def joined_ranks(
    device_type: str, timeout_s: int, *, deterministic: bool = False, even_alone: bool = False
) -> Iterator[None]:
    """Join the default process group for the duration of the block, from the environment of a launcher or torchrun.

    A process alone (WORLD_SIZE unset or 1) needs no group. After an error the group stays as it is: destroying it
    would need the other ranks, which may be gone.

    Args:
        device_type: where the ranks compute.
        timeout_s: how long a rank waits for the others before it gives up, in this group and those made from it.
        deterministic: use only deterministic kernels on CUDA, from now on.
        even_alone: make a group for a single process too.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)
    if deterministic and device_type == "cuda":
        # cuBLAS reads the variable when it starts. NCCL's constructor reads torch's flag: it then leaves NVLS out.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    backend = "gloo"
    device = None
    if device_type == "cuda":
        # A bound device: NCCL connects now, where an error names this call, and split_ranks divides its communicator.
        backend = "cpu:gloo,cuda:nccl"
        device = this_device(device_type)
        torch.cuda.set_device(device)
    # groups made later use these by default, whatever timeout the default group has
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    if world_size == 1:
        if even_alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        yield
        if even_alone:
            _leave_group()
        return
    if world_size > CONNECTS_TO_ALL:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo reads it when it makes its first group
    # After a restart by torchrun the store still holds the addresses of the ranks that are gone.
    generation = f"generation{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_groups)}"
    is_host = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_host, timeout=timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(generation, store),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timeout,
        device_id=device,
    )
    yield
    _leave_group()


def _leave_group() -> None:
    """Destroy the process groups, and wait until gloo's threads sleep.

    Torch's caches hold groups until the process ends, and with them these threads. One that lets go of the tensor of
    its last transfer takes the interpreter's lock; if the interpreter is ending by then, that aborts the process
    (pytorch/pytorch#190489).
    """
    dist.destroy_process_group()
    until = time.monotonic() + _MAX_SECONDS_AWAKE
    times_asleep = 0
    while times_asleep < 2 and time.monotonic() < until:
        time.sleep(0.001)  # without the interpreter's lock: a thread that waits for it wakes, and is seen running
        times_asleep = 0 if any(map(_runs_gloo, _THREADS.glob("*"))) else times_asleep + 1


def _runs_gloo(thread: Path) -> bool:
    """Return whether ``thread``, a directory in /proc, is one of gloo's that does not sleep."""
    try:
        if (thread / "comm").read_text().strip() != "pt_gloo_runloop":
            return False
        after_name = (thread / "stat").read_text().rpartition(")")[2]
    except OSError:  # it has ended
        return False
    return after_name.split()[0] != "S"


def has_bound_device() -> bool:
    """Return whether the default group is bound to a device, so that NCCL splits other groups from its communicator."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def split_ranks(partition: Sequence[Sequence[int]], *, on_host: bool = False) -> dist.ProcessGroup | None:
    """Make a process group of each list of ranks, and return the one of this rank; None if it is in no list.

    All ranks of the job must call it with the same lists, in the same order as their other calls. On CUDA the groups
    are split from the communicator of all ranks, by one call where torch can (2.13), and have no gloo: they transfer
    device memory only.

    Args:
        partition: lists of global ranks, in ascending order; no rank is in two of them.
        on_host: make groups of gloo in any case, which transfer host memory.
    """
    on_cuda = has_bound_device() and not on_host
    if on_cuda and splits_without_gloo():
        listed = {rank for ranks in partition for rank in ranks}
        # torch names a group after its ranks and the number of groups that a rank has. That number is the same on all
        # ranks only if each gets a group from every split.
        alone = [[rank] for rank in range(dist.get_world_size()) if rank not in listed]
        group = dist.split_group(split_ranks=[*map(list, partition), *alone], backend="cuda:nccl")
        return group if dist.get_rank() in listed else None
    backend = "nccl" if on_cuda else None
    if on_host:
        backend = "gloo"
    mine = None
    for ranks in partition:
        group = dist.new_group(list(ranks), backend=backend)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def splits_without_gloo() -> bool:
    """Return whether torch can split a group for CUDA alone; from 2.13 on."""
    return "backend" in signature(dist.split_group).parameters


def check_started(plan: ParallelPlan) -> None:
    """Refuse a plan whose number of ranks is not the number started.

    Raises:
        PlanError: naming both numbers.
    """
    started = dist.get_world_size() if dist.is_initialized() else 1
    if started != plan.world_size:
        raise PlanError(f"the plan has {plan.world_size} ranks, but {started} were started")


def this_device(device_type: str) -> torch.device:
    """Return the device of this rank; on CUDA, the GPU of its local rank."""
    if device_type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device(device_type)


@contextmanager
def one_per_machine_first() -> Iterator[None]:
    """Let one rank of each machine run the block before the others, which then find its results there."""
    if not dist.is_initialized():
        yield
        return
    everyone = _patient_group(dist.group.WORLD)
    goes_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not goes_first:
        dist.barrier(everyone)
    yield
    if goes_first:
        dist.barrier(everyone)


def wait_for_all() -> None:
    """Wait until all ranks arrive, even if some take hours."""
    if dist.is_initialized():
        dist.barrier(_patient_group(dist.group.WORLD))


@lru_cache(maxsize=1)
def _patient_group(everyone: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the gloo group of ``everyone``, all ranks, in which they wait for each other for hours."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PATIENCE)
    return group


def has_lost_the_others(error: BaseException) -> bool:
    """Return whether ``error`` says that another rank is gone or does not answer, so this rank is not at fault."""
    if not dist.is_initialized():  # another rank may have died while this one was joining it
        return isinstance(error, dist.DistNetworkError) and any(words in str(error) for words in _GONE)
    of_the_store = isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError)
    return of_the_store or any(words in str(error) for words in (*_GONE, *_LIBRARIES_SAY))


_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""The kernel's words for a connection whose other process has died, which gloo and the store quote."""

_LIBRARIES_SAY = (
    # gloo; the latter two say that the other rank is lost before this one has talked to it
    "Timed out waiting",
    "timed out connecting",
    "Connect timeout",
    # NCCL: ncclRemoteError, and the watchdog of torch
    "remote process exit",
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def is_joined() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_initialized()


def own_rank() -> int:
    """Return this process's rank; 0 if it is the only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Return whether this is rank 0, or the only one."""
    return own_rank() == 0


def from_first_rank(value: T) -> T:
    """Return rank 0's value on all ranks; it must be picklable."""
    return from_rank(0, value)


def from_rank(rank: int, value: T) -> T:
    """Return one rank's value on all ranks; it must be picklable."""
    if not dist.is_initialized():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=rank, device=torch.device("cpu"))
    return holder[0]


def on_first_rank(value: T) -> list[T]:
    """Return the values of all ranks on the first rank, and nothing on the others; they must be picklable."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if is_first_rank() else None
    dist.gather_object(value, values)
    return values or []


def first_complaint(complaint: str) -> str:
    """Return one rank's complaint on all ranks; "" if no rank has one."""
    (of_rank,) = most_over_ranks(own_rank() + 1 if complaint else 0)
    if not of_rank or not dist.is_initialized():
        return complaint
    return from_rank(of_rank - 1, complaint)


def most_over_ranks(*values: int) -> tuple[int, ...]:
    """Return the largest of each value over all ranks."""
    if not dist.is_initialized():
        return values
    most = torch.tensor(values)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return tuple(most.tolist())


def of_every_rank(value: N) -> tuple[N, ...]:
    """Return the values of all ranks, in order."""
    if not dist.is_initialized():
        return (value,)
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    values = torch.zeros(dist.get_world_size(), dtype=dtype)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return tuple(values.tolist())


def most_over_devices(device: torch.device, *values: float) -> Tensor:
    """Return the largest of each value over all ranks, as fp64 on ``device``, without waiting for it."""
    return _over_devices(device, values, dist.ReduceOp.MAX)


def sum_over_devices(device: torch.device, *values: float) -> Tensor:
    """Return the sum of each value over all ranks, as fp64 on ``device``, without waiting for it."""
    return _over_devices(device, values, dist.ReduceOp.SUM)


def of_every_device(values: Tensor) -> Tensor:
    """Return some values, [values], of every rank, [values, ranks], without waiting for the device that knows them."""
    by_rank = values.new_zeros(len(values), num_ranks())
    by_rank[:, own_rank()] = values
    if dist.is_initialized():
        dist.all_reduce(by_rank)
    return by_rank


def _over_devices(device: torch.device, values: Sequence[float], op: Any) -> Tensor:
    own = torch.tensor(values, dtype=torch.float64)
    reduced = (own.pin_memory() if device.type == "cuda" else own).to(device, non_blocking=True)
    if dist.is_initialized():
        dist.all_reduce(reduced, op=op)
    return reduced
