import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from operations import Operations
from parity import UNTIED
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Olmo3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from llama_core.config.models import model_spec
from llama_core.config.rope import YarnScaling
from llama_core.config.strategy import MATRICES, LoRA
from llama_core.models.attention import attend, document_mask
from llama_core.models.layers import Linear, RMSNorm
from llama_core.models.llama import Llama, with_adapters
from llama_core.models.rotation import rope_frequencies, rotate, rotation

aten = torch.ops.aten
LLAMA_405B = model_spec("llama3_405b")


def test_rms_norm_equals_hugging_faces_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64) * 7
    ours, theirs = RMSNorm(64, 1e-5), LlamaRMSNorm(64, 1e-5)
    torch.nn.init.normal_(ours.weight)
    theirs.weight = ours.weight
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_rms_norm_of_bf16_is_computed_in_fp32_and_returned_in_bf16():
    torch.manual_seed(0)
    # the sum of 4096 squares in bf16 would stop growing at 256
    x = torch.randn(2, 4096).bfloat16()
    normed = RMSNorm(4096, 1e-5)(x)
    assert normed.dtype == torch.bfloat16
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=2**-8, atol=0)  # one rounding to bf16


@pytest.mark.parametrize("targets", [MATRICES, ("q_proj", "down_proj")])
def test_an_adapters_product_is_added_by_the_kernel_that_computes_it(targets):
    plain, adapted = UNTIED, replace(UNTIED, lora=LoRA(lora_rank=4, target_modules=targets))
    added = []
    for spec in (plain, adapted):
        with torch.no_grad(), Operations() as operations:
            with_adapters(Llama(spec))(torch.zeros(1, 8, dtype=torch.int64))
        added.append([operations.called.count(op) for op in (aten.add.Tensor, aten.addmm.default)])
    additions, _ = added[0]
    assert added == [[additions, 0], [additions, len(targets) * plain.num_layers]]


def test_linear_computes_in_the_input_dtype_and_keeps_the_gradient_in_the_weight_dtype():
    linear = Linear(8, 4)
    out = linear(torch.randn(3, 8, dtype=torch.bfloat16))
    out.sum().backward()
    assert (out.dtype, linear.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_rotated_scores_depend_only_on_the_distance_between_positions():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, LLAMA_405B.head_dim)

    def score(q_position, k_position):
        rotated_q = rotate(q, rotation(LLAMA_405B.rope(0), torch.tensor([[q_position]])))
        return (rotated_q * rotate(k, rotation(LLAMA_405B.rope(0), torch.tensor([[k_position]])))).sum()

    torch.testing.assert_close(score(40, 7), score(1040, 1007), rtol=0, atol=2e-3)  # angles of 1000 radians in fp32
    assert abs(score(40, 7) - score(40, 17)) > 0.1


def test_rotation_keeps_the_dtype_and_the_length_of_every_head():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 3, LLAMA_405B.head_dim, dtype=torch.bfloat16)
    rotated = rotate(x, rotation(LLAMA_405B.rope(0), torch.arange(9)[None]))
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=0)


def test_adjacent_pairs_are_rotated_as_in_a_llama_4_up_to_their_order():
    q, k = torch.randn(2, 2, 9, 3, LLAMA_405B.head_dim, generator=torch.Generator().manual_seed(0))
    rotary = rotation(LLAMA_405B.rope(0), torch.arange(9)[None])
    theirs = apply_rotary_emb(q, k, torch.complex(rotary.cos, rotary.sin)[:, :, 0])
    ours = [rotate(x, rotary, "adjacent") for x in (q, k)]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.unflatten(-1, (2, -1)).mT.flatten(-2), other, rtol=0, atol=1e-5)
    assert (rotate(q, rotary) - ours[0]).abs().max() > 1


def test_layers_with_a_window_can_have_a_rotation_of_their_own():
    """Each layer computes what it does in a model whose layers all rotate as it does."""
    spec = replace(
        UNTIED, sliding_window=4, windowed_layers=(0, 1), rope_scaling=YarnScaling(4.0, 8), windowed_rope_theta=100.0
    )
    model = Llama(spec)
    scaled = replace(spec, windowed_rope_theta=0.0)
    unscaled = replace(scaled, rope_theta=100.0, rope_scaling=None)
    x = torch.randn(2, 12, spec.hidden_size)
    for layer, alike in ((1, unscaled), (2, scaled)):
        outs = []
        for model.spec in (spec, scaled, unscaled):
            outs.append(model.run_layers(x, None, range(layer, layer + 1)))
        assert outs[0].equal(outs[[scaled, unscaled].index(alike) + 1])
        assert not outs[1].equal(outs[2])


@pytest.mark.parametrize(("layer", "kind"), [(0, "sliding_attention"), (1, "full_attention")])
def test_the_rotations_of_layers_with_and_without_a_window_match_transformers(layer, kind):
    scaling = YarnScaling(8.0, 32, attention_factor=1.25)
    spec = replace(
        UNTIED, sliding_window=4, windowed_layers=(0,), rope_theta=1e6, rope_scaling=scaling, windowed_rope_theta=1e4
    )
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.25}
    ropes = {
        "full_attention": yarn | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Olmo3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=ropes,
    )
    places = torch.arange(64)[None]
    theirs = Olmo3RotaryEmbedding(config)(torch.empty(()), places, kind)
    for ours, whole in zip(rotation(spec.rope(layer), places), theirs, strict=True):
        torch.testing.assert_close(ours[:, :, 0], whole.chunk(2, -1)[0], rtol=0, atol=1e-5)


def test_scaled_rope_keeps_short_wavelengths_and_stretches_long_ones_by_the_factor():
    scaling = LLAMA_405B.rope_scaling
    plain = rope_frequencies(LLAMA_405B.rope(0)._replace(scaling=None))
    ratio = plain / rope_frequencies(LLAMA_405B.rope(0))
    wavelength = 2 * math.pi / plain
    short = wavelength < scaling.original_context / scaling.high_freq_factor
    long = wavelength > scaling.original_context / scaling.low_freq_factor
    between = ~short & ~long
    torch.testing.assert_close(ratio[short], torch.ones_like(ratio[short]))
    torch.testing.assert_close(ratio[long], torch.full_like(ratio[long], scaling.factor))
    assert between.any()
    assert ((ratio[between] > 1) & (ratio[between] < scaling.factor)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_sees_itself_and_the_earlier_tokens_of_its_own_document(dtype):
    lengths = [[3, 1, 4], [5, 3], [8]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    mask = document_mask(positions, dtype)
    document = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    same = document[:, :, None] == document[:, None, :]
    earlier = torch.ones(8, 8).tril().bool()
    assert (mask.shape, mask.dtype) == ((3, 1, 8, 8), dtype)
    assert torch.equal(mask[:, 0] == 0, same & earlier)
    assert torch.equal(mask[:, 0] == -math.inf, ~(same & earlier))


@pytest.mark.parametrize(
    ("dtype", "masked", "key_heads"), [("bfloat16", False, 2), ("bfloat16", True, 8), ("float32", False, 8)]
)
def test_on_cuda_heads_are_repeated_where_no_fused_kernel_takes_groups(dtype, masked, key_heads, monkeypatch):
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: seen.append(k.shape[1]))
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(1, heads, 16, 64, dtype=getattr(torch, dtype), device="cuda") for heads in (8, 2))
        attend(q, k, k, torch.empty(1, 1, 16, 16, device="cuda") if masked else None)
    assert seen == [key_heads]
