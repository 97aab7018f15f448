"""Choosing a plan: from what a run asks for and what a device holds to a ``ParallelPlan``."""

from llama_core.config.run import RunConfig
from llama_core.planning.memory import FILL_LIMIT, estimate_memory
from llama_core.planning.plan import ParallelPlan

MAX_MICROBATCH_TOKENS = 32_768
"""Tokens of a microbatch above which its matrix products keep a device no busier, so that more only takes memory."""


def choose_plan(config: RunConfig, memory_budget_bytes: int | None) -> ParallelPlan:
    """Return the plan of ``config``: all devices data-parallel, with the largest microbatch that fits.

    The microbatch is the one asked for, else the largest divisor of a rank's share of the batch that stays within
    ``MAX_MICROBATCH_TOKENS`` and whose estimated peak stays within ``FILL_LIMIT`` of the budget. Where not even one
    sequence does, the plan has one: its estimate tells by how much it does not fit.

    Args:
        config: what to run.
        memory_budget_bytes: bytes each device has for it; None where memory is no object.

    Raises:
        PlanError: if the request makes no valid plan.
    """
    share = config.batch_size // config.parallel.gpus
    asked = config.parallel.microbatch_size
    sizes = [asked] if asked else [size for size in range(share, 1, -1) if share % size == 0]
    for size in sizes:
        plan = _plan(config, size)
        if asked or (
            size * config.seq_len <= MAX_MICROBATCH_TOKENS
            and (memory_budget_bytes is None or _peak_bytes(config, plan) <= FILL_LIMIT * memory_budget_bytes)
        ):
            return plan
    return _plan(config, 1)


def _plan(config: RunConfig, microbatch_size: int) -> ParallelPlan:
    gpus, zero_stage = config.parallel.gpus, config.parallel.zero_stage
    return ParallelPlan(
        dp_shard=gpus if zero_stage else 1,
        dp_replicate=1 if zero_stage else gpus,
        zero_stage=zero_stage,
        microbatch_size=microbatch_size,
        num_microbatches=config.batch_size // (gpus * microbatch_size),
        recompute=config.parallel.recompute,
    )


def _peak_bytes(config: RunConfig, plan: ParallelPlan) -> int:
    return estimate_memory(
        config.spec,
        plan,
        seq_len=config.seq_len,
        precision=config.training.precision,
        document_mask=config.data.document_mask,
    ).peak_bytes
