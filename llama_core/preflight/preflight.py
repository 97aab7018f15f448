"""The check before the first step: all ranks measure themselves, and the first one names those that fall behind."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median

import torch

from llama_core.errors import RunDirectoryError
from llama_core.parallel.ranks import is_first_rank, on_first_rank
from llama_core.preflight.checks import AMOUNTS, CLOCK_SECONDS, PRODUCT, Check
from llama_core.preflight.measure import measure_rank
from llama_core.preflight.outliers import outliers
from llama_core.records.directory import RunDirectory
from llama_core.records.files import now, read_typed
from llama_core.records.measurements import ExpectedProduct, ExpectedStep
from llama_core.records.preflight import NamedRank, PreflightRecord, RankMeasurements, append_preflight
from llama_core.units import counted, format_duration

MAX_LINES = 8
"""Most ranks that are named on the console; the record has all of them."""

logger = logging.getLogger(__name__)


def measured_machines(run: RunDirectory, device: torch.device, hosts: Sequence[str]) -> PreflightRecord:
    """Measure every rank, and find those that are slow or have a fault; all ranks call it together.

    Args:
        run: the run.
        device: where this rank computes.
        hosts: the node of every rank, in order, as its scheduler names it.

    Returns:
        The record of all ranks on the first one; on the others an empty one.
    """
    started_at = now()
    began = time.perf_counter()
    ranks = on_first_rank(measure_rank(run.logs, device, hosts))
    if not is_first_rank():
        return PreflightRecord(started_at, 0.0, ())
    return PreflightRecord(
        started_at=started_at,
        seconds=time.perf_counter() - began,
        ranks=tuple(ranks),
        named=tuple(fallen_behind(ranks, AMOUNTS[device.type].checks, _expected_product(run))),
        unmeasured=tuple(_unmeasured(ranks)),
        usual={name: median(of_ranks.values()) for name, of_ranks in _by_check(ranks).items()},
    )


def tell(run: RunDirectory, record: PreflightRecord) -> None:
    """Name in the log the ranks that are slow or have a fault, and record the check."""
    for sentence in (*map(str, record.named[:MAX_LINES]), *record.unmeasured):
        logger.warning("preflight: %s", sentence)
    if len(record.named) > MAX_LINES:
        more = counted(len(record.named) - MAX_LINES, "other rank")
        logger.warning("preflight: %s fell behind, as %s tells", more, run.preflights)
    if record.excluded:
        logger.warning("preflight: the job starts again without %s", ", ".join(record.excluded))
    elif record.kept:
        logger.warning("preflight: the job keeps its nodes (launch.preflight=exclude): %s", record.kept)
    if not record.named:
        checked = counted(len(record.ranks), "rank")
        logger.info("preflight: %s checked in %.2f s, none behind its peers", checked, record.seconds)
    try:
        append_preflight(run, record)
    except OSError as error:
        logger.warning("preflight: not recorded in %s: %s", run.preflights, error.strerror or error)


def _expected_product(run: RunDirectory) -> ExpectedProduct | None:
    """Return what a product should take; None if nobody knows, or the record is damaged, of which ``doctor`` tells."""
    if not run.expected.exists():
        return None
    with suppress(RunDirectoryError):
        return read_typed(run.expected, ExpectedStep).product
    return None


def fallen_behind(
    ranks: Sequence[RankMeasurements], checks: Mapping[str, Check], product: ExpectedProduct | None = None
) -> Iterator[NamedRank]:
    """Yield the ranks that are slower than their peers by any check, or than expected, or whose machine has a fault.

    Args:
        ranks: what all ranks have measured.
        checks: the limits, by the name of a measurement.
        product: what a product should take on each; None if nobody knows.
    """
    findings = defaultdict(list)
    slowing = set()
    for name, seconds in _by_check(ranks).items():
        check = checks[name]
        places = list(seconds)
        slow = outliers(list(seconds.values()), share=check.share, least=check.least_seconds)
        for place, usual in slow.items():
            rank = places[place]
            findings[rank].append(f"{check.told} took {_told(seconds[rank])}, and {_told(usual)} on its peers")
            if check.slows_training:
                slowing.add(rank)
    for one in ranks:
        own = one.seconds.get(PRODUCT, 0.0)
        if product is not None and own > product.limit_seconds and not findings[one.rank]:
            expected = f"where {_told(product.seconds)} is expected ({product.told_by})"
            findings[one.rank].append(f"{checks[PRODUCT].told} took {_told(own)}, {expected}")
            slowing.add(one.rank)
        findings[one.rank] += one.faults
        if one.faults:
            slowing.add(one.rank)
        if abs(one.clock_ahead) > CLOCK_SECONDS:
            way = "ahead of" if one.clock_ahead > 0 else "behind"
            findings[one.rank].append(f"its clock is {format_duration(abs(one.clock_ahead))} {way} the others'")
    for one in ranks:
        if findings[one.rank]:
            yield NamedRank(one.rank, one.host, one.device, tuple(findings[one.rank]), one.rank in slowing)


def _by_check(ranks: Sequence[RankMeasurements]) -> dict[str, dict[int, float]]:
    """Return the seconds by rank, by the name of a measurement."""
    by_check: dict[str, dict[int, float]] = defaultdict(dict)
    for one in ranks:
        for name, seconds in one.seconds.items():
            by_check[name][one.rank] = seconds
    return by_check


def _told(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 10 else f"{1000 * seconds:.3g} ms"


def _unmeasured(ranks: Sequence[RankMeasurements]) -> Iterator[str]:
    """Yield what was not measured, with the ranks that could not, once for each reason."""
    ranks_of = defaultdict(list)
    for one in ranks:
        for reason in one.unmeasured:
            ranks_of[reason].append(one)
    for reason, of_reason in ranks_of.items():
        first = of_reason[0]
        more = f" and {counted(len(of_reason) - 1, 'other rank')}" if len(of_reason) > 1 else ""
        yield f"rank {first.rank} on {first.host}{more} could not measure {reason}"
