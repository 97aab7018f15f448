"""A tokenizer comes with somebody's weights: it takes no more time or memory than it may, and heeds an interrupt."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from waiting import eventually

from llama_core.data import tokenizer_limits
from llama_core.data.tokenizer import load_tokenizer
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
        (lambda: with_normalizer(normalizers.Prepend("a" * 999)), "1,000 times as long"),
        (lambda: with_normalizer(*[normalizers.ByteLevel()] * 12), "16,777,216 times as long"),
        (lambda: with_normalizer(normalizers.Precompiled(charsmap_of("a" * 300))), "300 times as long"),
        (with_byte_levels, "16,777,216 times as long"),
        (with_decoder, "the decoder in tokenizer '.*' may make a text 1,000,000 times as long"),
        (with_frame, "adds 2,000 tokens to each text"),
        (with_dropout, "dropout=0.1, with which a text gets other tokens each time"),
    ],
    ids=["text", "pattern", "prefix", "bytes", "charsmap", "pre-tokenizers", "decoder", "frame", "dropout"],
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
    monkeypatch.setattr(tokenizer_limits, "MOST_SECONDS", 1)
    monkeypatch.setattr(tokenizer_limits, "SLOWEST", 10**9)
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' has worked for more than 1 s on 303,001"):
        found.encode_input(f"{LINES * 3000}=")
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' still works on another text"):
        found.encode_documents(["a"])


def test_a_pattern_that_the_library_gives_up_is_an_error_with_the_file(tmp_path):
    found = load_tokenizer(slow(tmp_path, r"(\w+\s?)+$"))
    with pytest.raises(DataError, match=r"tokenizer '.*tokenizer.json' does not work: .*retry-limit"):
        found.encode_input(f"{'x' * 100}!")


ENCODE = "import sys; from llama_core.data.tokenizer import load_tokenizer as load; load(sys.argv[1]).encode_input({})"
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
