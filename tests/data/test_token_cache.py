import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from corpora import chat_of, write_jsonl, write_texts

from llama_core.data import token_cache
from llama_core.data.corpus import find_files
from llama_core.data.token_cache import ABANDONED_AFTER_SECONDS, cached_tokens
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import DataError

DOCUMENTS = ["one", "two\n", "drei, vier"]
CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    [{"role": "user", "content": "ja?"}, {"role": "assistant", "content": "nein"}],
]
RENDERED = [chat_of().document(messages, "").text for messages in CONVERSATIONS]


class WideTokenizer(ByteTokenizer):
    """Bytes in a vocabulary that 16 bits cannot hold."""

    vocab_size = 70_000
    eos_id = 69_999
    fingerprint = "wide"

    def encode_documents(self, texts):
        return [np.append(ids[:-1], self.eos_id) for ids in ByteTokenizer().encode_documents(texts)]


class SilentTokenizer(ByteTokenizer):
    """Gives no token to text without letters."""

    fingerprint = "silent"

    def encode_documents(self, texts):
        return super().encode_documents([text if any(map(str.isalpha, text)) else "" for text in texts])


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)


def build(source, directory, *, tokenizer=None, chat=None, max_bad_lines=100, on_progress=lambda done, total: None):
    return cached_tokens(
        find_files(str(source)),
        "text",
        tokenizer or ByteTokenizer(),
        Path(directory),
        chat=chat or chat_of(),
        max_bad_lines=max_bad_lines,
        on_progress=on_progress,
    )


def texts_of(cache):
    bounds = zip(cache.offsets[:-1], cache.offsets[1:], strict=True)
    return [ByteTokenizer().decode(cache.tokens[start:stop].tolist()) for start, stop in bounds]


def test_a_cache_holds_the_documents_in_order(source, tmp_path):
    cache = build(source, tmp_path / "cache")
    assert texts_of(cache) == DOCUMENTS
    assert cache.tokens[cache.offsets[:-1]].tolist() == [256] * 3
    assert cache.tokens[cache.offsets[1:] - 1].tolist() == [257] * 3


@pytest.mark.parametrize(("tokenizer", "dtype"), [(ByteTokenizer(), np.uint16), (WideTokenizer(), np.uint32)])
def test_tokens_take_no_more_bytes_than_the_vocabulary_needs(source, tmp_path, tokenizer, dtype):
    cache = build(source, tmp_path / "cache", tokenizer=tokenizer)
    assert cache.tokens.dtype == dtype
    assert cache.tokens[-1] == tokenizer.eos_id


def test_a_second_load_tokenises_nothing(source, tmp_path):
    first = build(source, tmp_path / "cache")
    calls = []
    second = build(source, tmp_path / "cache", on_progress=lambda *call: calls.append(call))
    assert calls == []
    assert texts_of(second) == texts_of(first)


def test_a_changed_source_is_tokenised_again(source, tmp_path):
    build(source, tmp_path / "cache")
    write_jsonl(source, ["other", "text"])
    assert texts_of(build(source, tmp_path / "cache")) == ["other", "text"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.parquet"])
def test_a_source_that_was_cut_while_it_was_tokenised_leaves_no_cache(tmp_path, name):
    source = write_texts(tmp_path / name, [os.urandom(1000).hex() for _ in range(3000)])
    with pytest.raises(DataError, match="changed while it was read"):
        build(source, tmp_path / "cache", on_progress=lambda done, total: os.truncate(source, done))
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_contents_of_the_same_size_and_time_are_tokenised_again(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", ["one"])
    before = source.stat()
    build(source, tmp_path / "cache")
    write_jsonl(source, ["two"])
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert texts_of(build(source, tmp_path / "cache")) == ["two"]


def test_a_source_that_comes_back_finds_its_cache_again(source, tmp_path):
    first = build(source, tmp_path / "cache")
    content = source.read_bytes()
    write_jsonl(source, [text.upper() for text in DOCUMENTS])
    build(source, tmp_path / "cache")
    source.write_bytes(content)
    calls = []
    assert build(source, tmp_path / "cache", on_progress=lambda *call: calls.append(call)).path == first.path
    assert calls == []


def test_a_source_is_compared_with_its_cache_only_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "SETTLED_AFTER_SECONDS", -60)
    first = build(source, tmp_path / "cache")
    source.chmod(0o600)  # contents are the same, but only reading them tells
    assert build(source, tmp_path / "cache").path == first.path
    monkeypatch.delattr(token_cache, "digest_of")
    assert build(source, tmp_path / "cache").path == first.path


def test_a_source_that_has_just_changed_is_compared_with_its_cache_each_time(source, tmp_path, monkeypatch):
    build(source, tmp_path / "cache")
    monkeypatch.setattr(token_cache, "digest_of", lambda files: "other contents under the same times")
    calls = []
    with pytest.raises(DataError, match="changed while it was read"):
        build(source, tmp_path / "cache", on_progress=lambda *call: calls.append(call))
    assert calls != []


def test_a_text_has_the_same_hash_wherever_it_is(source, tmp_path):
    there = build(source, tmp_path / "cache")
    reversed_source = write_jsonl(tmp_path / "reversed.jsonl", DOCUMENTS[::-1])
    here = build(reversed_source, tmp_path / "cache")
    assert here.text_hashes[::-1].tolist() == there.text_hashes.tolist()


def test_bad_lines_are_remembered_and_checked_against_a_later_limit(source, tmp_path):
    source.write_text(source.read_text() + "oops\noops\n")
    build(source, tmp_path / "cache", max_bad_lines=2)
    assert build(source, tmp_path / "cache", max_bad_lines=2).bad_lines.counts == {"invalid JSON": 2}
    with pytest.raises(DataError, match=rf"more than data\.max_bad_lines=1 .*2 invalid JSON.*{source}:4"):
        build(source, tmp_path / "cache", max_bad_lines=1)


def test_too_many_bad_lines_leave_no_cache(source, tmp_path):
    source.write_text("oops\n")
    with pytest.raises(DataError):
        build(source, tmp_path / "cache", max_bad_lines=0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_text_without_tokens_counts_as_empty(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["word", "..."])
    cache = build(source, tmp_path / "cache", tokenizer=SilentTokenizer())
    assert texts_of(cache) == ["word"]
    assert cache.bad_lines.examples == [f"{source}:2: empty (the tokenizer gives it no token)"]


@pytest.mark.parametrize(
    ("content", "report"),
    [("", "no document to train on$"), ("{}\n", r"no document to train on: .*1 missing field.*a\.jsonl:1")],
)
def test_a_source_without_documents_is_refused(tmp_path, content, report):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=report):
        build(tmp_path / "a.jsonl", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_builder_overtaken_by_another_uses_the_others_cache(source, tmp_path):
    directory = tmp_path / "cache"
    cache = build(source, directory, on_progress=lambda done, total: build(source, directory))
    assert texts_of(cache) == DOCUMENTS
    assert [path.name for path in directory.iterdir()] == [cache.path.name]


def test_concurrent_builders_all_end_with_one_cache(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", [f"document {n} " * 50 for n in range(2000)])
    directory = tmp_path / "cache"
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        caches = list(pool.map(build, [source] * 3, [directory] * 3))
    assert {len(cache.tokens) for cache in caches} == {len(build(source, directory).tokens)}
    assert len(list(directory.iterdir())) == 1


def test_a_builder_removes_no_cache_that_appears_once_it_has_looked(source, tmp_path, monkeypatch):
    directory, look = tmp_path / "cache", token_cache._find

    def look_and_be_overtaken(*entries):
        found = look(*entries)
        if not published:
            monkeypatch.setattr(token_cache, "_find", look)
            build(source, directory)
            published.update(path.stat().st_ino for path in directory.iterdir())
        return found

    published = set()
    monkeypatch.setattr(token_cache, "_find", look_and_be_overtaken)
    assert texts_of(build(source, directory)) == DOCUMENTS
    assert {path.stat().st_ino for path in directory.iterdir()} == published


def interrupt(done, total):
    raise KeyboardInterrupt


def test_an_interrupted_build_leaves_nothing(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "cache", on_progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_remains_of_a_killed_build_are_not_used_as_a_cache(source, tmp_path):
    directory = tmp_path / "cache"
    command = (
        "import os, test_token_cache as t;"
        f"t.build({str(source)!r}, {str(directory)!r}, on_progress=lambda *_: os.kill(os.getpid(), 9))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", command], env=environment, check=False)
    assert killed.returncode == -9
    assert [path.suffix for path in directory.iterdir()] == [".tmp"]
    cache = build(source, directory)
    assert texts_of(cache) == DOCUMENTS
    assert list(directory.iterdir()) == [cache.path], "the remains are removed"


def test_a_build_that_is_under_way_is_left_alone_however_old_its_files_are(source, tmp_path):
    directory = tmp_path / "cache"

    def build_other(done, total):
        (building,) = directory.glob(".tokens-*.tmp")
        for path in (building, *building.iterdir()):
            os.utime(path, (1, 1))
        build(write_jsonl(tmp_path / "other.jsonl", ["other"]), directory)

    assert texts_of(build(source, directory, on_progress=build_other)) == DOCUMENTS
    assert len(list(directory.iterdir())) == 2


def test_the_remains_of_a_build_under_another_kernel_may_belong_to_a_living_one(source, tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "lock_domain", lambda found: "kernel of another machine")
        patch.setattr(token_cache.shutil, "rmtree", lambda *arguments, **options: None)  # as if it were killed
        with pytest.raises(KeyboardInterrupt):
            build(source, directory, on_progress=interrupt)
    (left,) = directory.iterdir()
    build(source, directory)
    assert left.exists()


def test_only_abandoned_builds_are_removed(source, tmp_path):
    names = (".tokens-old.x.tmp", ".tokens-young.x.tmp")
    abandoned, alive = (tmp_path / "cache" / name for name in names)
    for folder in (abandoned, alive):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"xx")
    past = alive.stat().st_mtime - ABANDONED_AFTER_SECONDS - 60
    for path in (abandoned / "tokens.bin", abandoned, alive):
        os.utime(path, (past, past))
    build(source, tmp_path / "cache")
    assert (abandoned.exists(), alive.exists()) == (False, True)


@pytest.mark.parametrize(
    "name",
    ["tokens.bin", "offsets.bin", "text_hashes.bin", "cache.json", "ignored.bin", "is_conversation.bin"],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 2), lambda path: os.truncate(path, 0)])
def test_a_damaged_cache_is_rebuilt(tmp_path, name, damage):
    source = write_jsonl(tmp_path / "data.jsonl", [*DOCUMENTS, *CONVERSATIONS])
    damage(build(source, tmp_path / "cache").path / name)
    assert texts_of(build(source, tmp_path / "cache")) == [*DOCUMENTS, *RENDERED]


def test_conversations_and_texts_share_a_cache_that_knows_which_is_which(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", ["before", CONVERSATIONS[0], "between", CONVERSATIONS[1], "after"])
    for cache in (build(source, tmp_path / "cache"), build(source, tmp_path / "cache")):
        assert texts_of(cache) == ["before", RENDERED[0], "between", RENDERED[1], "after"]
        assert cache.is_conversation.tolist() == [False, True, False, True, False]
        bounds = zip(cache.offsets[:-1], cache.offsets[1:], strict=True)
        counted = [bytes(cache.tokens[a:b][~cache.ignored[a:b]].tolist()).decode() for a, b in list(bounds)[1::2]]
        assert counted == ["4<|eot_id|>", "nein<|eot_id|>"]
        assert not cache.ignored[: cache.offsets[1]].any()
        assert not cache.ignored[cache.offsets[2] : cache.offsets[3]].any()
        assert not cache.ignored[cache.offsets[4] :].any()


def test_texts_are_tokenised_once_for_every_chat_format(source, tmp_path):
    first = build(source, tmp_path / "cache")
    assert build(source, tmp_path / "cache", chat=chat_of("llama2", "all")).path == first.path


@pytest.mark.parametrize("other", [chat_of("llama2"), chat_of(loss_on="all")])
def test_conversations_are_tokenised_again_for_another_template_or_loss(tmp_path, other):
    source = write_jsonl(tmp_path / "data.jsonl", CONVERSATIONS)
    first, second = build(source, tmp_path / "cache"), build(source, tmp_path / "cache", chat=other)
    assert first.path != second.path
    assert first.fingerprint != second.fingerprint
    assert first.text_hashes.tolist() == second.text_hashes.tolist(), "the same conversations are held out"


def test_conversations_left_out_under_one_loss_are_kept_under_another(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", ["text", [{"role": "user", "content": "hello?"}]])
    assert build(source, tmp_path / "cache").bad_lines.counts == {"no assistant turn": 1}
    assert build(source, tmp_path / "cache", chat=chat_of(loss_on="all")).num_documents == 2
