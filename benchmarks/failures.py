"""Simulate a month of training on a cluster whose nodes fail: ``python -m benchmarks.failures``.

Failures come at random at the constant rate of a published run. Each costs the work since the last durable checkpoint,
and a restart. The failed node is away until it is repaired; a spare node takes its place if there is one. The table
has the share of the time that became progress (goodput) for several intervals between checkpoints, bandwidths of the
storage, numbers of spare nodes and restart times. A GPU may also become slow, and all others with it, until it is left
out.
"""

import argparse
import heapq
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pages import rewrite

GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""419 unexpected interruptions in 54 days on 16,384 GPUs. Source: Llama Team, The Llama 3 Herd of Models, 2024."""
CHECKPOINT_BYTES = 12 * 405.85e9
"""Weights and both moments of Llama 3 405B in fp32."""
DAYS = 30
MONTHS = 40
"""Simulated months behind each figure."""


@dataclass(frozen=True)
class Cluster:
    """A job, the nodes that it may use, and how they fail; times in seconds."""

    gpus: int = 16384
    gpus_per_node: int = 8
    spare_nodes: int = 16
    repair_s: float = 24 * 3600
    """Time until a failed node is back."""
    bandwidth: float = 1e12
    """Bytes per second that the storage writes or reads, for all nodes together."""
    interval_s: float = 600
    """From the start of one checkpoint to the start of the next; at least as long as one takes."""
    stall_s: float = 2
    """Time that steps wait while a checkpoint is copied to the host; it is written while they go on."""
    restart_s: float = 300
    """From a failure to the first step, without loading the checkpoint: notice, requeue, start, build."""
    slowdowns_per_failure: float = 0.0
    """How often a GPU becomes slow. No published run says; the table assumes a tenth of its failures."""
    slow_share: float = 0.15
    """The share of the work that is missing while one is slow."""
    left_out_after_s: float = math.inf
    """How long the job keeps a slow GPU, unless it restarts before."""
    restart_leaves_out: bool = True
    """Whether a restart leaves slow GPUs out."""

    @property
    def save_s(self) -> float:
        """Time to write or read a checkpoint."""
        return CHECKPOINT_BYTES / self.bandwidth

    @property
    def mean_time_s(self) -> float:
        """Mean time between two failures of the job."""
        return GPU_HOURS_PER_FAILURE * 3600 / self.gpus


@dataclass
class Shares:
    """Where the time went, in seconds."""

    progress: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    """Work that was done again."""
    restarting: float = 0.0
    without_nodes: float = 0.0
    slowed: float = 0.0
    """Work that was missing because a GPU was slow."""

    @property
    def goodput(self) -> float:
        """Share of the time that became progress."""
        return float(self.progress / sum(astuple(self)))


class SlowGpu:
    """When a GPU of a job is slow; others that become slow meanwhile change nothing.

    Args:
        cluster: the job.
        seed: of the times at which they become slow.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._dice = random.Random(f"slow GPUs {seed}")
        self._rate = cluster.slowdowns_per_failure / cluster.mean_time_s
        self._kept_s = cluster.left_out_after_s
        self.since = 0.0
        """When the present one has become slow, or the next one will."""
        self.leave_out(0.0)

    @property
    def until(self) -> float:
        """When the job leaves it out, unless it restarts before."""
        return self.since + self._kept_s

    def leave_out(self, now: float) -> None:
        """Leave out the present one, if there is one."""
        if self.since <= now:
            self.since = now + (self._dice.expovariate(self._rate) if self._rate else math.inf)


def simulate(cluster: Cluster, seconds: float, seed: int = 0) -> Shares:
    """Return where the time of a run of at least ``seconds`` went."""
    dice = random.Random(seed)
    shares = Shares()
    interval = max(cluster.interval_s, cluster.save_s + cluster.stall_s)
    slow = SlowGpu(cluster, seed)
    repaired: list[float] = []
    now = 0.0
    spare = cluster.spare_nodes
    while now < seconds:
        lasts = min(dice.expovariate(1 / cluster.mean_time_s), seconds - now, max(0.0, slow.until - now))
        is_over = now + lasts >= seconds
        fails = not is_over and now + lasts < slow.until
        begun = int(lasts // interval)  # checkpoints begun, each after interval - stall of work
        durable = begun if lasts - begun * interval >= cluster.save_s + cluster.stall_s else max(begun - 1, 0)
        worked = lasts - begun * cluster.stall_s
        kept = durable * (interval - cluster.stall_s) if fails else worked
        is_slow = max(0.0, now + lasts - max(now, slow.since)) / lasts if lasts else 0.0
        missing = cluster.slow_share * is_slow * kept
        shares.saving += begun * cluster.stall_s
        shares.progress += kept - missing
        shares.slowed += missing
        shares.lost += worked - kept
        now += lasts
        if is_over:
            break
        if cluster.restart_leaves_out or not fails:
            slow.leave_out(now)
        if not fails:  # it saves a checkpoint before it leaves the slow one out
            shares.restarting += cluster.save_s
            now += cluster.save_s
        while repaired and repaired[0] <= now:
            heapq.heappop(repaired)
            spare += 1
        heapq.heappush(repaired, now + cluster.repair_s)
        if spare:
            spare -= 1
        else:
            back = heapq.heappop(repaired)
            shares.without_nodes += back - now
            now = back
        restart = cluster.restart_s + cluster.save_s
        shares.restarting += restart
        now += restart
    return shares


def goodput(cluster: Cluster) -> float:
    """Return the goodput over many months."""
    months = [simulate(cluster, DAYS * 86400, seed) for seed in range(MONTHS)]
    return sum(month.goodput for month in months) / MONTHS


def rows() -> list[tuple[str, ...]]:
    """Return the lines of the table: the varied setting, its value, and the goodput on 1,024, 4,096 and 16,384 GPUs."""
    usual = Cluster()
    varied: list[tuple[str, str, dict[str, Any]]] = [
        ("interval between checkpoints", text, {"interval_s": 60 * minutes})
        for minutes, text in ((1, "1 min"), (5, "5 min"), (10, "10 min *"), (30, "30 min"), (120, "2 h"))
    ]
    varied += [
        ("storage", text, {"bandwidth": bandwidth})
        for bandwidth, text in ((1e10, "10 GB/s"), (1e11, "100 GB/s"), (1e12, "1 TB/s *"))
    ]
    varied += [
        ("spare nodes", text, {"spare_nodes": nodes}) for nodes, text in ((0, "0"), (4, "4"), (8, "8"), (16, "16 *"))
    ]
    varied += [
        ("restart", text, {"restart_s": 60 * minutes})
        for minutes, text in ((2, "2 min"), (5, "5 min *"), (15, "15 min"), (30, "30 min"))
    ]
    kept = ((3 * 86400.0, False, "3 days"), (math.inf, True, "to the next restart"), (600.0, True, "10 min"))
    varied += [
        (
            "a slow GPU is kept",
            text,
            {"slowdowns_per_failure": 0.1, "left_out_after_s": seconds, "restart_leaves_out": at_restart},
        )
        for seconds, at_restart, text in kept
    ]
    return [
        (name, value, *(f"{goodput(replace(usual, gpus=gpus, **change)):.1%}" for gpus in (1024, 4096, 16384)))
        for name, value, change in varied
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it into a page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="a page whose table is rewritten, such as docs/scale.md")
    options = parser.parse_args(arguments)
    lines = ["| varied | value | 1,024 GPUs | 4,096 | 16,384 |", "|---|---|---|---|---|"]
    text = "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"
    sys.stdout.write(text)
    rewrite(options.page, "failures", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
