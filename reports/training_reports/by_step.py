"""What a run did by step: each subject's figure beside the panel that shows it.

A figure is a pure function from the steps to a Plotly figure. ``LEARNING`` and ``RUNNING`` are the order on the page.
Unknown values are NaN and leave a gap in the line.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.registry import OBJECTIVES
from llama_core.records.measurements import OF_LAYER, BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.units import format_bytes
from training_reports.contents import RunContents, losses_by_name
from training_reports.downsampling import MAX_POINTS, kept
from training_reports.figures import (
    BLUE,
    GREY,
    LEGEND_LINE_PX,
    OLIVE,
    ORANGE,
    PINK,
    PURPLE,
    RED,
    STEEL,
    TAUPE,
    TEAL,
    add_level,
    add_line,
    add_place,
    memory_unit,
    styled_figure,
)
from training_reports.layout import Panel

REST = "everything else"
"""The part of a step's time that is not measured."""

PART_COLORS = {
    "forward": BLUE,
    "backward": PURPLE,
    "computing": STEEL,
    "communication": OLIVE,
    "pipeline bubble": PINK,
    "optimizer": TEAL,
    "waiting for data": ORANGE,
    "idle": TAUPE,
    REST: GREY,
}
"""Colour of each part of a step's time, in stacking order."""


_NAMED_COLORS = (BLUE, ORANGE, TEAL, PURPLE, RED, OLIVE, PINK, STEEL, TAUPE)
_DASHES = ("solid", "dash", "dot")


def panels_of_learning(contents: RunContents) -> list[Panel]:
    """Return the panels on what the model learns by step, that of the loss first.

    It is a single one without a figure if the run has no step.
    """
    if contents.steps.empty:
        return [Panel("Training by step", None, "", [contents.missing["steps"]], wide=True)]
    return _made(LEARNING, contents)


def panels_of_running(contents: RunContents) -> list[Panel]:
    """Return the panels on how the steps run; empty if the run has none."""
    return [] if contents.steps.empty else _made(RUNNING, contents)


def _made(kinds: Sequence[Callable[[RunContents], Panel | None]], contents: RunContents) -> list[Panel]:
    panels = [panel(contents) for panel in kinds]
    return [panel for panel in panels if panel is not None]


def _loss_panel(contents: RunContents) -> Panel:
    steps = contents.steps
    unigram = contents.training.unigram_entropy if contents.training else None
    bigram = contents.training.bigram_entropy if contents.training else None
    first = steps["loss"].iloc[0]
    last = steps["loss"].iloc[-1]
    figure = loss(steps, unigram, bigram, unit=contents.loss_unit)
    _mark_data(figure, contents)
    return Panel(
        "Loss",
        figure,
        f"{_range(steps)}: training loss from {first:.4f} to {last:.4f} {contents.loss_unit}.",
        [*_loss_notes(steps, unigram, bigram), *_data_notes(contents), *_left_out(steps)],
        wide=True,
    )


def loss(
    steps: pd.DataFrame,
    unigram_entropy: float | None = None,
    bigram_entropy: float | None = None,
    *,
    unit: str = NEXT_TOKEN.unit_in_words,
) -> go.Figure:
    """Return training and held-out loss by step, with the entropies of the corpus as reference lines.

    A skipped step is marked at its loss, or at the nearest finite loss if its own is not finite.
    """
    figure = styled_figure(f"loss ({unit})")
    add_line(figure, steps["step"], steps["loss"], "training", color=BLUE, hover="%{y:.4f}")
    held_out = steps[steps["eval_loss"].notna()]
    if not held_out.empty:
        add_line(
            figure, held_out["step"], held_out["eval_loss"], "held-out", color=ORANGE, hover="%{y:.4f}", marked=True
        )
    skipped = steps[steps["skipped"].astype(bool)]
    if not skipped.empty:
        finite = steps["loss"].where(steps["loss"].abs() < float("inf"))
        nearest = finite.ffill().bfill().fillna(0.0)[skipped.index]
        drawn = kept(nearest)
        figure.add_scatter(
            x=skipped["step"].iloc[drawn],
            y=nearest.iloc[drawn],
            name="skipped step",
            mode="markers",
            marker={"color": RED, "symbol": "x", "size": 9},
            hovertemplate="not finite, update left out",
        )
    for entropy, name, dash in ((unigram_entropy, "unigram", "dash"), (bigram_entropy, "bigram", "dot")):
        if entropy is not None:
            add_level(figure, entropy, f"byte-{name} entropy {entropy:.4f}", GREY, dash)
    _label_steps(figure, steps)
    return figure


def _loss_notes(steps: pd.DataFrame, unigram: float | None, bigram: float | None) -> Iterator[str]:
    if unigram is not None and bigram is not None:
        yield (
            "The byte-unigram entropy is the loss of a model that knows only the frequency of each byte; the"
            " byte-bigram entropy, of one that also knows the previous byte."
        )
    skipped = int(steps["skipped"].sum())
    if skipped:
        yield f"Updates skipped because the loss or the gradient was not finite: {skipped}."


def _mark_data(figure: go.Figure, contents: RunContents) -> None:
    """Draw a line where each stage begins, and where the run went on with other data or settings."""
    last = contents.steps["step"].iloc[-1]
    for stage in contents.stages:
        if stage.num_steps < last:
            add_place(figure, stage.num_steps, f"stage {stage.number}")
    for change in contents.data_changes:
        if change.step < last:
            add_place(figure, change.step, "other data")
    for later in contents.settings_changes:
        if later.step < last:
            add_place(figure, later.step, "other settings")


def _data_notes(contents: RunContents) -> Iterator[str]:
    for stage in contents.stages:
        yield f"Stage {stage.number} begins {stage}."
    for change in (*contents.data_changes, *contents.settings_changes):
        yield f"{str(change)[0].upper()}{str(change)[1:]}."


def _left_out(steps: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence on the steps that the figures leave out, if they do."""
    if len(steps) > MAX_POINTS:
        yield (
            f"The figures by step draw at most {MAX_POINTS} of {len(steps):,} steps: the lowest and the highest of "
            "every few, so that no spike is lost."
        )


def _named_loss_panel(contents: RunContents) -> Panel | None:
    """Return a panel if the held-out tokens have names."""
    losses = _by_name(contents.steps)
    if losses.empty:
        return None
    last = losses.iloc[-1]
    values = ", ".join(f"{name} {value:.4f}" for name, value in last.dropna().items())
    figure = named_losses(contents.steps, unit=contents.loss_unit)
    _mark_data(figure, contents)
    return Panel(
        "Held-out loss by name",
        figure,
        f"At step {last.name}: {values} {contents.loss_unit}.",
        list(weights_of_named(contents.training))
        or ["The held-out loss above is the mean over what is held out of all of these, whatever their shares."],
        wide=True,
        height_px=300 + LEGEND_LINE_PX * len(last),  # on a narrow page, each name has a line of the legend
    )


def named_losses(steps: pd.DataFrame, *, unit: str = NEXT_TOKEN.unit_in_words) -> go.Figure:
    """Return the held-out loss by step, a line for each name."""
    figure = styled_figure(f"held-out loss ({unit})")
    losses = _by_name(steps)
    for number, name in enumerate(losses.columns):
        losses_of_one = losses[name].dropna()
        add_line(
            figure,
            losses_of_one.index.to_series(),
            losses_of_one,
            name,
            color=_NAMED_COLORS[number % len(_NAMED_COLORS)],
            hover="%{y:.4f}",
            marked=True,
            dash=_DASHES[number // len(_NAMED_COLORS) % len(_DASHES)],
        )
    _label_steps(figure, steps)
    return figure


def weights_of_named(training: TrainingSummary | None) -> Iterator[str]:
    """Yield how much each named part weighs in the held-out loss, as a sentence; nothing if there are no names."""
    weights = {} if training is None else training.held_out_weights
    if training is not None and weights:
        told = ", ".join(f"{name} {weight:.1%}" for name, weight in weights.items())
        yield (
            f"Names weigh in the held-out loss as they have held-out {training.counted}, whatever their shares in "
            f"training: {told}."
        )


def _by_name(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the named held-out losses, a row for each evaluated step, by its number, and a column for each name."""
    losses = losses_by_name(steps)
    return losses.set_index(steps["step"][losses.index])


def _throughput_panel(contents: RunContents) -> Panel:
    steps = contents.steps
    return Panel(
        "Throughput",
        throughput(steps, contents.benchmark),
        f"{_range(steps)}: median {steps['tokens_per_second'].median():,.0f} tokens/s.",
        ["All devices together." if contents.benchmark else contents.missing["benchmark"]],
    )


def throughput(steps: pd.DataFrame, benchmark: BenchmarkRecord | None = None) -> go.Figure:
    """Return tokens/s by step, with the benchmark's median as a line and its interquartile range as a band."""
    figure = styled_figure("throughput (tokens/s)")
    add_line(
        figure, steps["step"], steps["tokens_per_second"], "training steps", color=BLUE, hover="%{y:,.0f} tokens/s"
    )
    if benchmark is not None:
        slow, fast = benchmark.throughput_quartiles
        figure.add_hrect(
            slow,
            fast,
            name="benchmark, middle half",
            showlegend=True,
            fillcolor=ORANGE,
            opacity=0.3,
            line_width=0,
        )
        median = benchmark.tokens_per_second
        add_level(figure, median, f"benchmark, median {median:,.0f}", ORANGE, "solid")
    figure.update_yaxes(rangemode="tozero", tickformat="~s")
    _label_steps(figure, steps)
    return figure


def _step_time_panel(contents: RunContents) -> Panel:
    steps = contents.steps
    shares = _time_shares(steps)
    return Panel("Where the time of a step goes", step_time(steps), f"{_range(steps)}. {shares}", [shares])


def step_time(steps: pd.DataFrame) -> go.Figure:
    """Return the seconds of every step as a stack: the measured parts and the rest."""
    parts = measured_parts(steps)
    drawn = kept(steps["step_seconds"], *parts.values())
    figure = styled_figure("time (s per step)")
    for name, seconds in parts.items():
        x = steps["step"].iloc[drawn]
        y = seconds.iloc[drawn]
        add_line(figure, x, y, name, color=PART_COLORS[name], hover="%{y:.3f} s", stack="step")
    figure.update_yaxes(rangemode="tozero")
    _label_steps(figure, steps)
    return figure


def measured_parts(steps: pd.DataFrame) -> dict[str, "pd.Series[float]"]:
    """Return the measured parts of every step and the rest, in seconds, in stacking order."""
    both = steps["forward_backward_seconds"]
    backward = steps["backward_seconds"]
    parts = {
        "forward": both - backward,
        "backward": backward,
        "optimizer": steps["optimizer_seconds"],
        "waiting for data": steps["data_seconds"],
    }
    # The parts are timed separately and may exceed the whole by a hair; a stack cannot go down.
    rest = (steps["step_seconds"] - sum(parts.values())).clip(lower=0.0)
    return parts | {REST: rest}


def _time_shares(steps: pd.DataFrame) -> str:
    whole = steps["step_seconds"].sum()
    parts = measured_parts(steps)
    del parts[REST]
    shares = (f"{name} {seconds.sum() / whole:.1%}" for name, seconds in parts.items())
    return f"Share of the time of all steps: {', '.join(shares)}."


def _learning_rate_panel(contents: RunContents) -> Panel:
    steps = contents.steps
    return Panel(
        "Learning rate and gradient norm",
        learning_rate_and_gradient_norm(steps),
        f"{_range(steps)}: learning rate up to {steps['learning_rate'].max():.3g}, "
        f"median gradient norm {steps['grad_norm'].median():.4g}.",
        ["The gradient norm is global, before clipping."],
    )


def learning_rate_and_gradient_norm(steps: pd.DataFrame) -> go.Figure:
    """Return two rows by step: the learning rate, and below it the global gradient norm before clipping."""
    figure = _two_rows(
        steps,
        ("learning_rate", "learning rate", "learning rate", "%{y:.3g}"),
        ("grad_norm", "gradient norm", "gradient norm", "%{y:.4g}"),
    )
    figure.update_yaxes(exponentformat="power", row=1)
    return figure


def _memory_panel(contents: RunContents) -> Panel:
    steps = contents.steps
    return Panel(
        "Memory by step",
        memory_by_step(steps),
        f"{_range(steps)}: up to {format_bytes(steps['memory_peak_bytes'].max())}.",
        [f"Memory is {contents.measure_of_memory}, including what was held before the model was built."],
    )


def memory_by_step(steps: pd.DataFrame) -> go.Figure:
    """Return the memory alive at the end of every step, and its peak and the memory taken for it up to that step."""
    size, unit = memory_unit(max(steps["memory_peak_bytes"].max(), steps["memory_reserved_bytes"].max()))
    figure = styled_figure(f"memory ({unit})")
    # The peak is drawn last and dotted, so that both lines show where they coincide.
    lines = (
        ("reserved", "taken so far", GREY, None),
        ("allocated", "held now", BLUE, None),
        ("peak", "peak so far", ORANGE, "dot"),
    )
    for column, name, color, dash in lines:
        held = steps[f"memory_{column}_bytes"] / size
        add_line(figure, steps["step"], held, name, color=color, hover=f"%{{y:.3f}} {unit}", dash=dash)
    figure.update_yaxes(rangemode="tozero")
    _label_steps(figure, steps)
    return figure


def _routing_panel(contents: RunContents) -> Panel | None:
    """Return a panel if the run has experts."""
    steps = contents.steps
    if not _has(steps, "expert_load"):
        return None
    last = steps.iloc[-1]
    return Panel(
        "Routing to experts",
        routing(steps),
        f"At the last step the busiest expert got {last['expert_load']:.3g} times the tokens of an average one; the "
        f"routers' entropy was {last['router_entropy']:.3g} nats.",
        [
            "The load is the largest of any layer; 1 means that all experts get the same.",
            "The entropy is a mean over layers and tokens. The logarithm of the number of experts means no preference; "
            "0 means that every token has one expert.",
            "The metrics have both for each layer, too.",
        ],
        wide=True,
    )


def routing(steps: pd.DataFrame) -> go.Figure:
    """Return two rows by step: the load of the busiest expert, and below it the entropy of the routers."""
    return _two_rows(
        steps,
        ("expert_load", "busiest expert", "load (x mean)", "%{y:.3g} x mean"),
        ("router_entropy", "entropy", "entropy (nats)", "%{y:.3g} nats"),
    )


def _experts_panel(contents: RunContents) -> Panel | None:
    """Return a panel if the run has experts, and a step that records what each of them got."""
    steps = contents.steps
    if "expert_shares" not in steps or not _has(steps, "expert_load"):
        return None
    recorded = steps[steps["expert_shares"].map(bool)]
    if recorded.empty:
        return None
    last = recorded.iloc[-1]
    shares = dict(last["expert_shares"])
    unused = sum(share == 0 for of_layer in shares.values() for share in of_layer)
    busiest = max(shares, key=lambda layer: max(shares[layer]))
    biases = {layer: last[name] for layer in shares if (name := f"balance_bias{OF_LAYER}{layer}") in steps}
    largest = max(biases, key=lambda layer: biases[layer], default="")
    return Panel(
        "Experts of each layer",
        experts(shares),
        f"At step {last['step']}, {unused} experts got no token; the busiest is in layer {busiest}, with "
        f"{max(shares[busiest]):.1%} of the tokens there."
        + (f" The largest balance bias is {biases[largest]:.3g}, in layer {largest}." if biases else ""),
        [
            "White is an expert's even share. It is recorded at evaluated steps and the last; no token is dropped.",
        ],
        wide=True,
        height_px=110 + max(120, min(720, 14 * len(shares))),
    )


def experts(shares: Mapping[str, Sequence[float]]) -> go.Figure:
    """Return a map of the tokens of each expert, over an even share, with a row for each layer that has experts.

    Args:
        shares: which share of a layer's tokens each of its experts got, by the layer's number.
    """
    loads = [[share * len(of_layer) for share in of_layer] for of_layer in shares.values()]
    most = max(2.0, *map(max, loads))
    figure = styled_figure("layer")
    figure.add_heatmap(
        z=np.array(loads),
        y=np.array(list(shares)),
        colorscale=[(0.0, BLUE), (1 / most, "#ffffff"), (1.0, ORANGE)],
        zmin=0,
        zmax=most,
        colorbar={"title": {"text": "x even share", "side": "right"}, "thickness": 12},
        hovertemplate="layer %{y}, expert %{x}: %{z:.3g} x its even share<extra></extra>",
    )
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_xaxes(title_text="expert")
    if len(loads[0]) <= MAX_NUMBERED_EXPERTS:  # else it would have ticks between experts
        figure.update_xaxes(dtick=1)
    return figure


def _rewards_panel(contents: RunContents) -> Panel | None:
    """Return a panel if the run trains on answers, in pairs or with labels."""
    steps = contents.steps
    if not _has(steps, "reward_margin"):
        return None
    last = steps[steps["reward_margin"].notna()].iloc[-1]  # a step may have good answers alone
    notes = [
        "A reward is what the objective makes of an answer's log-probability: with a reference, beta times the "
        "gain over it, so that both begin at 0."
    ]
    if _has_labels(contents):
        summary = (
            "At the last step with both, the good answers' mean reward exceeded that of the bad ones by "
            f"{last['reward_margin']:.3g}, and {last['reward_accuracy']:.1%} of the answers were on their side of the "
            "divergence."
        )
        about_divergence = (
            "The KL divergence is the mean gain over the reference in the log-probability of the step's answers after "
            "the prompts of other answers, at least 0: good answers are to gain more than that, and bad ones less."
        )
    else:
        summary = (
            "At the last step the chosen answers' reward exceeded that of the rejected ones by "
            f"{last['reward_margin']:.3g}, and it was higher in {last['reward_accuracy']:.1%} of the pairs."
        )
        notes.append("Both may fall: only the margin between them is trained for.")
        about_divergence = (
            "The KL divergence is an estimate on the answers of the data, which are not drawn from the model, so it "
            "may be negative: the mean gain in an answer's log-probability over the reference."
        )
    if _has(steps, "eval_reward_margin"):
        newest = steps[steps["eval_reward_margin"].notna()].iloc[-1]
        summary += (
            f" Of the held-out answers at step {newest['step']}, the margin was {newest['eval_reward_margin']:.3g} and "
            f"the accuracy {newest['eval_reward_accuracy']:.1%}."
        )
    has_reference = _has_reference(steps)
    if has_reference:
        summary += f" The KL divergence from the reference was about {last['kl']:.3g} nats."
        notes.append(about_divergence)
    return Panel(
        "Rewards of the answers",
        rewards(steps),
        summary,
        notes,
        wide=True,
        height_px=560 if has_reference else None,  # a fourth row
    )


def _has_labels(contents: RunContents) -> bool:
    """Return whether the run trains on answers with labels, as far as its configuration is known."""
    objective = OBJECTIVES.find(str(contents.setting("training", "objective")))
    return objective is not None and objective.records.has_labels


def _has_reference(steps: pd.DataFrame) -> bool:
    return _has(steps, "kl")


def rewards(steps: pd.DataFrame) -> go.Figure:
    """Return rows by step: rewards of chosen and rejected answers, their margin, and how often it is right.

    With a reference, the lowest row is the KL divergence from it.
    """
    titles = ["reward", "margin", "accuracy"]
    lines = [
        ("reward_chosen", "chosen", BLUE, "%{y:.3g}", 1),
        ("reward_rejected", "rejected", ORANGE, "%{y:.3g}", 1),
        ("reward_margin", "margin", TEAL, "%{y:.3g}", 2),
        ("reward_accuracy", "accuracy", BLUE, "%{y:.1%}", 3),
    ]
    if _has_reference(steps):
        titles.append("KL (nats)")
        lines.append(("kl", "KL from the reference", PURPLE, "%{y:.3g} nats", 4))
    figure = styled_figure("", rows=len(titles))
    for column, name, color, hover, row in lines:
        if _has(steps, column):
            add_line(figure, steps["step"], steps[column], name, color=color, hover=hover, row=row)
    for measure, hover, row in (("margin", "%{y:.3g}", 2), ("accuracy", "%{y:.1%}", 3)):
        column = f"eval_reward_{measure}"
        if _has(steps, column):
            held_out = steps[steps[column].notna()]
            name = f"held-out {measure}"
            add_line(figure, held_out["step"], held_out[column], name, color=RED, hover=hover, marked=True, row=row)
    for row, title in enumerate(titles, start=1):
        figure.update_yaxes(title_text=title, row=row)
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%", row=3)
    _label_steps(figure, steps, lowest_row=len(titles))
    return figure


def _other_metrics_panel(contents: RunContents) -> Panel | None:
    """Return a panel of the metrics that no other panel draws, if there are some."""
    steps = contents.steps
    names = []
    for name in map(str, steps):
        of_all_layers = name.partition(OF_LAYER)[0]
        if of_all_layers not in _DRAWN_IN_OTHER_FIGURES and _has(steps, name):
            names.append(name)
    if not names:
        return None
    drawn = names[:MAX_OTHER_METRICS]
    values = ", ".join(f"{name} {steps[name].dropna().iloc[-1]:.4g}" for name in drawn)
    notes = []
    if left_out := names[MAX_OTHER_METRICS:]:
        notes.append(f"Not drawn, but in the metrics: {', '.join(left_out)}.")
    return Panel(
        "Other metrics",
        other_metrics(steps, drawn),
        f"The last value of each: {values}.",
        notes,
        wide=True,
        height_px=80 + 140 * len(drawn),
    )


def other_metrics(steps: pd.DataFrame, names: Sequence[str]) -> go.Figure:
    """Return a row for each of some metrics, by step."""
    figure = styled_figure("", rows=len(names))
    for row, name in enumerate(names, start=1):
        own = steps[steps[name].notna()]
        shown = html.escape(name)  # a metric's name is what the run's files say
        add_line(figure, own["step"], own[name], shown, color=BLUE, hover="%{y:.4g}", row=row)
        figure.update_yaxes(title_text=shown, row=row)
    figure.update_layout(showlegend=False)
    _label_steps(figure, steps, lowest_row=len(names))
    return figure


MAX_NUMBERED_EXPERTS = 16
"""With how many experts the map of a layer's experts has a tick for each."""
MAX_OTHER_METRICS = 6
"""How many metrics are drawn that have no panel of their own."""
_DRAWN_IN_OTHER_FIGURES = {field.name for field in fields(StepRecord)} | {
    "expert_load",
    "router_entropy",
    "balance_bias",
    "unused_experts",
    *("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl"),
    *("eval_reward_chosen", "eval_reward_rejected", "eval_reward_margin", "eval_reward_accuracy", "eval_kl"),
}
"""The columns that have a panel or need none."""

LEARNING: tuple[Callable[[RunContents], Panel | None], ...] = (_loss_panel, _named_loss_panel, _rewards_panel)
"""The panels on what the model learns, in their order on the page; one that cannot apply to the run is None."""
RUNNING: tuple[Callable[[RunContents], Panel | None], ...] = (
    _throughput_panel,
    _step_time_panel,
    _learning_rate_panel,
    _memory_panel,
    _routing_panel,
    _experts_panel,
    _other_metrics_panel,
)
"""Likewise, the panels on how the steps run."""


def _has(steps: pd.DataFrame, name: str) -> bool:
    """Return whether any step has measured a metric; only those that one has are columns."""
    return name in steps and bool(steps[name].notna().any())


def _range(steps: pd.DataFrame) -> str:
    return f"Steps {steps['step'].iloc[0]} to {steps['step'].iloc[-1]}"


def _two_rows(steps: pd.DataFrame, *rows: tuple[str, str, str, str]) -> go.Figure:
    """Return two lines, one above the other; each row is the column, the line's name, the axis title and the hover."""
    figure = styled_figure("", rows=2)
    for row, (column, name, title, hover), color in zip((1, 2), rows, (BLUE, TEAL), strict=True):
        add_line(figure, steps["step"], steps[column], name, color=color, hover=hover, row=row)
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row)
    figure.update_layout(showlegend=False)
    _label_steps(figure, steps, lowest_row=2)
    return figure


def _label_steps(figure: go.Figure, steps: pd.DataFrame, lowest_row: int = 1) -> None:
    """Label the lowest x axis; with few steps, set a tick for each, so that the axis shows no half steps."""
    figure.update_xaxes(tickformat="d", dtick=1 if len(steps) <= 10 else None)
    figure.update_xaxes(title_text="optimizer step", row=lowest_row)
