"""A block with its norms before, after, or on both sides computes what is written out here, in fp64."""

from dataclasses import replace

import pytest
import torch
from architectures import VALUES

from llama_core.config.models import ModelSpec
from llama_core.models.layers import rotation
from llama_core.models.llama import Llama

SPEC = ModelSpec("small", "llama", 24, 3, 4, 2, 8, 40, 32, 1e4, 1e-5, 64, 64)
ROWS, LENGTH = 2, 7
PLACEMENTS = VALUES["norms"]
NORMS_OF_BLOCK = {"pre": 2, "post": 2, "both": 4}


def normalised(x, weights, name):
    """Return ``x`` after a norm; as it is if there is no such norm."""
    if name not in weights:
        return x
    return x / (x.square().mean(-1, keepdim=True) + SPEC.norm_eps).sqrt() * weights[name]


def turned(x, places):
    """Return heads [rows, length, heads, 8] turned by their places, pair by pair."""
    out = torch.empty_like(x)
    for pair in range(4):
        angle = places / 1e4 ** (2 * pair / 8)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        one, other = x[..., pair], x[..., pair + 4]
        out[..., pair] = one * cos - other * sin
        out[..., pair + 4] = other * cos + one * sin
    return out


def attention(x, weights):
    places = torch.arange(LENGTH, dtype=torch.float64)
    q = turned((x @ weights["attention.wq.weight"].T).view(ROWS, LENGTH, 4, 8), places)
    k = turned((x @ weights["attention.wk.weight"].T).view(ROWS, LENGTH, 2, 8), places)
    v = (x @ weights["attention.wv.weight"].T).view(ROWS, LENGTH, 2, 8)
    heads = []
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / 8**0.5
        hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, head // 2])
    return torch.cat(heads, dim=-1) @ weights["attention.wo.weight"].T


def feed_forward(x, weights):
    gate = x @ weights["feed_forward.w1.weight"].T
    up = x @ weights["feed_forward.w3.weight"].T
    return (gate * gate.sigmoid() * up) @ weights["feed_forward.w2.weight"].T


def written_out(x, weights):
    added = attention(normalised(x, weights, "attention_norm.weight"), weights)
    x = x + normalised(added, weights, "attention_post_norm.weight")
    added = feed_forward(normalised(x, weights, "ffn_norm.weight"), weights)
    return x + normalised(added, weights, "ffn_post_norm.weight")


def drawn(norms):
    """Return a model in fp64 whose matrices and norms matter, and the stream that enters its first block."""
    model = Llama(replace(SPEC, norms=norms), compute_dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=generator)
    x = torch.randn(ROWS, LENGTH, SPEC.hidden_size, generator=generator, dtype=torch.float64)
    return model, x.requires_grad_()


def after_block(model, x):
    rotary = rotation(model.spec, torch.arange(LENGTH)[None], torch.float64)
    return model.layers["0"](x, rotary, None)


@pytest.mark.parametrize("norms", PLACEMENTS)
def test_a_block_and_its_gradients_are_those_of_the_computation_written_out(norms):
    model, x = drawn(norms)
    weights = dict(model.layers["0"].named_parameters())
    assert sum("norm" in name for name in weights) == NORMS_OF_BLOCK[norms]
    out, expected = after_block(model, x), written_out(x, weights)
    # the block's angles are fp32; a frequency off by 1e-7 turns by less than 1e-6 radians over 7 places
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x, *weights.values()]
    found = torch.autograd.grad(out, inputs, towards)
    for name, one, other in zip(["x", *weights], found, torch.autograd.grad(expected, inputs, towards), strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)


def test_each_placement_of_the_norms_is_another_function():
    outs = []
    for norms in PLACEMENTS:
        model, x = drawn(norms)
        outs.append(after_block(model, x))
    for place, out in enumerate(outs):
        assert all((out - other).abs().max() > 0.1 for other in outs[:place])


@pytest.mark.parametrize("norms", PLACEMENTS)
def test_every_norm_counts_as_many_parameters_as_the_stream_is_wide(norms):
    spec = replace(SPEC, norms=norms)
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Llama(spec).parameters())
    matrices = 2 * SPEC.embedding_parameters + SPEC.num_layers * SPEC.layer_matmul_parameters
    num_norms = SPEC.num_layers * NORMS_OF_BLOCK[norms] + 1
    assert spec.num_parameters == built == matrices + num_norms * SPEC.hidden_size
