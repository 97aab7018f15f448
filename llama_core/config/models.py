"""The registry of models: a name and a row for each variant, with all its sizes.

``ModelSpec``, the type of the rows, can be imported from here too.
"""

from typing import Any

from llama_core.config.model_spec import ModelSpec
from llama_core.config.model_types import GEMMA3_TEXT, GPT_OSS, OLMO2, OLMO3
from llama_core.config.rope import LinearScaling, Llama3Scaling, YarnScaling, yarn_amplitude
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError, did_you_mean

__all__ = ["LONGEST_DEFAULT", "ModelSpec", "model_names", "model_spec"]

LONGEST_DEFAULT = 8192
"""Upper limit on the default sequence length of a model from a folder, in tokens."""

# The scalings of Llama 3.1 and 3.3 (8), of Llama 3.2 (32), and of Llama 4 Scout (16).
_SCALED_8 = Llama3Scaling(factor=8.0, original_context=8192)
_SCALED_32 = Llama3Scaling(factor=32.0, original_context=8192)
_SCALED_16 = Llama3Scaling(factor=16.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=1.0)


def _olmo3(num_layers: int) -> Any:
    """Return the traits of an OLMo 3: a window in all layers but every fourth, which alone are scaled."""
    return {
        **OLMO3.always,
        "sliding_window": 4096,
        "windowed_layers": tuple(layer for layer in range(num_layers) if layer % 4 != 3),
        "windowed_rope_theta": 5e5,
        "rope_scaling": YarnScaling(8.0, 8192),
    }


def _llama4(num_layers: int, *, num_experts: int, moe_layers: int | None, **traits: Any) -> Any:
    """Return the traits of a Llama 4: all layers but every fourth rotate, and see chunks; experts are as wide as 8192."""
    experts = MoE(
        num_experts=num_experts,
        experts_per_token=1,
        moe_layers=moe_layers,
        gates="sigmoid",
        gate_inputs=True,
        expert_size=8192,
        shared_size=8192,
    )
    return traits | {
        "rope_pairs": "adjacent",
        "nope_layers": tuple(range(3, num_layers, 4)),
        "query_temperature_scale": 0.1,
        "attention_chunk": 8192,
        "moe": experts,
    }


def _gemma3(num_layers: int, window: int, **traits: Any) -> Any:
    """Return the traits of a Gemma 3: a window in all layers but every sixth, which alone are scaled if any are."""
    return traits | {
        **GEMMA3_TEXT.always,
        "tied_embeddings": True,
        "sliding_window": window,
        "windowed_layers": tuple(layer for layer in range(num_layers) if layer % 6 != 5),
        "windowed_rope_theta": 1e4,
    }


def _gpt_oss(num_layers: int, num_experts: int) -> Any:
    """Return the traits of a GPT-OSS: a window in every other layer, and experts in all."""
    return {
        **GPT_OSS.of_model,
        "sliding_window": 128,
        "windowed_layers": tuple(range(0, num_layers, 2)),
        "rope_scaling": YarnScaling(32.0, 4096, truncate=False),
        "moe": MoE(num_experts=num_experts, experts_per_token=4, **GPT_OSS.of_experts),
    }


def _deepseek(moe: MoE, **traits: Any) -> Any:
    """Return the traits of a DeepSeek-V3: its heads have 128 numbers of a latent and 64 that are rotated."""
    moe = moe.model_copy(update={"gates": "sigmoid_chosen", "balance_bias": True, "balance_loss_coefficient": 1e-4})
    return traits | {"kv_rank": 512, "rope_dim": 64, "value_dim": 128, "rope_pairs": "adjacent", "moe": moe}


_OF_DEEPSEEK_V3 = MoE(
    num_experts=256,
    expert_size=2048,
    shared_size=2048,
    experts_per_token=8,
    moe_layers=tuple(range(3, 61)),
    gate_scale=2.5,
    expert_groups=8,
    groups_per_token=4,
)
_OF_MOONLIGHT = MoE(
    num_experts=64,
    expert_size=1408,
    shared_size=2816,
    experts_per_token=6,
    moe_layers=tuple(range(1, 27)),
    gate_scale=2.446,
)
_YARN_40 = YarnScaling(40.0, 4096, attention_factor=1.0)
"""DeepSeek-V3's, which scales scores in place of cosines and sines."""


# fmt: off
_VARIANTS = (
    #         name                      family        hidden layers heads kv hd   ffn    vocab    theta eps   context  default
    ModelSpec("tiny_llama3_50m",       "llama3",       256,  16,   4,   2,  64,  1152, 128_256, 5e5, 1e-5,   2048,  2048, tied_embeddings=True),
    ModelSpec("tiny_llama3_150m",      "llama3",       768,   8,  12,   4,  64,  2048, 128_256, 5e5, 1e-5,   8192,  8192, tied_embeddings=True),
    ModelSpec("llama1_7b",             "llama1",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-6,   2048,  2048),
    ModelSpec("llama2_7b",             "llama2",      4096,  32,  32,  32, 128, 11008,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_13b",            "llama2",      5120,  40,  40,  40, 128, 13824,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama2_70b",            "llama2",      8192,  80,  64,   8, 128, 28672,  32_000, 1e4, 1e-5,   4096,  4096),
    ModelSpec("llama3_8b",             "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_8b_instruct",    "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_70b",            "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192),
    ModelSpec("llama3_70b_instruct",   "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5,   8192,  8192, instruct=True),
    ModelSpec("llama3_1_8b",           "llama3",      4096,  32,  32,   8, 128, 14336, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_1_70b",          "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_405b",           "llama3",     16384, 126, 128,   8, 128, 53248, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8),
    ModelSpec("llama3_2_1b",           "llama3",      2048,  16,  32,   8,  64,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_2_3b",           "llama3",      3072,  28,  24,   8, 128,  8192, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_32, tied_embeddings=True),
    ModelSpec("llama3_3_70b_instruct", "llama3",      8192,  80,  64,   8, 128, 28672, 128_256, 5e5, 1e-5, 131072,  8192, rope_scaling=_SCALED_8, instruct=True),
    ModelSpec("code_llama_7b",         "code_llama",  4096,  32,  32,  32, 128, 11008,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_13b",        "code_llama",  5120,  40,  40,  40, 128, 13824,  32_016, 1e6, 1e-5,  16384, 16384),
    ModelSpec("code_llama_34b",        "code_llama",  8192,  48,  64,   8, 128, 22016,  32_000, 1e6, 1e-5,  16384, 16384),
    ModelSpec("mistral_7b",            "mistral",     4096,  32,  32,   8, 128, 14336,  32_000, 1e4, 1e-5,  32768,  8192, sliding_window=4096),
    ModelSpec("qwen2_5_0_5b",          "qwen",         896,  24,  14,   2,  64,  4864, 151_936, 1e6, 1e-6,  32768,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_1_5b",          "qwen",        1536,  28,  12,   2, 128,  8960, 151_936, 1e6, 1e-6, 131072,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_3b",            "qwen",        2048,  36,  16,   2, 128, 11008, 151_936, 1e6, 1e-6,  32768,  8192, tied_embeddings=True, qkv_bias=True),
    ModelSpec("qwen2_5_7b",            "qwen",        3584,  28,  28,   4, 128, 18944, 152_064, 1e6, 1e-6, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_14b",           "qwen",        5120,  48,  40,   8, 128, 13824, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_32b",           "qwen",        5120,  64,  40,   8, 128, 27648, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen2_5_72b",           "qwen",        8192,  80,  64,   8, 128, 29568, 152_064, 1e6, 1e-5, 131072,  8192, qkv_bias=True),
    ModelSpec("qwen3_0_6b",            "qwen",        1024,  28,  16,   8, 128,  3072, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_1_7b",            "qwen",        2048,  28,  16,   8, 128,  6144, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_4b",              "qwen",        2560,  36,  32,   8, 128,  9728, 151_936, 1e6, 1e-6,  40960,  8192, tied_embeddings=True, qk_norm=True),
    ModelSpec("qwen3_8b",              "qwen",        4096,  36,  32,   8, 128, 12288, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
    ModelSpec("qwen3_14b",             "qwen",        5120,  40,  40,   8, 128, 17408, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
    ModelSpec("qwen3_32b",             "qwen",        5120,  64,  64,   8, 128, 25600, 151_936, 1e6, 1e-6,  40960,  8192, qk_norm=True),
    # as in configs/official-1124 of github.com/allenai/OLMo (7b, 13b) and, in github.com/allenai/OLMo-core,
    # TransformerConfig.olmo2_1B_v2 and olmo2_32B; the vocabulary is padded from 100,278 tokens
    ModelSpec("olmo2_1b",              "llama",       2048,  16,  16,  16, 128,  8192, 100_352, 5e5, 1e-6,   4096,  4096, **OLMO2.always),
    ModelSpec("olmo2_7b",              "llama",       4096,  32,  32,  32, 128, 11008, 100_352, 5e5, 1e-6,   4096,  4096, **OLMO2.always),
    ModelSpec("olmo2_13b",             "llama",       5120,  40,  40,  40, 128, 13824, 100_352, 5e5, 1e-6,   4096,  4096, **OLMO2.always),
    ModelSpec("olmo2_32b",             "llama",       5120,  64,  40,   8, 128, 27648, 100_352, 5e5, 1e-6,   4096,  4096, **OLMO2.always),
    # as in src/scripts/official/OLMo3 of the latter; the vocabulary is not padded in the files that AI2 publishes
    ModelSpec("olmo3_7b",              "llama",       4096,  32,  32,  32, 128, 11008, 100_278, 5e5, 1e-6,  65536,  8192, **_olmo3(32)),
    ModelSpec("olmo3_32b",             "llama",       5120,  64,  40,   8, 128, 27648, 100_278, 5e5, 1e-6,  65536,  8192, **_olmo3(64)),
    # as in convert_gemma3_weights.py of transformers; the larger ones have 64 rows more, for images
    ModelSpec("gemma3_270m",           "gemma",        640,  18,   4,   1, 256,  2048, 262_144, 1e6, 1e-6,  32768,  8192, **_gemma3(18, 512)),
    ModelSpec("gemma3_1b",             "gemma",       1152,  26,   4,   1, 256,  6912, 262_144, 1e6, 1e-6,  32768,  8192, **_gemma3(26, 512)),
    ModelSpec("gemma3_4b",             "gemma",       2560,  34,   8,   4, 256, 10240, 262_208, 1e6, 1e-6, 131072,  8192, **_gemma3(34, 1024, rope_scaling=LinearScaling(8.0))),
    ModelSpec("gemma3_12b",            "gemma",       3840,  48,  16,   8, 256, 15360, 262_208, 1e6, 1e-6, 131072,  8192, **_gemma3(48, 1024, rope_scaling=LinearScaling(8.0))),
    ModelSpec("gemma3_27b",            "gemma",       5376,  62,  32,  16, 128, 21504, 262_208, 1e6, 1e-6, 131072,  8192, **_gemma3(62, 1024, rope_scaling=LinearScaling(8.0), query_pre_attn_scalar=168)),
    # as in the config.json of Llama-4-Scout-17B-16E-Instruct and of Llama-4-Maverick-17B-128E-Instruct; Scout's base
    # has a shorter context and another scaling, which its folder says
    ModelSpec("llama4_scout",          "llama4",      5120,  48,  40,   8, 128, 16384, 202_048, 5e5, 1e-5, 10485760,  8192, **_llama4(48, num_experts=16, moe_layers=None, rope_scaling=_SCALED_16, qk_norm=True, qk_norm_weights=False)),
    ModelSpec("llama4_maverick",       "llama4",      5120,  48,  40,   8, 128, 16384, 202_048, 5e5, 1e-5, 1048576,  8192, **_llama4(48, num_experts=128, moe_layers=2)),
    # as in the config.json of openai/gpt-oss-20b and gpt-oss-120b
    ModelSpec("gpt_oss_20b",           "llama",       2880,  24,  64,   8,  64,  2880, 201_088, 1.5e5, 1e-5, 131072, 8192, **_gpt_oss(24, 32)),
    ModelSpec("gpt_oss_120b",          "llama",       2880,  36,  64,   8,  64,  2880, 201_088, 1.5e5, 1e-5, 131072, 8192, **_gpt_oss(36, 128)),
    # as in the config.json of moonshotai/Moonlight-16B-A3B and deepseek-ai/DeepSeek-V3, without its module that predicts
    # later tokens
    ModelSpec("moonlight_16b_a3b",     "llama",       2048,  27,  16,  16, 192, 11264, 163_840, 5e4, 1e-5,   8192,  8192, **_deepseek(_OF_MOONLIGHT)),
    ModelSpec("deepseek_v3",           "llama",       7168,  61, 128, 128, 192, 18432, 129_280, 1e4, 1e-6, 163840,  8192, **_deepseek(_OF_DEEPSEEK_V3, query_rank=1536, rope_scaling=_YARN_40, score_factor=yarn_amplitude(40.0) ** 2)),
)
# fmt: on
_REGISTRY = {spec.name: spec for spec in _VARIANTS}


def model_names() -> list[str]:
    """Return the names of all variants, in the registry's order."""
    return list(_REGISTRY)


def model_spec(name: str) -> ModelSpec:
    """Return the architecture of the variant called ``name``.

    Raises:
        ConfigError: if there is no such variant; the message names the nearest ones.
    """
    if name not in _REGISTRY:
        nearest = did_you_mean(name, _REGISTRY) or f"; choose one of {', '.join(_REGISTRY)}"
        raise ConfigError(f"unknown model {name!r}{nearest}")
    return _REGISTRY[name]
