import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import (
    BY_LAYER,
    class_of,
    gradient_of,
    hugging_face_config,
    hugging_face_model,
    load,
    model_with_large_weights,
    random_tokens,
    shrunk,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from whole_logits import logits_of_documents

from llama_core.config.config_json.reading import read_folder
from llama_core.config.config_json.writing import config_json
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.models import model_names, model_spec
from llama_core.config.rope import LinearScaling, Llama3Scaling, YarnScaling
from llama_core.errors import WeightsError
from llama_core.hugging_face.weight_files import read_tensors
from llama_core.hugging_face.weight_names import check_weights, hugging_face_shapes
from llama_core.models.llama import Llama
from llama_core.models.rotation import rope_frequencies


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", model_names())
def test_logits_match_transformers_for_the_same_weights(name, attention):
    spec = shrunk(name)
    ours, theirs = model_with_large_weights(spec), hugging_face_model(spec, attention)
    load(theirs, ours)
    tokens = random_tokens(2, 48)
    with torch.no_grad():
        logits = ours(tokens)
        assert logits.std() > 1
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=1e-4)


GEMMA3 = shrunk("gemma3_27b")
GPT_OSS = shrunk("gpt_oss_20b")
LLAMA4 = shrunk("llama4_scout")
OLMO3 = replace(shrunk("olmo3_32b"), num_layers=4, windowed_layers=(0, 1, 2))
RELATIVES = {
    "Mistral": shrunk("mistral_7b"),
    "Qwen2, last layers": replace(BY_LAYER, windowed_layers=(2, 3)),
    "Qwen3, some layers": replace(BY_LAYER, qkv_bias=False, qk_norm=True),
    "Qwen3, all layers": replace(BY_LAYER, qkv_bias=False, qk_norm=True, windowed_layers=()),
    "OLMo 2, grouped heads": shrunk("olmo2_32b"),
    "OLMo 3": OLMO3,
    "OLMo 3, another base in windows": replace(OLMO3, windowed_rope_theta=1e3),
    "OLMo 3, all layers scaled": replace(OLMO3, windowed_rope_theta=0.0),
    "OLMo 3, no layer scaled": replace(OLMO3, rope_scaling=None, windowed_rope_theta=0.0),
    "OLMo 3, windows in all layers": replace(OLMO3, windowed_layers=(), windowed_rope_theta=0.0),
    "Gemma 3": GEMMA3,
    "Gemma 3, nothing scaled": replace(GEMMA3, rope_scaling=None, query_pre_attn_scalar=0),
    "Gemma 3, another base in windows": replace(GEMMA3, windowed_rope_theta=1e3, tied_embeddings=False),
    "Gemma 3, windows in all layers": replace(
        GEMMA3, windowed_layers=(), windowed_rope_theta=0.0, rope_scaling=None, rope_theta=1e4
    ),
    "GPT-OSS": GPT_OSS,
    "GPT-OSS, nothing scaled, a tied head": replace(GPT_OSS, rope_scaling=None, tied_embeddings=True),
    "GPT-OSS, windows in all layers": replace(GPT_OSS, windowed_layers=(), num_kv_heads=4),
    "GPT-OSS, no window": replace(GPT_OSS, windowed_layers=(), sliding_window=0),
    "Llama 4, all experts": LLAMA4,
    "Llama 4, some experts": replace(
        shrunk("llama4_maverick"), num_layers=5, nope_layers=(3,), rope_scaling=YarnScaling(8.0, 32)
    ),
    "Llama 4, experts and layers without rotation of its own": replace(
        LLAMA4,
        num_layers=4,
        nope_layers=(0, 3),
        query_temperature_scale=0.0,
        moe=LLAMA4.moe.model_copy(update={"moe_layers": (0, 1, 3)}),
    ),
    "Llama 4, no chunks": replace(LLAMA4, attention_chunk=0),
    "Llama 4, no layer without rotation": replace(LLAMA4, nope_layers=(), query_temperature_scale=0.0),
    "DeepSeek-V3": shrunk("deepseek_v3"),
    "DeepSeek-V3, nothing scaled": replace(shrunk("deepseek_v3"), rope_scaling=None, score_factor=1.0, value_dim=0),
    "Moonlight": shrunk("moonlight_16b_a3b"),
    "Qwen2, wide heads": replace(shrunk("qwen2_5_7b"), head_dim=32),
}


@pytest.mark.parametrize("spec", RELATIVES.values(), ids=RELATIVES)
def test_a_relative_read_from_a_folder_and_one_written_to_a_folder_give_the_logits_of_transformers(spec, tmp_path):
    theirs = hugging_face_model(spec)
    theirs.config.save_pretrained(tmp_path / "theirs")
    read = read_folder(str(tmp_path / "theirs"))
    assert read == replace(spec, name="theirs", family="llama")
    ours = model_with_large_weights(read)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/config.json").write_text(json.dumps(config_json(spec)))
    assert read_folder(str(tmp_path / "ours")) == replace(spec, name="ours", family="llama")
    exported = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "ours")).eval()
    assert type(exported) is type(theirs)
    tokens = random_tokens(2, 48)
    with torch.no_grad():
        logits = ours(tokens)
        for model in (theirs, exported):
            load(model, ours)
            torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=1e-4)
        full = replace(spec, sliding_window=0, windowed_layers=(), windowed_rope_theta=0.0)
        ours.spec = full
        assert not spec.sliding_window or (ours(tokens) - logits).abs().max() > 0.1


@pytest.mark.parametrize("name", model_names())
def test_every_variant_has_as_many_parameters_as_in_transformers(name):
    spec = model_spec(name)
    with torch.device("meta"):
        theirs = class_of(spec)[1](hugging_face_config(spec))
    assert spec.num_parameters == theirs.num_parameters()


SCALINGS = {
    "none": None,
    "linear": LinearScaling(4.0),
    "llama3": Llama3Scaling(8.0, 32),
    "yarn": YarnScaling(8.0, 32),
    "yarn, other bands": YarnScaling(4.0, 48, beta_fast=8.0, beta_slow=0.5, attention_factor=1.25, truncate=False),
    "llama3, other bands": Llama3Scaling(2.5, 16, low_freq_factor=0.5, high_freq_factor=6.0),
    "llama3, one bound": Llama3Scaling(16.0, 32, low_freq_factor=1.0, high_freq_factor=1.0),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", ["llama1_7b", "llama3_2_1b", "code_llama_34b"])
def test_rotary_frequencies_match_transformers(name, scaling):
    spec = replace(model_spec(name), rope_scaling=scaling)
    theirs = LlamaRotaryEmbedding(hugging_face_config(spec))
    torch.testing.assert_close(rope_frequencies(spec.rope(0)), theirs.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", ["llama2_7b", "llama3_2_1b", "mistral_7b", "qwen2_5_0_5b", "qwen3_0_6b"])
def test_a_model_read_from_a_transformers_folder_gives_its_logits(name, scaling, tmp_path):
    spec = replace(shrunk(name), rope_scaling=scaling, rope_theta=2e4, norm_eps=3e-5, max_context=256)
    theirs = hugging_face_model(spec).double()
    theirs.config.save_pretrained(tmp_path)
    read = read_folder(str(tmp_path))
    assert read == replace(spec, name=tmp_path.name, family="llama", default_seq_len=256)
    ours = model_with_large_weights(read).double()
    ours.compute_dtype = ours.tok_embeddings.out_dtype = torch.float64
    load(theirs, ours)
    tokens = random_tokens(2, 200)
    with torch.no_grad():
        # both sides compute angles in fp32; a frequency off by 1e-7 turns by 2e-5 radians over 200 positions
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-3)


def test_a_folder_with_transformers_4_keys_is_the_same_model(tmp_path):
    spec = shrunk("llama3_2_1b")
    config = hugging_face_config(spec).to_dict()
    rope = config.pop("rope_parameters")
    written = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config | written))
    read = read_folder(str(tmp_path))
    assert read.rope_scaling == spec.rope_scaling
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(rope_frequencies(read.rope(0)), theirs.inv_freq, rtol=1e-6, atol=0)


BEFORE = {"original_max_position_embeddings": 48}
BANDS = {"low_freq_factor": 0.5, "high_freq_factor": 6.0}


@pytest.mark.parametrize(
    "written",
    [
        BEFORE | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        BEFORE | {"rope_parameters": {"rope_type": "llama3", "factor": 3.0} | BANDS},
        BEFORE | {"rope_parameters": BEFORE | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0}},
        BEFORE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 12}},
        {"rope_scaling": BEFORE | {"rope_type": "llama3", "factor": 3.0} | BANDS},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        BEFORE | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"type": "yarn", "factor": 4.0}},
        BEFORE,
        {"rope_scaling": {"type": "yarn", "factor": 8.0, "attn_factor": 0.5, "finetuned": True} | BEFORE},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8.0, "extrapolation": "none"}},
        {"rope_scaling": {"rope_type": "default", "factor": 4.0, "mscale": 0.7}},
    ],
    ids=str,
)
def test_every_spelling_of_the_rotary_embedding_means_what_it_means_to_transformers(written, tmp_path):
    config = hugging_face_config(replace(shrunk("llama2_7b"), max_context=256)).to_dict()
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | written))
    read = read_folder(str(tmp_path))
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(rope_frequencies(read.rope(0)), theirs.inv_freq, rtol=1e-6, atol=0)
    assert getattr(read.rope_scaling, "amplitude", 1.0) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    "kind",
    [
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Olmo2Config,
        Olmo3Config,
        Gemma3TextConfig,
        GptOssConfig,
        Llama4TextConfig,
    ],
)
def test_missing_keys_take_the_defaults_of_transformers(kind, tmp_path):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind.model_type} | sizes))
    theirs = kind.from_pretrained(tmp_path)
    read = read_folder(str(tmp_path))
    head_dim = {"head_dim": read.head_dim}  # Qwen2's configuration has none of its own
    assert hugging_face_config(read).to_dict() == head_dim | theirs.to_dict()


@pytest.mark.parametrize(
    "name",
    [
        "llama2_7b",
        "llama3_405b",
        "tiny_llama3_50m",
        "mistral_7b",
        "qwen3_8b",
        "olmo2_32b",
        "olmo3_7b",
        "gemma3_27b",
        "gpt_oss_20b",
        "llama4_scout",
        "llama4_maverick",
        "moonlight_16b_a3b",
        "deepseek_v3",
    ],
)
def test_packed_documents_and_their_gradients_match_transformers_on_each_alone(name):
    spec = shrunk(name)
    ours, theirs = model_with_large_weights(spec), hugging_face_model(spec)
    load(theirs, ours)
    tokens = random_tokens(1, 48)
    positions = torch.cat((torch.arange(31), torch.arange(17)))[None]
    logits = logits_of_documents(ours, tokens, positions)
    alone = torch.cat((theirs(tokens[:, :31]).logits, theirs(tokens[:, 31:]).logits), dim=1)
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)
    for each in (logits, alone):
        F.cross_entropy(each[0], tokens[0].roll(-1)).backward()
    for weight, parameter in ours.named_parameters():
        gradient = gradient_of(theirs, weight, spec)
        # sums of fp32 are rounded otherwise on other CPUs, which has shown as 1.01e-5
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=5e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("name", model_names())
def test_shapes_are_known_without_building_the_model(name):
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Llama(model_spec(name)).named_parameters()}
    assert list(model_spec(name).parameter_shapes.items()) == list(built.items())


def shapes_of_transformers(spec):
    theirs = hugging_face_model(spec)
    if not spec.tied_embeddings:  # files may have other names, as of experts, and lack a tied head
        with TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return {name: tensor.shape for name, tensor in read_tensors(Path(folder)).items()}
    return {name: tuple(weight.shape) for name, weight in theirs.state_dict().items()}


@pytest.mark.parametrize("name", model_names())
def test_names_and_shapes_match_transformers(name):
    spec = shrunk(name)
    shapes = shapes_of_transformers(spec)
    check_weights(spec, shapes, source="there")
    ours = hugging_face_shapes(spec)
    assert ours.items() <= shapes.items()
    assert ("lm_head.weight" in ours) == (not spec.tied_embeddings)


def test_stored_rotary_frequencies_and_a_tied_head_are_accepted():
    spec = shrunk("tiny_llama3_50m")
    shapes = shapes_of_transformers(spec)
    check_weights(spec, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, source="there")
    assert "lm_head.weight" in shapes


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", ["llama2_7b", "llama3_2_1b", "mistral_7b", "qwen2_5_0_5b", "qwen3_0_6b"])
def test_transformers_reads_our_config_as_its_own(name, scaling):
    spec = replace(model_spec(name), rope_scaling=scaling)
    theirs = hugging_face_config(spec).to_dict()
    read = class_of(spec)[0](**config_json(spec, "bf16")).to_dict()
    free = ("architectures", "bos_token_id", "eos_token_id", "dtype")
    assert {key: read[key] for key in theirs if key not in free} == {
        key: value for key, value in theirs.items() if key not in free
    }
    assert read["dtype"] in ("bfloat16", torch.bfloat16)


@pytest.mark.parametrize("left_out", [(), ("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("name", ["llama2_7b", "mistral_7b", "qwen2_5_7b", "qwen3_8b"])
def test_our_config_gives_the_same_model_with_either_versions_keys(name, scaling, left_out, tmp_path):
    spec = replace(model_spec(name), rope_scaling=scaling)
    config = {key: value for key, value in config_json(spec, "bf16").items() if key not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_folder(str(tmp_path)) == replace(spec, name=tmp_path.name, family="llama")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda shapes: shapes.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda shapes: shapes.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda shapes: shapes.update(extra=(1,)), "extra is unknown"),
        (
            lambda shapes: shapes.update({"model.norm.weight": (65,)}),
            "model.norm.weight is [65] instead of [64]",
        ),
        (
            lambda shapes: shapes.update({"model.layers.0.self_attn.k_proj.weight": (64, 64)}),
            "model.layers.0.self_attn.k_proj.weight is [64, 64] instead of [32, 64] (4 key/value heads instead of 2)",
        ),
        (lambda shapes: shapes.clear(), "and 18 more"),
    ],
)
def test_weights_of_another_model_are_refused_in_one_line(change, complaint):
    spec = shrunk("llama3_8b")
    shapes = shapes_of_transformers(spec)
    change(shapes)
    with pytest.raises(WeightsError) as refusal:
        check_weights(spec, shapes, source="there")
    assert complaint in str(refusal.value)
    assert str(refusal.value).startswith("the weights in there are not those of llama3_8b: ")
    assert "\n" not in str(refusal.value)


def test_a_405b_checkpoint_with_16_key_value_heads_is_refused_for_its_head_count():
    spec = model_spec("llama3_405b")
    first_release = replace(spec, num_kv_heads=16).parameter_shapes
    theirs = {hugging_face_name(name): shape for name, shape in first_release.items()}
    with pytest.raises(WeightsError, match="16 key/value heads instead of 8"):
        check_weights(spec, theirs, source="there")
