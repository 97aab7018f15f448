"""Predictions for many rows, and their errors against the measurements."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.published.prediction import Prediction, predict
from benchmarks.published.rows import Row
from llama_core.errors import RequestError

OFF_BY = 0.15
"""Relative error above which a prediction counts as off."""
_SAME = (
    *("framework", "model", "gpus", "gpu_mem_gib", "method", "ac_mode", "optimizer", "compile", "float8", "extra"),
    *("tp", "pp", "vpp", "dp_shard", "dp_replicate", "cp", "ep", "seq_len", "local_batch", "micro_batch"),
    *("global_batch", "mem_stat"),
)
"""Columns that rows of one configuration share."""


@dataclass(frozen=True)
class Entry:
    """One row with its prediction, or the reason why it has none."""

    row: Row
    prediction: Prediction | None
    reason: str = ""

    @property
    def name(self) -> str:
        """The row's id."""
        return self.row.get("id") or ""

    @cached_property
    def measured(self) -> float | None:
        """The published figure in GiB, if the row has one."""
        try:
            return float(self.row.get("mem_gib") or "") or None
        except ValueError:
            return None

    @cached_property
    def capacity(self) -> float | None:
        """The GPU's memory in GiB, if the row gives it."""
        try:
            return float(self.row.get("gpu_mem_gib") or "")
        except ValueError:
            return None

    @cached_property
    def error(self) -> float | None:
        """Relative error of the prediction: 0.1 is 10 % too high."""
        if self.prediction is None or self.measured is None:
            return None
        return self.prediction.gib / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """The relative errors of a group of rows."""

    count: int
    mean_absolute: float
    bias: float
    share_off: float
    """Share of rows off by more than ``OFF_BY``."""


@dataclass(frozen=True)
class Fit:
    """Verdicts on whether rows fit their GPU, if that is known."""

    count: int
    false_hopes: int
    """Rows said to fit although their figure exceeds the GPU's memory."""
    false_alarms: int
    """Rows said to be too large although they ran."""


@dataclass(frozen=True)
class Ledger:
    """Rows and their predictions."""

    entries: tuple[Entry, ...]

    @property
    def refused(self) -> list[Entry]:
        """Rows without a prediction."""
        return [entry for entry in self.entries if entry.prediction is None]

    @property
    def compared(self) -> list[Entry]:
        """Rows with a prediction and a measurement, worst first."""
        return sorted((e for e in self.entries if e.error is not None), key=lambda e: abs(e.error or 0), reverse=True)

    def summary(self) -> Summary | None:
        """Return the error over all compared rows, or None if there are none."""
        return _summary(self.compared)

    def stating_conditions(self) -> Summary | None:
        """Return the error over the compared rows that state all that their figure depends on, or None."""
        return _summary([entry for entry in self.compared if entry.prediction and entry.prediction.states_conditions])

    def without_own_slack(self) -> "Ledger":
        """Return the ledger with the slack of every reserved row fitted without the rows of its configuration.

        The slack makes the mean error of reserved rows zero; it is the only number that is fitted.
        """
        reserved = [entry for entry in self.compared if entry.prediction and entry.prediction.statistic == "reserved"]
        entries = []
        for entry in self.entries:
            if entry not in reserved:
                entries.append(entry)
                continue
            others = [other.error or 0 for other in reserved if _configuration(other) != _configuration(entry)]
            factor = 1 / (1 + sum(others) / len(others))
            assert entry.prediction is not None
            prediction = replace(entry.prediction, gib=entry.prediction.gib * factor)
            entries.append(Entry(entry.row, prediction))
        return Ledger(tuple(entries))

    def by_framework(self) -> Mapping[str, Summary]:
        """Return the error of each framework's rows."""
        return self._by(lambda entry: (entry.row.get("framework") or "").split(" ")[0])

    def by_statistic(self) -> Mapping[str, Summary]:
        """Return the error for each statistic."""
        return self._by(lambda entry: entry.prediction.statistic if entry.prediction else "")

    def _by(self, key: Callable[[Entry], str]) -> Mapping[str, Summary]:
        groups = defaultdict(list)
        for entry in self.compared:
            groups[key(entry)].append(entry)
        summaries = {name: _summary(groups[name]) for name in sorted(groups)}
        return {name: summary for name, summary in summaries.items() if summary}

    def fit(self) -> Fit:
        """Return how often the verdict on fitting is wrong."""
        judged = [(e.prediction.gib, e.measured, e.capacity) for e in self.compared if e.prediction]
        known = [(said, was, limit) for said, was, limit in judged if was is not None and limit is not None]
        return Fit(
            count=len(known),
            false_hopes=sum(said <= limit < was for said, was, limit in known),
            false_alarms=sum(was <= limit < said for said, was, limit in known),
        )

    def spreads(self) -> Iterator[list[Entry]]:
        """Yield groups of rows with the same configuration but different figures."""
        groups = defaultdict(list)
        for entry in self.entries:
            groups[_configuration(entry)].append(entry)
        for entries in groups.values():
            if len({entry.measured for entry in entries if entry.measured}) > 1:
                yield entries


def _configuration(entry: Entry) -> tuple[str, ...]:
    return tuple(entry.row.get(column) or "" for column in _SAME)


def ledger(rows: Iterable[Row]) -> Ledger:
    """Return the rows with their predictions; a row that cannot be predicted has a reason instead."""
    return Ledger(tuple(_entry(row) for row in rows))


def _entry(row: Row) -> Entry:
    try:
        return Entry(row, predict(row))
    except RequestError as refusal:
        return Entry(row, None, str(refusal))


def _summary(entries: list[Entry]) -> Summary | None:
    errors = [entry.error for entry in entries if entry.error is not None]
    if not errors:
        return None
    return Summary(
        count=len(errors),
        mean_absolute=sum(map(abs, errors)) / len(errors),
        bias=sum(errors) / len(errors),
        share_off=sum(abs(error) > OFF_BY for error in errors) / len(errors),
    )


def write_predictions(ledger: Ledger, path: Path) -> None:
    """Write one line per row: its id, the prediction in GiB, and the reason if there is none.

    Raises:
        OSError: if the file cannot be written.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "predicted_gib", "reason"))
        for entry in ledger.entries:
            figure = f"{entry.prediction.gib:.2f}" if entry.prediction else ""
            writer.writerow((entry.name, figure, entry.reason))
