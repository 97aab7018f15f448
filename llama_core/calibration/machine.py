"""Calibrates this machine: measures the grids, and keeps them in its profile."""

from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median

from llama_core.calibration.grid import grids
from llama_core.calibration.profile import MachineProfile
from llama_core.calibration.ranks import measure_on_ranks
from llama_core.config.measured_rates import MeasuredRates, Sizes
from llama_core.errors import RequestError


def calibrate(
    known: MachineProfile,
    ranks: Collection[int],
    only: Collection[str] = (),
    on_begin: Callable[[int, int], None] = lambda ranks, points: None,
) -> MachineProfile:
    """Return the profile of this machine with every grid measured anew.

    Sizes that runs have asked for are kept: they were measured by themselves.

    Args:
        known: what is known of the machine.
        ranks: numbers of ranks that compute at once.
        only: first words of the kinds to measure; all if there are none.
        on_begin: called with each of them, and with the number of operations, before these are measured.

    Raises:
        RequestError: if there are no kinds that begin with one of ``only``.
        TrainingFailedError: if a measurement fails.
    """
    names = dict.fromkeys(kind.split()[0] for kind in grids(max(ranks)))
    if unknown := [name for name in only if name not in names]:
        raise RequestError(f"there is no kind of operation {unknown[0]!r} to measure; the kinds are {', '.join(names)}")
    profile = known
    spreads: dict[str, list[float]] = {}
    for num_ranks in ranks:
        of_kinds = {kind: grid for kind, grid in grids(num_ranks).items() if not only or kind.split()[0] in only}
        queries = [(kind, sizes) for kind, grid in of_kinds.items() for sizes in grid.points()]
        on_begin(num_ranks, len(queries))
        answer = measure_on_ranks(num_ranks, queries)
        kinds = dict(known.rates.get(num_ranks, MeasuredRates()).kinds)
        for kind, grid in of_kinds.items():
            seconds: dict[Sizes, float] = {sizes: answer.seconds[kind, sizes] for sizes in grid.points()}
            points = kinds[kind].points if kind in kinds else {}
            kinds[kind] = grid.measured(seconds).with_points(points)
        profile = profile.with_rates(num_ranks, MeasuredRates(kinds))
        for (kind, _), spread in answer.spread.items():
            spreads.setdefault(kind.split()[0], []).append(spread)
    medians = {name: median(values) for name, values in sorted(spreads.items())}
    return replace(profile, spread={**known.spread, **medians})
