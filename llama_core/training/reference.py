"""The reference of an objective of preferences: the log-probability of every answer under the weights of the beginning.

They are computed once, before the first step, by the ranks and under the plan that train, and kept in the run's
directory, since a run that goes on no longer has these weights. Adapters begin as zero, so that a run with new ones has
the model below them as its reference; a run that begins with adapters of another has the model with those.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from llama_core.data.datasets import Datasets, validation_batches
from llama_core.data.records.pairs import PackedPairs
from llama_core.errors import DataError, RunDirectoryError
from llama_core.models.batch import Batch
from llama_core.objectives.preferences import has_reference
from llama_core.objectives.traits import ObjectiveType
from llama_core.parallel.ranks import first_complaint, from_first_rank, is_first_rank, own_rank, wait_for_all
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.references import read_reference, write_reference
from llama_core.units import format_duration

logger = logging.getLogger(__name__)

Measure = Callable[[Batch], npt.NDArray[np.float32]]
"""Returns the log-probabilities of the answers in rows of a batch of every rank, after their own prompts and, for an
objective of mismatches, after others: of the rows of all ranks, in turns, [rows, A, 1 or 2]. Answer 0 is none."""


class References:
    """The rows of a run that need a reference.

    Args:
        run: where the log-probabilities are kept.
        weights: the weights that the run begins with, for its record.
        rows: the rows of each source, trained on or held out.
    """

    def __init__(self, run: RunDirectory, weights: str, rows: Mapping[str, PackedPairs]) -> None:
        self.run = run
        self.weights = weights
        self.rows = rows

    @classmethod
    def of(cls, run: RunDirectory, weights: str, objective: ObjectiveType, datasets: Datasets) -> "References | None":
        """Return the rows that need a reference; None if the objective reads none."""
        if not has_reference(objective):
            return None
        trained = zip(datasets.train.names, datasets.train.sources, strict=True)
        every = [(f"train/{name}", rows) for name, rows in trained]
        every += [(f"held-out/{name}", rows) for name, rows in datasets.validation.items()]
        return cls(run, weights, {name: rows for name, rows in every if isinstance(rows, PackedPairs)})

    def compute(self, plan: ParallelPlan, measure: Measure) -> None:
        """Compute the log-probabilities under the present weights, and keep them; all ranks call it together.

        Args:
            plan: how the rows are divided.
            measure: computes those of a rank's rows.
        """
        began = time.perf_counter()
        values = {name: self._computed(rows, plan, measure) for name, rows in self.rows.items()}
        if is_first_rank():
            write_reference(
                self.run,
                b"".join(of_rows.tobytes() for of_rows in values.values()),
                weights=self.weights,
                rows={name: rows.digest for name, rows in self.rows.items()},
                num_pairs={name: rows.num_pairs for name, rows in self.rows.items()},
            )
        wait_for_all()
        self._give(values)
        if is_first_rank():
            num_pairs = sum(map(len, values.values()))
            seconds = time.perf_counter() - began
            what = next((rows.unit for rows in self.rows.values()), "pairs")
            logger.info("the reference of %s %s took %s", f"{num_pairs:,}", what, format_duration(seconds))

    def read(self) -> None:
        """Read the log-probabilities that the run has computed before its first step; all ranks call it together.

        Raises:
            DataError: on every rank, if they are missing, damaged, or of other pairs.
        """
        values = None
        problem = ""
        if is_first_rank():
            try:
                values = self._read()
            except RunDirectoryError as error:
                problem = str(error)
        if problem := first_complaint(problem):
            raise DataError(
                f"{problem}; the reference is the model of step 0, which this run no longer has: restore the file and "
                "the data, or start a new run"
            )
        shared = from_first_rank(values)
        assert shared is not None, "there was no problem"
        self._give(shared)

    def _read(self) -> dict[str, npt.NDArray[np.float32]]:
        record, content = read_reference(self.run)
        other = [name for name, rows in self.rows.items() if record.rows.get(name) != rows.digest]
        if other:
            raise RunDirectoryError(f"{self.run.reference} is of other pairs than {', '.join(other)} has now")
        ends = np.cumsum(list(record.num_pairs.values()))[:-1]
        parts = np.split(np.frombuffer(content, np.float32).reshape(-1, 2), ends)
        of_name = dict(zip(record.num_pairs, parts, strict=True))
        return {name: of_name[name] for name in self.rows}

    def _give(self, values: Mapping[str, npt.NDArray[np.float32]]) -> None:
        for name, rows in self.rows.items():
            rows.set_references(values[name])

    def _computed(self, rows: PackedPairs, plan: ParallelPlan, measure: Measure) -> npt.NDArray[np.float32]:
        """Return the log-probabilities of the pairs or labelled answers of some rows, [pairs, 2]."""
        values_N2 = np.empty((rows.num_pairs, 2), np.float32)
        index = 0
        for batch in self._batches(rows, plan):
            for of_row in measure(batch):
                if index < len(rows):  # else it fills the last batch
                    pairs = rows.pairs_of(index)
                    values_N2[pairs.start : pairs.stop] = rows.references_in(of_row, index)
                index += 1
        return values_N2

    def _batches(self, rows: PackedPairs, plan: ParallelPlan) -> Iterator[Batch]:
        """Yield this rank's rows, as many at a time as a step has: a pipeline is then as full as in a step."""
        return validation_batches(
            rows,
            plan.rows_per_forward * plan.num_microbatches,
            len(rows),
            rank=plan.dp_rank(own_rank()),
            world_size=plan.dp,
            fills_batches=plan.compile,
        )
