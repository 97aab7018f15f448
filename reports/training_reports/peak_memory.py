"""The peak memory of a run: estimated, rehearsed and measured side by side."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import plotly.graph_objects as go

from llama_core.planning.memory.host import FREED
from llama_core.units import format_bytes
from training_reports.contents import JsonRecord, RunContents
from training_reports.figures import (
    BLUE,
    BROWN,
    GREY,
    OLIVE,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    STEEL,
    TAUPE,
    TEAL,
    add_bar,
    memory_unit,
    stack_bars,
    styled_figure,
)
from training_reports.layout import Panel

HEIGHT_PX = 420
"""Room for three bars with labels of three lines below a legend of a narrow page."""

CATEGORY_COLORS = {
    "weights": BLUE,
    "gradients": ORANGE,
    "moments": TEAL,
    "activations": PURPLE,
    "loss": RED,
    "communication": OLIVE,
    "temporaries": PINK,
    "checkpoint copy": BROWN,
}
"""Colour of each memory category, in stacking order."""

OUTSIDE_COLORS = {"process": TAUPE, FREED: STEEL}
"""Colour of each part of the memory taken beside the memory alive."""

MEASURED = "all categories"
"""Name of a measurement's bar."""

Profile = Mapping[str, Any]
"""A memory profile from ``estimate.json`` or ``dry_run.json``: ``phases``, ``peak_phase``, ``peak_bytes``."""


def memory_comparison_panel(contents: RunContents) -> Panel:
    """Return the panel of the peaks; a note explains each missing one."""
    measured = contents.measured_bytes
    predictions = list(contents.predictions_alive)
    peaks = [f"{how} {_peak(profile, measured)}" for how, _, profile in predictions if profile is not None]
    notes = [contents.missing[field] for _, field, profile in predictions if profile is None]
    if measured is None:
        notes.append(contents.missing["training"])
    else:
        peaks.append(f"measured {format_bytes(measured)}")
        notes.append(
            f"The measurement is the peak of {contents.measure_of_memory}, less its value before the model was built."
        )
    outside = {name: size for name, size in contents.estimated_outside.items() if name in OUTSIDE_COLORS}
    outside_tensors = {"estimated": outside, "rehearsed": outside, "measured": contents.measured_outside}
    if contents.training and contents.training.memory_process_bytes:
        notes.append(
            f"The whole process took {format_bytes(contents.training.memory_reserved_bytes)}, including its libraries "
            "and the freed memory that it keeps."
        )
    summary = ", ".join(peaks)
    figure = None
    if peaks:
        (_, _, estimated), (_, _, rehearsed) = predictions
        figure = memory_comparison(estimated, rehearsed, measured, outside_tensors)
        notes.insert(0, f"Peaks: {summary}.")
    title = "Peak memory: estimated, rehearsed, measured"
    return Panel(title, figure, summary, notes + _fit(contents), wide=True, height_px=HEIGHT_PX)


def _fit(contents: RunContents) -> list[str]:
    estimate = contents.estimate or {}
    if not {"fits", "usable_bytes", "device", "notes"} <= estimate.keys():
        return []
    # an estimate that leaves room on the device but does not fit is too large for the host
    verdict = "fits" if estimate["fits"] or estimate.get("headroom_bytes", -1) >= 0 else "does not fit"
    usable = f"{format_bytes(estimate['usable_bytes'])} usable of {estimate['device']}"
    notes = [f"Note on the estimate: {note}." for note in estimate["notes"]]
    return [f"The estimate {verdict} the {usable}.", *_host(estimate.get("host")), *notes]


def _host(host: JsonRecord | None) -> list[str]:
    """Return a sentence about the host memory of a node, if the estimate has it."""
    if not host:
        return []
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in host["parts"].items())
    ranks = "the rank" if host["num_ranks"] == 1 else f"each of {host['num_ranks']} ranks"
    return [f"Host memory of a node: about {format_bytes(host['node_bytes'])}; {ranks} takes {parts}."]


def _peak(profile: JsonRecord, measured: int | None) -> str:
    size = format_bytes(profile["peak_bytes"])
    return f"{size} in the {profile['peak_phase']} phase{relative_error(profile, measured)}"


def relative_error(profile: JsonRecord, measured: int | None) -> str:
    """Return the relative error of a prediction, such as ``' (+4.5 %)'``."""
    return f" ({100 * (profile['peak_bytes'] / measured - 1):+.1f} %)" if measured else ""


def memory_comparison(
    estimated: Profile | None,
    rehearsed: Profile | None,
    measured_bytes: float | None,
    outside: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> go.Figure:
    """Return the estimated, rehearsed and measured peaks as bars side by side; an argument of None has no bar.

    Each prediction is a stack of the categories at its peak phase, so its length is ``peak_bytes``. A measurement has
    no categories. Every bar continues with the memory taken beside the memory alive.

    Args:
        estimated: the estimate.
        rehearsed: the dry run.
        measured_bytes: the most bytes alive.
        outside: bytes taken beside those alive, by part, for ``estimated``, ``rehearsed`` and ``measured``.
    """
    profiles = {
        label: profile for label, profile in (("estimated", estimated), ("rehearsed", rehearsed)) if profile is not None
    }
    peaks = {label: profile["peak_bytes"] for label, profile in profiles.items()}
    if measured_bytes is not None:
        peaks["measured"] = measured_bytes
    parts = {label: outside.get(label, {}) for label in peaks}
    totals = {label: peak + sum(parts[label].values()) for label, peak in peaks.items()}
    size, unit = memory_unit(max(totals.values(), default=0))
    rows = {
        label: f"{label}<br><b>{peak / size:.2f} {unit}</b>"
        + (f"<br>{totals[label] / size:.2f} {unit} taken" if totals[label] > peak else "")
        for label, peak in peaks.items()
    }

    figure = styled_figure("")
    stacks = {label: profile["phases"][profile["peak_phase"]] for label, profile in profiles.items()}
    categories = dict.fromkeys([*CATEGORY_COLORS, *(category for stack in stacks.values() for category in stack)])
    for category in categories:
        num_bytes = {label: stack.get(category, 0) for label, stack in stacks.items()}
        if any(num_bytes.values()):
            color = CATEGORY_COLORS.get(category, GREY)
            add_bar(figure, {rows[label]: value / size for label, value in num_bytes.items()}, category, color, unit)
    if measured_bytes is not None:
        add_bar(figure, {rows["measured"]: measured_bytes / size}, MEASURED, GREY, unit, has_legend=False)
    for part in dict.fromkeys(part for own in parts.values() for part in own):
        lengths = {rows[label]: own.get(part, 0) / size for label, own in parts.items()}
        add_bar(figure, lengths, part, OUTSIDE_COLORS.get(part, GREY), unit)
    stack_bars(figure, list(rows.values()), f"peak memory per rank ({unit})")
    return figure
