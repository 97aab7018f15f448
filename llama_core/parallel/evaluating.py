"""A model that only computes, on several ranks: some divide its matrices, the others its texts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from llama_core.errors import TrainingInfraError
from llama_core.models.llama import Llama
from llama_core.parallel.expert import divide_experts
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.ranks import check_started
from llama_core.parallel.tensor import apply_tensor_parallel
from llama_core.planning.plan import ParallelPlan

T = TypeVar("T")
R = TypeVar("R")


class EvaluatingRanks:
    """The ranks that evaluate together. All of them call each method together.

    Args:
        plan: tensor-parallel ranks hold a part of every matrix, data-parallel ones whole copies. More than one rank
            needs the default process group.
        device_type: where the ranks compute.

    Raises:
        PlanError: if the plan's number of ranks is not the number started.
    """

    def __init__(self, plan: ParallelPlan, device_type: str) -> None:
        check_started(plan)
        self.plan = plan
        self._mesh = Mesh.build(plan, device_type) if plan.world_size > 1 else None

    def divide(self, model: Llama) -> None:
        """Divide the matrices of a model on the meta device.

        The stream between the blocks stays whole, because a text that is continued has one token at a time.
        """
        if self._mesh is not None and self.plan.tp > 1:
            divide_experts(model, self._mesh.experts)
            apply_tensor_parallel(model, self._mesh.weights["tp"], sequence_parallel=False)

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
