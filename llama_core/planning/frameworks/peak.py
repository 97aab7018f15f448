"""The predicted peak memory of a job: that of its fullest rank, in the statistic that a framework prints."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llama_core.planning.frameworks.footprint import moments, peak_bytes
from llama_core.planning.frameworks.job import Job

RESERVED_OVER_HELD = 1.04
"""Ratio of the bytes a caching allocator reserves to those of tensors, fitted to published figures: docs/memory.md."""
SLACK = {"allocated": 1.0, "active": 1.0, "reserved": RESERVED_OVER_HELD}
"""Ratio of each statistic to the predicted bytes. Allocated and active are the bytes of tensors. Reserved memory also
has the allocator's slack, beyond the streams' pools; it is fitted on the project's own copy of the rows."""


@dataclass(frozen=True)
class Peak:
    """The memory of the fullest rank of a job."""

    num_bytes: float
    """In the statistic that was asked for."""
    statistic: str
    """``allocated``, ``active`` or ``reserved``."""
    pp_rank: int
    """The fullest rank's place in the pipeline."""
    breakdown: Mapping[str, float]
    """Bytes of tensors by category at its fullest moment; pools and slack come on top."""


def peak_of(job: Job, statistic: str, pp_ranks: Iterable[int] | None = None) -> Peak:
    """Return the predicted peak of a job.

    Args:
        job: the job.
        statistic: ``allocated``, ``active`` or ``reserved``.
        pp_ranks: places in the pipeline to look at; by default all of them.
    """
    # a block freed on one stream is never handed to another, so their peaks add up in what is reserved
    sums = statistic == "reserved" and job.framework.own_pools
    ranks = range(job.pp) if pp_ranks is None else pp_ranks
    of_ranks = {rank: list(moments(job, rank)) for rank in ranks}
    fullest = max(of_ranks, key=lambda rank: peak_bytes(of_ranks[rank], sum_of_pools=sums))
    of_fullest = of_ranks[fullest]
    return Peak(
        num_bytes=peak_bytes(of_fullest, sum_of_pools=sums) * SLACK[statistic],
        statistic=statistic,
        pp_rank=fullest,
        breakdown=max(of_fullest, key=lambda moment: sum(moment.values())),
    )
