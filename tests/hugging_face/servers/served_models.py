"""A model of each type, and what servers make of a folder of it."""

import json
from dataclasses import replace

from llama_core.config.model_types import GEMMA3_TEXT, GPT_OSS, OLMO2
from llama_core.config.models import ModelSpec
from llama_core.config.strategy import MoE
from llama_core.hugging_face.servers.findings import SERVERS, findings

YES = "natively"
LOSS = "with a loss"
NO = "refused"
OTHER = "through transformers"
PLAIN = ModelSpec("plain", "llama", 64, 4, 4, 2, 16, 96, 128, 1e4, 1e-5, 4096, 256)
MIXTURE = MoE(num_experts=4)
LLAMA4 = replace(
    PLAIN,
    max_context=65_536,
    rope_pairs="adjacent",
    nope_layers=(3,),
    query_temperature_scale=0.1,
    attention_chunk=8192,
    qk_norm=True,
    qk_norm_weights=False,
    moe=MoE(num_experts=4, experts_per_token=1, gates="sigmoid", gate_inputs=True, expert_size=48, shared_size=48),
)
DEEPSEEK = replace(
    PLAIN,
    num_kv_heads=4,
    kv_rank=20,
    query_rank=24,
    rope_dim=8,
    value_dim=12,
    rope_pairs="adjacent",
    moe=MoE(gates="sigmoid_chosen", balance_bias=True, expert_size=32, shared_size=32, moe_layers=(1, 2, 3)),
)
OLMO3 = replace(PLAIN, **OLMO2.always, sliding_window=24, windowed_layers=(0, 1, 2))
GEMMA = replace(
    PLAIN,
    num_layers=7,
    **GEMMA3_TEXT.always,
    sliding_window=24,
    windowed_layers=(0, 1, 2, 3, 4, 6),
    windowed_rope_theta=1e3,
)
GPT = replace(
    PLAIN,
    **GPT_OSS.of_model,
    sliding_window=24,
    windowed_layers=(0, 2),
    moe=MoE(num_experts=4, **GPT_OSS.of_experts),
)
USUAL = {
    "llama": PLAIN,
    "mixtral": replace(PLAIN, moe=MIXTURE),
    "mistral": replace(PLAIN, sliding_window=PLAIN.max_context),
    "qwen2": replace(PLAIN, qkv_bias=True),
    "qwen3": replace(PLAIN, qk_norm=True),
    "qwen3_moe": replace(PLAIN, qk_norm=True, moe=MIXTURE),
    "olmo2": replace(PLAIN, **OLMO2.always),
    "olmo3": OLMO3,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT,
    "llama4_text": LLAMA4,
    "deepseek_v3": DEEPSEEK,
}
"""A model of each type, with the traits that published ones have."""


def verdicts(folder):
    return [finding.verdict for finding in findings(folder)]


def notes(folder, server):
    return findings(folder)[SERVERS.index(server)].notes


def with_two_templates(folder, inside="one", own="another"):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": inside}))
    (folder / "chat_template.jinja").write_text(own)
    return folder


def with_ends(folder, *names, eos="<end>"):
    """Write that a text ends with the tokenizer's EOS and with some other tokens."""
    config = json.loads((folder / "config.json").read_text())
    added = [{"id": index, "content": name} for index, name in enumerate((eos, *names))]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [token["id"] for token in added]}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder
