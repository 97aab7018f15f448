"""A block of the model on fake tensors, whose bytes and FLOPs are counted while it runs forward and backward."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch._subclasses import FakeTensorMode

from llama_core.models import cast_weights, layers, moe, nf4
from llama_core.models.attention import document_mask, use_kernels
from llama_core.models.llama import Llama, with_adapters
from llama_core.models.moe import prepare_routers
from llama_core.models.rotation import positional
from llama_core.parallel.cast_weights import CastWeights
from llama_core.parallel.recompute import apply_recompute
from llama_core.parallel.zero_bubble import DeferredGradients
from llama_core.rehearsal import kernels
from llama_core.rehearsal.byte_counter import ByteCounter, replaced


class _Source(torch.autograd.Function):
    """A leaf's way into the block: its gradient is dropped at once."""

    @staticmethod
    def forward(ctx, leaf, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return None, None


class _Sink(torch.autograd.Function):
    """A loss that keeps nothing of the block's output."""

    @staticmethod
    def forward(ctx, out):
        ctx.like = out.shape, out.dtype
        return out.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        shape, dtype = ctx.like
        return grad.new_empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Counted:
    """What a block was seen to keep, hold and compute."""

    num_held: int
    num_trained: int
    kept: int
    forward: int
    """Peak bytes of the forward, without the weights."""
    backward: int
    """Peak bytes of the backward, without the weights, but with their gradients."""
    forward_flops: int
    backward_flops: int
    deferred: int
    """Bytes kept after the backward for weight gradients that it has deferred."""
    weight_gradients: int
    """Peak bytes while those are made, with the gradients."""


def counted(spec, setting, *, mode, follows_trained):
    """Run the only layer of ``spec`` on fake tensors.

    Args:
        spec: a model of one layer.
        setting: tokens, dtype and kernels, of one rank.
        mode: what is recomputed.
        follows_trained: whether its input needs a gradient.
    """
    dtype = torch.bfloat16 if setting.itemsize == 2 else torch.float32
    with ExitStack() as stack:
        if setting.on_cuda:
            stack.enter_context(replaced(cast_weights, "multiplies_into_fp32", lambda x: True))
        if setting.fuses_norms:
            stack.enter_context(replaced(layers, "rms_norm", kernels._rms_norm))
            stack.enter_context(replaced(nf4, "unpack", kernels._unpack))
        if setting.compiles:
            for owner in (layers, moe):
                stack.enter_context(replaced(owner, "gated", kernels._Gated.apply))
        with torch.device("meta"):
            model = with_adapters(Llama(replace(spec, num_layers=1), compute_dtype=dtype))
        if setting.attention == "math":
            use_kernels(model, asked="math")
        apply_recompute(model, mode)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            copies = CastWeights(model).copies if setting.keeps_cast_weights else []
            return _run(model, copies, setting, dtype, follows_trained)


def _run(model, copies, setting, dtype, follows_trained):
    block = model.layers["0"]
    packed_bytes = sum(parameter.nbytes for parameter in block.parameters() if parameter.dtype is torch.uint8)
    num_held = sum(parameter.numel() for parameter in block.parameters()) - packed_bytes
    num_held += packed_bytes // setting.itemsize
    num_trained = sum(parameter.numel() for parameter in block.parameters() if parameter.requires_grad)
    prepare_routers(block, torch.ones(()))
    deferred = DeferredGradients(model) if setting.splits_backward else None
    places = torch.arange(setting.seq_len)[None]
    positions = positional(model.spec.positions(0), places)
    held = positions if isinstance(positions, tuple) else [] if positions is None else [positions]
    mask = document_mask(places, dtype) if setting.documents == "mask" else None
    with ByteCounter(block_bytes=1) as counter:
        leaf = torch.zeros((), requires_grad=follows_trained)
        weights = [*model.parameters(), *model.buffers(), *copies]
        counter.relabel([*weights, *held, leaf, *([] if mask is None else [mask])], "weights")
        before = counter.total_bytes
        x = torch.empty(setting.rows, setting.seq_len, model.spec.hidden_size, dtype=dtype)
        if follows_trained:
            x = _Source.apply(leaf, x)
        counter.forget_segments()
        counter.begin_segment()
        out = block(x, positions, mask)
        forward = counter.peaks["forward"].num_bytes - before
        forward_flops = counter.flops
        counter.begin_segment()
        loss = _Sink.apply(out)
        del x, out
        kept = counter.total_bytes - before - loss.nbytes
        counter.phase = "backward"
        backward = deferred_bytes = weight_gradients = 0
        if loss.requires_grad:
            with deferred.deferring("key") if deferred else nullcontext():
                loss.backward()
            backward = counter.peaks["backward"].num_bytes - before
        if deferred:
            made = sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
            deferred_bytes = counter.total_bytes - before - loss.nbytes - made
            counter.phase = "weight gradients"
            deferred.compute("key")
            weight_gradients = counter.peaks[counter.phase].num_bytes - before - loss.nbytes
    backward_flops = counter.flops - forward_flops
    return Counted(
        num_held,
        num_trained,
        kept,
        forward,
        backward,
        forward_flops,
        backward_flops,
        deferred_bytes,
        weight_gradients,
    )
