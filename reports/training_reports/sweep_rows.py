"""The elements of a sweep in its report, and how they are ranked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from llama_core.errors import TrainingInfraError
from llama_core.planning.plan import ParallelPlan
from llama_core.sweep.grid import GridValue
from training_reports.contents import RunContents
from training_reports.layout import STATUS_STYLE, Card, Panel
from training_reports.sweep_table import Cell, Order


@dataclass(frozen=True)
class Row:
    """One element, with its records."""

    name: str
    """Its settings without those that all elements share."""
    contents: RunContents
    settings: Mapping[str, GridValue] = field(default_factory=dict)
    """Its value for each key of the grid."""
    skipped: str = ""
    """Why it cannot run; empty if it can."""

    @property
    def status(self) -> str:
        """How its job ended, or its state so far."""
        outcome, job = self.contents.outcome, self.contents.job
        if self.skipped:
            return "skipped"
        return outcome.status if outcome else "submitted" if job else "waiting"

    @property
    def style(self) -> str:
        """The CSS class of the status."""
        return STATUS_STYLE.get(self.status, "bad") if self.contents.outcome and not self.skipped else "idle"

    @cached_property
    def plan(self) -> ParallelPlan | None:
        """Its plan, if it is known."""
        if self.contents.plan is None:
            return None
        try:
            return ParallelPlan.from_dict(self.contents.plan)
        except (TrainingInfraError, LookupError, TypeError, ValueError):  # the plan of another version
            return None

    @property
    def peaks(self) -> dict[str, int | None]:
        """Bytes of peak memory: estimated, rehearsed, and measured if it finished."""
        peaks: dict[str, int | None] = {
            how: profile["peak_bytes"] if profile else None for how, _, profile in self.contents.predictions
        }
        measured = self.contents.benchmark or self.contents.training
        return peaks | {"measured": measured.memory_added_bytes if measured and self.status == "finished" else None}

    @property
    def predicted_seconds(self) -> float | None:
        """The predicted time of a step, if the planner searched for its plan, as it does for GPUs."""
        step = (self.contents.choice or {}).get("step")
        seconds = step.get("step_seconds") if isinstance(step, dict) else None
        return seconds if isinstance(seconds, int | float) else None

    @property
    def measured_seconds(self) -> float | None:
        """The median time of a timed step, or else of a training step, if it finished."""
        if self.status != "finished":
            return None
        if self.contents.benchmark is not None:
            return self.contents.benchmark.median_seconds
        steps = self.contents.steps
        return None if steps.empty else float(steps["step_seconds"].median())


@dataclass(frozen=True)
class Ranking:
    """The elements in order, the best first, and what the page says about them."""

    title: str
    """Title of the table."""
    columns: Sequence[str]
    """The results of an element, after name and status and before times and memory; the first ranks the elements."""
    order: Order
    """Whether the best element has the highest value in that column (descending) or the lowest."""
    rows: Sequence[Row]
    """All elements that can run: those with a result by rank, then the others."""
    results: Mapping[str, Sequence[Cell]]
    """The cells of ``columns`` for each element with a result, by name."""
    cards: Sequence[Card]
    panels: Sequence[Panel]
    facts: Mapping[str, object] = field(default_factory=dict)


def short_names(names: Sequence[str], left_out: Sequence[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Return a name for each element without the settings that all share, by its whole name, and those settings.

    Args:
        names: the whole names of the elements that are compared.
        left_out: the whole names of the others. They keep a shared setting if they have another value for it.
    """
    parts = [name.split(",") for name in names]
    shared = [part for part in parts[0] if all(part in own for own in parts)] if len(parts) > 1 else []
    shown = {name: ",".join(part for part in name.split(",") if part not in shared) for name in (*names, *left_out)}
    if len(set(shown.values())) < len(shown) or "" in shown.values():
        return {name: name for name in shown}, []
    return shown, shared


def ordered(rows: Iterable[Row], best_first: Iterable[str]) -> list[Row]:
    """Return the rows that are named, in this order, and then the others."""
    rank = {name: place for place, name in enumerate(best_first)}
    return sorted(rows, key=lambda row: rank.get(row.name, len(rank)))
