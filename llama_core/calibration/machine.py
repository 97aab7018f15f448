"""Calibrates this machine: measures the grids, and keeps them in its profile."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from llama_core.calibration.grid import Grid, gpu_grids, grids, in_order_of_need
from llama_core.calibration.profile import MachineProfile, figure
from llama_core.calibration.ranks import measure_on_ranks
from llama_core.config.measured_rates import Measured, MeasuredRates
from llama_core.errors import RequestError
from llama_core.machine.detect import compute_capability
from llama_core.units import counted

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply in fp8."""


@dataclass(frozen=True)
class Calibration:
    """A profile that was measured, and what of it was not."""

    profile: MachineProfile
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of sizes for which there was no time, by the first word of their kind."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why the device refused others, by the first word of their kind."""

    def lines(self, minutes: float | None) -> list[str]:
        """Return what was not measured, in a line for each reason."""
        lines = []
        if self.left_out:
            total = counted(sum(self.left_out.values()), "size")
            after = "" if minutes is None else f" after {minutes:g} minutes"
            lines.append(
                f"left out{after}: {total} of {', '.join(self.left_out)}; what was measured earlier is kept, and more "
                "--minutes measure all"
            )
        lines += [f"{name}: not measured, because the device refused it ({why})" for name, why in self.failed.items()]
        return lines


def calibrate(
    known: MachineProfile,
    ranks: Collection[int],
    only: Collection[str] = (),
    on_begin: Callable[[int, int], None] = lambda ranks, points: None,
    *,
    minutes: float | None = None,
) -> Calibration:
    """Return the profile of this machine with every grid measured anew.

    Sizes that runs have asked for are kept: they were measured by themselves. So is what an earlier calibration
    measured and this one has no time for.

    Args:
        known: what is known of the machine.
        ranks: numbers of ranks that compute at once.
        only: first words of the kinds to measure; all if there are none.
        on_begin: called with each of them, and with the number of operations, before these are measured.
        minutes: the time for all of it; by default as long as it takes.

    Raises:
        RequestError: if there are no kinds that begin with one of ``only``.
        TrainingFailedError: if a measurement fails.
    """
    of_ranks = {num_ranks: _grids(known, num_ranks) for num_ranks in ranks}
    _check_kinds(only, of_ranks)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    profile = known
    spread = dict(known.spread)
    left_out: dict[str, int] = {}
    failed: dict[str, str] = {}
    for place, num_ranks in enumerate(ranks):
        all_kinds = of_ranks[num_ranks]
        of_kinds = {kind: grid for kind, grid in all_kinds.items() if not only or kind.split()[0] in only}
        queries = in_order_of_need(of_kinds)
        on_begin(num_ranks, len(queries))
        seconds = None if end is None else max(1.0, (end - time.monotonic()) / (len(ranks) - place))
        answer = measure_on_ranks(num_ranks, queries, device=known.kind, seconds=seconds)
        kinds = dict(known.rates.get(num_ranks, MeasuredRates()).kinds)
        for kind, grid in of_kinds.items():
            taken = {sizes: answer.seconds[kind, sizes] for sizes in grid.points() if (kind, sizes) in answer.seconds}
            kinds[kind] = _measured_anew(kinds.get(kind, Measured()), grid.measured(taken))
        kinds = {kind: measured for kind, measured in kinds.items() if measured.grid or measured.points}
        profile = profile.with_rates(num_ranks, MeasuredRates(kinds))
        spread |= {figure(*query): value for query, value in answer.spread.items()}
        for kind, sizes in queries:
            name = kind.split()[0]
            if (kind, sizes) in answer.failed:
                failed[name] = answer.failed[kind, sizes]
            elif (kind, sizes) not in answer.seconds:
                left_out[name] = left_out.get(name, 0) + 1
    return Calibration(replace(profile, spread=spread), left_out, failed)


def _measured_anew(before: Measured, now: Measured) -> Measured:
    """Return what is known of a kind: an earlier grid tells more than some points, for which there was time."""
    grid = now if now.grid or not before.grid else before
    return grid.with_points({**before.points, **now.points})


def _grids(known: MachineProfile, num_ranks: int) -> dict[str, Grid]:
    if known.kind == "cpu":
        return grids(num_ranks)
    capability = compute_capability()
    return gpu_grids(num_ranks, has_fp8=capability is not None and capability >= FP8_CAPABILITY)


def _check_kinds(only: Collection[str], of_ranks: Mapping[int, Mapping[str, Grid]]) -> None:
    names = dict.fromkeys(kind.split()[0] for of_kinds in of_ranks.values() for kind in of_kinds)
    if unknown := [name for name in only if name not in names]:
        raise RequestError(f"there is no kind of operation {unknown[0]!r} to measure; the kinds are {', '.join(names)}")
