"""Predict published memory figures from the configurations printed beside them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.rows import Reader, Row
from llama_core.errors import DataError
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.peak import peak_of
from llama_core.units import GIB

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
    states_conditions: bool
    """Whether the row states all that its figure depends on."""


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
        peak = peak_of(job, statistic, _measured_ranks(job, row.get("which_rank") or ""))
        gib = peak.num_bytes / GIB
        if gib <= capacity:
            break
    return Prediction(
        gib=gib,
        statistic=statistic,
        breakdown={category: num_bytes / GIB for category, num_bytes in peak.breakdown.items() if num_bytes},
        assumptions=tuple(reader.assumptions),
        states_conditions=reader.states_conditions(),
    )


def _measured_ranks(job: Job, which_rank: str) -> list[int]:
    """Return the places in the pipeline that a figure may be about."""
    ranks = list(range(job.pp))
    if "last" in which_rank.lower():
        return ranks[-1:]
    if which_rank.lower().replace(" ", "") == "rank0":
        return ranks[:1]
    return ranks
