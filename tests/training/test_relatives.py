"""Weights of Llama's relatives come from transformers' folders, and go back to folders of the same class."""

import pytest
import torch
from parity import native_engine
from same_logits import TOKENS
from test_stored_weights import filled, save_run
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.evaluation.exports import check_export
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.runs.export import export_run, write_export
from llama_core.runs.export_source import find_export_source
from llama_core.training.stored_weights import Pretrained

SIZES = {
    "vocab_size": 66,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.25,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 7}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
OF_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
LAYERS = {"use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
OF_LLAMA4 = {"intermediate_size_mlp": 40, "attention_chunk_size": 8, "floor_scale": 4, "no_rope_layers": [1, 0, 1]}
OF_DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
}
OF_DEEPSEEKS_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_nextn_predict_layers": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
RELATIVES = {
    "mistral": MistralConfig(**SIZES, **WINDOW, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "qwen2": Qwen2Config(**SIZES, **WINDOW, **LAYERS, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **WINDOW, **LAYERS, rope_parameters=YARN),
    "olmo2": Olmo2Config(**SIZES, rope_parameters=YARN),
    "olmo3": Olmo3Config(**SIZES, **WINDOW, layer_types=OF_LAYERS, rope_parameters=ROPES),
    "gemma3_text": Gemma3TextConfig(
        **SIZES, **WINDOW, layer_types=OF_LAYERS, rope_parameters=ROPES, query_pre_attn_scalar=20, pad_token_id=None
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, **WINDOW, layer_types=OF_LAYERS, rope_parameters=YARN | {"truncate": False}, num_local_experts=4
    ),
    "llama4_text, chunks": Llama4TextConfig(**SIZES, **OF_LLAMA4, num_local_experts=4, rope_parameters=LLAMA3),
    "llama4_text, some experts": Llama4TextConfig(
        **SIZES, **OF_LLAMA4, num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=2, use_qk_norm=False
    ),
    "deepseek_v3, dense": DeepseekV3Config(
        **OF_DEEPSEEK, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}
    ),
    "deepseek_v3, dense, one matrix to queries": DeepseekV3Config(
        **OF_DEEPSEEK | {"q_lora_rank": None, "v_head_dim": 20}, rope_interleave=False, rope_parameters=YARN
    ),
    "deepseek_v3": DeepseekV3Config(
        **OF_DEEPSEEK | OF_DEEPSEEKS_EXPERTS, n_group=4, topk_group=2, rope_parameters=YARN | {"mscale_all_dim": 1.0}
    ),
    "deepseek_v3, one group": DeepseekV3Config(
        **OF_DEEPSEEK | OF_DEEPSEEKS_EXPERTS | {"q_lora_rank": None, "n_shared_experts": 2},
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
    ),
    "mixtral": MixtralConfig(**SIZES, **WINDOW, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **WINDOW, **EXPERTS, use_sliding_window=True),
    "qwen3_moe, gates add up": Qwen3MoeConfig(**SIZES, **WINDOW, **EXPERTS, norm_topk_prob=True),
}
every_relative = pytest.mark.parametrize("kind", RELATIVES.values(), ids=RELATIVES)


@torch.no_grad()
def saved(kind, path):
    """Save a model of a kind whose vectors matter too, and return its logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter), alpha=0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer), alpha=0.25)
    model.save_pretrained(path)
    return model(TOKENS).logits


@torch.no_grad()
def logits_of_transformers(folder, kind):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    assert model.config.model_type == kind.model_type
    return model.eval()(TOKENS).logits


def trained(config, path, weights):
    """Save a run that has begun with some weights."""
    run = RunDirectory(path)
    run.create()
    engine = native_engine(ParallelPlan(), config.spec)
    engine.set_weights(Pretrained(config.spec, weights).fill)
    save_run(run, engine, config, 1)
    return run


@every_relative
def test_logits_are_those_of_transformers_after_an_import_and_after_an_export(kind, tmp_path):
    expected = saved(kind, tmp_path / "theirs")
    config = RunConfig.from_mapping({"model": str(tmp_path / "theirs")})
    assert expected.std() > 0.5
    with torch.no_grad():
        logits = filled(config.spec, tmp_path / "theirs")(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    out = export_run(trained(config, tmp_path / "run", tmp_path / "theirs"), tmp_path / "out")
    torch.testing.assert_close(logits_of_transformers(out, kind), expected, rtol=0, atol=1e-4)


@every_relative
@pytest.mark.wide
def test_the_check_passes_an_export_of_every_relative(kind, tmp_path):
    saved(kind, tmp_path / "theirs")
    settings = {"training": {"seq_len": 64}, "data": {"source": "dataloader"}}
    config = RunConfig.from_mapping(settings | {"model": str(tmp_path / "theirs")})
    run = trained(config, tmp_path / "run", tmp_path / "theirs")
    export = find_export_source(run, step=None, average=None, dtype="fp32", merged=False, tell=print)
    check = check_export(export, write_export(export, tmp_path / "out"), device="cpu")
    assert check.num_places == 4 * 64
    assert check.reading.difference < 1e-4
    assert check.rounding.difference < 1e-4


@every_relative
def test_a_run_without_the_folder_has_the_same_model(kind, tmp_path):
    saved(kind, tmp_path / "theirs")
    request = RunConfig.from_mapping({"model": str(tmp_path / "theirs")})
    (tmp_path / "run.yaml").write_text(request.self_contained().to_yaml())
    (tmp_path / "theirs").rename(tmp_path / "elsewhere")
    assert RunConfig.load(tmp_path / "run.yaml").spec == request.spec


@pytest.mark.parametrize("strategy", ["standard", "lora"])
def test_weights_of_norms_that_are_stored_less_one_come_back_bit_for_bit(strategy, tmp_path):
    """In bf16: zero, and from 2^-16 to 2^6 in size."""
    model = AutoModelForCausalLM.from_config(RELATIVES["gemma3_text"]).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                sizes = torch.rand(len(parameter), generator=generator) * 22 - 16
                signs = torch.randint(-1, 2, sizes.shape, generator=generator)
                parameter.copy_(signs * 2**sizes)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    settings = {"model": str(tmp_path / "theirs"), "training": {"init_from": str(tmp_path / "theirs")}}
    config = RunConfig.from_mapping(settings | {"strategy": strategy, "launch": {"device": "cpu"}})
    run = trained(config, tmp_path / "run", tmp_path / "theirs")
    out = export_run(run, tmp_path / "out", dtype="bf16", merged=strategy == "lora")
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    for name, weight in model.state_dict().items():
        assert found[name].equal(weight), name


@pytest.mark.parametrize(
    ("relative", "method", "strategy"),
    [
        *(
            ("qwen2", "lora", "lora"),
            ("qwen2", "dora", "lora"),
            ("olmo3", "lora", "lora"),
            ("gemma3_text", "lora", "lora"),
            ("deepseek_v3, dense", "lora", "lora"),
            ("deepseek_v3, dense, one matrix to queries", "dora", "lora"),
        ),
        *((name, "lora", "hybrid") for name in ("gpt_oss", "llama4_text, chunks", "llama4_text, some experts")),
        ("deepseek_v3", "lora", "hybrid"),
    ],
)
def test_adapters_of_a_relative_are_merged_to_the_same_logits(relative, method, strategy, tmp_path):
    kind = RELATIVES[relative]
    targets = "all-linear" if kind.model_type == "deepseek_v3" else ["q_proj", "v_proj", "o_proj"]
    saved(kind, tmp_path / "theirs")
    config = RunConfig.from_mapping(
        {
            "model": str(tmp_path / "theirs"),
            "training": {"init_from": str(tmp_path / "theirs")},
            "strategy": strategy,
            "lora": {"method": method, "lora_rank": 4, "target_modules": targets},
        }
    )
    run = RunDirectory(tmp_path / "run")
    run.create()
    engine = native_engine(ParallelPlan(), config.spec)
    engine.set_weights(Pretrained(config.spec, tmp_path / "theirs").fill)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        logits = engine.model(TOKENS)
    save_run(run, engine, config, 1)
    out = export_run(run, tmp_path / "out", merged=True)
    torch.testing.assert_close(logits_of_transformers(out, kind), logits, rtol=0, atol=1e-4)


def test_traits_that_no_class_of_transformers_has_together_are_not_exported(tmp_path):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    config = RunConfig.from_mapping({"architecture": {**sizes, "vocab_size": 66, "qk_norm": True, "qkv_bias": True}})
    run = RunDirectory(tmp_path / "run")
    run.create()
    save_run(run, native_engine(ParallelPlan(), config.spec), config, 1)
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM is the nearest there, and has no qk_norm=True\Z"):
        export_run(run, tmp_path / "out")
