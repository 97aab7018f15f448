import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from corpora import chat_of, texts_in, write_jsonl, write_texts

from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.data.selection import everything
from llama_core.data.shards import grouping, token_cache
from llama_core.data.shards import store as shard_store
from llama_core.data.shards.store import ABANDONED_AFTER_SECONDS, Recipe
from llama_core.data.shards.token_cache import cached_tokens
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import DataError

DOCUMENTS = ["drei, vier", "one", "two\n"]
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
    recipe = Recipe(FieldNames(), tokenizer or ByteTokenizer(), chat or chat_of(), max_bad_lines)
    return cached_tokens(find_files(str(source)).files, recipe, Path(directory), on_progress=on_progress)


def texts_of(cache):
    return sorted(texts_in(everything(cache)))


def shard_of(cache):
    (only,) = cache.shards
    return only


def test_a_cache_holds_the_documents_between_bos_and_eos(source, tmp_path):
    cache = build(source, tmp_path / "cache")
    shard = shard_of(cache)
    assert texts_of(cache) == DOCUMENTS
    assert shard.tokens[shard.offsets[:-1]].tolist() == [256] * 3
    assert shard.tokens[shard.offsets[1:] - 1].tolist() == [257] * 3


def test_the_documents_of_a_shard_stand_in_the_order_of_their_hashes(tmp_path):
    texts = [f"document {number}" for number in range(500)]
    shard = shard_of(build(write_jsonl(tmp_path / "data.jsonl", texts), tmp_path / "cache"))
    hashes = shard.text_hashes.tolist()
    assert hashes == sorted(hashes)
    assert sum(one < 2**63 for one in hashes) == pytest.approx(250, abs=60)


@pytest.mark.parametrize(("tokenizer", "dtype"), [(ByteTokenizer(), np.uint16), (WideTokenizer(), np.uint32)])
def test_tokens_take_no_more_bytes_than_the_vocabulary_needs(source, tmp_path, tokenizer, dtype):
    cache = build(source, tmp_path / "cache", tokenizer=tokenizer)
    assert shard_of(cache).tokens.dtype == dtype
    assert shard_of(cache).tokens[-1] == tokenizer.eos_id


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
    assert build(source, tmp_path / "cache", on_progress=lambda *call: calls.append(call)).digest == first.digest
    assert calls == []


def test_a_source_is_compared_with_its_cache_only_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_store, "SETTLED_AFTER_SECONDS", -60)
    first = build(source, tmp_path / "cache")
    source.chmod(0o600)  # contents are the same, but only reading them tells
    assert build(source, tmp_path / "cache").digest == first.digest
    monkeypatch.delattr(shard_store, "digest_of")
    assert build(source, tmp_path / "cache").digest == first.digest


def test_a_source_that_has_just_changed_is_compared_with_its_cache_each_time(source, tmp_path, monkeypatch):
    build(source, tmp_path / "cache")
    monkeypatch.setattr(shard_store, "digest_of", lambda files: "other contents under the same times")
    calls = []
    build(source, tmp_path / "cache", on_progress=lambda *call: calls.append(call))
    assert calls != []


def test_files_that_have_moved_keep_their_shards_and_their_bad_lines_are_named_where_they_are_now(source, tmp_path):
    source.write_text(source.read_text() + "oops\n")
    first = build(source, tmp_path / "cache")
    moved = source.rename(tmp_path / "moved.jsonl")
    calls = []
    second = build(moved, tmp_path / "cache", on_progress=lambda *call: calls.append(call))
    assert calls == []
    assert shard_of(second).path == shard_of(first).path
    assert str(second.bad_lines.examples[0]).startswith(f"{moved}:4: invalid JSON")


def test_a_text_has_the_same_hash_wherever_it_is(source, tmp_path):
    there = shard_of(build(source, tmp_path / "cache"))
    here = shard_of(build(write_jsonl(tmp_path / "reversed.jsonl", DOCUMENTS[::-1]), tmp_path / "cache"))
    assert here.text_hashes.tolist() == there.text_hashes.tolist()
    assert here.path != there.path
    assert here.facts.digest == there.facts.digest, "the tokens are the same"


def test_files_of_other_kinds_with_the_same_bytes_have_shards_of_their_own(tmp_path):
    content = '{"text": "one"}\n'
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_text(content)
    assert texts_of(build(tmp_path / "a.jsonl", tmp_path / "cache")) == ["one"]
    assert texts_of(build(tmp_path / "a.txt", tmp_path / "cache")) == [content]


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
    assert str(*cache.bad_lines.examples) == f"{source}:2: empty (the tokenizer gives it no token)"


@pytest.mark.parametrize(
    ("content", "report"),
    [("", "no document to train on$"), ("{}\n", r"no document to train on: .*1 missing field.*a\.jsonl:1")],
)
def test_a_source_without_documents_is_refused(tmp_path, content, report):
    (tmp_path / "a.jsonl").write_text(content)
    for _ in range(2):
        with pytest.raises(DataError, match=report):
            build(tmp_path / "a.jsonl", tmp_path / "cache")


def test_a_builder_overtaken_by_another_uses_the_others_cache(source, tmp_path):
    directory = tmp_path / "cache"
    cache = build(source, directory, on_progress=lambda done, total: build(source, directory))
    assert texts_of(cache) == DOCUMENTS
    assert [path.name for path in directory.iterdir()] == [shard_of(cache).path.name]


def test_concurrent_builders_all_end_with_one_cache(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", [f"document {n} " * 50 for n in range(2000)])
    directory = tmp_path / "cache"
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        caches = list(pool.map(build, [source] * 3, [directory] * 3))
    assert {cache.digest for cache in caches} == {build(source, directory).digest}
    assert len(list(directory.glob("shard-*"))) == 1


def test_a_builder_removes_no_cache_that_appears_once_it_has_looked(source, tmp_path, monkeypatch):
    directory, look = tmp_path / "cache", token_cache.find_shards

    def look_and_be_overtaken(*entries):
        found = look(*entries)
        if not published:
            monkeypatch.setattr(token_cache, "find_shards", look)
            build(source, directory)
            published.update(path.stat().st_ino for path in directory.iterdir())
        return found

    published = set()
    monkeypatch.setattr(token_cache, "find_shards", look_and_be_overtaken)
    assert texts_of(build(source, directory)) == DOCUMENTS
    assert {path.stat().st_ino for path in directory.iterdir()} == published


def interrupt(done, total):
    raise KeyboardInterrupt


def test_an_interrupted_build_leaves_nothing(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "cache", on_progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


DIE = "die = lambda *_, **__: os.kill(os.getpid(), 9)"
KILLED_WHILE = {
    "it takes its lock": "t.shard_store.fcntl.flock = die",
    "it makes its directory": "t.shard_store.Path.mkdir = lambda path, **options: options or die()",
    "it reads": "progress = die",
    "it removes its directory": "progress = t.interrupt; t.shard_store.shutil.rmtree = die",
}


@pytest.mark.parametrize("killed", KILLED_WHILE.values(), ids=KILLED_WHILE)
def test_the_remains_of_a_killed_build_are_not_used_as_a_cache(source, tmp_path, killed):
    directory = tmp_path / "cache"
    directory.mkdir()
    build_once = f"t.build({str(source)!r}, {str(directory)!r}, on_progress=progress)"
    command = f"import os, test_token_cache as t; progress = None; {DIE}; {killed}; {build_once}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", command], env=environment, check=False)
    assert ended.returncode == -9
    assert [path for path in directory.iterdir() if path.name.startswith(".shard-")]
    cache = build(source, directory)
    assert texts_of(cache) == DOCUMENTS
    assert not list(directory.glob(".shard-*"))


def test_a_build_that_loses_its_lock_before_it_holds_it_takes_another(source, tmp_path, monkeypatch):
    lock, lost = shard_store.fcntl.flock, []

    def lock_too_late(file, how):
        if not lost:
            lost.append(Path(file.name))
            shard_store.remove_abandoned(tmp_path / "cache")
        lock(file, how)

    monkeypatch.setattr(shard_store.fcntl, "flock", lock_too_late)
    assert texts_of(build(source, tmp_path / "cache")) == DOCUMENTS
    assert not lost[0].exists()


def test_a_build_that_is_under_way_is_left_alone_however_old_its_files_are(source, tmp_path):
    directory = tmp_path / "cache"

    def build_other(done, total):
        (building,) = directory.glob(".shard-*.tmp")
        for path in (building, *building.iterdir()):
            os.utime(path, (1, 1))
        build(write_jsonl(tmp_path / "other.jsonl", ["other"]), directory)

    assert texts_of(build(source, directory, on_progress=build_other)) == DOCUMENTS
    assert len(list(directory.glob("shard-*"))) == 2


def test_the_remains_of_a_build_under_another_kernel_may_belong_to_a_living_one(source, tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_store, "lock_domain", lambda found: "kernel of another machine")
        patch.setattr(shard_store.shutil, "rmtree", lambda *arguments, **options: None)  # as if it were killed
        with pytest.raises(KeyboardInterrupt):
            build(source, directory, on_progress=interrupt)
    (left,) = directory.iterdir()
    build(source, directory)
    assert left.exists()


def test_only_abandoned_builds_are_removed(source, tmp_path):
    names = (".shard-old.x.tmp", ".shard-young.x.tmp")
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
    ["tokens.bin", "offsets.bin", "text_hashes.bin", "shard.json", "ignored.bin", "is_conversation.bin"],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 2), lambda path: os.truncate(path, 0)])
def test_a_damaged_shard_is_rebuilt(tmp_path, name, damage):
    source = write_jsonl(tmp_path / "data.jsonl", [*DOCUMENTS, *CONVERSATIONS])
    damage(shard_of(build(source, tmp_path / "cache")).path / name)
    assert texts_of(build(source, tmp_path / "cache")) == sorted([*DOCUMENTS, *RENDERED])


def test_a_shard_that_is_damaged_while_it_is_used_is_one_line_and_built_again_at_the_next_start(source, tmp_path):
    shard = shard_of(build(source, tmp_path / "cache"))
    os.truncate(shard.path / "tokens.bin", 2)
    with pytest.raises(DataError, match=rf"shard {shard.path} .* is damaged \(tokens.bin holds 1 .*\); start again"):
        _ = shard.tokens
    assert texts_of(build(source, tmp_path / "cache")) == DOCUMENTS


def test_conversations_and_texts_share_a_shard_that_knows_which_is_which(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", ["before", CONVERSATIONS[0], "between", CONVERSATIONS[1], "after"])
    for cache in (build(source, tmp_path / "cache"), build(source, tmp_path / "cache")):
        shard = shard_of(cache)
        texts = texts_in(everything(cache))
        assert sorted(texts) == sorted(["before", RENDERED[0], "between", RENDERED[1], "after"])
        assert shard.is_conversation.tolist() == [text in RENDERED for text in texts]
        counted = {}
        for text, begin, end in zip(texts, shard.offsets[:-1], shard.offsets[1:], strict=True):
            counted[text] = bytes(shard.tokens[begin:end][~shard.ignored[begin:end]].astype(np.uint8).tolist())
        assert [counted[text] for text in RENDERED] == [b"4<|eot_id|>", b"nein<|eot_id|>"]
        assert all(len(counted[text]) == len(text) + 2 for text in ("before", "between", "after"))


def test_texts_are_tokenised_once_for_every_chat_format(source, tmp_path):
    first = build(source, tmp_path / "cache")
    assert build(source, tmp_path / "cache", chat=chat_of("llama2", "all")).digest == first.digest
    assert len(list((tmp_path / "cache").glob("shard-*"))) == 1


@pytest.mark.parametrize("other", [chat_of("llama2"), chat_of(loss_on="all")])
def test_conversations_are_tokenised_again_for_another_template_or_loss(tmp_path, other):
    source = write_jsonl(tmp_path / "data.jsonl", CONVERSATIONS)
    first, second = (shard_of(build(source, tmp_path / "cache", chat=chat)) for chat in (chat_of(), other))
    assert first.path != second.path
    assert first.facts.digest != second.facts.digest
    assert first.text_hashes.tolist() == second.text_hashes.tolist(), "the same conversations are held out"


def test_conversations_left_out_under_one_loss_are_kept_under_another(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", ["text", [{"role": "user", "content": "hello?"}]])
    assert build(source, tmp_path / "cache").bad_lines.counts == {"no assistant turn": 1}
    assert build(source, tmp_path / "cache", chat=chat_of(loss_on="all")).num_documents == 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of five files, each of which is a shard."""
    monkeypatch.setattr(grouping, "ALONE_BYTES", 1)
    (tmp_path / "data").mkdir()
    for number in range(5):
        write_jsonl(tmp_path / "data" / f"{number}.jsonl", [f"text {number} of {name}" for name in "abc"])
    return tmp_path / "data"


def state(directory):
    """Return what would change if a shard were touched."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.glob("shard-*/*.bin")}


def test_another_file_adds_a_shard_and_rebuilds_no_other(folder, tmp_path):
    before = build(folder, tmp_path / "cache")
    shards = state(tmp_path / "cache")
    write_jsonl(folder / "2b.jsonl", ["a new text"])
    calls = []
    after = build(folder, tmp_path / "cache", on_progress=lambda *call: calls.append(call))
    assert calls[-1] == ((folder / "2b.jsonl").stat().st_size,) * 2, "nothing else is read"
    assert state(tmp_path / "cache").items() > shards.items()
    assert len(after.shards) == len(before.shards) + 1


def test_a_killed_build_goes_on_with_the_missing_shards_only(folder, tmp_path):
    directory = tmp_path / "cache"
    command = (
        "import os, test_token_cache as t; t.grouping.ALONE_BYTES = 1;"
        f"kill = lambda done, total: done > total / 2 and os.kill(os.getpid(), 9);"
        f"t.build({str(folder)!r}, {str(directory)!r}, on_progress=kill)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", command], env=environment, check=False).returncode == -9
    shards = state(directory)
    assert 0 < len(list(directory.glob("shard-*"))) < 5
    calls = []
    cache = build(folder, directory, on_progress=lambda *call: calls.append(call))
    assert calls[-1][1] < sum(path.stat().st_size for path in folder.iterdir())
    assert state(directory).items() > shards.items()
    assert cache.digest == build(folder, tmp_path / "other").digest


def test_the_rows_are_the_same_whatever_the_order_and_the_place_of_the_files(folder, tmp_path):
    expected = build(folder, tmp_path / "cache")
    for number in (3, 0):
        build(folder / f"{number}.jsonl", tmp_path / "other")
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"{(number + 2) % 5} moved.jsonl")
    again = build(folder, tmp_path / "other")
    assert [shard.facts for shard in again.shards] == [shard.facts for shard in expected.shards]


def test_a_source_with_one_missing_shard_builds_that_one(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_store, "SETTLED_AFTER_SECONDS", -60)
    cache = build(folder, tmp_path / "cache")
    kept = {path: time for path, time in state(tmp_path / "cache").items() if path.parent != cache.shards[1].path}
    shard_store.remove_entry(cache.shards[1].path)
    assert build(folder, tmp_path / "cache").digest == cache.digest
    assert kept.items() < state(tmp_path / "cache").items()


def test_a_start_reads_the_manifest_and_no_shard(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_store, "SETTLED_AFTER_SECONDS", -60)
    cache = build(folder, tmp_path / "cache")
    monkeypatch.delattr(token_cache, "find_shards")
    again = build(folder, tmp_path / "cache")
    assert again.digest == cache.digest
    assert again.num_documents == 15


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema_version": 1, "shards": 3}'])
def test_a_damaged_manifest_is_written_again(folder, tmp_path, monkeypatch, content):
    monkeypatch.setattr(shard_store, "SETTLED_AFTER_SECONDS", -60)
    digest = build(folder, tmp_path / "cache").digest
    (manifest,) = (tmp_path / "cache").glob("source-*.json")
    manifest.write_text(content)
    assert build(folder, tmp_path / "cache").digest == digest
    assert manifest.read_text() != content


def test_bad_lines_are_limited_over_all_shards(folder, tmp_path):
    for path in folder.iterdir():
        path.write_text(path.read_text() + "oops\n")
    assert build(folder, tmp_path / "cache", max_bad_lines=5).bad_lines.counts == {"invalid JSON": 5}
    with pytest.raises(DataError, match=r"more than data\.max_bad_lines=4 .*5 invalid JSON"):
        build(folder, tmp_path / "cache", max_bad_lines=4)
