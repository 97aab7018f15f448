"""What the checkpoints of a run have scored, by the tokens that they were trained on."""

import html
from collections.abc import Iterator, Sequence
from itertools import groupby

import plotly.graph_objects as go

from llama_core.records.evaluations import Score
from llama_core.units import format_count
from training_reports.figures import BLUE, ORANGE, PURPLE, TEAL, styled_figure
from training_reports.layout import Panel

_COLORS = (BLUE, ORANGE, TEAL, PURPLE)


def evaluation_panels(scores: Sequence[Score]) -> Iterator[Panel]:
    """Yield a panel for each task and metric.

    Args:
        scores: the scores of a run, each metric's together, in the order of their steps.
    """
    for number, (name, group) in enumerate(groupby(scores, key=score_name)):
        of_metric = list(group)
        newest = of_metric[-1]
        spread = "" if newest.spread is None else f" ± {newest.spread:.4f}"
        version = f" of version {newest.version}" if newest.version else ""
        better = "higher" if newest.higher_is_better else "lower"
        notes = [f"Over {newest.examples:,} examples{version}; {better} is better."]
        if newest.spread is not None:
            notes.append("The bars are two standard errors either way.")
        yield Panel(
            f"Evaluated: {name}",
            scores_by_tokens(of_metric, _COLORS[number % len(_COLORS)]),
            f"After step {newest.step:,} ({format_count(newest.tokens)} tokens): {newest.value:.4f}{spread}.",
            notes,
        )


def score_name(score: Score) -> str:
    """Return the name of a score that its steps have in common: the task, how it was asked, and the metric."""
    asked = f" ({score.settings})" if score.settings else ""
    return f"{score.task}{asked}, {score.metric}"


def scores_by_tokens(scores: Sequence[Score], color: str) -> go.Figure:
    """Return one metric by the tokens that each checkpoint was trained on, with its spread."""
    figure = styled_figure(html.escape(scores[0].metric))
    figure.add_scatter(
        x=[score.tokens for score in scores],
        y=[score.value for score in scores],
        error_y={"type": "data", "array": [score.spread for score in scores], "color": color, "thickness": 1},
        customdata=[score.step for score in scores],
        mode="lines+markers",
        line={"color": color},
        name=html.escape(scores[0].task),
        hovertemplate="%{y:.4f} at step %{customdata:,}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="tokens", tickformat="~s", rangemode="tozero")
    return figure
