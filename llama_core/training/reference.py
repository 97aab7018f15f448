"""The reference of an objective: what other weights make of every row, such as those that the run begins with.

It is computed once, before the first step, by the ranks and under the plan that train, and kept in the run's directory,
since a run that goes on may no longer have these weights. Adapters begin as zero, so that a run with new ones has the
model below them as its reference; a run that begins with adapters of another has the model with those.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from llama_core.data.datasets import Datasets, validation_batches
from llama_core.data.packing import PackedDataset
from llama_core.errors import DataError, RunDirectoryError
from llama_core.models.batch import Batch, with_places
from llama_core.models.objective import Objective, ReferringObjective
from llama_core.objectives.traits import ObjectiveType, Reference
from llama_core.parallel.prepared import MeasureRows
from llama_core.parallel.ranks import first_complaint, is_first_rank, own_rank, wait_for_all
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.references import mapped_reference, read_reference, writing_reference
from llama_core.training.inputs import StepInputs
from llama_core.units import format_duration

logger = logging.getLogger(__name__)

StopBefore = Callable[[str], None]
Measure = Callable[[Batch], npt.NDArray[np.float32]]
"""Returns what the reference makes of the rows of a batch of every rank, by each of its forwards: of the rows of all
ranks, in turns, [rows, values, forwards]."""


def measured(
    batch: Batch, objective: Objective, measure_rows: MeasureRows, *, inputs: StepInputs, stop_before: StopBefore
) -> npt.NDArray[np.float32]:
    """Return the values of the rows of all ranks, in turns, and those of the rows before them.

    Args:
        batch: this rank's rows.
        objective: says what is measured.
        measure_rows: measures rows under the weights of the reference.
        inputs: cuts the batch into microbatches.
        stop_before: ends the run instead, if it is asked to.
    """
    assert isinstance(objective, ReferringObjective), "its row has a reference"
    stop_before("the reference was computed")
    pieces = inputs.on_device(with_places(batch))
    before = [piece.before for piece in pieces if piece.before is not None]
    num_values = objective.num_referred(batch.tokens_BS.shape[1])
    values = [measure_rows(objective.of_reference, num_values, rows) for rows in (pieces, before) if rows]
    return torch.stack(values, dim=-1).float().cpu().numpy()


def _forget(content: bytes) -> None:
    """Do nothing with values that another rank keeps."""


class References:
    """The rows of a run that need a reference.

    Args:
        run: where its values are kept.
        weights: the weights of the reference, for its record.
        reference: the trait of the objective.
        rows: the rows of each source, trained on or held out.
    """

    def __init__(
        self, run: RunDirectory, weights: str, reference: Reference, rows: Mapping[str, PackedDataset]
    ) -> None:
        self.run = run
        self.weights = weights
        self.reference = reference
        self.rows = rows
        self.are_there = False
        """Whether the rows have their values."""

    @classmethod
    def of(cls, run: RunDirectory, weights: str, objective: ObjectiveType, datasets: Datasets) -> "References | None":
        """Return the rows that need a reference; None if the objective reads none."""
        if objective.reference is None:
            return None
        trained = zip(datasets.train.names, datasets.train.sources, strict=True)
        every = [(f"train/{name}", rows) for name, rows in trained]
        every += [(f"held-out/{name}", rows) for name, rows in datasets.validation.items()]
        return cls(run, weights, objective.reference, dict(every))

    def compute(self, plan: ParallelPlan, measure: Measure) -> None:
        """Compute the values under the present weights, and keep them; all ranks call it together.

        Args:
            plan: how the rows are divided.
            measure: computes those of a rank's rows.
        """
        began = time.perf_counter()
        with ExitStack() as stack:
            keep: Callable[[bytes], None] = _forget
            if is_first_rank():
                writing = writing_reference(
                    self.run,
                    weights=self.weights,
                    rows={name: rows.digest for name, rows in self.rows.items()},
                    shapes=self._shapes,
                )
                keep = stack.enter_context(writing)
            for rows in self.rows.values():
                for entries in self._computed(rows, plan, measure):
                    keep(entries.tobytes())
        wait_for_all()
        self._give()
        if is_first_rank():
            num_entries = sum(number for number, _ in self._shapes.values())
            seconds = time.perf_counter() - began
            what = next((rows.unit for rows in self.rows.values()), "rows")
            logger.info(
                "the %s of %s %s took %s", self.reference.name, f"{num_entries:,}", what, format_duration(seconds)
            )

    def read(self) -> None:
        """Read the values that the run has computed before its first step; all ranks call it together.

        Raises:
            DataError: on every rank, if they are missing, damaged, or of other rows.
        """
        problem = ""
        if is_first_rank():
            try:
                self._check()
            except RunDirectoryError as error:
                problem = str(error)
        if problem := first_complaint(problem):
            raise DataError(f"{problem}; {self.reference.lost}: restore the file and the data, or start a new run")
        self._give()

    def _check(self) -> None:
        """Refuse values that are damaged or of other rows."""
        record = read_reference(self.run)
        shapes = self._shapes
        other = [
            name
            for name, rows in self.rows.items()
            if record.rows.get(name) != rows.digest or tuple(record.shapes[name]) != shapes[name]
        ]
        if other:
            what = next(rows.unit for rows in self.rows.values())
            raise RunDirectoryError(f"{self.run.reference} is of other {what} than {', '.join(other)} has now")

    @property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {name: rows.reference_shape for name, rows in self.rows.items()}

    def _give(self) -> None:
        for name, values in mapped_reference(self.run, self._shapes).items():
            self.rows[name].set_references(values)
        self.are_there = True

    def _computed(self, rows: PackedDataset, plan: ParallelPlan, measure: Measure) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the entries of each row, [entries, numbers]."""
        index = 0
        for batch in self._batches(rows, plan):
            for of_row in measure(batch):
                if index < len(rows):  # else it fills the last batch
                    yield rows.references_in(of_row, index)
                index += 1

    def _batches(self, rows: PackedDataset, plan: ParallelPlan) -> Iterator[Batch]:
        """Yield this rank's rows, as many at a time as a step has: a pipeline is then as full as in a step."""
        return validation_batches(
            rows,
            plan.rows_per_forward * plan.num_microbatches,
            len(rows),
            rank=plan.dp_rank(own_rank()),
            world_size=plan.dp,
            fills_batches=plan.compile,
        )
