"""Models of transformers, small and with large weights, to compare ours with."""

from dataclasses import asdict, replace
from math import log

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llama_core.config.config_json.experts import router_aux_loss_coef
from llama_core.config.model_types import Layout
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.models import model_spec
from llama_core.hugging_face.weight_names import hugging_face_names, is_per_expert, other_layouts
from llama_core.models.llama import Llama, named_weights
from llama_core.training.weight_sources import weight_in


def shrunk(name):
    """Return the variant with small sizes and the traits of its family."""
    spec = model_spec(name).with_few_layers(2)
    scaling = spec.rope_scaling
    if hasattr(scaling, "original_context"):
        scaling = replace(scaling, original_context=32)  # so that few tokens show it
    window = 9 if spec.sliding_window else 0
    num_kv_heads = 4 if spec.num_kv_heads == spec.num_heads else 2
    moe = spec.moe
    if moe is not None:
        few = {"num_experts": 6, "experts_per_token": min(3, moe.experts_per_token)}
        if moe.expert_groups > 1:
            few |= {"expert_groups": 3, "groups_per_token": 2}
        moe = moe.with_widths(48, 48).model_copy(update=few)
    return replace(
        spec,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        ffn_size=96,
        vocab_size=128,
        kv_rank=20 if spec.kv_rank else 0,
        query_rank=24 if spec.query_rank else 0,
        rope_dim=6 if spec.rope_dim else 0,
        value_dim=12 if spec.value_dim else 0,
        rope_scaling=scaling,
        sliding_window=window,
        attention_chunk=10 if spec.attention_chunk else 0,
        query_temperature_floor=4 if spec.query_temperature_scale else spec.query_temperature_floor,
        moe=moe,
    )


def class_of(spec):
    """Return transformers' configuration and model with the traits of a spec."""
    of_traits = {
        (DeepseekV3Config, DeepseekV3ForCausalLM): spec.kv_rank,
        (GptOssConfig, GptOssForCausalLM): spec.attention_sinks,
        (Llama4TextConfig, Llama4ForCausalLM): spec.rope_pairs == "adjacent",
        (Gemma3TextConfig, Gemma3ForCausalLM): spec.scaled_embedding,
        (Olmo3Config, Olmo3ForCausalLM): spec.norms == "post" and spec.sliding_window,
        (Olmo2Config, Olmo2ForCausalLM): spec.norms == "post",
        (Qwen3Config, Qwen3ForCausalLM): spec.qk_norm,
        (Qwen2Config, Qwen2ForCausalLM): spec.qkv_bias,
        (MistralConfig, MistralForCausalLM): spec.sliding_window,
        (LlamaConfig, LlamaForCausalLM): True,
    }
    return next(classes for classes, has_traits in of_traits.items() if has_traits)


def mapping_of(rope):
    """Return what transformers has in its configuration of a rotary embedding."""
    mapping = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is not None:
        mapping |= {key: value for key, value in asdict(rope.scaling).items() if value is not None}
        mapping["rope_type"] = mapping.pop("kind")
        if "original_context" in mapping:
            mapping["original_max_position_embeddings"] = mapping.pop("original_context")
    return mapping


def hugging_face_config(spec, kind=None, **settings):
    kind = kind or class_of(spec)[0]
    if spec.sliding_window:
        settings["sliding_window"] = spec.sliding_window
    layer_types = ["sliding_attention" if spec.window(layer) else "full_attention" for layer in range(spec.num_layers)]
    if kind in {Qwen2Config, Qwen3Config, Olmo3Config, Gemma3TextConfig, GptOssConfig}:
        settings["layer_types"] = layer_types
    if kind in {Qwen2Config, Qwen3Config}:
        settings["use_sliding_window"] = spec.sliding_window > 0
    if kind is Gemma3TextConfig:
        settings["query_pre_attn_scalar"] = spec.query_pre_attn_scalar or spec.head_dim
    if kind is GptOssConfig:
        settings["num_local_experts"] = spec.moe.num_experts
        settings["num_experts_per_tok"] = spec.moe.experts_per_token
        settings["router_aux_loss_coef"] = router_aux_loss_coef(spec)
    if kind is Llama4TextConfig:
        settings |= of_llama4(spec)
    rope = mapping_of(spec.rope(0))
    if kind is DeepseekV3Config:
        settings |= of_deepseek(spec)
        if spec.score_factor != 1.0:
            rope |= {"mscale_all_dim": 10 * (spec.score_factor**0.5 - 1) / log(spec.rope_scaling.factor)}
    if kind in {Olmo3Config, Gemma3TextConfig}:
        rope = {kind: mapping_of(spec.rope(layer)) for layer, kind in enumerate(layer_types)}
    return kind(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size if kind is DeepseekV3Config else spec.expert_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.rope_dim or spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_context,
        rope_parameters=rope,
        tie_word_embeddings=spec.tied_embeddings,
        **settings,
    )


def of_llama4(spec):
    """Return the settings that only a Llama 4 has."""
    layers = range(spec.num_layers)
    return {
        "intermediate_size_mlp": spec.ffn_size,
        "num_local_experts": spec.moe.num_experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "moe_layers": [layer for layer in layers if spec.has_experts(layer)],
        "router_aux_loss_coef": spec.moe.balance_loss_coefficient * spec.num_sparse_layers / spec.moe.experts_per_token,
        "no_rope_layers": [int(spec.rotates(layer)) for layer in layers],
        "attention_chunk_size": spec.attention_chunk or None,
        "attn_temperature_tuning": spec.query_temperature_scale > 0,
        "attn_scale": spec.query_temperature_scale,
        "floor_scale": spec.query_temperature_floor,
        "use_qk_norm": spec.qk_norm,
    }


def of_deepseek(spec):
    """Return the settings that only a DeepSeek-V3 has."""
    moe = spec.moe
    return {
        "kv_lora_rank": spec.kv_rank,
        "q_lora_rank": spec.query_rank or None,
        "qk_rope_head_dim": spec.rope_dim,
        "qk_nope_head_dim": spec.head_dim - spec.rope_dim,
        "v_head_dim": spec.value_head_dim,
        "rope_interleave": spec.rope_pairs == "adjacent",
        "first_k_dense_replace": spec.num_layers - spec.num_sparse_layers,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "norm_topk_prob": moe.gates == "sigmoid_chosen",
        "routed_scaling_factor": moe.gate_scale,
        "n_group": moe.expert_groups,
        "topk_group": moe.groups_per_token,
        "num_nextn_predict_layers": spec.mtp_layers,
        "aux_loss_alpha": moe.balance_loss_coefficient,
    }


def hugging_face_model(spec, attention="sdpa"):
    if spec.attention_sinks:  # which no other attention there has
        attention = "eager"
    # an OLMo and a Gemma have a padding token, whose embedding gets no gradient there
    return class_of(spec)[1](hugging_face_config(spec, attn_implementation=attention, pad_token_id=None)).eval()


def model_with_large_weights(spec):
    """Return a model with weights so large that attention is sharp and every norm weight matters."""
    model = Llama(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=generator)
        for name, weight in named_weights(model):
            if name in spec.buffer_shapes:
                weight.normal_(std=0.25, generator=generator)
    return model


@torch.no_grad()
def renamed(model):
    """Return the tensors that Hugging Face stores for a model, by its names."""
    spec = model.spec
    layouts = other_layouts(spec)
    stored = {}
    for name, parameter in named_weights(model):
        layout = layouts.get(name, Layout())
        for expert, theirs in enumerate(hugging_face_names(name, spec)):
            weight = parameter[expert] if is_per_expert(name, spec) else parameter
            if theirs not in stored:
                stored[theirs] = torch.empty(layout.stored_shape(tuple(weight.shape)), dtype=weight.dtype)
            weight_in(stored[theirs], layout).copy_(weight - float(layout.less_one))
    return stored


def in_memory(stored):
    """Return stored tensors as transformers holds them, with the matrices of all experts of a layer in one."""
    held = dict(stored)
    for name in stored:
        experts, is_first, _ = name.partition(".experts.0.gate_proj")
        if is_first:
            numbers = range(sum(other.startswith(f"{experts}.experts.") for other in stored) // 3)
            gate, up, down = (
                torch.stack([held.pop(f"{experts}.experts.{number}.{part}.weight") for number in numbers])
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            held |= {f"{experts}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.experts.down_proj": down}
    return held


def gradient_of(theirs, name, spec):
    """Return the gradient of our parameter in a transformers model, as we lay it out."""
    if is_per_expert(name, spec):
        stacked = "down_proj" if ".w2." in name else "gate_up_proj"
        gradient = theirs.get_parameter(f"model.{name.split('.feed_')[0]}.mlp.experts.{stacked}").grad
        return gradient if ".w2." in name else gradient.chunk(2, dim=1)[".w3." in name]
    stored = theirs.get_parameter(hugging_face_name(name, spec.model_type)).grad
    return weight_in(stored, other_layouts(spec).get(name, Layout()))


def load(theirs, ours):
    """Load our weights into a transformers model."""
    theirs.load_state_dict(in_memory(renamed(ours)), strict=not ours.spec.tied_embeddings)


def random_tokens(*shape):
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(1))


BY_LAYER = replace(shrunk("qwen2_5_7b"), num_layers=4, sliding_window=9, windowed_layers=(0, 3))
