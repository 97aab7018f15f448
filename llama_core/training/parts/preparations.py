"""What is done once before the first step: compiling the blocks, and computing the reference of an objective."""

import torch

from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import Engine, NativeEngine, evaluating
from llama_core.training.inputs import StepInputs
from llama_core.training.parts.activity import ActivityLog
from llama_core.training.parts.part import LoopPart, RunProgress
from llama_core.training.parts.stop import StopRequest
from llama_core.training.reference import References, measured


class CompiledBlocks(LoopPart):
    """Compiles the blocks for everything that training will give them, on all ranks at once.

    Otherwise the stages of a cold pipeline compile one after another, each when its first input arrives, while the
    ranks behind it wait; and the first evaluation stalls all of them once more.

    Args:
        plan: says whether blocks are compiled.
        engine: this rank's part of the model.
        inputs: knows what the blocks will be given.
        evaluates: whether there are evaluations.
        activity: is told of it.
    """

    def __init__(
        self, plan: ParallelPlan, engine: Engine, inputs: StepInputs, *, evaluates: bool, activity: ActivityLog
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._inputs = inputs
        self._evaluates = evaluates
        self._activity = activity
        self._is_done = False

    def begin(self) -> None:
        """Compile, unless it is done."""
        if self._is_done or not self._plan.compile or not isinstance(self._engine, NativeEngine):
            return
        self._activity.tell("compiling the blocks")
        parallel = self._engine.parallel
        for microbatch in self._inputs.examples():
            parallel.compile_blocks(microbatch)
            if self._inputs.prepares:
                with torch.no_grad():
                    parallel.compile_blocks(microbatch)
            if self._evaluates:
                with evaluating(self._engine), torch.no_grad():
                    parallel.compile_blocks(microbatch)
        self._is_done = True


class ReferenceModel(LoopPart):
    """Gets what the reference makes of all rows, where its weights are those that the run begins with.

    Args:
        references: the rows that need it; None if the objective reads none.
        plan: how the model is divided.
        progress: how far the run is.
        engine: this rank's part of the model.
        inputs: cuts batches into microbatches.
        stop: ends the run between batches.
        activity: is told of it.
    """

    def __init__(
        self,
        references: References | None,
        plan: ParallelPlan,
        progress: RunProgress,
        *,
        engine: Engine,
        inputs: StepInputs,
        stop: StopRequest,
        activity: ActivityLog,
    ) -> None:
        self.references = references
        self._plan = plan
        self._progress = progress
        self._engine = engine
        self._inputs = inputs
        self._stop = stop
        self._activity = activity

    def begin(self) -> None:
        """Compute the values, or read them again.

        Raises:
            DataError: if a run that goes on has them no longer.
            StoppedError: if the run is asked to stop.
        """
        if self.references is None or self.references.are_there:  # a teacher has computed them
            return
        if self._progress.step > 0 or self.references.reference.weights:
            self.references.read()
            return
        self._activity.tell("computing the log-probabilities under the reference")
        with evaluating(self._engine):
            self.references.compute(
                self._plan,
                lambda batch: measured(
                    batch,
                    self._engine.model.objective,
                    self._engine.measure_rows,
                    inputs=self._inputs,
                    stop_before=self._stop.stop_before,
                ),
            )
