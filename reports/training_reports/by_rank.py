"""The peak memory of every rank: estimated, rehearsed and measured."""

from collections.abc import Iterator, Mapping, Sequence

import plotly.graph_objects as go

from llama_core.units import format_bytes
from training_reports.contents import RunContents
from training_reports.figures import memory_unit, styled_figure
from training_reports.layout import Panel
from training_reports.sweep_figures import PEAK_COLORS

MAX_RANKS = 16
"""Most ranks with bars of their own; with more ranks, each pipeline stage has bars instead."""

INK = "#1c2024"
"""Colour of the lines, which lie inside the bars."""

Peaks = Mapping[str, Sequence[int]]
"""The peaks of a group of ranks in bytes, by the keys of ``PEAK_COLORS``; empty where they are not known."""


def memory_by_rank(contents: RunContents) -> Iterator[Panel]:
    """Yield a panel if the run has several ranks."""
    plan = contents.parallel_plan
    if plan is None or plan.world_size == 1:
        return
    title = "Peak memory by rank"
    groups = peaks_by_group(contents)
    notes = _missing(contents, groups)
    if not any(any(peaks.values()) for peaks in groups.values()):
        yield Panel(title, None, "", notes, wide=True)
        return
    by_rank = len(groups) == plan.world_size
    told = "; ".join(f"{'rank' if by_rank else 'ranks'} {label}: {_in_words(peaks)}" for label, peaks in groups.items())
    if not by_rank:
        notes.insert(0, "Each group is a pipeline stage; a line goes from its fullest rank down to its least full one.")
    if plan.world_size > plan.pp:
        notes.append("Ranks of one pipeline stage share their prediction.")
    figure = draw(groups, "rank" if by_rank else "ranks of each pipeline stage")
    yield Panel(title, figure, f"{told}.", notes, wide=True)


def peaks_by_group(contents: RunContents) -> dict[str, Peaks]:
    """Return the peaks of every rank or, of many ranks, of every pipeline stage, by its ranks in words."""
    plan = contents.parallel_plan
    training = contents.training
    if plan is None:
        return {}
    whole = plan.world_size
    of_stage = plan.world_size // plan.pp
    per_group = 1 if whole <= MAX_RANKS else of_stage
    measured = training.memory_by_rank_bytes if training else ()
    predicted = {"estimated": contents.stage_peaks("estimate"), "rehearsed": contents.stage_peaks("dry_run")}
    return {
        str(first) if per_group == 1 else f"{first} to {first + per_group - 1}": {
            **{how: peaks[first // of_stage : first // of_stage + 1] for how, peaks in predicted.items()},
            "measured": measured[first : first + per_group] if len(measured) == whole else (),
        }
        for first in range(0, whole, per_group)
    }


def draw(groups: Mapping[str, Peaks], x_title: str) -> go.Figure:
    """Return the peaks of every group side by side: bars to the largest of each kind, with lines to the smallest."""
    size, unit = memory_unit(max(max(peaks) for kinds in groups.values() for peaks in kinds.values() if peaks))
    figure = styled_figure(f"peak memory ({unit})")
    for kind, color in PEAK_COLORS.items():
        known = {label: kinds[kind] for label, kinds in groups.items() if kinds[kind]}
        spread = [(max(peaks) - min(peaks)) / size for peaks in known.values()]
        # A mapping, because the keyword annotations allow only numbers for x.
        bars = {
            "type": "bar",
            "x": list(known),
            "y": [max(peaks) / size for peaks in known.values()],
            "name": kind,
            "marker": {"color": color},
            "hovertemplate": f"%{{y:.3f}} {unit}",
        }
        if any(spread):
            bars["error_y"] = {"symmetric": False, "array": [0.0] * len(spread), "arrayminus": spread, "color": INK}
        if known:
            figure.add_trace(bars)
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text=x_title, type="category", categoryorder="array", categoryarray=list(groups))
    return figure


def _in_words(peaks: Peaks) -> str:
    told = []
    for how, values in peaks.items():
        if values:
            least = format_bytes(min(values))
            most = format_bytes(max(values))
            told.append(f"{how} {most}" if least == most else f"{how} {least} to {most}")
    return ", ".join(told) or "unknown"


def _missing(contents: RunContents, groups: Mapping[str, Peaks]) -> list[str]:
    """Return a sentence for each kind of peak that no rank has."""
    absent = [how for how in PEAK_COLORS if not any(peaks[how] for peaks in groups.values())]
    fields = {"estimated": "estimate", "rehearsed": "dry_run", "measured": "training"}
    return [
        contents.missing.get(fields[how], f"No rank's own peak was {how}, or another version recorded it.")
        for how in absent
    ]
