"""The byte tokenizer as transformers and ``tokenizers`` read it: the same ids and the same texts."""

import errno
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llama_core.data.byte_level import write_byte_tokenizer
from llama_core.data.tokenizer import ByteTokenizer, load_tokenizer
from llama_core.errors import EnvironmentMismatchError

OURS = ByteTokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", " a  b\r\n\tc ", "naïve 你好 👩\u200d👧 שלום", "<s>a</s>", "e\u0301 \u0000\u00ad\u007f"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


@given(text=TEXTS)
def test_transformers_gives_our_ids_and_our_text(theirs, text):
    document = OURS.encode_documents([text])[0].tolist()
    assert theirs(text)["input_ids"] == document[:-1]
    assert theirs(text, add_special_tokens=False)["input_ids"] == OURS.encode_rendered([text])[0].ids.tolist()
    assert theirs.decode(document, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


@given(text=TEXTS)
def test_the_files_are_read_here_as_the_byte_tokenizer(folder, text):
    read = load_tokenizer(str(folder))
    assert read.encode_documents([text])[0].tolist() == OURS.encode_documents([text])[0].tolist()
    for mine, its in zip(OURS.encode_rendered([text])[0], read.encode_rendered([text])[0], strict=True):
        assert its.tolist() == mine.tolist()


def test_the_special_tokens_are_those_of_training(theirs):
    assert (theirs.bos_token_id, theirs.eos_token_id) == (OURS.bos_id, OURS.eos_id)
    assert theirs.pad_token_id == OURS.eos_id, "rows are padded with it"
    assert len(theirs) == OURS.vocab_size


def test_texts_of_different_lengths_make_a_batch(theirs):
    batch = theirs(["é", "abc"], padding=True)
    assert batch["input_ids"] == [[256, 0xC3, 0xA9, 257], [256, *b"abc"]]
    assert batch["attention_mask"] == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentMismatchError, match="is written with the package 'tokenizers'; "):
        write_byte_tokenizer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """Which callers turn into one line; the package's own way to a file raises a plain Exception."""
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as refused:
        write_byte_tokenizer(tmp_path)
    assert refused.value.errno == errno.ENOSPC
