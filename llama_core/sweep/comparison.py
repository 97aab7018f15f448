"""Compare the elements of a sweep: measure those that can run from here, predict the others.

An element that cannot run, does not fit or runs out of memory is a row with the reason.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from llama_core.chain import steps as chain_steps
from llama_core.chain.planned import PlannedRun, plan_for_gpu, plan_run
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, EnvironmentMismatchError, PlanError, StoppedError, TrainingFailedError
from llama_core.launch.outcome import read_outcome
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.cost import BILLION
from llama_core.planning.time.step_time import StepTime
from llama_core.runs.loading import load_plan
from llama_core.sweep import steps as sweeps
from llama_core.sweep.chain import SweepSteps, run_sweep
from llama_core.sweep.directory import SweepDirectory, is_timed, read_record
from llama_core.sweep.grid import Element, GridValue, SweepConfig
from llama_core.sweep.naming import ElementNames, element_names

How = Literal["measured", "predicted"]


@dataclass(frozen=True)
class ComparisonRow:
    """The result of one element, measured or predicted."""

    name: str
    settings: Mapping[str, GridValue]
    """Its value for each key of the grid."""
    how: How
    """Whether the row comes from running the element or from arithmetic."""
    status: str
    """finished, or else impossible, does-not-fit, oom or another outcome of a run."""
    reason: str = ""
    """Why it did not finish, or which figures are unknown."""
    device: str = ""
    plan: str = ""
    step_seconds: float | None = None
    """Seconds of an optimizer step: the median of the timed steps, or the estimate."""
    tokens_per_second: float | None = None
    """Tokens per second of all devices together."""
    mfu: float | None = None
    memory_bytes: int | None = None
    """Peak of the fullest device."""
    dollars_per_billion_tokens: float | None = None
    """What a billion tokens cost at ``launch.dollars_per_gpu_hour``; None for a measured element."""
    rates: Mapping[str, Any] | None = None
    """Where the rates of a predicted element's device are from, as ``KnownDevice.as_dict`` says it; None for a measured
    one, and for one without a plan."""
    parallel_plan: ParallelPlan | None = None
    """The plan itself, of a predicted element; not part of the record."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a record."""
        record = asdict(self) | {"settings": dict(self.settings)}
        del record["parallel_plan"]
        return record


@dataclass(frozen=True)
class Comparison:
    """The rows of all elements, in the order of the grid."""

    rows: tuple[ComparisonRow, ...]
    sweep: SweepDirectory | None
    """The sweep that measured; None if every row is predicted."""

    @property
    def names(self) -> ElementNames:
        """What people call the elements."""
        return element_names(self.rows)

    def fastest_predicted(self) -> str:
        """Return which element is predicted to be the fastest, and how far ahead; empty without two such speeds."""
        rates = {row.name: row.tokens_per_second for row in self.rows if row.how == "predicted"}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if len(known) < 2:
            return ""
        names = self.names
        first, second = sorted(known, key=lambda name: -known[name])[:2]
        ahead = known[first] / known[second] - 1
        return (
            f"{names[first]}: {known[first]:,.0f} tokens/s predicted, {ahead:.1%} more than the next ({names[second]})"
        )

    def rates(self) -> list[str]:
        """Return where the predictions are from: a line for each source, and for each profile that is not used."""
        lines: dict[str, None] = {}
        for told in (row.rates for row in self.rows if row.rates is not None):
            lines[f"rates: {told['source']}"] = None
            if told["note"]:
                lines[f"note: {told['note']}"] = None
        return list(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a record."""
        return {"sweep_dir": str(self.sweep.path) if self.sweep else None, "rows": [row.as_dict() for row in self.rows]}


def compare(
    config: SweepConfig, steps: SweepSteps, sweep_dir: Path | None = None, *, resume: bool = False
) -> Comparison:
    """Measure the elements of a sweep that this machine or a cluster can run, and predict the others.

    Args:
        config: the sweep.
        steps: the steps that measure.
        sweep_dir: the sweep's directory; by default ``sweeps/<name>-<date>``.
        resume: continue the sweep there, or the newest unfinished one of its name.

    Raises:
        TrainingInfraError: if the request is wrong for every element, or the sweep is interrupted.
    """
    elements = config.elements()
    rows = {element.name: row for element in elements if (row := _without_running(element, config.base)) is not None}
    sweep = None
    if len(rows) < len(elements):
        sweep = sweeps.prepare(config.without(rows), sweep_dir, resume=resume)
        try:
            run_sweep(sweep, steps, keeps_skipped=True)
        except StoppedError:
            raise
        except (ConfigError, TrainingFailedError):
            pass  # no element could be timed: the rows say why
        rows |= {row.name: row for row in _measured(sweep)}
    return Comparison(tuple(rows[element.name] for element in elements), sweep)


def predict(config: SweepConfig) -> Comparison:
    """Predict every element of a sweep by arithmetic, for the GPUs that it names or for the default ones.

    Raises:
        ConfigError: if no element has a valid plan, with the reason for each.
    """
    comparison = Comparison(tuple(_predicted_anywhere(element, config.base) for element in config.elements()), None)
    if all(row.status == "impossible" for row in comparison.rows):
        names = comparison.names
        raise ConfigError(*(f"{names[row.name]}: {row.reason}" for row in comparison.rows))
    return comparison


def _predicted_anywhere(element: Element, base: RunConfig) -> ComparisonRow:
    try:
        return _predicted(element, plan_for_gpu(element.config(base)))
    except (ConfigError, PlanError, EnvironmentMismatchError) as error:
        return ComparisonRow(element.name, element.settings, "predicted", "impossible", str(error))


def _without_running(element: Element, base: RunConfig) -> ComparisonRow | None:
    """Return the row of an element that cannot run from here; None if it can."""
    try:
        config = element.config(base)
        here = _plan_here(config)
        if here is not None and (here.estimate.fits or config.launch.force):
            return None
        if here is None or (config.launch.device == "auto" and here.config.launch.device == "cpu"):
            return _predicted(element, plan_for_gpu(config))
        return _predicted(element, here)
    except (ConfigError, PlanError) as error:
        return ComparisonRow(element.name, element.settings, "predicted", "impossible", str(error))


def _plan_here(config: RunConfig) -> PlannedRun | None:
    """Return the plan of a run on this machine or a cluster; None if the devices are missing."""
    try:
        return plan_run(config)
    except EnvironmentMismatchError:
        return None


def _predicted(element: Element, planned: PlannedRun) -> ComparisonRow:
    estimate = planned.estimate
    step = planned.step if estimate.fits else None
    reason = "" if step else "no speed model for this device"
    return ComparisonRow(
        element.name,
        element.settings,
        "predicted",
        "finished" if estimate.fits else "does-not-fit",
        reason if estimate.fits else "; ".join(estimate.notes),
        estimate.device,
        planned.plan.summary(),
        step_seconds=step.total if step else None,
        tokens_per_second=step.tokens_per_second if step else None,
        mfu=step.mfu if step and planned.is_on_gpu else None,
        memory_bytes=estimate.profile.peak_bytes,
        dollars_per_billion_tokens=_price(planned, step),
        rates=planned.device.as_dict(),
        parallel_plan=planned.plan,
    )


def _price(planned: PlannedRun, step: StepTime | None) -> float | None:
    """Return what a billion tokens cost; None if that is unknown, and on a CPU, which has no price."""
    if step is None or not planned.is_on_gpu:
        return None
    return step.price(BILLION, planned.config.launch.dollars_per_gpu_hour)


def _measured(sweep: SweepDirectory) -> list[ComparisonRow]:
    rows = []
    for element in read_record(sweep).elements:
        run = sweep.run(element.name)
        if element.skipped:
            rows.append(ComparisonRow(element.name, element.settings, "predicted", "does-not-fit", element.skipped))
        elif is_timed(run):
            timed = chain_steps.read_benchmark(run)
            rows.append(
                ComparisonRow(
                    element.name,
                    element.settings,
                    "measured",
                    "finished",
                    device=timed.device,
                    plan=load_plan(run).summary(),
                    step_seconds=timed.median_seconds,
                    tokens_per_second=timed.tokens_per_second,
                    mfu=timed.mfu,
                    memory_bytes=timed.memory_added_bytes,
                )
            )
        else:
            outcome = read_outcome(run)
            rows.append(ComparisonRow(element.name, element.settings, "measured", outcome.status, outcome.reason))
    return rows
