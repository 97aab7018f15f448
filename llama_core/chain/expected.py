"""How long a run will take, said before it starts and while somebody waits for its first step."""

from functools import cache

from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.config.run import RunConfig
from llama_core.config.settings import Precision
from llama_core.errors import TrainingInfraError
from llama_core.imports import importing_torch
from llama_core.planning.before import forwards_before_run, forwards_before_step, spec_before_run
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import (
    forward_flops_per_token,
    forward_time_of,
    hardware_flops_per_token,
    step_time_of,
)
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json, write_json
from llama_core.records.measurements import ExpectedStep
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import TFLOP, counted, format_duration

SLOW_STEP_SECONDS = 180.0
"""Steps expected to take longer are announced."""
LONG_RUN_SECONDS = 3600.0
"""Runs expected to take longer are announced, however short their steps."""
CPU_SHARE = 0.5
"""Share of the rate of large matrix products that a whole step reaches on a CPU.

1830 tokens/s of the 50M model at 2048 tokens are 73 % of two cores' rate in bf16, 1390 without compilation 56 %.
"""
CORE_RATE = 6e10
"""FLOP/s of a core of another machine's CPU in large fp32 products; machines differ by a factor of three."""
_QUICKER = "quicker: a smaller --batch-size, a shorter --seq-len, a smaller --model, fewer --steps, or a GPU"


def expected_time(run: RunDirectory) -> str:
    """Return how long a slow run on this machine's CPU takes; empty for every other run.

    It times matrix products, which takes a fraction of a second.
    """
    config = load_config(run)
    num_sequences = None
    if not _computes_here(config):
        return ""
    if run.data.exists():
        with intact(run.data):
            num_sequences = int(read_json(run.data)["num_sequences"])
    rate = _rate_here(config.training.precision)
    return slow_steps(config, load_plan(run), rate, num_sequences, _reference_tokens(run, config))


def _reference_tokens(run: RunDirectory, config: RunConfig) -> float:
    """Return the tokens over which the run is still to compute its reference; 0 if its data are not known yet."""
    num_forwards = forwards_before_run(config.objective)
    if not num_forwards or newest_step(run) or not run.data.exists():
        return 0
    with intact(run.data):
        data = read_json(run.data)
        num_tokens = int(data["num_sequences"]) * config.seq_len + int(data["num_validation_tokens"])
        return num_forwards * num_tokens


def expected_here(config: RunConfig, plan: ParallelPlan, num_tokens: float | None, reference_tokens: float = 0) -> str:
    """Return how long a step and the run take on this machine's CPU; empty if the run would not compute there.

    Args:
        config: the resolved configuration.
        plan: its plan.
        num_tokens: tokens to train on; by default those of ``training.steps``.
        reference_tokens: tokens over which the reference of the objective is computed.
    """
    if not _computes_here(config):
        return ""
    of_a_step = plan.batch_size * config.seq_len
    steps = config.training.steps if num_tokens is None else max(1, round(num_tokens / of_a_step))
    return _told(config, plan, _rate_here(config.training.precision), steps, reference_tokens)


def _computes_here(config: RunConfig) -> bool:
    return config.launch.device == "cpu" and config.launch.is_here


def record_expected_step(run: RunDirectory) -> None:
    """Record how long a step should take, for the report to compare; only for a run on this machine's CPU."""
    config = load_config(run)
    if _computes_here(config):
        rate = _rate_here(config.training.precision)
        plan = load_plan(run)
        write_json(run.expected, ExpectedStep(_step_seconds(config, plan, rate), _step_flops(config, plan), rate))


def slow_steps(
    config: RunConfig,
    plan: ParallelPlan,
    flops_per_second: float,
    num_sequences: int | None,
    reference_tokens: float = 0,
) -> str:
    """Return the time of a step and of the run, and what would shorten it; empty if neither is long.

    Args:
        config: the resolved configuration.
        plan: its plan.
        flops_per_second: rate of matrix products of all ranks together.
        num_sequences: sequences of an epoch; None if unknown.
        reference_tokens: tokens over which the reference of the objective is computed.
    """
    seconds = _step_seconds(config, plan, flops_per_second)
    training = config.training
    steps = training.steps
    if num_sequences is not None:
        steps = training.total_steps(num_sequences / config.batch_size)
    reference = _reference_seconds(config, reference_tokens, flops_per_second)
    whole = reference + _run_seconds(config, plan, seconds, steps or 0)
    if seconds < SLOW_STEP_SECONDS and whole < LONG_RUN_SECONDS:
        return ""
    return f"{_told(config, plan, flops_per_second, steps, reference_tokens)}; {_QUICKER}"


def _told(
    config: RunConfig, plan: ParallelPlan, flops_per_second: float, steps: int | None, reference_tokens: float
) -> str:
    seconds = _step_seconds(config, plan, flops_per_second)
    whole = ""
    if steps:
        whole = (
            f", the {counted(steps, 'step')} of the run {format_duration(_run_seconds(config, plan, seconds, steps))}"
        )
    if reference_tokens:
        reference = _reference_seconds(config, reference_tokens, flops_per_second)
        whole += f", the reference before the first step {format_duration(reference)}"
    return (
        f"a step takes about {format_duration(seconds)} on this CPU ({_step_flops(config, plan) / TFLOP:,.1f} TFLOP; "
        f"it multiplies matrices at {flops_per_second / TFLOP:.2f} TFLOP/s){whole}"
    )


def _run_seconds(config: RunConfig, plan: ParallelPlan, step_seconds: float, steps: int) -> float:
    """Return the time of so many steps; a ramp's smaller ones take less than ``step_seconds``, those of the plan."""
    return step_seconds * config.tokens_before(steps) / (plan.batch_size * config.seq_len)


def _reference_seconds(config: RunConfig, reference_tokens: float, flops_per_second: float) -> float:
    if not reference_tokens:
        return 0.0
    flops = reference_tokens * forward_flops_per_token(spec_before_run(config), config.seq_len)
    return flops / (CPU_SHARE * flops_per_second)


def expected_step(run: RunDirectory) -> str:
    """Return in one clause how long a step should take: from the time model on a GPU, roughly on a CPU."""
    try:
        return f"expected: {_step(run)}"
    except TrainingInfraError as error:  # whoever waits for the job goes on waiting
        return f"the length of a step is not known ({error})"


def _step(run: RunDirectory) -> str:
    config = load_config(run)
    plan = load_plan(run)
    reference_tokens = _reference_tokens(run, config)
    if config.launch.device == "cpu":
        cores = plan.world_size * config.launch.request.cores_of_a_rank("cpu")
        rate = _rate_here(config.training.precision) if config.launch.is_here else cores * CORE_RATE
        flops = _step_flops(config, plan)
        seconds = format_duration(_step_seconds(config, plan, rate))
        before = _before_the_first(_reference_seconds(config, reference_tokens, rate))
        return f"a step of {flops / TFLOP:.3g} TFLOP takes roughly {seconds}{before}"
    device = gpu_spec(config.launch.gpu_type or DEFAULT_GPU_TYPE)
    took = step_time_of(config, plan, device)
    before = ""
    if reference_tokens:
        before = _before_the_first(forward_time_of(config, plan, device, reference_tokens))
    compiles = ", and the first compiles the blocks" if plan.compile else ""
    return f"about {format_duration(took.total)} a step on {device.label}{before}{compiles}"


def _before_the_first(reference_seconds: float) -> str:
    return f", and the reference before the first {format_duration(reference_seconds)}" if reference_seconds else ""


def _step_seconds(config: RunConfig, plan: ParallelPlan, flops_per_second: float) -> float:
    return _step_flops(config, plan) / (CPU_SHARE * flops_per_second)


def _step_flops(config: RunConfig, plan: ParallelPlan) -> float:
    per_token = hardware_flops_per_token(config.spec, config.seq_len, plan.recompute)
    per_token += forwards_before_step(config.objective) * forward_flops_per_token(config.spec, config.seq_len)
    return plan.batch_size * config.seq_len * per_token


@cache
def _rate_here(precision: Precision) -> float:
    """Return the FLOP/s of this machine's matrix products, measured once: before a run takes its processors."""
    with importing_torch():
        from llama_core.training.measure import product_rate

    return product_rate(precision)
