"""Run the action lists of a schedule: forwards and backwards of this rank's stages, and transfers between ranks.

A single rank is a pipeline of one stage, with a forward and a backward per microbatch: one executor does all training
and evaluation.
"""

# Shape suffixes: B batch, S sequence, D model dim

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, product
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.parallel.mesh import Mesh
from llama_core.parallel.zero import DataParallel
from llama_core.parallel.zero_bubble import DeferredGradients
from llama_core.planning.memory.profile import Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.schedules.actions import COMPUTATIONS, Action, Kind, Schedule, posting_early

OnPhase = Callable[[Phase], None]
OnAction = Callable[[Action, Literal["begins", "ends"]], None]


class Pipeline:
    """The stages of a model that one rank runs, and its place among the ranks that run the others.

    Args:
        model: this rank's part of the model.
        data: calls the model.
        plan: the plan.
        mesh: the ranks; None if there is only this one.
    """

    def __init__(self, model: Llama, data: DataParallel, plan: ParallelPlan, mesh: Mesh | None) -> None:
        self.model = model
        self.data = data
        self.mesh = mesh
        self.schedule = plan.build_schedule()
        self._plan = plan
        self.layers = plan.stage_layers(model.spec)
        self.rank = mesh.rank("pp") if mesh else 0
        self.num_ranks = plan.pp
        self.actions = self.schedule.with_communication()[self.rank]
        self._actions_of_other_steps: dict[int, Sequence[Action]] = {}
        in_two_parts = any(action.kind is Kind.WEIGHT_GRADIENT for action in self.actions)
        self.deferred = DeferredGradients(model) if in_two_parts else None
        self.on_action: OnAction | None = None
        """Called when a computation begins, after its inputs have arrived, and when it ends."""

    def forward_backward(self, microbatches: Sequence[Batch], scale: Tensor, on_phase: OnPhase) -> list[Tensor]:
        """Run one step's forwards and backwards, adding ``scale`` times the gradients to the parameters'.

        Args:
            microbatches: the step's microbatches, as many on every rank of a pipeline. Where they are not as many as
                the plan has, as in a batch ramp, they run by the schedule of the same plan for that number.
            scale: factor on the summed loss before it is differentiated, a scalar.
            on_phase: called as each forward and backward begins.

        Returns:
            The summed loss of every microbatch whose last stage is here.

        Raises:
            PlanError: if the plan's schedule cannot have that number of microbatches.
        """
        schedule = self.schedule
        actions: Sequence[Action] = self.actions
        if len(microbatches) != schedule.num_microbatches:
            schedule = self._plan.schedule_of(len(microbatches) // schedule.parts_per_microbatch)
            actions = self._in_other_step(schedule)
        return _Execution(self, microbatches, schedule.rank_of, scale, on_phase).run(actions)

    def _in_other_step(self, schedule: Schedule) -> Sequence[Action]:
        """Return this rank's actions in a step of another number of microbatches than the plan's."""
        count = schedule.num_microbatches
        if count not in self._actions_of_other_steps:
            self._actions_of_other_steps[count] = schedule.with_communication()[self.rank]
        return self._actions_of_other_steps[count]

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> dict[int, Tensor]:
        """Return the model's losses of every microbatch whose last stage is here, by its number, without gradients."""
        actions = list(posting_early(self._forwards(len(microbatches)), self.rank_of))
        last_stage = len(self.layers) - 1
        ends_here = [
            action.microbatch for action in actions if action.kind is Kind.FORWARD and action.stage == last_stage
        ]
        losses = _Execution(self, microbatches, self.rank_of, torch.ones(()), lambda phase: None).run(actions)
        self.data.release()
        return dict(zip(ends_here, losses, strict=True))

    def _forwards(self, num_microbatches: int) -> Iterator[Action]:
        """Yield this rank's actions for the forwards of any number of microbatches, in waves that keep all busy."""
        waves = (range(num_microbatches)[at : at + self.num_ranks] for at in range(0, num_microbatches, self.num_ranks))
        for stage, microbatch in chain.from_iterable(product(range(len(self.layers)), wave) for wave in waves):
            here, before, after = (self.rank_of(s, microbatch) for s in (stage, max(0, stage - 1), stage + 1))
            if here == self.rank:
                if before != here:
                    yield Action(stage, Kind.RECV_F, microbatch)
                yield Action(stage, Kind.FORWARD, microbatch)
                if after != here:
                    yield Action(stage, Kind.SEND_F, microbatch)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the pipeline rank that runs ``stage`` for ``microbatch``; past the last stage, the last stage's."""
        known = microbatch % self.schedule.num_microbatches
        return self.schedule.rank_of(min(stage, len(self.layers) - 1), known)


class _Execution:
    """The state while one list of actions runs; keys are (stage, microbatch).

    Args:
        pipeline: the pipeline.
        microbatches: those that the actions name by number.
        rank_of: returns the pipeline rank that runs a stage for a microbatch.
        scale: factor on the summed loss before it is differentiated, a scalar.
        on_phase: called as each forward and backward begins.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: Sequence[Batch],
        rank_of: Callable[[int, int], int],
        scale: Tensor,
        on_phase: OnPhase,
    ) -> None:
        self.pipeline = pipeline
        self.microbatches = microbatches
        self.rank_of = rank_of
        self.scale = scale
        self.on_phase = on_phase
        self.last_stage = len(pipeline.layers) - 1
        self.losses: list[Tensor] = []
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.roots: dict[tuple[int, int], Tensor | GradientEdge] = {}
        self.input_gradients: dict[tuple[int, int], Tensor] = {}
        self.arriving: dict[tuple[Kind, int, int], tuple[dist.Work, Tensor]] = {}
        self.leaving: list[tuple[dist.Work, Tensor]] = []
        self.is_last_of_its_kind = False

    def run(self, actions: Sequence[Action]) -> list[Tensor]:
        """Run ``actions`` in order and return the losses of the last stage's forwards."""
        last_places = {action.kind: place for place, action in enumerate(actions)}
        run_one = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.SEND_F: self._send_output,
            Kind.SEND_B: self._send_input_gradient,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
        }
        for place, action in enumerate(actions):
            self.is_last_of_its_kind = place == last_places[action.kind]
            run_one[action.kind](action)
            if action.kind in COMPUTATIONS:
                self._tell(action, "ends")
                self._forget_sent()
        self._forget_sent()
        return self.losses

    def _tell(self, action: Action, edge: Literal["begins", "ends"]) -> None:
        if self.pipeline.on_action is not None:
            self.pipeline.on_action(action, edge)

    def _forward(self, action: Action) -> None:
        stage, key = action.stage, (action.stage, action.microbatch)
        batch = self.microbatches[action.microbatch]
        self.on_phase("forward")
        self.pipeline.data.prepare(last=self.is_last_of_its_kind)
        x = batch.tokens_BS
        if stage > 0:
            x = self._arrived(Kind.RECV_F, key, self.outputs, (stage - 1, action.microbatch))
            if torch.is_grad_enabled():  # else there is no backward, which would drop it
                self.inputs[key] = x.requires_grad_()
        self._tell(action, "begins")
        layers = self.pipeline.layers[stage]
        out = self.pipeline.data.call(x, batch, layers=layers)
        if stage == self.last_stage:
            self.losses.append(out.detach())
            self.roots[key] = out
            return
        self.outputs[key] = out.detach()
        if out.requires_grad:  # keep only the graph: the values are dropped as soon as they are sent
            self.roots[key] = get_gradient_edge(out)

    def _backward(self, action: Action) -> None:
        stage, key = action.stage, (action.stage, action.microbatch)
        self.on_phase("backward")
        self.pipeline.data.prepare(last=self.is_last_of_its_kind)
        root = self.roots.pop(key)
        if isinstance(root, Tensor):
            gradient = self.scale.to(root.dtype)
        else:
            gradient = self._arrived(Kind.RECV_B, key, self.input_gradients, (stage + 1, action.microbatch))
        self._tell(action, "begins")
        deferred = self.pipeline.deferred
        with deferred.deferring(key) if deferred else nullcontext():
            torch.autograd.backward(root, gradient)
        if stage > 0:
            gradient_of_input = self.inputs.pop(key).grad
            if gradient_of_input is None:
                raise RuntimeError(f"stage {stage} returned no gradient of its input")
            self.input_gradients[key] = gradient_of_input

    def _weight_gradient(self, action: Action) -> None:
        if self.pipeline.deferred is None:
            raise RuntimeError(f"{action} has no deferred gradients to compute")
        self.on_phase("backward")
        self._tell(action, "begins")
        self.pipeline.deferred.compute((action.stage, action.microbatch))

    def _send_output(self, action: Action) -> None:
        self._send(self.outputs.pop((action.stage, action.microbatch)), action.stage + 1, action.microbatch)

    def _send_input_gradient(self, action: Action) -> None:
        self._send(self.input_gradients.pop((action.stage, action.microbatch)), action.stage - 1, action.microbatch)

    def _arrived(
        self, kind: Kind, key: tuple[int, int], local: dict[tuple[int, int], Tensor], source: tuple[int, int]
    ) -> Tensor:
        """Return the tensor received under ``key``, or the one that another stage of this rank left at ``source``."""
        if source in local:
            return local.pop(source)
        work, tensor = self.arriving.pop((kind, *key))
        work.wait()
        return tensor

    def _send(self, tensor: Tensor, stage: int, microbatch: int) -> None:
        tensor = tensor.contiguous()
        work = self._mesh.send_to_stage(tensor, self.rank_of(stage, microbatch))
        self.leaving.append((work, tensor))

    def _forget_sent(self) -> None:
        """Drop the tensors sent before the last computation, during which they could be transferred.

        On CUDA this makes only the computations that follow wait for the transfers, as they may use the memory.
        """
        for work, _ in self.leaving:
            work.wait()
        self.leaving.clear()

    def _receive(self, action: Action) -> None:
        model = self.pipeline.model
        tokens_BS = self.microbatches[action.microbatch].tokens_BS
        num_rows, num_tokens = tokens_BS.shape
        x_BSD = torch.empty(
            (num_rows, num_tokens // model.sequence_shards, model.spec.hidden_size),
            dtype=model.compute_dtype,
            device=tokens_BS.device,
        )
        source = action.stage + (-1 if action.kind is Kind.RECV_F else 1)
        work = self._mesh.receive_from_stage(x_BSD, self.rank_of(source, action.microbatch))
        self.arriving[action.kind, action.stage, action.microbatch] = (work, x_BSD)

    @property
    def _mesh(self) -> Mesh:
        if self.pipeline.mesh is None:
            raise RuntimeError("a pipeline of one rank has no peer")
        return self.pipeline.mesh
