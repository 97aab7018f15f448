"""A model that only computes, on several ranks: some divide its matrices, some its layers, the others its texts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llama_core.config.models import ModelSpec
from llama_core.errors import TrainingInfraError
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.parallel.expert import divide_experts
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.ranks import check_started
from llama_core.parallel.tensor import apply_tensor_parallel
from llama_core.planning.plan import ParallelPlan

T = TypeVar("T")
R = TypeVar("R")

PARTS_PER_STAGE = 2
"""Parts of a forward for each stage of a pipeline: while one is computed by a stage, others are by the next ones."""


class EvaluatingRanks:
    """The ranks that evaluate together. All of them call each method together.

    Args:
        plan: tensor-parallel ranks hold a part of every matrix, pipeline-parallel ones some layers, and data-parallel
            ones whole copies. More than one rank needs the default process group.
        device_type: where the ranks compute.

    Raises:
        PlanError: if the plan's number of ranks is not the number started.
    """

    def __init__(self, plan: ParallelPlan, device_type: str) -> None:
        check_started(plan)
        self.plan = plan
        self._mesh = Mesh.build(plan, device_type) if plan.world_size > 1 else None
        self._results: dist.ProcessGroup | None = None
        """The ranks of this rank's pipeline, if there are others."""
        if self._mesh is not None and plan.pp > 1:
            self._results = self._mesh.groups_across_pipeline(range(plan.pp), on_host=True)

    def layers(self, spec: ModelSpec) -> range:
        """Return the layers that this rank holds of a model."""
        return range(spec.num_layers) if self._mesh is None else self.plan.stage_layers(spec)[self._mesh.rank("pp")]

    def divide(self, model: Llama) -> None:
        """Divide the matrices of a model of ``layers`` on the meta device, and let its forward use all of its stages.

        The stream between the blocks stays whole, because a text that is continued has one token at a time.
        """
        if self._mesh is None:
            return
        if self.plan.tp > 1:
            divide_experts(model, self._mesh.experts, self._mesh.expert_hops)
            apply_tensor_parallel(model, self._mesh.weights["tp"], sequence_parallel=False)
        if self._results is not None:
            stage = _Stage(model, self.layers(model.spec), self._mesh, self._results)
            model.forward = stage.forward  # type: ignore[method-assign, assignment]  # no other argument is used

    def shared(self, items: Sequence[T], compute: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """Return what ``compute`` makes of each item; a data-parallel rank computes every so many of them.

        An expected error on one rank is raised on all.

        Args:
            items: the same on every rank, neighbours being of similar size.
            compute: returns a picklable value for each of some items.
        """
        if self._mesh is None:
            return list(compute(items))
        own = items[self.plan.dp_rank(dist.get_rank()) :: self.plan.dp]
        values: Sequence[R] = ()
        error: TrainingInfraError | None = None
        try:
            values = compute(own)
        except TrainingInfraError as raised:
            error = raised
        answer = (list(values), None if error is None else (type(error), str(error)))
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, answer)
        for _, problem in answers:
            if problem is not None:
                kind, text = problem
                raise kind(text)
        of_copies = {self.plan.dp_rank(rank): found for rank, (found, _) in enumerate(answers)}
        return [of_copies[place % self.plan.dp][place // self.plan.dp] for place in range(len(items))]


class _Stage:
    """The layers of a model that one rank of a pipeline holds, and a forward that all of its ranks call together.

    The rows of a batch go through the stages in parts, so that all compute at once; but not where forwards continue
    each other, because what they keep is of all rows. The last stage sends the result back to the others.

    Args:
        model: this rank's part of the model.
        layers: its layers.
        mesh: the ranks.
        results: the group in which the results go back.
    """

    def __init__(self, model: Llama, layers: range, mesh: Mesh, results: dist.ProcessGroup) -> None:
        self._model = model
        self._layers = layers
        self._mesh = mesh
        self._results = results
        self._rank = mesh.rank("pp")
        self._is_last = self._rank == mesh.plan.pp - 1

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        """Return what ``Llama.forward`` returns of the whole model, in host memory."""
        num_parts = 1 if self._model.continues_rows else PARTS_PER_STAGE * self._mesh.plan.pp
        parts = batch.split(-(-len(tokens_BS) // num_parts))
        if batch.documents is not None:
            parts = [part.with_documents() for part in parts]
        if self._is_last:
            streams = [self._run(part) for part in parts]
            return self._share(self._finish(torch.cat(streams), batch))
        leaving: list[tuple[dist.Work, Tensor]] = []  # with the tensors, which have to be kept until they are sent
        for part in parts:
            stream_BSD = self._run(part).contiguous()
            leaving.append((self._mesh.send_to_stage(stream_BSD, self._rank + 1), stream_BSD))
        for work, _ in leaving:
            work.wait()
        return self._share(None)

    def _run(self, part: Batch) -> Tensor:
        """Return the residual stream after this rank's layers."""
        inputs = part.tokens_BS if self._rank == 0 else self._receive(part.tokens_BS)
        return self._model.run_layers(inputs, part, self._layers)

    def _receive(self, tokens_BS: Tensor) -> Tensor:
        """Return the residual stream of some tokens, from the stage before."""
        shape = (*tokens_BS.shape, self._model.spec.hidden_size)
        stream_BSD = torch.empty(shape, dtype=self._model.compute_dtype, device=tokens_BS.device)
        self._mesh.receive_from_stage(stream_BSD, self._rank - 1).wait()
        return stream_BSD

    def _finish(self, stream_BSD: Tensor, batch: Batch) -> Tensor:
        assert self._model.norm is not None
        return self._model.head(self._model.norm(stream_BSD), batch)

    def _share(self, result: Tensor | None) -> Tensor:
        """Return the last stage's result on all ranks of the pipeline."""
        holder = [None if result is None else result.cpu()]
        last = self._mesh.pipeline_peer(self._mesh.plan.pp - 1)
        dist.broadcast_object_list(holder, src=last, group=self._results, device=torch.device("cpu"))
        (shared,) = holder
        assert shared is not None
        return shared
