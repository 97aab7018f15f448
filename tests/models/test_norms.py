"""A block with norms in each place and of each width computes what is written out here, in fp64."""

from dataclasses import replace

import pytest
import torch
from architectures import VALUES

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.models.llama import Llama
from llama_core.models.rotation import rotation
from llama_core.planning.time.matmul_flops import layer_matmul_parameters

SPEC = ModelSpec("small", "llama", 24, 3, 4, 2, 8, 40, 32, 1e4, 1e-5, 64, 64)
ROWS, LENGTH = 2, 7
PLACEMENTS = VALUES["norms"]
NORMS_OF_BLOCK = {"pre": 2, "post": 2, "both": 4}
WIDTHS = {"none": {}, **{width: {"qk_norm": True, "qk_norm_width": width} for width in VALUES["qk_norm_width"]}}


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


def heads_of(x, weights, letter, num_heads):
    """Return queries or keys, [rows, length, heads, 8], with a norm as wide as its weight."""
    product = x @ weights[f"attention.w{letter}.weight"].T
    norm = f"attention.{letter}_norm.weight"
    width = len(weights[norm]) if norm in weights else product.shape[-1]
    return normalised(product.unflatten(-1, (-1, width)), weights, norm).reshape(ROWS, LENGTH, num_heads, 8)


def attention(x, weights):
    places = torch.arange(LENGTH, dtype=torch.float64)
    q = turned(heads_of(x, weights, "q", 4), places)
    k = turned(heads_of(x, weights, "k", 2), places)
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


def drawn(norms="pre", width="none"):
    """Return a model in fp64 whose matrices and norms matter, and the stream that enters its first block."""
    model = Llama(replace(SPEC, norms=norms, **WIDTHS[width]), compute_dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=generator)
    x = torch.randn(ROWS, LENGTH, SPEC.hidden_size, generator=generator, dtype=torch.float64)
    return model, x.requires_grad_()


def after_block(model, x):
    rotary = rotation(model.spec.rope(0), torch.arange(LENGTH)[None], torch.float64)
    return model.layers["0"](x, rotary, None)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norms", PLACEMENTS)
def test_a_block_and_its_gradients_are_those_of_the_computation_written_out(norms, width):
    model, x = drawn(norms, width)
    weights = dict(model.layers["0"].named_parameters())
    assert sum("norm" in name for name in weights) == NORMS_OF_BLOCK[norms] + 2 * (width != "none")
    out, expected = after_block(model, x), written_out(x, weights)
    # the block's angles are fp32; a frequency off by 1e-7 turns by less than 1e-6 radians over 7 places
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x, *weights.values()]
    found = torch.autograd.grad(out, inputs, towards)
    for name, one, other in zip(["x", *weights], found, torch.autograd.grad(expected, inputs, towards), strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)


EACH = [*((norms, "none") for norms in PLACEMENTS), *(("pre", width) for width in VALUES["qk_norm_width"])]


def test_each_place_and_width_of_norms_is_another_function():
    outs = []
    for norms, width in EACH:
        model, x = drawn(norms, width)
        outs.append(after_block(model, x))
    for place, out in enumerate(outs):
        assert all((out - other).abs().max() > 0.1 for other in outs[:place])


@pytest.mark.parametrize(("width", "of_heads"), [("none", 0), ("head", 8 + 8), ("all", 4 * 8 + 2 * 8)])
@pytest.mark.parametrize("norms", PLACEMENTS)
def test_every_norm_counts_as_many_parameters_as_what_it_normalises_is_wide(norms, width, of_heads):
    spec = replace(SPEC, norms=norms, **WIDTHS[width])
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Llama(spec).parameters())
    matrices = 2 * SPEC.embedding_parameters + SPEC.num_layers * layer_matmul_parameters(SPEC)
    of_blocks = SPEC.num_layers * (NORMS_OF_BLOCK[norms] * SPEC.hidden_size + of_heads)
    assert spec.num_parameters == built == matrices + of_blocks + SPEC.hidden_size


def test_a_width_without_norms_of_queries_and_keys_is_refused():
    with pytest.raises(ConfigError, match=r"architecture.qk_norm_width=all needs architecture.qk_norm=true\Z"):
        RunConfig.from_mapping({"architecture": {"qk_norm_width": "all"}})
