"""How long a run will take, said before it starts and while somebody waits for its first step."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from llama_core.calibration.demand import device_for, is_measurable
from llama_core.config.hardware import CpuRates, DeviceSpec, processor
from llama_core.config.run import RunConfig
from llama_core.config.settings import Precision
from llama_core.errors import ConfigError, TrainingInfraError
from llama_core.imports import importing_torch
from llama_core.planning.before import forwards_before_run, forwards_before_step, spec_before_run
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.links import node_size
from llama_core.planning.time.step_time import (
    forward_flops_per_token,
    forward_time_of,
    hardware_flops_per_token,
    step_by_kind,
)
from llama_core.preflight.checks import AMOUNTS, BEYOND_PROFILE, BEYOND_SHEET
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import intact, read_json, read_typed, write_json
from llama_core.records.measurements import ExpectedProduct, ExpectedStep
from llama_core.runs.console import say
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import GB, TFLOP, counted, format_duration

SLOW_STEP_SECONDS = 180.0
"""Steps expected to take longer are announced."""
LONG_RUN_SECONDS = 3600.0
"""Runs expected to take longer are announced, however short their steps."""
WORTH_MEASURING_SECONDS = 10.0
"""The operations of a step are measured for a run that should take longer. That takes some steps' time: those of a step
that takes as long by itself are not measured."""
_QUICKER = "quicker: a smaller --batch-size, a shorter --seq-len, a smaller --model, fewer --steps, or a GPU"


def rough_step(config: RunConfig, plan: ParallelPlan, rates: CpuRates) -> ExpectedStep:
    """Return the step that follows from no more than the rates of a machine's products, attention and copies."""
    device = processor("a CPU", rates, node_size(config, plan.world_size))
    step, kinds = step_by_kind(config, plan, device)
    copies = f"copies {rates.bandwidth / GB:.0f} GB/s"
    told_by = f"it multiplies matrices at {rates.product_flops / TFLOP:.2f} TFLOP/s and {copies}"
    return ExpectedStep(step.total, _step_flops(config, plan), told_by, kinds, "few rates")


def step_here(
    config: RunConfig, plan: ParallelPlan, *, may_measure: bool, tell: Callable[[str], None] = lambda text: None
) -> ExpectedStep:
    """Return the step of a run on this machine's CPU.

    Args:
        config: the resolved configuration.
        plan: its plan.
        may_measure: whether the operations of its step may be measured for some seconds, where the machine's profile
            does not know them. They are only for a run that lasts longer than that.
        tell: called with a line that says why the profile is not used.
    """
    rough = rough_step(config, plan, _rates_here(config.training.precision, config.seq_len))
    if not is_measurable(config, plan):
        return replace(rough, rates="unmodelled")
    steps = config.training.steps or LONG_RUN_SECONDS
    is_worth_it = may_measure and rough.seconds * steps >= WORTH_MEASURING_SECONDS > rough.seconds
    try:
        return measured_step(config, plan, may_measure=is_worth_it, tell=tell) or rough
    except ConfigError:  # the profile that the user names
        raise
    except (TrainingInfraError, OSError):  # the run itself says what is wrong with this machine
        return rough


def measured_step(
    config: RunConfig, plan: ParallelPlan, *, may_measure: bool = False, tell: Callable[[str], None] = lambda text: None
) -> ExpectedStep | None:
    """Return the step of a run on a CPU from the times of its operations; None if they were not measured.

    Args:
        config: the resolved configuration.
        plan: its plan.
        may_measure: whether to measure them now, for some seconds.
        tell: called with a line that says why a profile is not used.

    Raises:
        ConfigError: if the profile that the user names cannot be used.
        TrainingFailedError: if a measurement fails.
    """
    known = device_for(config, plan, may_measure=may_measure)
    if known.note:
        tell(known.note)
    return None if known.spec is None else _step_on(known.spec, config, plan)


def step_on_gpu(config: RunConfig, plan: ParallelPlan) -> ExpectedStep:
    """Return the step of a run on GPUs.

    Raises:
        ConfigError: if the GPU is not known, or the profile that the user names cannot be used.
    """
    return _step_on(_gpu(config), config, plan)


def _gpu(config: RunConfig) -> DeviceSpec:
    device = device_for(config).spec
    assert device is not None  # a GPU has a data sheet
    return device


def _step_on(device: DeviceSpec, config: RunConfig, plan: ParallelPlan) -> ExpectedStep:
    step, kinds = step_by_kind(config, plan, device)
    flops = _step_flops(config, plan)
    if device.measured:
        return ExpectedStep(step.total, flops, f"from operations {device.source}", kinds, "operations")
    return ExpectedStep(step.total, flops, f"from the data sheet of {device.label}", kinds, "data sheet")


def expected_time(run: RunDirectory) -> str:
    """Return how long a slow run on this machine's CPU takes; empty for every other run."""
    config = load_config(run)
    num_sequences = None
    if not _computes_here(config):
        return ""
    if run.data.exists():
        with intact(run.data):
            num_sequences = int(read_json(run.data)["num_sequences"])
    plan = load_plan(run)
    return slow_steps(config, plan, _recorded_step(run, config, plan), num_sequences, _reference_tokens(run, config))


def _recorded_step(run: RunDirectory, config: RunConfig, plan: ParallelPlan) -> ExpectedStep:
    """Return the step that ``record_expected_step`` has recorded, or else what it would be without measuring."""
    return read_typed(run.expected, ExpectedStep) if run.expected.exists() else _step_of(config, plan)


def _reference_tokens(run: RunDirectory, config: RunConfig) -> float:
    """Return the tokens over which the run is still to compute its reference; 0 if its data are not known yet."""
    num_forwards = forwards_before_run(config.objective)
    if not num_forwards or newest_step(run) or not run.data.exists():
        return 0
    with intact(run.data):
        data = read_json(run.data)
        num_tokens = int(data["num_sequences"]) * config.seq_len + int(data["num_validation_tokens"])
        return num_forwards * num_tokens


def expected_here(
    config: RunConfig,
    plan: ParallelPlan,
    num_tokens: float | None,
    reference_tokens: float = 0,
    *,
    may_be_rough: bool = True,
) -> str:
    """Return how long a step and the run take on this machine's CPU; empty if the run would not compute there.

    Args:
        config: the resolved configuration.
        plan: its plan.
        num_tokens: tokens to train on; by default those of ``training.steps``.
        reference_tokens: tokens over which the reference of the objective is computed.
        may_be_rough: whether to time matrix products, with torch, if no operations were measured; otherwise the answer
            is then empty. A profile that the user names tells of the CPUs of other machines, too.
    """
    if config.launch.device != "cpu":
        return ""
    is_rough_enough = may_be_rough and _computes_here(config)
    step = step_here(config, plan, may_measure=False) if is_rough_enough else measured_step(config, plan)
    if step is None:
        return ""
    of_a_step = plan.batch_size * config.seq_len
    steps = config.training.steps if num_tokens is None else max(1, round(num_tokens / of_a_step))
    return _told(config, plan, step, steps, reference_tokens)


def _computes_here(config: RunConfig) -> bool:
    return config.launch.device == "cpu" and config.launch.is_here


def record_expected_step(run: RunDirectory) -> None:
    """Record how long a step should take, by part. The reports compare it with what the steps took."""
    config = load_config(run)
    plan = load_plan(run)
    try:
        step = _step_of(config, plan, may_measure=True, tell=partial(say, "note"))
        write_json(run.expected, _with_product(step, config, plan))
    except ConfigError:
        if config.launch.device == "cpu":  # the profile that the user names
            raise
        # else a GPU whose rates nobody knows


def _step_of(
    config: RunConfig, plan: ParallelPlan, *, may_measure: bool = False, tell: Callable[[str], None] = lambda text: None
) -> ExpectedStep:
    """Return the step of a run where it computes: on GPUs, on this machine's CPU, or on another's.

    Raises:
        ConfigError: as ``step_on_gpu`` and ``measured_step`` do.
    """
    if config.launch.device == "cuda":
        return step_on_gpu(config, plan)
    if config.launch.is_here:
        return step_here(config, plan, may_measure=may_measure, tell=tell)
    cores = node_size(config, plan.world_size) * config.launch.request.cores_of_a_rank("cpu")
    assumed = rough_step(config, plan, CpuRates.of_cores(cores))
    return measured_step(config, plan, tell=tell) or replace(assumed, rates="assumed", told_by=f"if {assumed.told_by}")


def _with_product(step: ExpectedStep, config: RunConfig, plan: ParallelPlan) -> ExpectedStep:
    """Return a step with the product that the ranks time before the first one."""
    known = device_for(config, plan)
    if known.spec is None:
        return step
    on_cuda = config.launch.device == "cuda"
    side = AMOUNTS[config.launch.device].product_side
    rates = known.spec.rates(plan.world_size // config.num_nodes)
    # no gradient of a product reads a transposed matrix but the one of its input
    measured = rates.seconds(f"product {'bf16' if on_cuda else 'fp32'} input", (side, side, side)) if rates else None
    if measured is not None:
        limit = BEYOND_PROFILE[config.launch.device] * measured
        return replace(step, product=ExpectedProduct(measured, limit, known.source))
    if not on_cuda:
        return step
    seconds = 2 * side**3 / (known.spec.matmul_share * known.spec.bf16_flops)
    told_by = f"data sheet of {known.spec.label}"
    return replace(step, product=ExpectedProduct(seconds, BEYOND_SHEET * seconds, told_by))


def slow_steps(
    config: RunConfig,
    plan: ParallelPlan,
    step: ExpectedStep,
    num_sequences: int | None,
    reference_tokens: float = 0,
) -> str:
    """Return the time of a step and of the run, and what would shorten it; empty if neither is long.

    Args:
        config: the resolved configuration.
        plan: its plan.
        step: the time of a step.
        num_sequences: sequences of an epoch; None if unknown.
        reference_tokens: tokens over which the reference of the objective is computed.
    """
    training = config.training
    steps = training.steps
    if num_sequences is not None:
        steps = training.total_steps(num_sequences / config.batch_size)
    reference = _reference_seconds(config, reference_tokens, step)
    whole = reference + _run_seconds(config, plan, step.seconds, steps or 0)
    if step.seconds < SLOW_STEP_SECONDS and whole < LONG_RUN_SECONDS:
        return ""
    return f"{_told(config, plan, step, steps, reference_tokens)}; {_QUICKER}"


def _told(config: RunConfig, plan: ParallelPlan, step: ExpectedStep, steps: int | None, reference_tokens: float) -> str:
    whole = ""
    if steps:
        whole = (
            f", the {counted(steps, 'step')} of the run "
            f"{format_duration(_run_seconds(config, plan, step.seconds, steps))}"
        )
    if reference_tokens:
        reference = _reference_seconds(config, reference_tokens, step)
        whole += f", the reference before the first step {format_duration(reference)}"
    return (
        f"a step takes about {format_duration(step.seconds)} on the CPU ({step.flops / TFLOP:,.1f} TFLOP; "
        f"{step.told_by}){whole}"
    )


def _run_seconds(config: RunConfig, plan: ParallelPlan, step_seconds: float, steps: int) -> float:
    """Return the time of so many steps; a ramp's smaller ones take less than ``step_seconds``, those of the plan."""
    return step_seconds * config.tokens_before(steps) / (plan.batch_size * config.seq_len)


def _reference_seconds(config: RunConfig, reference_tokens: float, step: ExpectedStep) -> float:
    """Return the time of the reference's forward at the rate of a step."""
    if not reference_tokens:
        return 0.0
    flops = reference_tokens * forward_flops_per_token(spec_before_run(config), config.seq_len)
    return flops / step.flops_per_second


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
        step = _recorded_step(run, config, plan)
        roughly = "roughly" if step.is_rough else "about"
        before = _before_the_first(_reference_seconds(config, reference_tokens, step))
        return f"a step of {step.flops / TFLOP:.3g} TFLOP takes {roughly} {format_duration(step.seconds)}{before}"
    device = _gpu(config)
    step = _recorded_step(run, config, plan)
    before = ""
    if reference_tokens:
        before = _before_the_first(forward_time_of(config, plan, device, reference_tokens))
    compiles = ", and the first compiles the blocks" if plan.compile else ""
    known = f"rates: {device_for(config).source}"
    return f"about {format_duration(step.seconds)} a step on {device.label}{before}{compiles} ({known})"


def _before_the_first(reference_seconds: float) -> str:
    return f", and the reference before the first {format_duration(reference_seconds)}" if reference_seconds else ""


def _step_flops(config: RunConfig, plan: ParallelPlan) -> float:
    per_token = hardware_flops_per_token(config.spec, config.seq_len, plan.recompute)
    per_token += forwards_before_step(config.objective) * forward_flops_per_token(config.spec, config.seq_len)
    return plan.batch_size * config.seq_len * per_token


@cache
def _rates_here(precision: Precision, seq_len: int) -> CpuRates:
    """Return the rates of this machine for rows of a length, measured once: before a run takes its processors."""
    with importing_torch():
        from llama_core.training.measure import attention_rate, copy_rate, product_rate

    return CpuRates(product_rate(precision), attention_rate(precision, seq_len), copy_rate())
