"""What an objective measures before a step, summed over all ranks."""

from collections.abc import Callable, Sequence

from torch import Tensor

from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs
from llama_core.models.objective import Objective, PreparingObjective
from llama_core.parallel.pipeline import OnPhase

MeasureRows = Callable[[Callable[[HeadInputs, Batch], Tensor], int, Sequence[Batch]], Tensor]
"""Returns some values of every row of all ranks, [rows, values]: ``ParallelModel.measure_rows``."""


def prepare(
    objective: Objective,
    microbatches: Sequence[Batch],
    measure_rows: MeasureRows,
    on_phase: OnPhase = lambda phase: None,
) -> None:
    """Let an objective measure what it has to know before a step or an evaluation; all ranks call it together.

    Args:
        objective: what is trained for.
        microbatches: this rank's share of the rows, whole. Without other rows before them, nothing is measured.
        measure_rows: measures those other rows.
        on_phase: called as that forward begins.
    """
    if not isinstance(objective, PreparingObjective):
        return
    rows = [batch.before for batch in microbatches if batch.before is not None]
    if rows:
        on_phase("forward")
        objective.prepare(measure_rows(objective.of_rows_before, objective.num_prepared, rows).double().sum(0))
