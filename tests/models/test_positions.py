"""Layers rotate adjacent pairs, or not at all, and see positions and chunks, as in a Llama 4 without experts."""

from dataclasses import replace

import pytest
import torch
from greedy_texts import NUM_TOKENS, PROMPT, generated, greedy_without_cache
from hugging_face_models import model_with_large_weights, random_tokens, renamed
from transformers import Llama4ForCausalLM, Llama4TextConfig

from llama_core.config.models import ModelSpec
from llama_core.config.rope import QueryTemperature
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.models.batch import Batch
from llama_core.models.rotation import positional

ROTATING = ModelSpec("small", "llama", 64, 3, 4, 2, 16, 96, 128, 1e4, 1e-5, 256, 64, rope_pairs="adjacent")
SPEC = replace(ROTATING, nope_layers=(1,), query_temperature_scale=0.5, query_temperature_floor=4)
SPECS = {
    "adjacent pairs": ROTATING,
    "a layer without rotation": replace(ROTATING, nope_layers=(1,)),
    "with a temperature": SPEC,
    "norms of heads without weights": replace(SPEC, qk_norm=True, qk_norm_weights=False),
    "chunks": replace(ROTATING, attention_chunk=10),
    "chunks in layers that rotate": replace(SPEC, attention_chunk=10),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def oracle(ours):
    """Return transformers' model with the same weights."""
    spec = ours.spec
    config = Llama4TextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size_mlp=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        moe_layers=[],
        no_rope_layers=[int(spec.rotates(layer)) for layer in range(spec.num_layers)],
        attn_temperature_tuning=spec.query_temperature_scale > 0,
        attn_scale=spec.query_temperature_scale,
        floor_scale=spec.query_temperature_floor,
        attention_chunk_size=spec.attention_chunk or None,
        use_qk_norm=spec.qk_norm,
    )
    model = Llama4ForCausalLM(config).eval()
    model.load_state_dict({name.replace(".mlp.", ".feed_forward."): value for name, value in renamed(ours).items()})
    return model


@every_spec
def test_logits_and_gradients_are_those_of_transformers(spec):
    ours = model_with_large_weights(spec)
    theirs = oracle(ours)
    tokens = random_tokens(2, 48)
    logits, expected = ours(tokens), theirs(tokens).logits
    assert logits.std() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    towards = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    ours_of, theirs_of = (
        torch.autograd.grad(out, list(model.parameters()), towards)
        for out, model in ((logits, ours), (expected, theirs))
    )
    by_name = dict(zip((name for name, _ in theirs.named_parameters()), theirs_of, strict=True))
    for name, found in zip(renamed(ours), ours_of, strict=True):
        other = by_name[name.replace(".mlp.", ".feed_forward.")]
        assert (found - other).abs().max() < 1e-4 * other.abs().max()


@every_spec
def test_a_document_in_a_row_is_one_alone(spec):
    """In transformers, temperatures and chunks go by places in the row, even if documents share it."""
    ours = model_with_large_weights(spec).double()
    ours.compute_dtype = torch.float64
    ours.tok_embeddings.out_dtype = torch.float64
    tokens = random_tokens(1, 48)
    lengths = (9, 25, 14)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        stream = ours.norm(ours.run_layers(tokens, Batch(tokens, tokens, positions), range(spec.num_layers)))
        logits = ours.head(stream, None)[0]
        alone = torch.cat([ours(piece)[0] for piece in tokens.split(lengths, dim=1)])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-10)


@every_spec
def test_texts_with_a_cache_are_those_of_transformers(spec):
    ours = model_with_large_weights(spec)
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = oracle(ours).generate(PROMPT, **settings)[0, PROMPT.shape[1] :].tolist()
    assert greedy_without_cache(ours) == expected
    prompts = [PROMPT[0].tolist(), PROMPT[0, :9].tolist()]
    rows = generate_rows(model_with_large_weights(spec), prompts, num_tokens=NUM_TOKENS, is_end=lambda *_: False)
    alone = generate_rows(model_with_large_weights(spec), prompts[1:], num_tokens=NUM_TOKENS, is_end=lambda *_: False)
    assert rows == [expected, *alone]
    assert generated(ours) == expected


def test_a_temperature_grows_with_whole_steps():
    factors = positional(QueryTemperature(0.1, 4), torch.arange(9)[None]).flatten()
    expected = 1 + 0.1 * torch.tensor([1.0, 1, 1, 2, 2, 2, 2, 3, 3]).log()
    torch.testing.assert_close(factors, expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"qk_norm_weights": False}, r"architecture.qk_norm_weights=false needs architecture.qk_norm=true and "),
        (
            {"nope_layers": [0, 40]},
            r"architecture.nope_layers=\[40\] are not layers of llama3_8b, which has layers 0 to 31",
        ),
        (
            {"query_temperature_scale": 0.1},
            r"architecture.query_temperature_scale=0.1 needs architecture.nope_layers: ",
        ),
    ],
)
def test_traits_that_lack_another_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_mapping({"model": "llama3_8b", "architecture": settings})
