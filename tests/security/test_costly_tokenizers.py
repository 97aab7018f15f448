"""A tokenizer comes with somebody's weights: it takes no more time or memory than it may, and heeds an interrupt."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from waiting import eventually

from llama_core.data.tokenizer import load_tokenizer
from llama_core.data.tokenizers import limits as tokenizer_limits
from llama_core.data.tokenizers.sentencepiece import NotSentencePieceError, cuts_of, listed_merges
from llama_core.errors import DataError

LINES = "x" * 100 + "\n"
SLOW = r"x*x*x*[\d=]"
"""On each of ``LINES``, a search for this takes some milliseconds, if there is a = after them."""


def tokenizer():
    vocab = {chr(code): number for number, code in enumerate(range(32, 127))} | {"</s>": 95, "<s>": 96, "\n": 97}
    return Tokenizer(models.BPE(vocab, []))


def written(folder, backend):
    file = folder / "tokenizer.json"
    backend.save(str(file))
    return str(file)


def with_normalizer(*steps):
    backend = tokenizer()
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


def with_byte_levels():
    backend = tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel() for _ in range(12)])
    return backend


def with_spaces():
    backend = tokenizer()
    steps = [
        (pre_tokenizers.Split(Regex("."), "isolated"), pre_tokenizers.Metaspace(one, "always")) for one in "12345678"
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence([step for pair in [*steps, *steps] for step in pair])
    return backend


def with_growing_tokens():
    """An added token that the steps of the tokenizer make long when it is loaded."""
    described = json.loads(with_normalizer(*[normalizers.Replace("a", "aa")] * 2).to_str())
    described["normalizer"]["normalizers"] *= 20
    added = {"id": 98, "content": "xa", "single_word": False, "lstrip": False, "rstrip": False}
    described["added_tokens"] = [added | {"normalized": True, "special": False}]
    return Raw(json.dumps(described))


def with_long_token():
    described = json.loads(tokenizer().to_str())
    described["model"]["vocab"]["x" * 20_000_000] = 99
    return Raw(json.dumps(described))


class Raw(str):
    """A ``tokenizer.json`` that would take long to load."""

    def save(self, file):
        Path(file).write_text(self)


def with_decoder():
    backend = tokenizer()
    backend.decoder = decoders.Sequence([decoders.Replace("a", "a" * 100) for _ in range(3)])
    return backend


def with_frame():
    backend = tokenizer()
    named = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 96)])
    backend.post_processor = named
    described = json.loads(backend.to_str())
    described["post_processor"]["special_tokens"]["<s>"] |= {"ids": [96] * 2000, "tokens": ["<s>"] * 2000}
    return Tokenizer.from_str(json.dumps(described))


def with_repeated_text():
    described = json.loads(with_frame_of("<s>").to_str())
    described["post_processor"]["single"] *= 1000
    return Raw(json.dumps(described))


def with_frame_of(token):
    backend = tokenizer()
    backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 96)])
    return backend


def with_dropout():
    backend = tokenizer()
    backend.model.dropout = 0.1
    return backend


def charsmap_of(text):
    """A table of SentencePiece without a trie, and with one text."""
    return (0).to_bytes(4, "little") + text.encode() + b"\0"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: with_normalizer(*[normalizers.Replace("a", "a" * 10)] * 3), "1,000 times as long"),
        (lambda: with_normalizer(*[normalizers.Replace(Regex("(?=a)"), "aaa")] * 5), "1,024 times as long"),
        (lambda: with_normalizer(*[normalizers.Replace(Regex("b*"), "b")] * 9), "512 times as long"),
        (lambda: with_normalizer(normalizers.Prepend("a" * 999)), "1,000 times as long"),
        (lambda: with_normalizer(*[normalizers.ByteLevel()] * 12), "16,777,216 times as long"),
        (lambda: with_normalizer(normalizers.Precompiled(charsmap_of("a" * 300))), "300 times as long"),
        (with_byte_levels, "16,777,216 times as long"),
        (with_spaces, "65,536 times as long"),
        (with_growing_tokens, "1,099,511,627,776 times as long"),
        (with_long_token, "has a token of 20,000,000 characters"),
        (with_repeated_text, "adds 1,000 tokens to each text and repeats it 1,000 times"),
        (with_decoder, "the decoder in tokenizer '.*' may make a text 1,000,000 times as long"),
        (with_frame, "adds 2,000 tokens to each text"),
        (with_dropout, "dropout=0.1, with which a text gets other tokens each time"),
    ],
    ids=[
        *("text", "place", "nothing", "prefix", "bytes", "charsmap", "pre-tokenizers", "spaces", "added", "token"),
        *("repeated", "decoder", "frame", "dropout"),
    ],
)
def test_a_tokenizer_that_may_lengthen_a_text_without_end_is_refused_with_its_file(tmp_path, made, says):
    file = written(tmp_path, made())
    with pytest.raises(DataError, match=says) as refused:
        load_tokenizer(file)
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)


def slow(folder, pattern=SLOW):
    backend = tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return written(folder, backend)


def test_a_pattern_that_takes_too_long_is_told_with_the_file(tmp_path, monkeypatch):
    found = load_tokenizer(slow(tmp_path))
    monkeypatch.setattr(tokenizer_limits, "MAX_SECONDS", 1)
    monkeypatch.setattr(tokenizer_limits, "SLOWEST", 10**9)
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' has worked for more than 1 s on 303,001"):
        found.encode_input(f"{LINES * 3000}=")
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' still works on another text"):
        found.encode_documents(["a"])


def test_a_pattern_that_the_library_gives_up_is_an_error_with_the_file(tmp_path):
    found = load_tokenizer(slow(tmp_path, r"(\w+\s?)+$"))
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' does not work: .*retry-limit"):
        found.encode_input(f"{'x' * 100}!")


ENCODE = (
    "import sys; from llama_core.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode_input({})"
)
TOKENIZE = ["-m", "training_infra.cli", "tokenize", "--data", "data.txt", "--set", "data.cache_dir=cache"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["-c", ENCODE.format("open('data.txt').read()")], "KeyboardInterrupt\n"), (TOKENIZE, "interrupted\n")],
    ids=["in the process", "in a worker"],
)
def test_an_interrupt_ends_a_tokenizer_that_works(tmp_path, arguments, says):
    (tmp_path / "data.txt").write_text(f"{LINES * 100_000}=")
    command = [sys.executable, *arguments, *(["--tokenizer"] if "tokenize" in arguments else []), slow(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path)
    family = [psutil.Process(process.pid)]
    eventually(lambda: any(seconds_of(one) > 4 for one in (*family, *family[0].children())))
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1].endswith(says)
    assert process.returncode in (130, -signal.SIGINT)


def seconds_of(process):
    """The time of a core that a process has taken."""
    return process.cpu_times().user


def test_a_tokenizer_that_is_gone_leaves_no_thread(tmp_path):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "tokenizer"}

    before = threads()
    found = load_tokenizer(written(tmp_path, tokenizer()))
    assert found.encode_input("ab") == [65, 66]
    assert threads() > before
    del found
    gc.collect()
    eventually(lambda: threads() <= before)


def test_a_tokenizer_works_in_a_process_that_was_forked(tmp_path):
    found = load_tokenizer(written(tmp_path, tokenizer()))
    child = os.fork()
    if not child:
        os._exit(found.encode_input("ab") != [65, 66])
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("bos", ["$A:x", "$1", "a:1"])
def test_a_token_is_itself_before_a_text_whatever_it_is_called(tmp_path, bos):
    described = json.loads(tokenizer().to_str())
    described["added_tokens"] = [
        {"id": 98, "content": bos, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": "</s>"}))
    found = load_tokenizer(str(tmp_path), adds_bos=True)
    assert found.before == (98,)
    assert found.encode_input("a") == [98, 65]


def test_ids_of_added_tokens_that_are_no_numbers_are_refused_in_one_line(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text('{"<x>": "y", "<z>": 5}')
    with pytest.raises(DataError, match=r"the added tokens in .* cannot be read"):
        load_tokenizer(str(tmp_path))


def test_pieces_that_are_made_in_countless_ways_are_refused():
    """Each piece of one letter is made of any two shorter ones."""
    pieces = {letter * length for letter in "abc" for length in range(1, 257)}
    merges = (cut for piece in pieces for cut in cuts_of(piece, pieces))
    with pytest.raises(NotSentencePieceError, match="its 768 pieces have more than 24,576 merges"):
        listed_merges(merges, len(pieces))
