"""Whether the best learning rate of a narrow model is that of a wide one: ``python -m benchmarks.width_transfer``.

Models of several widths and depths train on the built-in sample with the same learning rates, once with the usual
initial values and rates and once with CompleteP's, whose base is the smallest. The first table has the loss of the last
steps for each rate; the second, how far the first steps move the logits of one batch. ``--page FILE`` rewrites the
tables there; ``--picture FILE`` draws them, which needs Chromium.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from benchmarks.pages import draw, rewrite
from llama_core.config.model_spec import BaseShape
from llama_core.config.models import ModelSpec, model_spec
from llama_core.config.run import TrainingConfig
from llama_core.config.settings import DataConfig
from llama_core.data.datasets import BatchStream, load_datasets
from llama_core.data.mixture import Mixture
from llama_core.models.batch import Batch
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import NativeEngine, train_step
from llama_core.training.optimizer import build_optimizer
from llama_core.training.rates import learning_rate
from training_reports.figures import BLUE, GREY, ORANGE, TEAL

SHAPES = (BaseShape(64, 2), BaseShape(256, 2), BaseShape(256, 8))
"""The models; the first is the base."""
CHECKED_SHAPES = (BaseShape(64, 2), BaseShape(128, 2), BaseShape(256, 2), BaseShape(512, 2), BaseShape(256, 8))
"""The models of the coordinate check."""
KINDS = ("usual", "CompleteP")
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
FIRST_STEPS = 5
FIRST_RATE = 1e-3
"""Steps after which the logits are compared with those before, and their learning rate."""
HEAD_DIM = 32
SEQ_LEN = 128
BATCH_SIZE = 8
WIDTH_PX = 1120
HEIGHT_PX = 380
"""Size of the picture."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them into a page if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="peak learning rates")
    parser.add_argument("--page", type=Path, help="the page whose tables are rewritten")
    parser.add_argument("--picture", type=Path, help="the PNG that is drawn")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = DataConfig(source="sample", tokenizer="sample", validation_fraction=0)
    rows = load_datasets(data, model_spec("tiny_llama3_50m"), seq_len=SEQ_LEN).train
    found = Found(tuple(options.rates))
    lines = []
    for line in tables(found, rows, options.steps):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        lines.append(line)
    rewrite(options.page, "width transfer", "\n".join(lines))
    if options.picture is not None:
        draw(picture(found), options.picture, width=WIDTH_PX, height=HEIGHT_PX)
    return 0


@dataclass
class Found:
    """What was measured, by kind and model."""

    rates: tuple[float, ...]
    losses: dict[tuple[str, BaseShape], list[float]] = field(default_factory=dict)
    """For each of the rates."""
    moved: dict[tuple[str, BaseShape], float] = field(default_factory=dict)


def tables(found: Found, rows: Mixture, num_steps: int) -> Iterator[str]:
    """Measure, and yield the lines of both tables."""
    yield from _heading(["loss after width x depth", *(f"{rate:g}" for rate in found.rates)])
    for kind in KINDS:
        for shape in SHAPES:
            losses = [final_loss(_spec(kind, shape), rows, rate, num_steps) for rate in found.rates]
            found.losses[kind, shape] = losses
            best = min(losses)
            figures = (f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses)
            yield f"| {kind}, {_name(shape)} | {' | '.join(figures)} |"
    yield ""
    yield from _heading(["logits moved", *map(_name, CHECKED_SHAPES)])
    for kind in KINDS:
        changes = [change_of_logits(_spec(kind, shape), rows) for shape in CHECKED_SHAPES]
        found.moved |= {(kind, shape): change for shape, change in zip(CHECKED_SHAPES, changes, strict=True)}
        yield f"| {kind} | {' | '.join(f'{change:.3f}' for change in changes)} |"


def picture(found: Found) -> go.Figure:
    """Return the losses by learning rate, a panel for each kind, beside the coordinate check."""
    titles = [*(f"{kind}: loss by learning rate" for kind in KINDS), f"logits moved by {FIRST_STEPS} steps"]
    figure = make_subplots(cols=3, subplot_titles=titles, horizontal_spacing=0.07)
    figure.update_layout(template="simple_white", margin={"l": 50, "r": 16, "t": 32, "b": 90})
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.28})
    for panel, kind in enumerate(KINDS, start=1):
        for shape, color in zip(SHAPES, (BLUE, ORANGE, TEAL), strict=True):
            losses = found.losses[kind, shape]
            best = min(losses)
            line = go.Scatter(
                x=[f"{rate:g}" for rate in found.rates],
                y=losses,
                name=_name(shape),
                showlegend=panel == 1,
                line={"color": color},
                marker={"size": [13 if loss == best else 6 for loss in losses]},
            )
            figure.add_trace(line, row=1, col=panel)
        figure.update_xaxes(title_text="peak learning rate", row=1, col=panel)
        figure.update_yaxes(range=_range_of_losses(found), row=1, col=panel)
    for kind, dash in zip(KINDS, ("dot", "solid"), strict=True):
        line = go.Scatter(
            x=[_name(shape) for shape in CHECKED_SHAPES],
            y=[found.moved[kind, shape] for shape in CHECKED_SHAPES],
            name=kind,
            line={"color": GREY, "dash": dash},
        )
        figure.add_trace(line, row=1, col=3)
    figure.update_xaxes(title_text="width x depth", row=1, col=3)
    figure.update_yaxes(rangemode="tozero", row=1, col=3)
    return figure


def _range_of_losses(found: Found) -> tuple[float, float]:
    every = [loss for losses in found.losses.values() for loss in losses]
    margin = 0.05 * (max(every) - min(every))
    return min(every) - margin, max(every) + margin


def _heading(columns: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * len(columns) + "|"


def _name(shape: BaseShape) -> str:
    return f"{shape.width} x {shape.depth}"


def _spec(kind: str, shape: BaseShape) -> ModelSpec:
    return spec_of(shape, SHAPES[0] if kind == "CompleteP" else None)


def spec_of(shape: BaseShape, base: BaseShape | None) -> ModelSpec:
    """Return a Llama of this width and depth, scaled up from ``base``, or with the usual initial values and rates."""
    heads = shape.width // HEAD_DIM
    return replace(
        model_spec("tiny_llama3_50m"),
        hidden_size=shape.width,
        num_layers=shape.depth,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        ffn_size=3 * shape.width,
        vocab_size=2048,
        tied_embeddings=False,
        base=base,
    )


def final_loss(spec: ModelSpec, rows: Mixture, rate: float, num_steps: int) -> float:
    """Return the mean loss of the last tenth of a run, in nats per token."""
    training = TrainingConfig(learning_rate=rate, precision="fp32", warmup_steps=num_steps // 10)
    engine = _engine(spec, training)
    losses = _train(engine, _batches(rows, num_steps), training, num_steps)
    return fmean(losses[-max(1, num_steps // 10) :])


def change_of_logits(spec: ModelSpec, rows: Mixture) -> float:
    """Return the root of the mean square by which the first steps move the logits of a batch."""
    engine = _engine(spec, TrainingConfig(learning_rate=FIRST_RATE, precision="fp32"))
    batch, *others = _batches(rows, FIRST_STEPS + 1)
    seen = []
    norm, head = engine.model.norm, engine.model.output
    assert norm is not None
    assert head is not None
    handle = norm.register_forward_hook(lambda norm, given, x_BSD: seen.append(x_BSD.detach() @ head.weight.detach().T))
    engine.evaluate([batch])
    for other in others:
        train_step(engine, [other], learning_rate=FIRST_RATE, max_grad_norm=1.0)
    engine.evaluate([batch])
    handle.remove()
    return float((seen[-1] - seen[0]).square().mean().sqrt())


def _engine(spec: ModelSpec, training: TrainingConfig) -> NativeEngine:
    parallel = ParallelModel(
        spec, ParallelPlan(microbatch_size=BATCH_SIZE), device=torch.device("cpu"), compute_dtype=torch.float32
    ).materialize()
    engine = NativeEngine(parallel, build_optimizer(parallel.model, training))
    engine.initialize_weights(training.seed)
    return engine


def _batches(rows: Mixture, number: int) -> list[Batch]:
    stream = BatchStream(rows, BATCH_SIZE, 0)
    return [stream.next_batch() for _ in range(number)]


def _train(engine: NativeEngine, batches: Sequence[Batch], training: TrainingConfig, num_steps: int) -> list[float]:
    return [
        float(
            train_step(
                engine,
                [batch],
                learning_rate=learning_rate(step, training, num_steps),
                max_grad_norm=training.max_grad_norm,
            ).loss
        )
        for step, batch in enumerate(batches, start=1)
    ]


if __name__ == "__main__":
    sys.exit(main())
