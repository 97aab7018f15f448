"""The layers of a model and its two ends, timed in the steps of a model that has only some of the layers.

What they take over the sum of their operations, each measured alone, is what no operation shows: caches that other
operations have used, and Python between them. Whole steps, because an operation that is repeated finds its weights in
the caches, where a step would have to read them.
"""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llama_core.calibration.timing import timer_of, typical
from llama_core.config.run import RunConfig
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.asked import shortened
from llama_core.planning.time.kernels import Pass
from llama_core.training.engine import NativeEngine, build_model
from llama_core.training.optimizer import build_optimizer

MIN_STEPS = 6
MAX_SECONDS = 4.0
"""Steps are taken until there are ``MIN_STEPS`` after the first, but no longer than this if there are two."""


class WholePasses(NamedTuple):
    """The seconds of the parts of a model."""

    layers: Pass
    """Of the layers of ``shortened``."""
    ends: Pass
    """Of the embedding, the final norm, the head and its loss."""


def time_whole(config: RunConfig, rows: int, device: torch.device) -> WholePasses:
    """Return the time of the first layers and of the ends of a model on rows of one document each.

    Args:
        config: the resolved configuration.
        rows: rows of a forward.
        device: where they are computed.
    """
    parallel = build_model(config, ParallelPlan(microbatch_size=rows), device, spec=shortened(config.spec))
    parallel.materialize().initialize_weights(0)
    engine = NativeEngine(parallel, build_optimizer(parallel.model, training=config.training))
    tokens_BS = torch.randint(0, config.spec.vocab_size, (rows, config.seq_len), device=device)
    positions_BS = torch.arange(config.seq_len, device=device).expand(rows, config.seq_len)
    batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_BS)
    clock = _PartsClock(parallel.model, device)
    began = time.perf_counter()
    while True:
        clock.begin()
        out = parallel.model(tokens_BS, batch)
        clock.mark("forward")
        torch.autograd.backward(out, torch.ones_like(out))
        clock.mark("backward")
        engine.update(
            out.detach().sum(), learning_rate=1e-6, max_grad_norm=1.0, loss_scale=1.0, on_phase=lambda phase: None
        )
        steps = len(clock.steps) - 1  # the first one sets up the kernels
        if steps >= MIN_STEPS or (steps >= 2 and time.perf_counter() - began > MAX_SECONDS):
            return clock.passes()


class _PartsClock:
    """When a step enters and leaves the layers of a model, forwards and backwards."""

    def __init__(self, model: Llama, device: torch.device) -> None:
        self.steps: list[dict[str, Any]] = []
        self._timer = timer_of(device)
        first, *_, last = [*model.layers.values()] * 2
        first.register_forward_pre_hook(self._enter)
        last.register_forward_hook(self._leave)

    def begin(self) -> None:
        """Begin a step."""
        self.steps.append({})
        self.mark("begin")

    def mark(self, name: str) -> None:
        """Note the time under a name."""
        self.steps[-1][name] = self._timer.mark()

    def _enter(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.mark("layers")
        if inputs[0].requires_grad:  # not with adapters, where the backward ends in the layers
            inputs[0].register_hook(lambda grad: self.mark("embedding's backward"))  # type: ignore[no-untyped-call]

    def _leave(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        self.mark("head")
        out.register_hook(lambda grad: self.mark("layers' backward"))  # type: ignore[no-untyped-call]

    def passes(self) -> WholePasses:
        """Return the typical seconds of the layers and of the ends."""
        steps = [{"embedding's backward": step["backward"], **step} for step in self.steps[1:]]

        def seconds(since: str, until: str) -> float:
            return typical([self._timer.between(step[since], step[until]) for step in steps])

        layers = Pass(seconds("layers", "head"), seconds("layers' backward", "embedding's backward"))
        return WholePasses(
            layers,
            Pass(
                seconds("begin", "layers") + seconds("head", "forward"),
                seconds("forward", "layers' backward") + seconds("embedding's backward", "backward"),
            ),
        )
