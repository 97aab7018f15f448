"""What servers make of exported folders: every type of models has a row, and every rule is met by a folder."""

import json
import re
from dataclasses import replace

import pytest
from served_models import (
    DEEPSEEK,
    GEMMA,
    GPT,
    LLAMA4,
    LOSS,
    NO,
    OLMO3,
    OTHER,
    PLAIN,
    USUAL,
    YES,
    notes,
    verdicts,
    with_ends,
    with_two_templates,
)

from llama_core.config.model_types import MODEL_TYPES
from llama_core.config.rope import LinearScaling, YarnScaling, yarn_amplitude
from llama_core.config.strategy import LoRA
from llama_core.hugging_face.peft import ADAPTER_CONFIG, adapter_json
from llama_core.hugging_face.servers.findings import SERVERS

NO_WINDOWS = {"sliding_window": 0, "windowed_layers": (), "windowed_rope_theta": 0.0}


def with_moe(spec, **settings):
    return replace(spec, moe=spec.moe.model_copy(update=settings))


YARN = YarnScaling(4.0, 32)
YARN_OF_SCORES = replace(YARN, attention_factor=1.0)
CASES = {
    "mistral's window": (replace(PLAIN, sliding_window=24), YES, LOSS, LOSS),
    "windows in some layers": (replace(USUAL["qwen2"], sliding_window=24, windowed_layers=(2, 3)), NO, LOSS, LOSS),
    "other windows of a Gemma": (replace(GEMMA, windowed_layers=(0, 1)), YES, YES, LOSS),
    "other windows of a GPT-OSS": (replace(GPT, windowed_layers=(0, 1)), LOSS, YES, LOSS),
    "scaling of a Gemma": (replace(GEMMA, rope_scaling=LinearScaling(8.0)), YES, LOSS, YES),
    "scaling of a Gemma without windows": (
        replace(GEMMA, **NO_WINDOWS, rope_scaling=LinearScaling(8.0)),
        YES,
        LOSS,
        LOSS,
    ),
    "scaling in windows": (replace(OLMO3, rope_scaling=LinearScaling(8.0)), OTHER, OTHER, LOSS),
    "another base in windows": (replace(OLMO3, windowed_rope_theta=1e3), OTHER, OTHER, LOSS),
    "another blend": (replace(PLAIN, rope_scaling=YarnScaling(4.0, 64, beta_slow=2.0)), YES, YES, LOSS),
    "a blend within pairs": (replace(PLAIN, rope_scaling=replace(YARN, truncate=False)), YES, YES, LOSS),
    "another amplitude": (replace(PLAIN, rope_scaling=YARN_OF_SCORES), YES, YES, LOSS),
    "YaRN of a DeepSeek-V3": (
        replace(DEEPSEEK, rope_scaling=YARN_OF_SCORES, score_factor=yarn_amplitude(4.0) ** 2),
        YES,
        YES,
        YES,
    ),
    "YaRN of cosines in a DeepSeek": (replace(DEEPSEEK, rope_scaling=YARN), YES, YES, LOSS),
    "YaRN of neither": (replace(DEEPSEEK, rope_scaling=YARN_OF_SCORES), YES, YES, LOSS),
    "gates below 1": (with_moe(USUAL["qwen3_moe"], gates="softmax_all"), YES, YES, LOSS),
    "another scalar": (replace(GEMMA, query_pre_attn_scalar=24), YES, YES, LOSS),
    "no chunks": (replace(LLAMA4, attention_chunk=0), YES, YES, NO),
    "short chunks": (replace(LLAMA4, attention_chunk=24), YES, LOSS, LOSS),
    "other layers that do not rotate": (replace(LLAMA4, nope_layers=(1,)), YES, LOSS, LOSS),
    "no temperatures": (replace(LLAMA4, query_temperature_scale=0.0), YES, LOSS, LOSS),
    "a short context with temperatures": (replace(LLAMA4, max_context=4096), LOSS, YES, YES),
    "128 experts with norms": (with_moe(LLAMA4, num_experts=128), YES, LOSS, LOSS),
    "uneven experts": (with_moe(LLAMA4, moe_layers=(0, 1)), NO, NO, NO),
    "no latent of queries": (replace(DEEPSEEK, query_rank=0), YES, YES, NO),
    "no shared experts": (with_moe(DEEPSEEK, shared_size=0), YES, YES, NO),
    "pairs of halves": (replace(DEEPSEEK, rope_pairs="halves"), LOSS, YES, LOSS),
    "modules of later tokens": (replace(DEEPSEEK, mtp_layers=1), YES, YES, YES),
}
"""A model with a trait, and what vLLM, SGLang and llama.cpp make of it."""


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_a_server_has_a_row_for_every_type_of_models(server):
    names = {kind.name for kind in MODEL_TYPES}
    assert server.natively.keys() | server.through_transformers.keys() == names
    assert not server.natively.keys() & server.through_transformers.keys()
    assert {name for rule in (*server.rules, *server.adapter_rules) for name in rule.model_types} <= names


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_model_is_served_as_it_is(export, name):
    assert USUAL[name].model_type.name == name
    lost = {"llama4_text": [YES, LOSS, YES]}  # SGLang has the chunks of a Llama 4 with images alone
    assert verdicts(export(USUAL[name])) == lost.get(
        name, [OTHER if name in server.through_transformers else YES for server in SERVERS]
    )


@pytest.mark.parametrize("case", CASES)
def test_what_becomes_of_a_trait_is_told(export, case):
    spec, *expected = CASES[case]
    assert verdicts(export(spec)) == expected


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_every_rule_of_a_server_is_met_by_some_folder(export, server):
    folders = [export(spec, f"case-{number}", "fp32") for number, (spec, *_) in enumerate(CASES.values())]
    folders.append(export(PLAIN, "no-tokenizer", merges=None))
    folders.append(export(PLAIN, "bytes", merges=()))
    folders.append(export(GEMMA, "padded", tokens=100))
    folders.append(with_two_templates(export(PLAIN, "templates")))
    folders.append(with_ends(export(PLAIN, "ends"), "<stop>"))
    met = {note for folder in folders for note in notes(folder, server)}
    unmet = [rule.says for rule in server.rules if not any(_says(rule, note) for note in met)]
    assert unmet == []


def _says(rule, note):
    """Return whether a note is a rule's, whatever its numbers are."""
    parts = re.split(r"(?<!{){(?!{)[^}]*}", rule.says)
    pattern = ".*".join(re.escape(part.replace("{{", "{").replace("}}", "}")) for part in parts)
    return re.fullmatch(pattern, note) is not None


ADAPTERS = {
    "plain": (PLAIN, LoRA(), YES, YES, YES),
    "the base's window": (replace(PLAIN, sliding_window=24), LoRA(), YES, LOSS, LOSS),
    "through transformers": (USUAL["olmo2"], LoRA(), OTHER, YES, YES),
    "DoRA": (PLAIN, LoRA(method="dora"), NO, NO, NO),
    "rsLoRA": (PLAIN, LoRA(rslora=True), YES, LOSS, LOSS),
    "a large rank": (PLAIN, LoRA(lora_rank=513), NO, YES, YES),
    "the head": (PLAIN, LoRA(target_modules=("q_proj", "lm_head")), YES, YES, YES),
    "the head of a Qwen 2": (USUAL["qwen2"], LoRA(target_modules=("q_proj", "lm_head")), NO, YES, YES),
    "the head through transformers": (USUAL["olmo2"], LoRA(target_modules=("q_proj", "lm_head")), NO, YES, YES),
    "a latent of DeepSeek's keys": (DEEPSEEK, LoRA(target_modules=("kv_b_proj",)), LOSS, YES, NO),
    "a latent of DeepSeek's queries": (DEEPSEEK, LoRA(target_modules=("q_a_proj",)), YES, YES, LOSS),
    "the output of DeepSeek's attention": (DEEPSEEK, LoRA(target_modules=("o_proj",)), YES, YES, YES),
    "a tied head": (replace(PLAIN, tied_embeddings=True), LoRA(target_modules=("q_proj", "lm_head")), YES, YES, NO),
    "a tied embedding": (
        replace(PLAIN, tied_embeddings=True),
        LoRA(target_modules=("q_proj", "embed_tokens")),
        YES,
        YES,
        NO,
    ),
}
"""Adapters over a base, and what vLLM, SGLang and llama.cpp make of them."""


@pytest.mark.parametrize("case", ADAPTERS)
def test_what_becomes_of_adapters_is_told(export, adapters, case):
    spec, lora, *expected = ADAPTERS[case]
    assert verdicts(adapters(lora, export(spec))) == expected


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_every_rule_of_a_server_on_adapters_is_met_by_some_folder(export, tmp_path, server):
    met = set()
    for number, (spec, lora, *_) in enumerate(ADAPTERS.values()):
        folder = tmp_path / f"adapters-{number}"
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(lora, str(export(spec, f"base-{number}")))))
        met.update(notes(folder, server))
    unmet = [rule.says for rule in server.adapter_rules if not any(_says(rule, note) for note in met)]
    assert unmet == []
