"""Label the tensors of a training step for the byte counter."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama_core.models.llama import Llama
from llama_core.planning.memory.profile import Phase
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import ByteCounter
from llama_core.schedules.actions import Action, Kind


class Labels:
    """Tells a counter which part of ``train_step`` is running, and labels its tensors.

    The tensors that a forward leaves behind are activations, those made after the final norm belong to the loss, and a
    gradient counts as one once it is accumulated. Everything else is temporary or communication, which the counter
    recognises itself.
    """

    def __init__(self, counter: ByteCounter, model: Llama) -> None:
        self.counter = counter
        self.model = model
        self._forward_since = 0
        self._watched: set[int] = set()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self._at(module, name))
        model.register_forward_pre_hook(lambda module, args: self._begin_forward(args[0]))
        model.register_forward_hook(lambda module, args, out: self._end_forward())
        if model.norm is not None:
            model.norm.register_forward_hook(lambda module, args, out: self._begin_loss())
        self._watch(model)

    def enter(self, phase: Phase) -> None:
        """Begin a phase of ``train_step``."""
        counter = self.counter
        counter.phase = phase
        counter.category = "temporaries"
        counter.landmark = f"the {phase} began"
        counter.relabel((p.grad for p in self.model.parameters() if p.grad is not None), "gradients")

    def _watch(self, module: nn.Module) -> None:
        """Label the gradients of ``module`` from now on; gathered weights are other parameters with their own."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda parameter, name=name: self._accumulated(parameter, name)
                )

    def _at(self, module: nn.Module, name: str) -> None:
        self.counter.landmark = name or "the model"
        self._watch(module)

    def _begin_forward(self, inputs: Tensor) -> None:
        self._forward_since = self.counter.num_born
        self.counter.relabel([inputs], "activations")

    def _end_forward(self) -> None:
        # ring attention also sends tensors that it keeps
        self.counter.relabel_since(self._forward_since, ("temporaries", "communication"), "activations")
        self.counter.category = "temporaries"

    def _begin_loss(self) -> None:
        self.counter.landmark = "the loss began"
        self.counter.category = "loss"

    def _accumulated(self, parameter: nn.Parameter, name: str) -> None:
        self.counter.landmark = f"the gradient of {name}"
        if parameter.grad is not None:
            self.counter.relabel([parameter.grad], "gradients")


class GradientBuckets:
    """The buckets in which replicas of a whole model average their gradients; they hold all gradients, at all times.

    This mimics the memory of ``DistributedDataParallel``, whose own reducer needs real ranks. A gradient lies outside
    the buckets until the last backward of a step moves it in.
    """

    def __init__(self, model: Llama, plan: ParallelPlan) -> None:
        copies = plan.averages_in_buckets and dist.get_backend() == "fake"
        self._backwards_left = 0
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if copies else []
        self.gradients = {parameter: torch.empty_like(parameter, requires_grad=False) for parameter in trained}
        for parameter in self.gradients:
            parameter.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]

    def expect(self, actions: Sequence[Action]) -> None:
        """Begin a step of ``actions``."""
        self._backwards_left = sum(action.kind is Kind.BACKWARD for action in actions)

    def enter(self, phase: Phase) -> None:
        """Begin a phase of ``train_step``."""
        self._backwards_left -= phase == "backward"

    def _move(self, parameter: nn.Parameter) -> None:
        if not self._backwards_left:
            parameter.grad = self.gradients[parameter]
