"""Calibrates this machine: measures the grids, and keeps them in its profile."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from llama_core.calibration.grid import grids
from llama_core.calibration.profile import MachineProfile
from llama_core.calibration.ranks import measure_on_ranks
from llama_core.config.measured_rates import MeasuredRates, Sizes


def calibrate(
    known: MachineProfile, ranks: Iterable[int], on_begin: Callable[[int, int], None] = lambda ranks, points: None
) -> MachineProfile:
    """Return the profile of this machine with every grid measured anew.

    Sizes that runs have asked for are kept: they were measured by themselves.

    Args:
        known: what is known of the machine.
        ranks: numbers of ranks that compute at once.
        on_begin: called with each of them, and with the number of operations, before these are measured.

    Raises:
        TrainingFailedError: if a measurement fails.
    """
    profile = known
    spreads: dict[str, list[float]] = {}
    for num_ranks in ranks:
        of_kinds = grids(num_ranks)
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
    return replace(profile, spread={name: median(values) for name, values in sorted(spreads.items())})
