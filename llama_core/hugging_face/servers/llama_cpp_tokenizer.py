"""What llama.cpp's converter makes of a tokenizer, its chat template and the tokens that end a text."""

from llama_core.hugging_face.servers.exported import ExportedModel
from llama_core.hugging_face.servers.rules import NO_TOKENIZER, Rule, lacks_tokenizer

_CHAT_TEMPLATE = "chat_template.jinja"
_LIKE_LLAMA = ("llama", "mistral", "mixtral")
_BPE_ONLY = ("qwen3_moe", "olmo2", "olmo3", "gpt_oss", "llama4_text", "deepseek_v3")
"""Types whose converter reads no ``tokenizer.model``."""
_KNOWN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""The tokens that end a text there by their names, src/llama-vocab.cpp."""


def _has_no_merges(model: ExportedModel) -> bool:
    """Return whether a text is its bytes, as the tokenizer of runs on bytes has it."""
    described = model.tokenizer.get("model", {})
    return described.get("type") == "BPE" and not described.get("merges")


def _needs_known_cuts(model: ExportedModel) -> bool:
    """Return whether llama.cpp has to know how a BPE cuts a text, which it tells by a hash of some tokens."""
    if lacks_tokenizer(model) or _has_no_merges(model):
        return False
    if model.model_type in _BPE_ONLY:
        return True
    is_like_sentencepiece = model.model_type in _LIKE_LLAMA and model.tokenizer.get("model", {}).get("byte_fallback")
    return not (model.has_sentencepiece or is_like_sentencepiece)


def _has_unused_rows(model: ExportedModel) -> bool:
    """Return whether the embedding of a Gemma 3 has more rows than its ``tokenizer.json`` has tokens."""
    if model.has_sentencepiece or not model.tokenizer:
        return False
    vocabulary = model.tokenizer.get("model", {}).get("vocab", ())
    return len(vocabulary) + len(model.tokenizer.get("added_tokens", ())) < model.spec.vocab_size


def _has_two_templates(model: ExportedModel) -> bool:
    """Return whether the chat template of ``tokenizer_config.json`` is another than that of its own file.

    transformers takes the one of the file, and llama.cpp's converter the other one.
    """
    file = model.folder / _CHAT_TEMPLATE
    inside = model.tokenizer_config.get("chat_template")
    return inside is not None and file.is_file() and inside != file.read_text(errors="replace")


def _has_unknown_ends(model: ExportedModel) -> bool:
    """Return whether a text may end with a token that is not the tokenizer's EOS, nor one that llama.cpp knows."""
    ends = model.config.get("eos_token_id")
    if not isinstance(ends, list) or len(ends) < 2:
        return False
    eos = model.tokenizer_config.get("eos_token")
    known = {*_KNOWN_ENDS, eos.get("content") if isinstance(eos, dict) else eos}
    names = {token["id"]: token["content"] for token in model.tokenizer.get("added_tokens", ())}
    return any(names.get(end) not in known for end in ends)


TOKENIZER_RULES = (
    Rule("refused", lacks_tokenizer, NO_TOKENIZER, "conversion/base.py, get_vocab_base"),
    Rule(
        "refused",
        _has_no_merges,
        "a tokenizer of bytes, without merges, is none that its converter knows",
        "conversion/base.py, get_vocab_base_pre",
        was_run=True,
    ),
    Rule(
        "loss",
        _has_two_templates,
        "its converter takes the chat template of tokenizer_config.json, and not chat_template.jinja: chats are "
        "written otherwise; remove it there, or add --chat-template-file chat_template.jinja to llama-server",
        "gguf-py/gguf/vocab.py, SpecialVocab",
        was_run=True,
    ),
    Rule(
        "loss",
        _has_unknown_ends,
        "of several tokens that end a text, a GGUF file names one and llama.cpp knows some by name, but not all of "
        "these: give the others to the server as stop strings",
        "gguf-py/gguf/vocab.py, SpecialVocab; src/llama-vocab.cpp, special_eog_ids",
        was_run=True,
    ),
    Rule(
        "advice",
        _needs_known_cuts,
        "its converter refuses a BPE tokenizer that cuts texts unlike those of the models it knows; --vocab-only "
        "tells without the weights",
        "conversion/base.py, get_vocab_base_pre",
        was_run=True,
    ),
    Rule(
        "refused",
        _has_unused_rows,
        "the embedding has more rows than tokenizer.json has tokens: the converter cuts them off, and the file is "
        "refused; add tokens, or set architecture.vocab_size to their number",
        "conversion/gemma.py, Gemma3Model",
        ("gemma3_text",),
        was_run=True,
    ),
)
