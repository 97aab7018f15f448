"""Times a rank's device, memory, links and disk for a moment, at the same time as all other ranks."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from llama_core.machine.detect import device_label
from llama_core.parallel.ranks import num_ranks, own_rank
from llama_core.preflight.checks import (
    AMOUNTS,
    COPY,
    EXCHANGE_ACROSS,
    EXCHANGE_INSIDE,
    PRODUCT,
    WRITE,
    Amounts,
)
from llama_core.preflight.gpu_health import HealthReader
from llama_core.records.preflight import RankMeasurements

CLOCK_LOOKS = 3
"""How often all ranks read their clocks at once; the look that disturbs a rank least counts."""


def measure_rank(folder: Path, device: torch.device, hosts: Sequence[str]) -> RankMeasurements:
    """Return what this rank measures; all ranks call it together.

    Args:
        folder: where a file is written and removed.
        device: where this rank computes.
        hosts: the node of every rank, in order.
    """
    own = _Measuring(folder, device, hosts)
    own.compute()
    own.exchange()
    own.write()
    on_cuda = device.type == "cuda"
    name = f"{torch.cuda.get_device_name(device)}, {device}" if on_cuda else device_label("cpu")
    return RankMeasurements(
        rank=own_rank(),
        host=hosts[own_rank()],
        device=name,
        seconds=own.seconds,
        clock_ahead=_clock_ahead() if own.has_several_nodes else 0.0,
        faults=tuple(own.faults),
        unmeasured=tuple(own.unmeasured),
    )


class _Measuring:
    """The measurements of one rank; the arguments are those of ``measure_rank``."""

    def __init__(self, folder: Path, device: torch.device, hosts: Sequence[str]) -> None:
        self.folder = folder
        self.device = device
        self.hosts = hosts
        self.amounts: Amounts = AMOUNTS[device.type]
        self.seconds: dict[str, float] = {}
        self.faults: list[str] = []
        self.unmeasured: list[str] = []

    def compute(self) -> None:
        """Time products and copies, and look at the GPU's health meanwhile."""
        health = HealthReader(self.device) if self.device.type == "cuda" else None
        try:
            self._compute(health)
        except RuntimeError as error:  # the device refuses; a later step that needs it says more
            self.unmeasured.append(f"its device, because of: {str(error).strip().splitlines()[0]}")
        if self.device.type == "cuda":
            _forget_workspaces()
        if health is not None:
            health.look_at_memory()
            self.faults += health.faults
            self.unmeasured += [health.unread] if health.unread else []

    def _compute(self, health: HealthReader | None) -> None:
        amounts = self.amounts
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        # ones would keep a GPU cooler than weights do; a generator of its own leaves the run's random numbers alone
        generator = torch.Generator(self.device).manual_seed(0)
        side = (amounts.product_side, amounts.product_side)
        left = torch.empty(side, dtype=dtype, device=self.device).normal_(generator=generator)
        right = torch.empty(side, dtype=dtype, device=self.device).normal_(generator=generator)
        result = torch.empty_like(left)
        self.seconds[PRODUCT] = multiplying(left, right, result, amounts, health)
        del left, right, result
        source = torch.zeros(amounts.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.seconds[COPY] = best_seconds(lambda: target.copy_(source), self.device, amounts.repeats)

    def exchange(self) -> None:
        """Time exchanges with the ranks beside this one in its node, and with the ranks of its place in other nodes.

        All ranks of an all-reduce take as long as each other, so it would tell of a slow link but not whose it is. Here
        each rank has two partners and counts the better one, so that only the rank that is slow with both is slow.
        """
        rank = own_rank()
        partners = {EXCHANGE_ACROSS: partners_across(self.hosts, rank)}
        if self.device.type == "cuda":  # CPU ranks of a node share a memory, whose speed the copy tells
            partners[EXCHANGE_INSIDE] = partners_inside(self.hosts, rank)
        for name, of_kind in partners.items():
            times = [exchanging(partner, self.device, self.amounts) for partner in of_kind]
            if times:
                self.seconds[name] = min(times)

    def write(self) -> None:
        """Try whether the first rank of each node can write to the run's folder.

        Where several nodes can be compared, the write is timed until it is on the disk.
        """
        if self.hosts.index(self.hosts[own_rank()]) != own_rank():
            return
        path = self.folder / f".preflight-{own_rank()}.tmp"
        began = time.perf_counter()
        try:
            with path.open("wb") as file:
                file.write(bytes(self.amounts.write_bytes))
                if self.has_several_nodes:
                    file.flush()
                    os.fsync(file.fileno())
            if self.has_several_nodes:
                self.seconds[WRITE] = time.perf_counter() - began
        except OSError as error:
            self.unmeasured.append(f"a write to {self.folder}: {error.strerror or error}")
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    @property
    def has_several_nodes(self) -> bool:
        """Whether there are other nodes to compare this one with."""
        return len(set(self.hosts)) > 1


def multiplying(
    left: torch.Tensor, right: torch.Tensor, result: torch.Tensor, amounts: Amounts, health: HealthReader | None
) -> float:
    """Return the best seconds of a product, and look at the clocks of a GPU while it multiplies."""
    best = best_seconds(
        lambda: torch.mm(left, right, out=result), left.device, amounts.repeats, in_repeat=amounts.in_repeat
    )
    if health is not None:
        for _ in range(amounts.in_repeat):
            torch.mm(left, right, out=result)
        health.look_at_clocks()  # while the device still works on these
    return best


def exchanging(partner: int, device: torch.device, amounts: Amounts) -> float:
    """Return the best seconds in which this rank and its partner send each other some data; both call it."""
    sent = torch.zeros(amounts.exchange_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    best = best_seconds(lambda: _swap(sent, received, partner), device, amounts.exchanges)
    # the one that comes later waits less; both count what the other one has waited
    own = torch.tensor([best], dtype=torch.float64, device=device)
    other = torch.empty_like(own)
    _swap(own, other, partner)
    return max(best, float(other))


def _swap(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for transfer in dist.batch_isend_irecv(both):
        transfer.wait()


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int, *, in_repeat: int = 1) -> float:
    """Return the seconds of the fastest run: whatever else a machine does only makes the others slower.

    Args:
        run: what is timed; its first call sets up kernels and connections, and does not count.
        device: where it computes.
        repeats: timed calls, or groups of calls.
        in_repeat: calls that are timed together, so that a GPU always has the next one in its queue.
    """
    run()
    _wait(device)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(in_repeat):
            run()
        _wait(device)
        best = min(best, (time.perf_counter() - began) / in_repeat)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_workspaces() -> None:
    """Free what the products have left on the GPU, so that it does not count as the run's."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def partners_inside(hosts: Sequence[str], rank: int) -> list[int]:
    """Return the ranks of its node that a rank exchanges data with, in order; empty if it is alone there."""
    return list(_partners([other for other, host in enumerate(hosts) if host == hosts[rank]], rank))


def partners_across(hosts: Sequence[str], rank: int) -> list[int]:
    """Return the ranks of other nodes that a rank exchanges data with, in order: those of the same place there."""
    ranks_of = defaultdict(list)
    for other, host in enumerate(hosts):
        ranks_of[host].append(other)
    place = ranks_of[hosts[rank]].index(rank)
    return list(_partners([ranks[place] for ranks in ranks_of.values() if place < len(ranks)], rank))


def _partners(ring: Sequence[int], rank: int) -> Iterator[int]:
    """Yield the neighbours of a rank in a ring, in an order in which all pairs of the ring can meet in turn.

    First every even place meets the one after it, then the one before it; in an odd ring, the ends meet last.
    """
    place = ring.index(rank)
    if len(ring) < 3:
        yield from (other for other in ring if other != rank)
        return
    after = ring[(place + 1) % len(ring)]
    before = ring[place - 1]
    is_last_of_odd = len(ring) % 2 == 1 and place == len(ring) - 1
    yield from (after, before) if place % 2 == 0 and not is_last_of_odd else (before, after)


def _clock_ahead() -> float:
    """Return the seconds that this rank's clock is ahead of most others."""
    offsets: list[float] = []
    for _ in range(CLOCK_LOOKS):
        clocks = torch.zeros(num_ranks(), dtype=torch.float64)
        dist.all_reduce(torch.zeros(1))  # all ranks leave it at once
        clocks[own_rank()] = time.time()
        dist.all_reduce(clocks)
        own = float(clocks[own_rank()])
        offsets.append(own - median_low(clocks.tolist()))
    return min(offsets, key=abs)
