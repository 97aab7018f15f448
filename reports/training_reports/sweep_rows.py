"""The elements of a sweep in its report, and how they are ranked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llama_core.errors import TrainingInfraError
from llama_core.planning.plan import ParallelPlan
from training_reports.contents import RunContents
from training_reports.layout import STATUS_STYLE, Card, Panel


@dataclass(frozen=True)
class Row:
    """One element that can run, with its records."""

    name: str
    contents: RunContents

    @property
    def status(self) -> str:
        """How its job ended, or its state so far."""
        outcome, job = self.contents.outcome, self.contents.job
        return outcome.status if outcome else "submitted" if job else "waiting"

    @property
    def style(self) -> str:
        """The CSS class of the status."""
        return STATUS_STYLE.get(self.status, "bad") if self.contents.outcome else "idle"

    @property
    def plan(self) -> str | None:
        """Its plan in one line, if it is known."""
        if self.contents.plan is None:
            return None
        try:
            return ParallelPlan.from_dict(self.contents.plan).summary()
        except (TrainingInfraError, LookupError, TypeError, ValueError):  # the plan of another version
            return None

    @property
    def peaks(self) -> dict[str, int | None]:
        """Bytes of peak memory: estimated, rehearsed, and measured if it finished."""
        peaks: dict[str, int | None] = {
            how: profile["peak_bytes"] if profile else None for how, _, profile in self.contents.predictions
        }
        measured = self.contents.benchmark or self.contents.training
        return peaks | {"measured": measured.memory_peak_bytes if measured and self.status == "finished" else None}


@dataclass(frozen=True)
class Ranking:
    """The elements in order, the best first, and what the page says about them."""

    title: str
    """The table's."""
    columns: Sequence[str]
    """The results of an element, after its name and status and before its memory."""
    rows: Sequence[Row]
    """All elements: those with a result by rank, then the others."""
    results: Mapping[str, Sequence[str | None]]
    """The cells of ``columns`` for each element with a result, by name."""
    cards: Sequence[Card]
    panels: Sequence[Panel]
    facts: Mapping[str, object] = field(default_factory=dict)


def ordered(rows: Iterable[Row], best_first: Iterable[str]) -> list[Row]:
    """Return the rows that are named, in this order, and then the others."""
    rank = {name: place for place, name in enumerate(best_first)}
    return sorted(rows, key=lambda row: rank.get(row.name, len(rank)))
