"""Where the time of a step goes: predicted by the planner, measured in the steps, and profiled."""

from collections.abc import Iterator, Mapping

import plotly.graph_objects as go

from llama_core.records.profiles import ProfileRecord
from llama_core.records.step_parts import BUBBLE, COMPUTING, HOST, OPTIMIZER, TRANSFERS
from llama_core.units import TFLOP, format_duration
from training_reports.by_step import PART_COLORS, measured_parts
from training_reports.contents import RunContents
from training_reports.figures import add_bar, stack_bars, styled_figure
from training_reports.layout import Panel

MAX_PROFILES = 8
"""Most profiled ranks with a bar of their own; the table of profiles has all."""


def step_breakdown(contents: RunContents) -> Iterator[Panel]:
    """Yield a panel of the parts of a step if some were measured; a note explains each missing bar."""
    measurements = {"measured": measured(contents), **profiled(contents)}
    known = {name: parts for name, parts in ({"predicted": predicted(contents)} | measurements).items() if parts}
    if not any(measurements.values()):
        return
    told = "; ".join(
        f"{name} {', '.join(f'{part} {seconds:.3g} s' for part, seconds in parts.items() if seconds > 0)}"
        for name, parts in known.items()
    )
    yield Panel(
        "Time of a step: predicted and measured",
        step_parts(known),
        f"{told}.",
        list(_notes(contents)),
        wide=True,
        height_px=160 + 60 * len(known),
    )


def step_parts(rows: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Return the time of a step as bars, one above the other.

    Args:
        rows: the seconds of the parts in ``PART_COLORS``, by the label of their bar; unknown parts are missing.
    """
    labels = {name: f"{name}<br><b>{sum(parts.values()):.3g} s</b>" for name, parts in rows.items()}
    figure = styled_figure("")
    for part, color in PART_COLORS.items():
        lengths = {labels[name]: parts[part] for name, parts in rows.items() if parts.get(part, 0) > 0}
        if lengths:
            add_bar(figure, lengths, part, color, "s")
    stack_bars(figure, list(labels.values()), "time of a step (s)")
    return figure


def predicted(contents: RunContents) -> dict[str, float]:
    """Return the planner's parts of a step in seconds; empty without a prediction."""
    expected = contents.expected
    if expected is None:
        return {}
    if not expected.parts:
        return {"computing": expected.seconds}
    return {
        "computing": sum(expected.parts.get(kind, 0.0) for kind in COMPUTING),
        "communication": sum(expected.parts.get(kind, 0.0) for kind in TRANSFERS),
        "pipeline bubble": expected.parts.get(BUBBLE, 0.0),
        "optimizer": expected.parts.get(OPTIMIZER, 0.0),
        "idle": expected.parts.get(HOST, 0.0),
    }


def measured(contents: RunContents) -> dict[str, float]:
    """Return the mean seconds of each measured part of a step, without the run's first, which includes start-up."""
    steps = contents.steps
    if steps.empty:
        return {}
    parts = measured_parts(steps.iloc[1:] if len(steps) > 1 else steps)
    return {name: float(seconds.mean()) for name, seconds in parts.items()}


def profiled(contents: RunContents) -> dict[str, dict[str, float]]:
    """Return the seconds of each part of a profiled step, for every profiled rank."""
    count = len(contents.benchmark.step_seconds) if contents.benchmark else 0
    several = len(contents.profiles) > 1
    return {
        f"profiled, rank {profile.rank}" if several else "profiled": _parts(profile, count)
        for profile in contents.profiles[:MAX_PROFILES]
        if count
    }


def _parts(profile: ProfileRecord, num_steps: int) -> dict[str, float]:
    if profile.span_seconds is None:  # on a CPU, operators of all threads, one after the other
        whole = sum(profile.seconds.values())
        communication = profile.communication_seconds
        idle = 0.0
    else:  # on a GPU, where communication may hide behind computing
        whole = profile.span_seconds
        communication = profile.exposed_seconds or 0.0
        idle = profile.idle_seconds or 0.0
    optimizer = profile.seconds.get("optimizer", 0.0)
    parts = {
        "computing": max(0.0, whole - communication - optimizer - idle),
        "communication": communication,
        "optimizer": optimizer,
        "idle": idle,
    }
    return {name: seconds / num_steps for name, seconds in parts.items()}


def _notes(contents: RunContents) -> Iterator[str]:
    num_steps = len(contents.steps)
    plan = contents.parallel_plan
    several = plan is not None and plan.world_size > 1
    if num_steps:
        counted = f"mean of {num_steps - 1} steps, without the first" if num_steps > 1 else "the only step"
        waits = "; forward and backward include communication and waits for other ranks" if several else ""
        yield f"Measured on rank 0: {counted}{waits}."
    if contents.expected is not None:
        expected = contents.expected
        yield (
            f"Predicted before the run, {expected.told_by}: {format_duration(expected.seconds)} for "
            f"{expected.flops / TFLOP:.3g} TFLOP."
        )
    else:
        yield contents.missing.get("expected", "No prediction.")
    if contents.profiles and contents.benchmark:
        on_gpu = contents.profiles[0].span_seconds is not None
        counts = "Only communication not hidden by computing" if on_gpu else "The operators' own time on all threads"
        yield f"Profiled in {len(contents.benchmark.step_seconds)} timed steps, slowed by profiling. {counts} counts."
    elif several:
        yield (
            "Communication is not measured separately, because that would slow the steps. To measure it in a new run "
            f"of the same configuration: {contents.profile_command}"
        )
