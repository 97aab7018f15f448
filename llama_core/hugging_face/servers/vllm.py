"""vLLM's row."""

from llama_core.hugging_face.servers.exported import ExportedModel
from llama_core.hugging_face.servers.rules import (
    LATER_TOKENS,
    MERGE,
    NO_LORA,
    NO_TOKENIZER,
    Rule,
    Server,
    in_fp32,
    is_no_lora,
    lacks_tokenizer,
    other_windows,
    uneven_experts,
)

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of its ``--max-lora-rank``."""


def _has_temperatures(model: ExportedModel) -> bool:
    return bool(model.spec.query_temperature_scale and model.spec.nope_layers)


VLLM = Server(
    name="vLLM",
    version="0.33.0",
    natively={  # vllm/model_executor/models/registry.py
        "llama": "llama.py",
        "mixtral": "mixtral.py",
        "mistral": "mistral.py",
        "qwen2": "qwen2.py",
        "qwen3": "qwen3.py",
        "qwen3_moe": "qwen3_moe.py",
        "gemma3_text": "gemma3.py",
        "gpt_oss": "gpt_oss.py",
        "llama4_text": "llama4.py",
        "deepseek_v3": "deepseek_v2.py",
    },
    through_transformers={"olmo2": "transformers/causal.py", "olmo3": "transformers/causal.py"},
    rules=(
        Rule("refused", lacks_tokenizer, f"{NO_TOKENIZER}, or add --skip-tokenizer-init", "engine/arg_utils.py"),
        Rule(
            "refused",
            lambda model: model.has_window and len(set(model.windowed)) > 1,
            "only a window in all layers or in none is computed, and here some layers have one",
            "qwen2.py, Qwen2Model",
            ("qwen2", "qwen3"),
        ),
        Rule(
            "loss",
            other_windows(2),
            "every other layer, from the first on, has the window of {it.spec.sliding_window:,} tokens there, whatever "
            "layer_types says: longer texts are computed otherwise",
            "gpt_oss.py, _build_attention",
            ("gpt_oss",),
        ),
        Rule(
            "refused",
            uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "llama4.py, Llama4DecoderLayer",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            lambda model: _has_temperatures(model) and model.spec.max_context <= 32_768,
            "queries have no temperatures in a context of up to 32,768 tokens: texts of more than "
            "{it.spec.query_temperature_floor:,} are computed otherwise; add --override-generation-config "
            "'{{\"attn_temperature_tuning\": true}}'",
            "llama4.py, Llama4ForCausalLM",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_pairs == "halves",
            "adjacent numbers of a head are rotated as pairs, and here pairs are halves of it (rope_interleave=false)",
            "deepseek_v2.py, is_neox_style",
            ("deepseek_v3",),
        ),
        LATER_TOKENS,
        Rule(
            "advice",
            in_fp32,
            "weights in fp32 are computed in bf16 unless --dtype float32 is given",
            "vllm/config/model.py, _resolve_auto_dtype",
        ),
    ),
    commands=("vllm serve {folder}",),
    adapter_rules=(
        Rule("refused", is_no_lora, NO_LORA, "lora/peft_helper.py"),
        Rule(
            "refused",
            lambda it: it.rank > _LORA_RANKS[-1],
            f"the rank {{it.rank}} is above {_LORA_RANKS[-1]}; {MERGE}",
            "config/lora.py, MaxLoRARanks",
        ),
        Rule(
            "refused",
            lambda it: it.targets("embed_tokens", "lm_head"),
            f"adapters of embed_tokens and lm_head are not computed for this type; {MERGE}",
            "embedding_modules of each model",
            ("mistral", "qwen2", "gemma3_text", "gpt_oss", "deepseek_v3"),
        ),
        Rule(
            "refused",
            lambda it: it.targets("lm_head"),
            f"adapters of lm_head are not computed through transformers; {MERGE}",
            "transformers/base.py, embedding_modules",
            ("olmo2", "olmo3"),
        ),
        Rule(
            "loss",
            lambda it: it.targets("kv_b_proj"),
            f"adapters of kv_b_proj are left out where a text is continued; {MERGE}",
            "layers/attention/mla_attention.py, split_kv_b_proj",
            ("deepseek_v3",),
        ),
    ),
    adapter_commands=("vllm serve {base} --enable-lora --lora-modules {named} --max-lora-rank {rank}",),
    lora_ranks=_LORA_RANKS,
)
