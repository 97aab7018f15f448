"""Does a plan fit? Its peak against the memory limit, and the least recomputation that makes it fit."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from llama_core.config.run import RecomputeMode, RunConfig
from llama_core.planning.memory.estimate import estimate_ranks
from llama_core.planning.memory.host import host_memory
from llama_core.planning.memory.verdict import FILL_LIMIT
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.work import Work


class Fitting:
    """The memory limit for the plans of one run: ``FILL_LIMIT`` of the budget, on every rank.

    Args:
        config: the run.
        memory_budget_bytes: bytes each device has for the run; None for no limit.
    """

    def __init__(self, config: RunConfig, memory_budget_bytes: int | None) -> None:
        self.config = config
        self.budget = memory_budget_bytes
        self.limit = None if memory_budget_bytes is None else int(FILL_LIMIT * memory_budget_bytes)
        """Highest allowed peak of a rank, in bytes."""
        self._peaks: dict[ParallelPlan, tuple[int, ...]] = {}
        self._glances: dict[ParallelPlan, int] = {}

    def fits(self, plan: ParallelPlan) -> bool:
        """Return whether every rank of the pipeline stays within the limit."""
        return self.limit is None or self.peak_bytes(plan) <= self.limit

    def peak_bytes(self, plan: ParallelPlan) -> int:
        """Return the peak of the fullest rank."""
        return max(self.peaks(plan))

    def peaks(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Return the peak of every rank of the pipeline."""
        if plan not in self._peaks:
            self._peaks[plan] = self._held(plan)
        return self._peaks[plan]

    def glance(self, plan: ParallelPlan) -> int:
        """Return the approximate peak of the fullest rank, from the first, the middle and the last rank alone."""
        if plan not in self._glances:
            self._glances[plan] = max(self._held(plan, {0, plan.pp // 2, plan.pp - 1}))
        return self._glances[plan]

    def _held(self, plan: ParallelPlan, pp_ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return what ranks, by default all, take of the limit: their peaks or, on the CPU, their whole processes."""
        profiles = estimate_ranks(Work.of(self.config, plan), pp_ranks=pp_ranks)
        if self.config.launch.device != "cpu":
            return tuple(profile.peak_bytes for profile in profiles)
        return tuple(map(host_memory(self.config, plan).rank_bytes, profiles))

    def may_fit(self, plan: ParallelPlan) -> bool:
        """Return whether ``plan`` fits according to ``glance``."""
        return self.limit is None or self.glance(plan) <= self.limit

    def state_bytes(self, plan: ParallelPlan) -> int:
        """Return the bytes of weights, gradients and moments on the fullest rank."""
        profiles = estimate_ranks(Work.of(self.config, plan))
        return max(profile.state_bytes for profile in profiles)

    def with_least_recomputation(self, plan: ParallelPlan) -> ParallelPlan:
        """Return ``plan`` with the least recomputation that makes it fit; if nothing does, with as much as helps.

        That is ``selective`` on the fewest layers of each stage separately, or ``full`` if selective on all layers is
        not enough. A stage that still does not fit recomputes all its layers.
        """
        if self.limit is None or (self.may_fit(plan) and self.fits(plan)):
            return plan
        if self.may_fit(replace(plan, recompute="selective")):
            selective = self._least(plan, "selective", self.limit)
            if self.fits(selective):
                return selective
        return self._least(plan, "full", self.limit)

    def _least(self, plan: ParallelPlan, mode: RecomputeMode, limit: int) -> ParallelPlan:
        """Return ``plan`` with ``mode`` on the fewest layers of each stage."""
        available = tuple(len(layers) for layers in plan.stage_layers(self.config.spec))
        neighbourhoods = _neighbourhoods(plan)
        # stages of one rank share its memory, so they take turns
        turns = [_turns(stages, available) for stages in neighbourhoods]
        brackets = [_Bracket(len(own)) for own in turns]
        while not all(bracket.is_closed for bracket in brackets):
            tried = [bracket.next() for bracket in brackets]
            counts = _counted(turns, tried, len(available))
            peaks = self.peaks(replace(plan, recompute=mode, recomputed_layers=counts))
            for bracket, count, ranks in zip(brackets, tried, neighbourhoods.values(), strict=True):
                fullest = max(peaks[rank] for rank in ranks)
                bracket.note(count, fullest - limit)
        counts = _counted(turns, [bracket.most for bracket in brackets], len(available))
        everywhere = counts == available
        return replace(plan, recompute=mode, recomputed_layers=None if everywhere else counts)


class _Bracket:
    """The search for the fewest recomputed layers that leave no excess. The excess falls about linearly.

    Args:
        most: the number of layers, which is the answer if even all of them leave an excess.
    """

    def __init__(self, most: int) -> None:
        self.too_few = -1
        self.most = most
        self._excesses: dict[int, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to try."""
        return self.most - self.too_few <= 1 and self.most in self._excesses

    def next(self) -> int:
        """Return the next count to try: all, then none, then the zero of a line between the two nearest counts."""
        if self.is_closed or self.most not in self._excesses:
            return self.most
        if self.too_few < 0:
            return 0
        over = self._excesses[self.too_few]
        under = -self._excesses[self.most]
        guess = self.too_few + -(-over * (self.most - self.too_few) // max(1, over + under))
        return min(max(guess, self.too_few + 1), self.most - 1)

    def note(self, count: int, excess: int) -> None:
        """Record by how many bytes the limit is exceeded with ``count`` layers; 0 or less if it is not."""
        self._excesses[count] = excess
        if excess <= 0:
            self.most = min(self.most, count)
        elif count < self.most:
            self.too_few = max(self.too_few, count)
        else:
            self.too_few = self.most - 1  # not even all layers are enough


def _neighbourhoods(plan: ParallelPlan) -> dict[tuple[int, ...], list[int]]:
    """Return the pipeline ranks grouped by the stages they host."""
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    schedule = plan.layout
    for pp_rank in range(plan.pp):
        ranks_of.setdefault(tuple(sorted(schedule.stages_of(pp_rank))), []).append(pp_rank)
    return ranks_of


def _turns(stages: Iterable[int], available: Sequence[int]) -> list[int]:
    """Return the order in which stages of a rank recompute one layer more each, as far as they have layers."""
    turns: list[int] = []
    for turn in range(max(available)):
        turns += [stage for stage in stages if turn < available[stage]]
    return turns


def _counted(turns: list[list[int]], taken: list[int], num_stages: int) -> tuple[int, ...]:
    """Return how often each stage occurs among the turns taken."""
    counts = Counter[int]()
    for own, count in zip(turns, taken, strict=True):
        counts.update(own[:count])
    return tuple(counts[stage] for stage in range(num_stages))
