"""SGLang's row."""

from llama_core.hugging_face.servers.rules import (
    LATER_TOKENS,
    NO_LORA,
    NO_RSLORA,
    NO_TOKENIZER,
    WINDOWS_LOST,
    Rule,
    Server,
    in_fp32,
    is_no_lora,
    lacks_tokenizer,
    other_nope_layers,
    uneven_experts,
)

SGLANG = Server(
    name="SGLang",
    version="0.5.23",
    natively={  # sglang/srt/models
        "llama": "llama.py",
        "mixtral": "mixtral.py",
        "mistral": "mistral.py",
        "qwen2": "qwen2.py",
        "qwen3": "qwen3.py",
        "qwen3_moe": "qwen3_moe.py",
        "olmo2": "olmo2.py",
        "gemma3_text": "gemma3_causal.py",
        "gpt_oss": "gpt_oss.py",
        "llama4_text": "llama4.py",
        "deepseek_v3": "deepseek_v2.py",
    },
    through_transformers={"olmo3": "transformers.py"},
    rules=(
        Rule("refused", lacks_tokenizer, f"{NO_TOKENIZER}, or add --skip-tokenizer-init", "server_args.py"),
        Rule(
            "loss",
            lambda model: model.has_window,
            "the window of {it.spec.sliding_window:,} tokens is not computed: longer texts are computed otherwise",
            "llama.py, mixtral.py, qwen2.py, qwen3.py, qwen3_moe.py: RadixAttention without sliding_window_size",
            WINDOWS_LOST,
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_scaling is not None,
            "the scaling of the rotary embedding is not computed: texts are computed otherwise",
            "gemma3_causal.py, Gemma3Attention",
            ("gemma3_text",),
        ),
        Rule(
            "loss",
            lambda model: 0 < model.spec.attention_chunk < model.spec.max_context,
            "only a Llama 4 with images has its chunks, here of {it.spec.attention_chunk:,} tokens: longer texts are "
            "computed otherwise",
            "configs/model_config.py, is_local_attention_model",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            other_nope_layers,
            "every fourth layer does not rotate there, whatever no_rope_layers says: texts are computed otherwise",
            "llama4.py, Llama4Attention",
            ("llama4_text",),
        ),
        Rule(
            "refused",
            uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "llama4.py, Llama4DecoderLayer",
            ("llama4_text",),
        ),
        LATER_TOKENS,
        Rule(
            "advice",
            in_fp32,
            "weights in fp32 are computed in fp16, or bf16 for a Gemma, unless --dtype float32 is given",
            "configs/model_config.py, _get_and_verify_dtype",
        ),
    ),
    commands=("python -m sglang.launch_server --model-path {folder}",),
    adapter_rules=(
        Rule("refused", is_no_lora, NO_LORA, "lora/lora_manager.py"),
        Rule(
            "loss",
            lambda it: it.has_rslora,
            NO_RSLORA,
            "lora/lora.py, LoRAAdapter",
        ),
    ),
    adapter_commands=("python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {named}",),
)
