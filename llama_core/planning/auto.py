"""Choosing a plan: from what a run asks for and what a device holds to a ``ParallelPlan``."""

import re
from collections.abc import Iterator
from dataclasses import replace

from llama_core.config.run import ParallelConfig, RecomputeMode, RunConfig
from llama_core.errors import PlanError
from llama_core.planning.memory import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.profile import FILL_LIMIT

MAX_MICROBATCH_TOKENS = 32_768
"""Tokens of a microbatch above which its matrix products keep a device no busier, so that more only takes memory."""
BUSY_MICROBATCHES = 4
"""Microbatches per pipeline rank with which its bubble is small: at most a fifth of the step under 1F1B."""
DEFAULT_CHUNKS = 2
"""Stages per rank of an interleaved pipeline."""

_KEYS = {name: f"parallel.{name}" for name in ParallelConfig.model_fields}
_KEYS |= {"num_ranks": "parallel.pp", "seq_len": "training.seq_len"}
"""How a request spells what a plan calls by these names."""


def choose_plan(config: RunConfig, memory_budget_bytes: int | None) -> ParallelPlan:
    """Return the plan of ``config``, with everything that it leaves open chosen for the memory of a device.

    What fits is what leaves a margin: an estimated peak within ``FILL_LIMIT`` of the budget on every rank.

    * All devices that ``tp``, ``pp`` and ``cp`` leave are data-parallel; they shard, but for ``dp_replicate`` copies,
      or are all copies at ``zero_stage=0``.
    * The microbatch is the one asked for, else the largest divisor of a rank's share of the batch that fits, has at
      most ``MAX_MICROBATCH_TOKENS`` and gives every pipeline rank ``BUSY_MICROBATCHES``; where none does, the smallest.
    * ``recompute=adaptive`` recomputes only where even the smallest microbatch does not fit without, and then the
      least: ``selective`` on the fewest layers of every stage, each stage by itself, or ``full`` where selective on all
      of them is not enough. A stage that nothing makes fit recomputes all of its layers.
    * ``schedule=chimera`` becomes, once and for all ranks, what the least memory left on any rank of the pipeline
      allows: forward doubling if it fits, else backward halving if it fits and the microbatch can be cut in two, else
      direct concatenation. With one unit of microbatches or less there is nothing to choose.

    Where nothing fits, the plan is the leanest of those: its estimate tells by how much it does not fit.

    Args:
        config: what to run.
        memory_budget_bytes: bytes each device has for it; None where memory is no object.

    Raises:
        PlanError: if the request makes no valid plan, in the spelling of ``config``.
    """
    try:
        return _Search(config, memory_budget_bytes).choose()
    except PlanError as error:
        spelled = re.sub(rf"(?<![.\w])({'|'.join(_KEYS)})(?==)", lambda name: _KEYS[name[0]], str(error))
        raise PlanError(spelled) from None


class _Search:
    """The plans that one request allows, and which of them fit.

    Args:
        config: the request.
        memory_budget_bytes: bytes each device has; None where memory is no object.
    """

    def __init__(self, config: RunConfig, memory_budget_bytes: int | None) -> None:
        self.config, self.budget = config, memory_budget_bytes

    def choose(self) -> ParallelPlan:
        """Return the plan, chosen in this order: its microbatch, what is recomputed, the form of Chimera."""
        plan = self._with_microbatch()
        if self.config.parallel.recompute == "adaptive" and not self._fits(plan):
            plan = self._with_recomputation(plan)
        return self._with_chimera(plan) if plan.schedule == "chimera" else plan

    def _fits(self, plan: ParallelPlan, pp_ranks: tuple[int, ...] | None = None) -> bool:
        """Return whether ``plan`` leaves a margin on the given pipeline ranks, by default on all."""
        if self.budget is None:
            return True
        limit = FILL_LIMIT * self.budget
        ranks = range(plan.pp) if pp_ranks is None else pp_ranks
        return all(self._peak_bytes(plan, pp_rank) <= limit for pp_rank in ranks)

    def _peak_bytes(self, plan: ParallelPlan, pp_rank: int) -> int:
        config = self.config
        return estimate_memory(
            config.spec,
            plan,
            seq_len=config.seq_len,
            precision=config.training.precision,
            document_mask=config.data.document_mask,
            pp_rank=pp_rank,
        ).peak_bytes

    def _with_microbatch(self) -> ParallelPlan:
        """Return the plan with the microbatch asked for, or the largest that fits."""
        *larger, smallest = self._microbatch_sizes()
        return next(filter(self._fits, map(self._plan, larger)), None) or self._plan(smallest)

    def _microbatch_sizes(self) -> list[int]:
        """Return the sizes to try, the largest first."""
        parallel, pp = self.config.parallel, self.config.parallel.pp
        share = self.config.batch_size // self.config.data_parallel
        if parallel.microbatch_size or parallel.num_microbatches:
            return [parallel.microbatch_size or share // (parallel.num_microbatches or 1)]
        sizes = [size for size in range(share, 0, -1) if share % size == 0 and self._is_legal(size, share // size)]
        good = [
            size
            for size in sizes
            if size * self.config.seq_len // parallel.cp <= MAX_MICROBATCH_TOKENS
            and (pp == 1 or share // size >= BUSY_MICROBATCHES * pp)
        ]
        return good or sizes[-1:] or [1]  # the plan tells what is wrong with 1

    def _is_legal(self, size: int, num_microbatches: int) -> bool:
        parallel = self.config.parallel
        match parallel.schedule if parallel.pp > 1 else "1f1b":
            case "interleaved":
                return num_microbatches % parallel.pp == 0
            case "chimera_halving":
                return size % 2 == 0
        return True

    def _plan(self, microbatch_size: int) -> ParallelPlan:
        config, parallel = self.config, self.config.parallel
        dp, copies = config.data_parallel, parallel.dp_replicate if parallel.zero_stage else config.data_parallel
        interleaves = parallel.schedule == "interleaved" and parallel.pp > 1
        plan = ParallelPlan(
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            dp_shard=dp // copies,
            dp_replicate=copies,
            sequence_parallel=parallel.sequence_parallel,
            zero_stage=parallel.zero_stage,
            zero_backend=parallel.zero_backend,
            offload=parallel.offload,
            schedule=parallel.schedule,
            num_chunks=parallel.num_chunks or (DEFAULT_CHUNKS if interleaves else 1),
            microbatch_size=microbatch_size,
            num_microbatches=config.batch_size // (dp * microbatch_size),
            recompute="none" if parallel.recompute == "adaptive" else parallel.recompute,
            gradient_compression=parallel.gradient_compression,
            compile=parallel.compile,
        )
        plan.check(config.spec, seq_len=config.seq_len, precision=config.training.precision)
        return plan

    def _with_recomputation(self, plan: ParallelPlan) -> ParallelPlan:
        """Return ``plan`` with the least recomputation that makes it fit; where nothing does, with all that helps."""
        selective = self._least(plan, "selective")
        return selective if self._fits(selective) else self._least(plan, "full")

    def _least(self, plan: ParallelPlan, mode: RecomputeMode) -> ParallelPlan:
        """Return ``plan`` with ``mode`` on the fewest layers of every stage."""
        available = tuple(len(layers) for layers in plan.stage_layers(self.config.spec))
        plan = replace(plan, recompute=mode, recomputed_layers=available)
        counts = list(available)
        for ranks, stages in _neighbourhoods(plan):
            # stages of one rank share its memory, so that they take turns
            turns = [stage for turn in range(max(available)) for stage in stages if turn < available[stage]]
            least, most = 0, len(turns)
            while least < most:
                middle = (least + most) // 2
                if self._fits(replace(plan, recomputed_layers=_counted(turns[:middle], counts, stages)), ranks):
                    most = middle
                else:
                    least = middle + 1
            counts = list(_counted(turns[:least], counts, stages))
        return replace(plan, recomputed_layers=None if tuple(counts) == available else tuple(counts))

    def _with_chimera(self, plan: ParallelPlan) -> ParallelPlan:
        """Return ``plan`` with the form of Chimera that fits and idles least."""
        if plan.pp == 1 or plan.num_microbatches <= plan.pp:
            return plan
        forms = [replace(plan, schedule="chimera_doubling")]
        if plan.microbatch_size % 2 == 0:
            forms.append(replace(plan, schedule="chimera_halving"))
        return next(filter(self._fits, forms), plan)


def _neighbourhoods(plan: ParallelPlan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the pipeline ranks that host the same stages, and those stages."""
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    schedule = plan.build_schedule()
    for pp_rank in range(plan.pp):
        ranks_of.setdefault(tuple(sorted(schedule.stages_of(pp_rank))), []).append(pp_rank)
    for stages, ranks in ranks_of.items():
        yield tuple(ranks), stages


def _counted(turns: list[int], counts: list[int], stages: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``counts`` with those of ``stages`` as often as they are in ``turns``."""
    return tuple(turns.count(stage) if stage in stages else count for stage, count in enumerate(counts))
