"""What llama.cpp's converter makes of tokenizers and of the names of tensors."""

import re

import pytest
from served_models import LOSS, PLAIN, USUAL, YES, notes, verdicts, with_ends, with_two_templates

from llama_core.hugging_face.servers.llama_cpp import LLAMA_CPP
from llama_core.hugging_face.weight_names import hugging_face_shapes


def test_llama_cpp_takes_a_chat_template_beside_another_one(export):
    assert verdicts(with_two_templates(export(PLAIN)))[-1] == LOSS
    assert verdicts(with_two_templates(export(PLAIN, "same"), "one", "one"))[-1] == YES


@pytest.mark.parametrize(("names", "verdict"), [((), YES), (("<|im_end|>",), YES), (("<|im_end|>", "<stop>"), LOSS)])
def test_llama_cpp_ends_texts_with_tokens_that_it_knows_by_name(export, names, verdict):
    assert verdicts(with_ends(export(PLAIN), *names))[-1] == verdict


@pytest.mark.parametrize(("name", "is_doubtful"), [("llama", False), ("qwen2", False), ("olmo2", True)])
def test_a_sentencepiece_model_is_enough_where_the_converter_reads_one(export, name, is_doubtful):
    said = notes(export(USUAL[name], sentencepiece=True), LLAMA_CPP)
    assert any("BPE tokenizer" in note for note in said) == is_doubtful


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
