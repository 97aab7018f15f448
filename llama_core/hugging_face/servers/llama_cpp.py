"""llama.cpp's row, and how it was run.

Models of each type with few layers and random weights were written as ``export-hf`` writes them, converted by
``convert_hf_to_gguf.py --outtype f32`` with its check of the tokenizer taken out, and computed on a CPU with caches in
fp32. Over 200 tokens, more than any window, the logits of models without a loss were within 1e-3 standard deviations of
transformers', and those of a Gemma 3 within 2.1e-3, since ggml looks GELU up in a table in fp16; so were those with
adapters of each type, through ``convert_lora_to_gguf.py``. Each marked loss was seen, from the token on that it tells
of. Of tokenizers, Llama 3's, Qwen 2's and a SentencePiece model were converted, and gave the same ids.
"""

from llama_core.config.model_types import DEEPSEEK_V3, MODEL_TYPES
from llama_core.config.rope import YarnScaling, yarn_amplitude
from llama_core.hugging_face.servers.exported import ExportedModel
from llama_core.hugging_face.servers.llama_cpp_tokenizer import TOKENIZER_RULES
from llama_core.hugging_face.servers.rules import (
    MERGE,
    NO_LORA,
    NO_RSLORA,
    WINDOWS_LOST,
    Rule,
    Server,
    in_fp32,
    is_no_lora,
    other_nope_layers,
    other_windows,
    predicts_later,
    uneven_experts,
)


def _is_scaled_in_windows(model: ExportedModel) -> bool:
    """Return whether layers with a window have the scaled rotary embedding of the others."""
    spec = model.spec
    return model.has_window and spec.rope_scaling is not None and not spec.windowed_rope_theta


def _scales_no_window(model: ExportedModel) -> bool:
    """Return whether layers rotate with scaling that a fixed pattern takes for ones with a window, which have none."""
    spec = model.spec
    return not model.has_window and spec.rope_scaling is not None


def _blends_otherwise(model: ExportedModel) -> bool:
    """Return whether YaRN's blend begins or ends elsewhere than with the paper's numbers, at whole pairs."""
    spec = model.spec
    scaling = spec.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return False
    usual = YarnScaling(scaling.factor, scaling.original_context)
    return scaling.blend(spec.rotated_dim, spec.rope_theta) != usual.blend(spec.rotated_dim, spec.rope_theta)


def _has_other_amplitude(model: ExportedModel) -> bool:
    """Return whether YaRN multiplies cosines and sines by another number than the paper's."""
    scaling = model.spec.rope_scaling
    return isinstance(scaling, YarnScaling) and scaling.amplitude != yarn_amplitude(scaling.factor)


def _scales_scores_otherwise(model: ExportedModel) -> bool:
    """Return whether YaRN does something else than DeepSeek-V3's, which multiplies scores, but no cosines and sines."""
    spec = model.spec
    scaling = spec.rope_scaling
    return isinstance(scaling, YarnScaling) and (scaling.amplitude != 1.0 or spec.score_factor == 1.0)


def _other_scalar(model: ExportedModel) -> bool:
    """Return whether llama.cpp divides scores of a Gemma 3 by another number; it knows the 27B by its 62 layers."""
    spec = model.spec
    theirs = spec.hidden_size // spec.num_heads if spec.num_layers == 62 else spec.head_dim
    return (spec.query_pre_attn_scalar or spec.head_dim) != theirs


def _other_temperatures(model: ExportedModel) -> bool:
    """Return whether queries of layers that do not rotate have another temperature than Llama 4's."""
    spec = model.spec
    theirs = (0.1, 8192)
    return bool(spec.nope_layers) and (spec.query_temperature_scale, spec.query_temperature_floor) != theirs


def _norms_of_16_experts(model: ExportedModel) -> bool:
    """Return whether llama.cpp, which tells by the number of experts, is wrong about norms of queries and keys."""
    return model.spec.qk_norm == (model.spec.num_experts == 128)


def _misses_query_rank(model: ExportedModel) -> bool:
    """Return whether llama.cpp expects a latent of queries and there is none, or the other way round."""
    spec = model.spec
    is_lite = spec.num_layers in {26, 27} or (spec.num_layers, spec.vocab_size) == (48, 128_256)
    return is_lite == bool(spec.query_rank)


def _lacks_shared_experts(model: ExportedModel) -> bool:
    return model.spec.moe is not None and not model.spec.moe.shared_size


LLAMA_CPP = Server(
    name="llama.cpp",
    version="of llama-cpp-python 0.3.36 (ggml 0.25.3, gguf 0.19.0)",
    natively={  # the converter's class, and the file of the model in src/models
        "llama": "conversion/llama.py, llama.cpp",
        "mixtral": "conversion/llama.py, llama.cpp",
        "mistral": "conversion/llama.py, llama.cpp",
        "qwen2": "conversion/qwen.py, qwen2.cpp",
        "qwen3": "conversion/qwen.py, qwen3.cpp",
        "qwen3_moe": "conversion/qwen.py, qwen3moe.cpp",
        "olmo2": "conversion/olmo.py, olmo2.cpp",
        "olmo3": "conversion/olmo.py, olmo2.cpp",
        "gemma3_text": "conversion/gemma.py, gemma3.cpp",
        "gpt_oss": "conversion/gpt_oss.py, openai-moe.cpp",
        "llama4_text": "conversion/llama.py, llama4.cpp",
        "deepseek_v3": "conversion/deepseek.py, deepseek2.cpp",
    },
    rules=(
        *TOKENIZER_RULES,
        Rule(
            "loss",
            lambda model: model.has_window,
            "the window of {it.spec.sliding_window:,} tokens is not in a GGUF file: longer texts are computed "
            "otherwise",
            "conversion/llama.py, conversion/qwen.py: no add_sliding_window",
            WINDOWS_LOST,
            was_run=True,
        ),
        Rule(
            "loss",
            other_windows(6),
            "all layers but every sixth have the window of {it.spec.sliding_window:,} tokens there and rotate as such, "
            "whatever layer_types says: texts are computed otherwise",
            "src/models/gemma3.cpp, load_swa_pattern",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            other_windows(2),
            "every other layer, from the first on, has the window of {it.spec.sliding_window:,} tokens there, whatever "
            "layer_types says: longer texts are computed otherwise",
            "src/models/openai-moe.cpp, load_swa_pattern",
            ("gpt_oss",),
            was_run=True,
        ),
        Rule(
            "loss",
            _is_scaled_in_windows,
            "layers with a window rotate without the scaling that they have here: texts are computed otherwise",
            "src/models/olmo2.cpp, gemma3.cpp",
            ("olmo3", "gemma3_text"),
            was_run=True,
        ),
        Rule(
            "loss",
            _scales_no_window,
            "all layers but every sixth rotate without the scaling that they have here: texts are computed otherwise",
            "src/models/gemma3.cpp, load_swa_pattern",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.has_window and model.spec.windowed_rope_theta not in {0.0, model.spec.rope_theta},
            "layers with a window rotate with the base {it.spec.rope_theta:g} of the others, and not with "
            "{it.spec.windowed_rope_theta:g}: texts are computed otherwise",
            "src/models/olmo2.cpp, graph",
            ("olmo3",),
            was_run=True,
        ),
        Rule(
            "loss",
            _blends_otherwise,
            "YaRN's beta_fast, beta_slow and truncate are not read, but taken as 32, 1 and true: texts are computed "
            "otherwise",
            "src/llama-context.cpp; ggml.c, ggml_rope_yarn_corr_dims",
            was_run=True,
        ),
        Rule(
            "loss",
            _has_other_amplitude,
            "YaRN's attention_factor is not read, but taken as the paper's: texts are computed otherwise",
            "src/llama-context.cpp, yarn_attn_factor",
            tuple(kind.name for kind in MODEL_TYPES if kind is not DEEPSEEK_V3),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.moe is not None and model.spec.moe.gates == "softmax_all",
            "gates of the chosen experts always add up to 1, and here they do not (norm_topk_prob=false)",
            "src/models/qwen3moe.cpp, build_moe_ffn",
            ("qwen3_moe",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_scalar,
            "scores are divided by the root of the width of a head, whatever query_pre_attn_scalar says",
            "src/models/gemma3.cpp, f_attention_scale",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            lambda model: not model.spec.attention_chunk,
            "it aborts on a Llama 4 whose layers have no chunks",
            "src/llama-graph.cpp, f_attn_temp_scale",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.attention_chunk not in {0, 8192},
            "chunks have 8,192 tokens there, and here {it.spec.attention_chunk:,}: longer texts are computed otherwise",
            "src/models/llama4.cpp, n_swa",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            other_nope_layers,
            "every fourth layer does not rotate there, whatever no_rope_layers says: texts are computed otherwise",
            "src/models/llama4.cpp, n_no_rope_layer_step",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_temperatures,
            "queries of layers that do not rotate have the temperatures of attn_scale=0.1 and floor_scale=8192: longer "
            "texts are computed otherwise",
            "src/models/llama4.cpp, f_attn_temp_scale",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _norms_of_16_experts,
            "queries and keys are normalised unless there are 128 experts, whatever use_qk_norm says",
            "src/models/llama4.cpp, use_kq_norm",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "src/models/llama4.cpp, n_moe_layer_step",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            _misses_query_rank,
            "queries of a model of 26 or 27 layers are expected without a latent (q_lora_rank), and of others with one",
            "src/models/deepseek2.cpp, is_lite",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "refused",
            _lacks_shared_experts,
            "a shared expert is expected in each layer with experts, and here there is none (n_shared_experts=0)",
            "src/models/deepseek2.cpp, load_arch_tensors",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_pairs == "halves",
            "adjacent numbers of a head are rotated as pairs, and here pairs are halves of it (rope_interleave=false)",
            "src/llama-model.cpp, llama_model_rope_type",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            _scales_scores_otherwise,
            "YaRN is computed as in DeepSeek-V3, where mscale and mscale_all_dim are one number above 0, and here they "
            "are not: texts are computed otherwise",
            "src/llama-context.cpp, yarn_attn_factor",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "advice",
            predicts_later,
            "its modules that predict later tokens are left out, which changes no logits",
            "conversion/deepseek.py, skip_mtp",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "advice",
            in_fp32,
            "weights in fp32 are converted to fp16 unless --outtype f32 is given",
            "conversion/base.py, LlamaFileType.GUESSED",
            was_run=True,
        ),
    ),
    commands=(
        "python convert_hf_to_gguf.py {folder} --vocab-only --outfile {vocabulary}",
        "python convert_hf_to_gguf.py {folder} --outfile {gguf}",
        "llama-quantize {gguf} {small} Q4_K_M",
        "llama-server -m {small}",
    ),
    adapter_rules=(
        Rule("refused", is_no_lora, NO_LORA, "convert_lora_to_gguf.py", was_run=True),
        Rule(
            "loss",
            lambda it: it.has_rslora,
            NO_RSLORA,
            "src/llama-adapter.h, get_scale",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.base is not None and it.base.spec.tied_embeddings and it.targets("lm_head"),
            f"a head that is the embedding has no adapters there; {MERGE}",
            "src/llama-adapter.cpp",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.base is not None and it.base.spec.tied_embeddings and it.targets("embed_tokens"),
            f"it aborts on adapters of an embedding that is the head, too; {MERGE}",
            "ggml/src/ggml.c, ggml_mul_mat",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.targets("kv_b_proj"),
            f"adapters of kv_b_proj are not converted; {MERGE}",
            "convert_lora_to_gguf.py, LoraTorchTensor",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda it: it.targets("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
            f"adapters of q_proj, q_a_proj, q_b_proj and kv_a_proj_with_mqa are read, but not computed; {MERGE}",
            "src/models/deepseek2.cpp, ggml_mul_mat in place of build_lora_mm",
            ("deepseek_v3",),
            was_run=True,
        ),
    ),
    adapter_commands=(
        "python convert_hf_to_gguf.py {base} --outfile {base_gguf}",
        "python convert_lora_to_gguf.py {folder} --base {base} --outfile {gguf}",
        "llama-server -m {base_gguf} --lora {gguf}",
    ),
)
