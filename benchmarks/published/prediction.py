"""Predict published memory figures from the configurations printed beside them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.footprint import Moment, moments, peak_bytes
from benchmarks.published.job import Job
from benchmarks.published.rows import Reader, Row
from llama_core.errors import DataError
from llama_core.rehearsal.device_overhead import RESERVED_OVER_HELD
from llama_core.units import GIB

SLACK = {"allocated": 1.0, "active": 1.0, "reserved": RESERVED_OVER_HELD}
"""Ratio of each statistic to the predicted bytes. Allocated and active are the bytes of tensors. Reserved memory also
has the allocator's slack, beyond the streams' pools; it is fitted on the project's own copy of the rows."""

_NEEDED = ("model", "framework", "seq_len", "method", "mem_stat")


@dataclass(frozen=True)
class Prediction:
    """The predicted peak memory of a row's GPU."""

    gib: float
    statistic: str
    """``allocated``, ``active`` or ``reserved``."""
    breakdown: Mapping[str, float]
    """GiB of tensors by category at the fullest moment; pools and slack come on top."""
    assumptions: tuple[str, ...]
    """The values assumed for empty or unclear cells."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header.

    Raises:
        DataError: if it cannot be read, or lacks a column that every prediction needs.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or ())
            rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    missing = [column for column in _NEEDED if column not in header]
    if missing:
        raise DataError(f"{path} has no column {', '.join(missing)}; its header is {', '.join(header) or 'empty'}")
    return rows


def predict(row: Row) -> Prediction:
    """Return the predicted figure of a row's configuration.

    Raises:
        ConfigError: if the row does not say enough, or names an unknown framework or model.
        PlanError: if its degrees of parallelism contradict each other.
    """
    reader = Reader(row)
    statistic = reader.statistic()
    capacity = reader.number("gpu_mem_gib") or float("inf")
    for job in reader.jobs():
        peak, moment = _peak(job, statistic, row.get("which_rank") or "")
        gib = peak * SLACK[statistic] / GIB
        if gib <= capacity:
            break
    return Prediction(
        gib=gib,
        statistic=statistic,
        breakdown={category: num_bytes / GIB for category, num_bytes in moment.items() if num_bytes},
        assumptions=tuple(reader.assumptions),
    )


def _peak(job: Job, statistic: str, which_rank: str) -> tuple[float, Moment]:
    """Return the peak in bytes of the rank that a figure is about, and its fullest moment."""
    ranks = list(range(job.pp))
    if "last" in which_rank.lower():
        ranks = ranks[-1:]
    elif which_rank.lower().replace(" ", "") == "rank0":
        ranks = ranks[:1]
    sums = statistic == "reserved" and job.framework.own_pools
    of_ranks = [list(moments(job, rank)) for rank in ranks]
    fullest = max(of_ranks, key=lambda of_rank: peak_bytes(of_rank, sum_of_pools=sums))
    return peak_bytes(fullest, sum_of_pools=sums), max(fullest, key=lambda moment: sum(moment.values()))
