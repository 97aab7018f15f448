"""The elements of a sweep in its report, and how they are ranked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import pandas as pd

from llama_core.config.evaluation import EvaluationConfig
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.job import Outcome
from llama_core.records.measurements import BenchmarkRecord, TrainingSummary
from llama_core.sweep.directory import ElementRecord
from llama_core.sweep.divergence import divergence
from llama_core.sweep.grid import GridValue
from llama_core.sweep.objective import SweepObjective
from llama_core.sweep.quality import NOT_ENDED, Quality, quality_of, why_not_evaluated
from training_reports.contents import RunContents
from training_reports.layout import STATUS_STYLE, Card, Panel
from training_reports.sweep_table import Cell, SortOrder

NOT_EVALUATED = "not evaluated"
HAVE_ENDED = frozenset({"finished", "diverged", NOT_EVALUATED})
"""The states of elements that have taken all their steps."""


@dataclass(frozen=True)
class SweepRow:
    """One element of a sweep, measured or predicted."""

    name: str
    """What people call it: the settings in which elements differ."""
    settings: Mapping[str, GridValue]
    """Its value for each key of the grid."""
    status: str
    """How its job ended, ``diverged`` if its loss ended far above the start, ``not evaluated`` without the score that
    ranks it, or its state so far; of a prediction, whether it fits."""
    style: str
    """The CSS class of the status."""
    skipped: str = ""
    """Why it cannot run; empty if it can."""
    diverged: str = ""
    """How its training diverged, in words; empty if it did not."""
    not_evaluated: str = ""
    """Why it has no score, though it has trained and a score ranks the elements; empty otherwise."""
    folder: str = ""
    """The name of its run directory."""
    num_parameters: int | None = None
    """Parameters of its model, if it is known and elements may differ in it."""
    plan: ParallelPlan | None = None
    """Its plan, if it is known."""
    tokens_per_second: float | None = None
    """Of all devices together, in the timed steps or predicted."""
    memory_bytes: int | None = None
    """Peak of the fullest rank, in the timed steps or estimated."""
    peaks: Mapping[str, int | None] = field(default_factory=dict)
    """Bytes of peak memory: estimated, rehearsed, and measured if it finished."""
    predicted_seconds: float | None = None
    """The predicted time of a step, if the planner searched for the plan of a run, as it does for GPUs."""
    device: str = ""
    """``launch.device`` of its run."""
    usable_bytes: int | None = None
    """Memory of a device that its run may use."""
    outcome: Outcome | None = None
    benchmark: BenchmarkRecord | None = None
    training: TrainingSummary | None = None
    quality: Quality | None = None
    """How good its model is by what ranks the elements; None if it has not trained, or was not evaluated."""
    steps: pd.DataFrame = field(default_factory=pd.DataFrame, compare=False)
    """One row for each step of its run."""
    loss_unit: str = NEXT_TOKEN.unit_in_words
    """The unit of its loss."""

    @property
    def href(self) -> str | None:
        """The address of its run directory, relative to the page; None without one."""
        return f"runs/{quote(self.folder, safe='=,+')}/" if self.folder and not self.skipped else None

    @property
    def measured_seconds(self) -> float | None:
        """The median time of a timed step, or else of a training step, if it finished."""
        if self.status not in HAVE_ENDED:
            return None
        if self.benchmark is not None:
            return self.benchmark.median_seconds
        return None if self.steps.empty else float(self.steps["step_seconds"].median())


def measured_row(
    name: str, element: ElementRecord, contents: RunContents, objective: SweepObjective, evaluation: EvaluationConfig
) -> SweepRow:
    """Return the row of an element that runs, or is skipped because it cannot.

    Args:
        name: its name on the page.
        element: what the sweep recorded of it.
        contents: what its run has recorded so far.
        objective: what ranks the elements.
        evaluation: what the checkpoints of all elements are evaluated on.
    """
    diverged = _divergence(contents)
    status = "diverged" if diverged else _status(element, contents)
    quality = None
    not_evaluated = ""
    if objective.trains and contents.training is not None and status in HAVE_ENDED:
        quality = quality_of(objective, evaluation, contents.training, contents.scores)
        if objective.kind == "score" and status == "finished" and quality is None:
            status = NOT_EVALUATED
            not_evaluated = why_not_evaluated(RunDirectory(contents.path))
    benchmark = contents.benchmark
    peaks: dict[str, int | None] = {
        how: profile["peak_bytes"] if profile else None for how, _, profile in contents.predictions
    }
    measured = benchmark or contents.training
    peaks["measured"] = measured.memory_added_bytes if measured and status in HAVE_ENDED else None
    return SweepRow(
        name,
        element.settings,
        status,
        _style(element, contents, status, not_evaluated),
        skipped=element.skipped,
        diverged=diverged,
        not_evaluated=not_evaluated,
        folder=element.name,
        num_parameters=_num_parameters(contents) if any(map(_is_of_model, element.settings)) else None,
        plan=contents.parallel_plan,
        tokens_per_second=benchmark.tokens_per_second if benchmark else None,
        memory_bytes=benchmark.memory_added_bytes if benchmark else None,
        peaks=peaks,
        predicted_seconds=_predicted_seconds(contents),
        device=str(contents.setting("launch", "device") or ""),
        usable_bytes=(contents.estimate or {}).get("usable_bytes"),
        outcome=contents.outcome,
        benchmark=benchmark,
        training=contents.training,
        quality=quality,
        steps=contents.steps_of_part(objective.part),
        loss_unit=contents.loss_unit,
    )


def _status(element: ElementRecord, contents: RunContents) -> str:
    if element.skipped:
        return "skipped"
    if contents.outcome is not None:
        return contents.outcome.status
    return "waiting" if contents.job is None else "submitted"


def _style(element: ElementRecord, contents: RunContents, status: str, not_evaluated: str) -> str:
    if element.skipped or contents.outcome is None or not_evaluated == NOT_ENDED:
        return "idle"
    return "warn" if not_evaluated else STATUS_STYLE.get(status, "bad")


def _divergence(contents: RunContents) -> str:
    if contents.training is None or contents.outcome is None or contents.outcome.status != "finished":
        return ""
    return divergence(contents.steps["loss"].tolist(), contents.training.eval_loss)


def _is_of_model(key: str) -> bool:
    return key == "model" or key.startswith("architecture.")


def _num_parameters(contents: RunContents) -> int | None:
    try:
        return RunConfig.from_mapping(contents.config or {}).spec.num_parameters
    except ConfigError:  # the configuration of another version
        return None


def _predicted_seconds(contents: RunContents) -> float | None:
    step = (contents.choice or {}).get("step")
    seconds = step.get("step_seconds") if isinstance(step, dict) else None
    return seconds if isinstance(seconds, int | float) else None


@dataclass(frozen=True)
class Ranking:
    """The elements in order, the best first, and what the page says about them."""

    title: str
    """Title of the table."""
    columns: Sequence[str]
    """The results of an element, after name and status and before times and memory; the first ranks the elements."""
    order: SortOrder
    """Whether the best element has the highest value in that column (descending) or the lowest."""
    rows: Sequence[SweepRow]
    """All elements that can run: those with a result by rank, then the others."""
    results: Mapping[str, Sequence[Cell]]
    """The cells of ``columns`` for each element with a result, by name."""
    cards: Sequence[Card]
    panels: Sequence[Panel]
    facts: Mapping[str, object] = field(default_factory=dict)
    diverged: Mapping[str, Sequence[Cell]] = field(default_factory=dict)
    """The same cells for each element that diverged: its result is not ranked."""

    @property
    def ranked(self) -> list[SweepRow]:
        """The elements with a result, the best first."""
        return [row for row in self.rows if row.name in self.results]

    @property
    def unranked(self) -> list[SweepRow]:
        """The elements without a result, of those that can run."""
        return [row for row in self.rows if row.name not in self.results]

    @property
    def missing(self) -> list[SweepRow]:
        """Those of them that neither diverged nor lack only a score: they failed, or have not run to their end."""
        return [row for row in self.unranked if not (row.diverged or row.not_evaluated)]


def ordered(rows: Iterable[SweepRow], best_first: Iterable[str]) -> list[SweepRow]:
    """Return the rows that are named, in this order, and then the others."""
    rank = {name: place for place, name in enumerate(best_first)}
    return sorted(rows, key=lambda row: rank.get(row.name, len(rank)))
