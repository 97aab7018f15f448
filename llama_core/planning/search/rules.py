"""Choosing a plan without knowing how fast a device is: by rules, as on the CPU."""

from dataclasses import replace

from llama_core.config.run import Offload
from llama_core.errors import PlanError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.search.candidates import Candidates, Order, Shape, Sharding, Variant
from llama_core.planning.search.fitting import Fitting
from llama_core.schedules.registry import DEFAULT_SCHEDULE, schedule_type

BUSY_MICROBATCHES = 4
"""Microbatches per pipeline rank with which its bubble is small: at most a fifth of the step under 1F1B."""
DEFAULT_CHUNKS = 2
"""Stages per rank of an interleaved pipeline."""


def plan_by_rules(candidates: Candidates, fitting: Fitting) -> ParallelPlan:
    """Return the first plan that fits, data parallelism first; where none does, the one that misses by least.

    Of shapes that are equally data-parallel, that with fewer pipeline ranks comes first. Each fills in, in this order:
    ZeRO 3 where there is somebody to shard with; 1F1B; the microbatch; the least recomputation; what is kept in host
    memory, where DeepSpeed may; the form of a schedule that has several.

    Raises:
        PlanError: if no division of the devices makes a plan, with what is wrong with the most data-parallel one.
    """
    problems, unfit = [], []
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
    """Return the error of a request whose batch no division of the devices divides."""
    config, ranks = candidates.config, candidates.asked.most_data_parallel
    nearest = -(-config.batch_size // ranks) * ranks
    return PlanError(
        f"training.batch_size={config.batch_size} cannot be divided among parallel.gpus={candidates.asked.gpus}; "
        f"use {nearest}, a multiple of {ranks} data-parallel ranks"
    )


def _of_shape(candidates: Candidates, fitting: Fitting, shape: Shape) -> ParallelPlan:
    for offload in candidates.offloads():
        plan = _with_microbatch(candidates, fitting, shape, offload)
        if candidates.adapts:
            plan = fitting.with_least_recomputation(plan)
        if fitting.fits(plan):
            break
    return in_best_form(plan, fitting)


def _with_microbatch(candidates: Candidates, fitting: Fitting, shape: Shape, offload: Offload) -> ParallelPlan:
    """Return the plan with the largest microbatch that fits and keeps a pipeline busy, else with the smallest."""
    sizes = candidates.microbatch_sizes(shape)
    legal = [size for size in sizes if candidates.orders(shape, size)]
    busy = [
        size
        for size in legal
        if shape.pp == 1 or candidates.num_microbatches(shape, size) >= BUSY_MICROBATCHES * shape.pp
    ]
    sharding, order = _sharding(candidates, shape), _order(candidates, shape)
    *larger, smallest = [
        candidates.plan(Variant(shape, sharding, order, size, offload))
        for size in busy or legal[-1:] or sizes[-1:]  # the plan tells what is wrong with the last
    ]
    return next(filter(fitting.fits, larger), smallest)


def _sharding(candidates: Candidates, shape: Shape) -> Sharding:
    """Return the most that is divided, without copies unless they are asked for."""
    shardings = candidates.shardings(shape)
    most = max(sharding.zero_stage for sharding in shardings)
    return next(sharding for sharding in shardings if sharding.zero_stage == most)


def _order(candidates: Candidates, shape: Shape) -> Order:
    asked = candidates.asked
    schedule = DEFAULT_SCHEDULE if asked.schedule == "auto" else asked.schedule
    if asked.num_chunks != "auto":
        return Order(schedule, asked.num_chunks)
    return Order(schedule, DEFAULT_CHUNKS if schedule_type(schedule).takes_chunks and shape.pp > 1 else 1)


def in_best_form(plan: ParallelPlan, fitting: Fitting) -> ParallelPlan:
    """Return ``plan`` with the form of its schedule that fits and idles least; without a form that fits, as it is.

    With one unit of microbatches or less there is nothing to choose.
    """
    if plan.pp == 1 or plan.num_microbatches <= plan.pp:
        return plan
    forms = map(schedule_type, schedule_type(plan.schedule).forms)
    plans = (
        replace(plan, schedule=form.name) for form in forms if plan.microbatch_size % form.parts_per_microbatch == 0
    )
    return next(filter(fitting.fits, plans), plan)
