"""When each rank was behind its peers."""

import html
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from llama_core.records.stragglers import Straggler
from llama_core.units import counted
from training_reports.contents import RunContents
from training_reports.figures import ORANGE, styled_figure
from training_reports.layout import Panel

MAX_RANKS = 24
"""Most ranks with a strip; those that were behind for the most steps."""
STRIP_PX = 26
AXES_PX = 90

Span = tuple[int, int, str]
"""The first and the last step of a time behind, and what was found."""


def slow_ranks(contents: RunContents) -> Iterator[Panel]:
    """Yield a panel if a rank fell behind while the run trained."""
    steps = contents.steps
    last = 0 if steps.empty else int(steps["step"].iloc[-1])
    behind = spans_by_rank(contents.stragglers, last)
    if not behind:
        return
    shown = dict(sorted(behind.items(), key=lambda item: -_num_steps(item[1]))[:MAX_RANKS])
    told = "; ".join(f"{rank}: {counted(_num_steps(spans), 'step')}" for rank, spans in shown.items())
    notes = ["A strip is the steps in which a rank computed more slowly than its peers, or waited for a core."]
    if len(behind) > len(shown):
        notes.append(f"{counted(len(behind) - len(shown), 'further rank')} were behind for fewer steps.")
    height = AXES_PX + STRIP_PX * len(shown)
    yield Panel("Ranks behind their peers", draw(shown, last), f"{told}.", notes, wide=True, height_px=height)


def spans_by_rank(stragglers: Sequence[Straggler], last: int) -> dict[str, list[Span]]:
    """Return the times behind of every rank that was, by the rank and its node.

    Args:
        stragglers: what was found, in order.
        last: the run's newest step; a rank that has not caught up is behind until then.
    """
    behind: dict[str, list[Span]] = {}
    open_ones: dict[tuple[int, str], Straggler] = {}
    for one in stragglers:
        begun = open_ones.pop((one.rank, one.signal), None)
        if begun is not None:
            behind.setdefault(_label(begun), []).append((begun.since_step, one.since_step, begun.finding))
        if not one.is_over:
            open_ones[one.rank, one.signal] = one
    for begun in open_ones.values():
        behind.setdefault(_label(begun), []).append((begun.since_step, max(last, begun.step), begun.finding))
    return behind


def draw(behind: dict[str, list[Span]], last: int) -> go.Figure:
    """Return a strip for every rank, from its first step to the ``last``."""
    figure = styled_figure("")
    spans = [(rank, *span) for rank, of_rank in behind.items() for span in of_rank]
    # A mapping, because the keyword annotations allow only numbers for y.
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [rank for rank, *_ in spans],
        "base": [begin for _, begin, _, _ in spans],
        "x": [end - begin for _, begin, end, _ in spans],
        "marker": {"color": ORANGE},
        "customdata": [[begin, end, html.escape(finding)] for _, begin, end, finding in spans],
        "hovertemplate": "steps %{customdata[0]:,} to %{customdata[1]:,}: %{customdata[2]}<extra></extra>",
    }
    figure.add_trace(bars)
    figure.update_layout(barmode="overlay", hovermode="closest", showlegend=False)
    figure.update_xaxes(title_text="step", range=[0, max(last, 1)])
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def _label(one: Straggler) -> str:
    return html.escape(f"rank {one.rank} on {one.host}")


def _num_steps(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end, _ in spans)
