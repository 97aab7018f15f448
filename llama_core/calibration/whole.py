"""Whole blocks of a model and its two ends, timed as training runs them.

What they take over the sum of their operations, each measured alone, is what no operation shows: caches that other
operations have used, and Python between them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama_core.calibration.operations import Prepared
from llama_core.calibration.timing import time_passes
from llama_core.config.run import RunConfig
from llama_core.models.batch import Batch
from llama_core.models.layers import rotation
from llama_core.models.llama import Llama
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.asked import shortened
from llama_core.planning.time.kernels import Pass
from llama_core.training.engine import build_model


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
    plan = ParallelPlan(microbatch_size=rows)
    parallel = build_model(config, plan, device, spec=shortened(config.spec)).materialize()
    parallel.initialize_weights(0)
    model = parallel.model
    shape_BS = rows, config.seq_len
    tokens_BS = torch.randint(0, config.spec.vocab_size, shape_BS, device=device)
    positions_BS = torch.arange(config.seq_len, device=device).expand(shape_BS)
    batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), positions_BS)
    return WholePasses(_layers(model, batch, device), _ends(model, batch, device))


def _layers(model: Llama, batch: Batch, device: torch.device) -> Pass:
    assert batch.positions_BS is not None
    shape_BSD = (*batch.tokens_BS.shape, model.spec.hidden_size)
    x_BSD = torch.randn(shape_BSD, device=device).to(model.compute_dtype).requires_grad_()
    rotary = rotation(model.spec, batch.positions_BS)
    places_S = model.sequence_index(shape_BSD[1], device)
    total = Pass(0.0, 0.0)
    for number, layer in model.layers.items():
        window = model.spec.attention(int(number)).window
        mask = model.attention_mask(batch.positions_BS, places_S, model.compute_dtype, None, window)

        def run(layer: torch.nn.Module = layer, mask: Tensor | None = mask) -> Tensor:
            out: Tensor = layer(x_BSD, rotary, mask)
            return out

        total = total.plus(_time(Prepared(run, (x_BSD, *_trained(layer))), device))
    return total


def _ends(model: Llama, batch: Batch, device: torch.device) -> Pass:
    ends = [part for part in (model.tok_embeddings, model.norm, model.output) if part is not None]
    inputs = [weight for part in ends for weight in _trained(part)]
    if not inputs:  # with adapters, the ends are frozen, and the gradient ends at the last layer
        x_BSD = torch.randn(*batch.tokens_BS.shape, model.spec.hidden_size, device=device)
        x_BSD = x_BSD.to(model.compute_dtype).requires_grad_()
        assert model.norm is not None
        norm = model.norm
        return _time(Prepared(lambda: model.head(norm(x_BSD), batch), (x_BSD,)), device)

    def run() -> Tensor:
        assert model.norm is not None
        return model.head(model.norm(model.run_layers(batch.tokens_BS, batch, range(0))), batch)

    return _time(Prepared(run, inputs), device)


def _trained(module: torch.nn.Module) -> list[Tensor]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _time(prepared: Prepared, device: torch.device) -> Pass:
    forward, backward = time_passes(prepared, device)
    return Pass(forward.seconds, backward.seconds)
