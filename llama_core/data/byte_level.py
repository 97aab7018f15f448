"""The byte tokenizer as files that Hugging Face's libraries open: a byte-level BPE without merges."""

import json
from pathlib import Path

from llama_core.data.tokenizer import LLAMA_BOS_TOKENS, LLAMA_EOS_TOKENS, ByteTokenizer, byte_symbols
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import how_to_install


def write_byte_tokenizer(folder: Path, *, adds_bos: bool = True) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` that give the ids of ``ByteTokenizer``.

    Text that spells a special token is encoded as its bytes.

    Args:
        folder: where to write.
        adds_bos: whether a text begins with BOS, as Llama's do.

    Raises:
        EnvironmentMismatchError: if the package ``tokenizers`` is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError:
        raise EnvironmentMismatchError(
            f"that of a run on bytes is written with the package 'tokenizers'; {how_to_install('tokenizers')}"
        ) from None
    bos = LLAMA_BOS_TOKENS[0]
    eos = LLAMA_EOS_TOKENS[0]
    tokenizer = Tokenizer(models.BPE(byte_symbols(), merges=[]))
    tokenizer.add_special_tokens([bos, eos])  # 256 and 257, which follow the bytes
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ByteTokenizer.bos_id)]
        )
    # the package's own way to a file tells of a full disk as a plain Exception
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,  # as rows are padded in training
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
