"""What servers make of exported folders: every type of models has a row, and every rule is met by a folder."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from llama_core.config.config_json.writing import config_json, without_unstated_modules
from llama_core.config.model_types import GEMMA3_TEXT, GPT_OSS, MODEL_TYPES, OLMO2
from llama_core.config.models import ModelSpec
from llama_core.config.rope import LinearScaling, YarnScaling, yarn_amplitude
from llama_core.config.strategy import LoRA, MoE
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.peft import ADAPTER_CONFIG, adapter_json
from llama_core.hugging_face.servers import LLAMA_CPP, SERVERS, findings
from llama_core.hugging_face.weight_names import hugging_face_shapes

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


NO_WINDOWS = {"sliding_window": 0, "windowed_layers": (), "windowed_rope_theta": 0.0}


def with_moe(spec, **settings):
    return replace(spec, moe=spec.moe.model_copy(update=settings))


YARN = YarnScaling(4.0, 32)
YARN_OF_SCORES = replace(YARN, attention_factor=1.0)
YES = "natively"
LOSS = "with a loss"
NO = "refused"
OTHER = "through transformers"
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


@pytest.fixture
def export(tmp_path):
    """Return a function that writes what ``export-hf`` writes of a model, but for the weights."""

    def write(spec, name="out", dtype="bf16", merges=("a b",), tokens=None, sentencepiece=False):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(without_unstated_modules(spec), dtype)))
        if merges is not None:
            vocabulary = {str(index): index for index in range(spec.vocab_size if tokens is None else tokens)}
            model = {"type": "BPE", "vocab": vocabulary, "merges": list(merges)}
            (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
        if sentencepiece:
            (folder / "tokenizer.model").write_bytes(b"")
        return folder

    return write


@pytest.fixture
def adapters(tmp_path):
    """Return a function that writes what ``export-hf`` writes of adapters, but for the weights."""

    def write(lora, base):
        folder = tmp_path / "adapters"
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(lora, str(base))))
        return folder

    return write


def verdicts(folder):
    return [finding.verdict for finding in findings(folder)]


def notes(folder, server):
    return findings(folder)[SERVERS.index(server)].notes


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


def test_llama_cpp_takes_a_chat_template_beside_another_one(export):
    assert verdicts(with_two_templates(export(PLAIN)))[-1] == LOSS
    assert verdicts(with_two_templates(export(PLAIN, "same"), "one", "one"))[-1] == YES


@pytest.mark.parametrize(("names", "verdict"), [((), YES), (("<|im_end|>",), YES), (("<|im_end|>", "<stop>"), LOSS)])
def test_llama_cpp_ends_texts_with_tokens_that_it_knows_by_name(export, names, verdict):
    assert verdicts(with_ends(export(PLAIN), *names))[-1] == verdict


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


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (2, 8), (16, 16), (17, 32), (129, 256), (257, 320), (512, 512)])
def test_vllm_is_given_the_smallest_of_its_ranks_that_has_room(export, adapters, rank, flag):
    vllm, *_ = findings(adapters(LoRA(lora_rank=rank), export(PLAIN)))
    (command,) = vllm.commands
    assert command.endswith(f" --max-lora-rank {flag}")


def test_commands_have_the_paths_as_a_shell_reads_them(export, adapters):
    base = export(PLAIN, "my base")
    folder = adapters(LoRA(), base)
    for finding in findings(folder):
        words = [word for command in finding.commands for word in shlex.split(command)]
        assert str(base) in words
        assert {str(folder), f"adapters={folder}"} & set(words)
    assert "my base.gguf" in words


def test_adapters_over_a_base_elsewhere_are_told_of_by_themselves(adapters, tmp_path):
    folder = adapters(LoRA(rslora=True), tmp_path / "elsewhere")
    assert verdicts(folder) == [YES, LOSS, LOSS]
    assert all("elsewhere is not on this machine" in note for note in (notes(folder, server)[-1] for server in SERVERS))


@pytest.mark.parametrize("base", ["tiny_llama3_50m", "a checkpoint"])
def test_adapters_over_what_no_server_reads_are_to_be_merged(adapters, tmp_path, base):
    (tmp_path / "a checkpoint").mkdir()
    folder = adapters(LoRA(), tmp_path / base if " " in base else base)
    assert verdicts(folder) == [NO, NO, NO]
    assert all("export-hf --merged" in notes(folder, server)[0] for server in SERVERS)


def test_a_refused_export_has_no_commands(export):
    *_, llama_cpp = findings(export(PLAIN, merges=()))
    assert (llama_cpp.verdict, llama_cpp.commands) == (NO, ())
    assert llama_cpp.lines == [f"llama.cpp {LLAMA_CPP.version}: refused", f"  {llama_cpp.notes[0]}"]


@pytest.mark.parametrize(("name", "is_doubtful"), [("llama", False), ("qwen2", False), ("olmo2", True)])
def test_a_sentencepiece_model_is_enough_where_the_converter_reads_one(export, name, is_doubtful):
    said = notes(export(USUAL[name], sentencepiece=True), LLAMA_CPP)
    assert any("BPE tokenizer" in note for note in said) == is_doubtful


@pytest.mark.parametrize("text", ["{", "[]", b"\xff"])
def test_a_damaged_tokenizer_is_named(export, text):
    folder = export(PLAIN)
    (folder / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WeightsError, match=r"cannot read .*tokenizer\.json: .*; export the folder again"):
        findings(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        findings(tmp_path)


CONVERTED = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "olmo2": "olmo2", "olmo3": "olmo2"},
    **{"gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "llama4_text": "llama4", "deepseek_v3": "deepseek2"},
}
"""The architecture in a GGUF file of each type."""
RENAMED = (
    (r"\.experts\.\d+\.", ".experts."),
    (r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.", r"\1.feed_forward.experts."),
    (r"gate_up_proj", "gate_proj"),
    (r"_proj_bias$", "_proj.bias"),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"(_proj|sinks)$", r"\1.weight"),
    (r"kv_b_proj", "k_b_proj"),
)
"""What converters do to names before they look them up: conversion/llama.py, qwen.py, gpt_oss.py, deepseek.py."""


@pytest.mark.parametrize("kind", USUAL)
def test_a_gguf_file_has_a_name_for_every_tensor_of_an_export(kind):
    gguf = pytest.importorskip("gguf")
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[CONVERTED[kind]]
    names = gguf.get_tensor_name_map(architecture, USUAL[kind].num_layers)
    unknown = []
    for stored in hugging_face_shapes(USUAL[kind]):
        name = stored
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if names.get_name(name, (".weight", ".bias")) is None:
            unknown.append(stored)
    assert unknown == []
