"""A reference with weights of its own: a teacher, whom the ranks hold before the model that they train."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.hugging_face.pretrained import checkpoints_behind
from llama_core.models.objective import build_objective
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.ranks import wait_for_all
from llama_core.planning.before import spec_before_run, weights_before_run
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import newest_step
from llama_core.training.checkpoint import refuse_damaged_together
from llama_core.training.engine import COMPUTE_DTYPES, build_model
from llama_core.training.inputs import StepInputs
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.stop import StopRequest
from llama_core.training.reference import References, measured
from llama_core.training.stored_weights import Pretrained


def refer_to_teacher(
    references: References | None,
    config: RunConfig,
    plan: ParallelPlan,
    device: torch.device,
    *,
    stop: StopRequest,
    activity: ActivityLog,
) -> None:
    """Compute what a teacher makes of all rows, if the objective has one; all ranks call it together.

    A run that goes on reads it instead, once it knows its step (``ReferenceModel``).

    Args:
        references: the rows.
        config: the configuration.
        plan: how the ranks divide the model that they train, and the teacher.
        device: where this rank computes.
        stop: ends the run between batches.
        activity: is told of it.

    Raises:
        WeightsError: if its weights cannot be read.
        StoppedError: if the run is asked to stop.
    """
    source = weights_before_run(config)
    if references is None or source is None or newest_step(references.run):
        return
    activity.tell(f"computing what the {references.reference.name} makes of the data")
    objective = build_objective(config.training)
    spec = spec_before_run(config)
    inputs = StepInputs(config, plan, objective, device, spec=spec)
    references.weights = source
    with _held(config, spec, plan, device, Path(source)) as teacher:
        measure = partial(
            measured,
            objective=objective,
            measure_rows=teacher.measure_rows,
            inputs=inputs,
            stop_before=stop.stop_before,
        )
        references.compute(plan, measure)


@contextmanager
def _held(
    config: RunConfig, spec: ModelSpec, plan: ParallelPlan, device: torch.device, source: Path
) -> Iterator[ParallelModel]:
    """Yield this rank's part of a model that is not trained, in the dtype in which it computes."""
    for checkpoint in checkpoints_behind(source):
        refuse_damaged_together(checkpoint)
    dtype = COMPUTE_DTYPES[config.training.precision]
    parallel = build_model(config, plan, device, spec=spec, weight_dtype=dtype)
    parallel.model.requires_grad_(False)
    parallel.materialize()
    pretrained = Pretrained(spec, source)
    pretrained.fill(parallel.model)
    parallel.weights_changed()
    pretrained.done()
    wait_for_all()  # a collective would time out while a rank with a slow disk still reads
    parallel.model.eval()
    yield parallel
    del parallel
    if device.type == "cuda":
        torch.cuda.empty_cache()
