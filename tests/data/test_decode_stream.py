"""Text comes piece by piece as its tokens do, in whole characters."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llama_core.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, decode_stream


def saved(folder, tokenizer):
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


def byte_level(folder):
    """Llama 3's kind: every byte has a token, so a character may be several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return saved(folder, tokenizer)


def sentence_piece(folder):
    """Llama 2's kind: a text begins with a space that is dropped, and rare characters are bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é"]
    bpe = models.BPE({symbol: index for index, symbol in enumerate(vocabulary)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return saved(folder, tokenizer)


@pytest.fixture(scope="module", params=["bytes", byte_level, sentence_piece])
def tokenizer(request, tmp_path_factory):
    return ByteTokenizer() if request.param == "bytes" else request.param(tmp_path_factory.mktemp("tokenizer"))


texts = st.text(st.sampled_from("ab é漢🦙"))  # one to four bytes each


@given(before=texts, text=texts)
def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer, before, text):
    first, whole = (tokenizer.encode_documents([part])[0][:-1].tolist() for part in (before, before + text))
    pieces = list(decode_stream(tokenizer, first, whole[len(first) :]))
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == [1] * len(text)


def test_a_character_comes_with_its_last_token(tokenizer):
    ids = tokenizer.encode_documents(["a漢b"])[0][:-1].tolist()
    seen = []
    pieces = decode_stream(tokenizer, ids[:-4], (seen.append(index) or index for index in ids[-4:]))
    assert [(piece, len(seen)) for piece in pieces] == [("漢", 3), ("b", 4)]


@given(st.lists(st.integers(0, 300)))
def test_tokens_that_are_no_text_still_come_as_what_they_decode_to(ids):
    tokenizer = ByteTokenizer()
    assert "".join(decode_stream(tokenizer, [], ids)) == tokenizer.decode(ids)
