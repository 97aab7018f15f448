"""How long a run will take, said before it starts and while somebody waits for its first step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

from llama_core.calibration.demand import device_for
from llama_core.config.run import RunConfig
from llama_core.config.settings import Precision
from llama_core.errors import ConfigError, TrainingInfraError
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
from llama_core.records.files import intact, read_json, read_typed, write_json
from llama_core.records.measurements import ExpectedStep
from llama_core.runs.console import say
from llama_core.runs.loading import load_config, load_plan
from llama_core.units import TFLOP, counted, format_duration

SLOW_STEP_SECONDS = 180.0
"""Steps expected to take longer are announced."""
LONG_RUN_SECONDS = 3600.0
"""Runs expected to take longer are announced, however short their steps."""
WORTH_MEASURING_SECONDS = 10.0
"""The operations of a step are measured for a run that should take longer. That takes some steps' time: those of a step
that takes as long by itself are not measured."""
CPU_SHARE = 0.5
"""Share of the rate of large matrix products that a whole step reaches on a CPU.

1830 tokens/s of the 50M model at 2048 tokens are 73 % of two cores' rate in bf16, 1390 without compilation 56 %.
"""
CORE_RATE = 6e10
"""FLOP/s of a core of another machine's CPU in large fp32 products; machines differ by a factor of three."""
_QUICKER = "quicker: a smaller --batch-size, a shorter --seq-len, a smaller --model, fewer --steps, or a GPU"


@dataclass(frozen=True)
class Pace:
    """How long a step of a run takes on a CPU."""

    seconds: float
    flops: float
    """Of a step, over all ranks."""
    told_by: str
    """What it follows from, in a clause."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The seconds of its parts, as in ``StepTime``; empty if only the whole is known."""

    @property
    def is_rough(self) -> bool:
        """Whether it is no more than FLOPs over a rate."""
        return not self.parts

    @property
    def flops_per_second(self) -> float:
        """The rate of a whole step."""
        return self.flops / self.seconds


def rough_pace(config: RunConfig, plan: ParallelPlan, flops_per_second: float) -> Pace:
    """Return the pace that follows from the rate of large matrix products, of all ranks together."""
    flops = _step_flops(config, plan)
    told_by = f"it multiplies matrices at {flops_per_second / TFLOP:.2f} TFLOP/s, and a step reaches about half of that"
    return Pace(flops / (CPU_SHARE * flops_per_second), flops, told_by)


def pace_here(
    config: RunConfig, plan: ParallelPlan, *, may_measure: bool, tell: Callable[[str], None] = lambda text: None
) -> Pace:
    """Return the pace of a run on this machine's CPU.

    Args:
        config: the resolved configuration.
        plan: its plan.
        may_measure: whether the operations of its step may be measured for some seconds, where the machine's profile
            does not know them. They are only for a run that lasts longer than that.
        tell: called with a line that says why the profile is not used.
    """
    rough = rough_pace(config, plan, _rate_here(config.training.precision))
    steps = config.training.steps or LONG_RUN_SECONDS
    is_worth_it = may_measure and rough.seconds * steps >= WORTH_MEASURING_SECONDS > rough.seconds
    try:
        return measured_pace(config, plan, may_measure=is_worth_it, tell=tell) or rough
    except ConfigError:  # the profile that the user names
        raise
    except (TrainingInfraError, OSError):  # the run itself says what is wrong with this machine
        return rough


def measured_pace(
    config: RunConfig, plan: ParallelPlan, *, may_measure: bool = False, tell: Callable[[str], None] = lambda text: None
) -> Pace | None:
    """Return the pace of a run on a CPU from the times of its operations; None if they were not measured.

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
    if known.spec is None:
        return None
    step = step_time_of(config, plan, known.spec)
    parts: dict[str, float] = {str(part): seconds for part, seconds in step.parts.items()}
    return Pace(step.total, _step_flops(config, plan), f"from operations {known.source}", parts)


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
    return slow_steps(config, plan, _recorded_pace(run, config, plan), num_sequences, _reference_tokens(run, config))


def _recorded_pace(run: RunDirectory, config: RunConfig, plan: ParallelPlan) -> Pace:
    """Return the pace that ``record_expected_step`` has recorded."""
    if not run.expected.exists():
        return pace_here(config, plan, may_measure=False)
    recorded = read_typed(run.expected, ExpectedStep)
    return Pace(recorded.seconds, recorded.flops, recorded.told_by, recorded.parts)


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
    pace = pace_here(config, plan, may_measure=False) if _computes_here(config) and may_be_rough else None
    pace = pace or measured_pace(config, plan)
    if pace is None:
        return ""
    of_a_step = plan.batch_size * config.seq_len
    steps = config.training.steps if num_tokens is None else max(1, round(num_tokens / of_a_step))
    return _told(config, plan, pace, steps, reference_tokens)


def _computes_here(config: RunConfig) -> bool:
    return config.launch.device == "cpu" and config.launch.is_here


def record_expected_step(run: RunDirectory) -> None:
    """Record how long a step should take, for the report to compare; only for a run on this machine's CPU."""
    config = load_config(run)
    if _computes_here(config):
        pace = pace_here(config, load_plan(run), may_measure=True, tell=partial(say, "note"))
        write_json(run.expected, ExpectedStep(pace.seconds, pace.flops, pace.told_by, pace.parts))


def slow_steps(
    config: RunConfig,
    plan: ParallelPlan,
    pace: Pace,
    num_sequences: int | None,
    reference_tokens: float = 0,
) -> str:
    """Return the time of a step and of the run, and what would shorten it; empty if neither is long.

    Args:
        config: the resolved configuration.
        plan: its plan.
        pace: the time of a step.
        num_sequences: sequences of an epoch; None if unknown.
        reference_tokens: tokens over which the reference of the objective is computed.
    """
    training = config.training
    steps = training.steps
    if num_sequences is not None:
        steps = training.total_steps(num_sequences / config.batch_size)
    reference = _reference_seconds(config, reference_tokens, pace)
    whole = reference + _run_seconds(config, plan, pace.seconds, steps or 0)
    if pace.seconds < SLOW_STEP_SECONDS and whole < LONG_RUN_SECONDS:
        return ""
    return f"{_told(config, plan, pace, steps, reference_tokens)}; {_QUICKER}"


def _told(config: RunConfig, plan: ParallelPlan, pace: Pace, steps: int | None, reference_tokens: float) -> str:
    whole = ""
    if steps:
        whole = (
            f", the {counted(steps, 'step')} of the run "
            f"{format_duration(_run_seconds(config, plan, pace.seconds, steps))}"
        )
    if reference_tokens:
        reference = _reference_seconds(config, reference_tokens, pace)
        whole += f", the reference before the first step {format_duration(reference)}"
    return (
        f"a step takes about {format_duration(pace.seconds)} on this CPU ({pace.flops / TFLOP:,.1f} TFLOP; "
        f"{pace.told_by}){whole}"
    )


def _run_seconds(config: RunConfig, plan: ParallelPlan, step_seconds: float, steps: int) -> float:
    """Return the time of so many steps; a ramp's smaller ones take less than ``step_seconds``, those of the plan."""
    return step_seconds * config.tokens_before(steps) / (plan.batch_size * config.seq_len)


def _reference_seconds(config: RunConfig, reference_tokens: float, pace: Pace) -> float:
    """Return the time of the reference's forward at the rate of a step."""
    if not reference_tokens:
        return 0.0
    flops = reference_tokens * forward_flops_per_token(spec_before_run(config), config.seq_len)
    return flops / pace.flops_per_second


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
        if config.launch.is_here:
            pace = _recorded_pace(run, config, plan)
        else:
            cores = plan.world_size * config.launch.request.cores_of_a_rank("cpu")
            pace = measured_pace(config, plan) or rough_pace(config, plan, cores * CORE_RATE)
        roughly = "roughly" if pace.is_rough else "about"
        before = _before_the_first(_reference_seconds(config, reference_tokens, pace))
        return f"a step of {pace.flops / TFLOP:.3g} TFLOP takes {roughly} {format_duration(pace.seconds)}{before}"
    known = device_for(config)
    device = known.spec
    assert device is not None  # a GPU has a data sheet
    took = step_time_of(config, plan, device)
    before = ""
    if reference_tokens:
        before = _before_the_first(forward_time_of(config, plan, device, reference_tokens))
    compiles = ", and the first compiles the blocks" if plan.compile else ""
    took_and_before = f"about {format_duration(took.total)} a step on {device.label}{before}{compiles}"
    return f"{took_and_before} (rates: {known.source})"


def _before_the_first(reference_seconds: float) -> str:
    return f", and the reference before the first {format_duration(reference_seconds)}" if reference_seconds else ""


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
