"""Small tokenizers of the kinds that published models have, trained on a line of text."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["user assistant system, hello world; question and answer: é漢", "[INST] <<SYS>> <</SYS>> [/INST]"] * 4


def byte_level(folder, special_tokens, config):
    """A tokenizer like Llama 3's: byte-level BPE, whose offsets leave leading spaces out."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, folder, config, special_tokens=special_tokens, initial_alphabet=alphabet)


def sentence_piece(folder, config):
    """A tokenizer like Llama 2's: BPE over text with a space in front, falling back to bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(tokenizer, folder, config, special_tokens=special)


def trained(tokenizer, folder, config, **options):
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=420, show_progress=False, **options))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config)
    )
    return folder


def with_template(tokenizer, template):
    """Let a tokenizer add special tokens around a text, unless the template is None."""
    if template is not None:
        special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    return tokenizer
