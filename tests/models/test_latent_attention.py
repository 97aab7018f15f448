"""Latent attention is that of DeepSeek-V3 in transformers, in rows, packed documents and gradients."""

from dataclasses import replace

import pytest
import torch
from hugging_face_models import model_with_large_weights
from test_soft_cap import check_losses_of_packed_rows, check_texts_with_a_cache
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from llama_core.config.model_spec import BaseShape
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.models import ModelSpec
from llama_core.config.rope import QueryTemperature
from llama_core.errors import ConfigError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.generation import Cache
from llama_core.models.attention import use_kernels
from llama_core.models.latent_attention import LatentAttention
from llama_core.models.llama import Llama
from llama_core.models.rotation import positional

SPEC = ModelSpec(
    *("small", "llama", 24, 2, 3, 3, 12, 40, 32, 1e4, 1e-3, 64, 64),
    kv_rank=10,
    query_rank=14,
    rope_dim=4,
    value_dim=6,
    rope_pairs="adjacent",
)
SPECS = {
    "latents of queries": SPEC,
    "one matrix to queries": replace(SPEC, query_rank=0),
    "values as wide as keys, halves": replace(SPEC, value_dim=0, rope_pairs="halves"),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def theirs_of(spec):
    """Return transformers' model with the sizes of a spec."""
    config = DeepseekV3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads,
        kv_lora_rank=spec.kv_rank,
        q_lora_rank=spec.query_rank or None,
        qk_rope_head_dim=spec.rope_dim,
        qk_nope_head_dim=spec.head_dim - spec.rope_dim,
        v_head_dim=spec.value_head_dim,
        rope_interleave=spec.rope_pairs == "adjacent",
        first_k_dense_replace=spec.num_layers,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config)


def both(spec):
    """Return our model and transformers' with the same large weights, and the pairs of their parameters by name."""
    ours, theirs = Llama(spec), theirs_of(spec)
    their_parameters = dict(theirs.named_parameters())
    pairs = {}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            same = their_parameters[hugging_face_name(name, spec.model_type)]
            parameter.copy_(torch.randn(parameter.shape) * 0.25 + (1 if parameter.ndim == 1 else 0))
            same.copy_(parameter)
            pairs[name] = parameter, same
    assert len(pairs) == len(their_parameters)
    return ours, theirs, pairs


@every_spec
@pytest.mark.parametrize("asked", ["auto", "math"])
def test_logits_and_gradients_are_those_of_transformers(spec, asked):
    ours, theirs, pairs = both(spec)
    use_kernels(ours, asked=asked)
    tokens = torch.randint(0, spec.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    logits = [model(tokens) for model in (ours, theirs)]
    logits[1] = logits[1].logits
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    towards = torch.randn(logits[0].shape, generator=torch.Generator().manual_seed(2)) / len(tokens[0])
    found, right = (
        torch.autograd.grad(one, [pair[place] for pair in pairs.values()], towards) for place, one in enumerate(logits)
    )
    for name, mine, their in zip(pairs, found, right, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}")


@every_spec
def test_packed_documents_have_the_losses_that_they_have_alone(spec):
    check_losses_of_packed_rows(both(spec)[0], 1e-5)


@pytest.mark.parametrize("changes", [{}, {"attention_sinks": True}, {"attention_soft_cap": 2.0}, {"num_layers": 1}])
@torch.no_grad()
def test_a_cache_keeps_the_latents_alone_and_gives_the_logits_of_one_forward(changes):
    model = model_with_large_weights(replace(SPEC, **changes))
    tokens_BS = torch.arange(20)[None] % 32
    expected = model(tokens_BS)
    cache = Cache(model)
    logits = torch.cat([model(tokens_BS[:, begin:end]) for begin, end in ((0, 9), (9, 10), (10, 15), (15, 20))], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for keys, values in cache._kept.values():
        assert (keys.numel(), values.numel()) == (20 * (SPEC.kv_rank + SPEC.rope_dim), 0)


@torch.no_grad()
def test_a_text_is_continued_with_the_weights_that_a_model_has_by_then():
    model = model_with_large_weights(SPEC)
    before = generate_rows(model, [[3, 1, 4]], num_tokens=5, is_end=lambda *_: False)
    for block in model.layers.values():
        block.attention.wkv_b.weight.mul_(-1.5)
    after = generate_rows(model, [[3, 1, 4]], num_tokens=5, is_end=lambda *_: False)
    assert after != before
    other = model_with_large_weights(SPEC)
    other.load_state_dict(model.state_dict())
    assert generate_rows(other, [[3, 1, 4]], num_tokens=5, is_end=lambda *_: False) == after


def test_texts_with_a_cache_are_those_without():
    latents = {"kv_rank": 24, "query_rank": 20, "rope_dim": 8, "value_dim": 12}
    check_texts_with_a_cache(qkv_bias=False, num_kv_heads=4, **latents)


def test_every_head_shares_the_rotated_part_of_a_key_and_zeros_follow_its_values():
    layer = both(SPEC)[0].layers["0"].attention
    x = torch.randn(1, 5, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    k, v = layer.keys_and_values(*layer.latents(x, positional(SPEC.rope(0), torch.arange(5)[None])))
    assert (k[..., 8:] == k[:, :, :1, 8:]).all()
    assert (k[..., :8] != k[:, :, :1, :8]).any()
    assert not v[..., SPEC.value_dim :].any()


@pytest.mark.parametrize("kind", [None, QueryTemperature(0.3, 3)])
def test_layers_without_rotation_know_only_the_temperature_of_a_query(kind):
    layer = LatentAttention(SPEC)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(1, 7, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = layer.queries(x, None)
    factor = 1.0 if kind is None else positional(kind, torch.arange(7)[None])
    torch.testing.assert_close(layer.queries(x, positional(kind, torch.arange(7)[None])), plain * factor)
    keys = layer.keys_and_values(*layer.latents(x, None))
    placed = layer.latents(x, positional(kind, torch.arange(7)[None]))
    assert (layer.keys_and_values(*placed)[0] == keys[0]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_rank": 0}, "architecture.rope_dim=4 needs architecture.kv_rank"),
        ({"rope_dim": 0}, "architecture.kv_rank=10 needs architecture.rope_dim=0 to be even, above 0 and below"),
        ({"rope_dim": 12}, "below architecture.head_dim=12"),
        ({"rope_dim": 3}, "rope_dim=3 to be even"),
        ({"value_dim": 13}, "architecture.value_dim=13 is above architecture.head_dim=12"),
        ({"num_kv_heads": 1}, "set architecture.num_kv_heads=3, not 1"),
        ({"qk_norm": True}, "does not go with architecture.qk_norm=true"),
        ({"base": BaseShape(12, 1)}, "does not go with training.parametrization=completep"),
        ({"qkv_bias": True}, "does not go with architecture.qkv_bias=true"),
    ],
)
def test_sizes_and_traits_that_do_not_go_with_latents_are_refused(changes, said):
    with pytest.raises(ConfigError) as refused:
        replace(SPEC, **changes)
    assert said in str(refused.value)
