"""Sources in object stores: the files of a bucket are those of a folder, and what cannot be read is told in a line."""

import gzip
import json
import logging
import pickle
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from threading import Thread
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from tiers import nightly

from llama_core.chain.paths import data_from_anywhere
from llama_core.chain.tokenize import tokenize
from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig, RunConfig
from llama_core.data.check import check_data
from llama_core.data.datasets import load_datasets
from llama_core.data.files import remote
from llama_core.data.find import find_files
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError

TEXTS = [f"text number {number}, " * (1 + number % 4) for number in range(40)]
EXPECTED = sorted(ids.tolist() for ids in load_tokenizer("bytes").encode_documents(TEXTS))
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = pa.table({"text": TEXTS})


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(remote, "_WAITS_SECONDS", (0.0, 0.0))
    return MemoryFileSystem()


def parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


def arrow():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as stream:
        stream.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def feather_file():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, TABLE.schema) as file:
        file.write_table(TABLE)
    return sink.getvalue().to_pybytes()


FILES = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "a.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "a.parquet": parquet(),
    "a.arrow": arrow(),
    "a.feather.arrow": feather_file(),
}


def data_of(folder, source, **settings):
    return DataConfig(source=source, cache_dir=str(folder / "cache"), validation_fraction=0, **settings)


def documents_of(folder, source):
    (rows,) = load_datasets(data_of(folder, source), model_spec("tiny_llama3_50m"), seq_len=16).train.sources
    shards = [part.shard for part in rows.selection.parts]
    return sorted(shard.tokens[begin:end].tolist() for shard in shards for begin, end in pairwise(shard.offsets))


@pytest.mark.parametrize("path", ["memory://bucket/data", "memory://bucket/data/*", "memory://bucket/d*/a.*"])
@pytest.mark.parametrize("name", FILES)
def test_documents_of_a_bucket_are_those_of_its_files(name, path, bucket, tmp_path):
    bucket.pipe(f"/bucket/data/{name}", FILES[name])
    bucket.pipe("/bucket/data/.hidden/b.jsonl", b"{}")
    assert [str(file.path) for file in find_files(path).files] == [f"memory://bucket/data/{name}"]
    assert documents_of(tmp_path, path) == documents_of(tmp_path, f"memory://bucket/data/{name}") == EXPECTED
    assert "40 texts" in check_data(data_of(tmp_path, path), model_spec("tiny_llama3_50m")).summary


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(bucket, tmp_path, monkeypatch):
    bucket.pipe("/bucket/a.jsonl", LINES)
    before = documents_of(tmp_path, "memory://bucket")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "open", None)
        assert documents_of(tmp_path, "memory://bucket") == before
    bucket.pipe("/bucket/a.jsonl", LINES.replace(b"number", b"figure"))
    assert documents_of(tmp_path, "memory://bucket") != before


def test_a_file_without_time_and_version_is_compared_again(bucket, tmp_path, monkeypatch):
    bucket.pipe("/bucket/a.jsonl", LINES)
    info = {"name": "/bucket/a.jsonl", "size": len(LINES), "type": "file"}
    monkeypatch.setattr(MemoryFileSystem, "info", lambda store, path, **settings: info)
    before = documents_of(tmp_path, "memory://bucket/a.jsonl")
    bucket.pipe("/bucket/a.jsonl", LINES.replace(b"number", b"figure"))
    assert documents_of(tmp_path, "memory://bucket/a.jsonl") != before == EXPECTED


def serve(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize("name", [name if name in {"a.jsonl.gz", "a.parquet"} else nightly(name) for name in FILES])
def test_a_file_of_a_web_server_is_read_here_and_by_other_processes(name, tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / name).write_bytes(FILES[name])
    server = serve(tmp_path / "served")
    source = f"http://127.0.0.1:{server.server_port}/{name}"
    try:
        config = RunConfig(model="tiny_llama3_50m", data=data_of(tmp_path, source), training={"seq_len": 16})
        assert tokenize(config, 1).num_new_shards == 1
        assert documents_of(tmp_path, source) == EXPECTED
        with pytest.raises(DataError, match="does not exist"):
            find_files(f"{source}.jsonl")
    finally:
        server.shutdown()
        server.server_close()


def test_a_file_elsewhere_reaches_other_processes_as_it_is(bucket):
    bucket.pipe("/bucket/a.jsonl", LINES)
    [file] = find_files("memory://bucket").files
    assert pickle.loads(pickle.dumps(file)) == file
    assert str(pickle.loads(pickle.dumps(file)).path) == "memory://bucket/a.jsonl"


def test_addresses_stay_as_they_are_wherever_a_run_starts():
    data = DataConfig(source=["s3://bucket/a", "hf://datasets/org/name"])
    assert data_from_anywhere(data).source == data.source


def breaking(monkeypatch, num_failures):
    failures = iter(range(num_failures))
    real = MemoryFileSystem.open

    def fail_first(*given, **settings):
        if next(failures, None) is not None:
            raise ConnectionResetError("peer left")
        return real(*given, **settings)

    monkeypatch.setattr(MemoryFileSystem, "open", fail_first)


def test_a_broken_connection_is_tried_again(bucket, tmp_path, monkeypatch, caplog):
    bucket.pipe("/bucket/a.jsonl", LINES)
    breaking(monkeypatch, 2)
    with caplog.at_level(logging.WARNING):
        assert documents_of(tmp_path, "memory://bucket") == EXPECTED
    assert [record.getMessage() for record in caplog.records if "trying" in record.getMessage()] == [
        "reading memory://bucket/a.jsonl failed (ConnectionResetError: peer left); trying again in 0 s"
    ] * 2


@pytest.mark.parametrize("name", FILES)
def test_a_file_goes_on_where_its_connection_broke(name, bucket, tmp_path, monkeypatch):
    bucket.pipe(f"/bucket/data/{name}", FILES[name])
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 64)
    real = MemoryFile.read
    calls = count()

    def fail_every_second(file, *given):
        if next(calls) % 2 == 1:
            raise ConnectionResetError("peer left")
        return real(file, *given)

    monkeypatch.setattr(MemoryFile, "read", fail_every_second)
    assert documents_of(tmp_path, "memory://bucket") == EXPECTED
    assert next(calls) >= 2


@pytest.mark.parametrize("name", FILES)
def test_a_connection_that_stays_broken_is_told_in_a_line(name, bucket, tmp_path, monkeypatch):
    bucket.pipe(f"/bucket/{name}", FILES[name])
    breaking(monkeypatch, 99)
    with pytest.raises(DataError) as caught:
        documents_of(tmp_path, "memory://bucket")
    assert str(caught.value) == f"cannot read memory://bucket/{name}: ConnectionResetError: peer left"


REFUSED = {
    "missing": ("memory://nowhere", "data source 'memory://nowhere' does not exist"),
    "another scheme": ("github://org:repo@/a.jsonl", "is no address that is read; use s3://, gs://"),
    "chained": ("zip://a.jsonl::https://host/a.zip", "is no address that is read; use s3://, gs://"),
    "password": ("https://me:hunter2@host/a.jsonl", "data source https://***: an address with credentials"),
    "query": ("https://host/a.jsonl?signature=hunter2", "data source https://***: an address with credentials"),
    "package": ("s3://bucket/a.jsonl", "s3:// needs s3fs; pip install s3fs"),
    "tokens": ("memory://bucket/a.npy", "is of tokens that are read from local disks only; copy it to this machine"),
}


@pytest.mark.parametrize(("source", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_a_line(source, told, bucket, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    bucket.pipe("/bucket/a.npy", b"abcd")
    for read in (find_files, partial(documents_of, tmp_path)):
        with pytest.raises(DataError) as caught:
            read(source)
        assert told in str(caught.value)
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)


class AnsweredError(Exception):
    """An error with what a client of HTTP hangs on its own."""

    def __init__(self, **answer):
        super().__init__("sorry")
        self.__dict__ |= answer


FORBIDDEN = {
    "s3fs": PermissionError("403"),
    "aiohttp": AnsweredError(status=403),
    "gcsfs": OSError("Forbidden: https://storage.googleapis.com/bucket"),
    "huggingface_hub": AnsweredError(response=SimpleNamespace(status_code=401)),
}


@pytest.mark.parametrize("error", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_forbidden_file_is_refused_at_once_in_a_line(error, bucket, monkeypatch):
    def forbid(*given, **settings):
        raise error

    monkeypatch.setattr(MemoryFileSystem, "info", forbid)
    monkeypatch.setattr(time, "sleep", None)  # another attempt would fail here
    with pytest.raises(DataError, match=r"^cannot read memory://bucket: your credentials may not read it$"):
        find_files("memory://bucket")
