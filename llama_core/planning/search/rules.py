"""Choose a plan by rules, for a device of unknown speed such as the CPU."""

from dataclasses import replace

from llama_core.config.run import Offload
from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates, ScheduleChoice, Shape, Sharding, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

BUSY_MICROBATCHES = 4
"""Microbatches per pipeline rank that keep the bubble small: at most a fifth of the step under 1F1B."""
DEFAULT_CHUNKS = 2
"""Stages per rank of an interleaved pipeline."""


def plan_by_rules(candidates: Candidates, fitting: Fitting) -> ParallelPlan:
    """Return the first plan that fits, the most data-parallel first; if none fits, the one that misses by least.

    Among equally data-parallel shapes, the one with the fewest context-parallel, then pipeline ranks comes first. Each
    shape chooses in this order: ZeRO 3 if there are ranks to shard over; 1F1B; the microbatch; the least recomputation;
    with DeepSpeed, the least offload; and the form of a schedule that has several.

    Raises:
        PlanError: if no division of the devices is a valid plan; names the problem of the most data-parallel one.
    """
    problems = []
    unfit = []
    for shape in candidates.shapes():
        try:
            plan = _of_shape(candidates, fitting, shape)
        except PlanError as error:
            problems.append(error)
            continue
        if fitting.fits(plan):
            return plan
        unfit.append(plan)
    if unfit:
        return min(unfit, key=fitting.peak_bytes)
    raise problems[0] if problems else no_shape(candidates)


def no_shape(candidates: Candidates) -> PlanError:
    """Return the error for a batch that no division of the devices can split."""
    config = candidates.config
    ranks = candidates.asked.most_data_parallel
    size = next((size for size in config.batch_sizes if size % ranks), config.batch_size)
    nearest = -(-size // ranks) * ranks
    setting = "training.batch_size"
    if size != config.batch_sizes[0]:
        setting = "training.batch_ramp: batch_size"
    return PlanError(
        f"{setting}={size} cannot be divided among parallel.gpus={candidates.asked.gpus}; "
        f"use {nearest}, a multiple of the {ranks} data-parallel ranks"
    )


def _of_shape(candidates: Candidates, fitting: Fitting, shape: Shape) -> ParallelPlan:
    for offload in candidates.offloads():
        plan = _with_microbatch(candidates, fitting, shape, offload)
        if candidates.adapts:
            plan = fitting.with_least_recomputation(plan)
        if fitting.fits(plan):
            break
    return in_best_form(plan, fitting)


def _with_microbatch(
    candidates: Candidates,
    fitting: Fitting,
    shape: Shape,
    offload: Offload,
) -> ParallelPlan:
    """Return the plan with the largest microbatch that fits and keeps a pipeline busy, or with the smallest."""
    sizes = candidates.microbatch_sizes(shape)
    legal = [size for size in sizes if candidates.orders(shape, size)]
    busy = legal
    if shape.pp > 1:
        least = BUSY_MICROBATCHES * shape.pp
        busy = [size for size in legal if candidates.num_microbatches(shape, size) >= least]
    sharding = _sharding(candidates, shape)
    order = _order(candidates, shape)
    experts = candidates.expert_ranks(shape, sharding)[0]  # one, if it is not asked for
    # if none is legal, building the plan reports what is wrong with the last
    tried = busy or legal[-1:] or sizes[-1:]
    plans = [candidates.plan(Variant(shape, sharding, experts, order, size, offload)) for size in tried]
    *larger, smallest = plans
    return next(filter(fitting.fits, larger), smallest)


def _sharding(candidates: Candidates, shape: Shape) -> Sharding:
    """Return the sharding of the highest ZeRO stage, without copies unless they are asked for."""
    shardings = candidates.shardings(shape)
    most = max(sharding.zero_stage for sharding in shardings)
    return next(sharding for sharding in shardings if sharding.zero_stage == most)


def _order(candidates: Candidates, shape: Shape) -> ScheduleChoice:
    asked = candidates.asked
    schedule = DEFAULT_SCHEDULE if asked.schedule == "auto" else asked.schedule
    if asked.num_chunks != "auto":
        return ScheduleChoice(schedule, asked.num_chunks)
    has_chunks = schedule_type(schedule).takes_chunks and shape.pp > 1
    return ScheduleChoice(schedule, DEFAULT_CHUNKS if has_chunks else 1)


def in_best_form(plan: ParallelPlan, fitting: Fitting) -> ParallelPlan:
    """Return ``plan`` with the first form of its schedule that fits, or unchanged if none does.

    With at most ``pp`` microbatches, the forms do not differ.
    """
    if plan.pp == 1 or plan.num_microbatches <= plan.pp:
        return plan
    for form in map(schedule_type, schedule_type(plan.schedule).forms):
        if plan.microbatch_size % form.parts_per_microbatch:
            continue
        in_form = replace(plan, schedule=form.name)
        if fitting.fits(in_form):
            return in_form
    return plan
