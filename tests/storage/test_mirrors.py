"""Mirrors of checkpoints: what exists on one, whose it is, and what is said about an address that cannot be used."""

import signal
import subprocess
import sys
import tarfile
from dataclasses import asdict, replace
from threading import Event

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from s3_server import SECRET, s3_server
from s3fs import S3FileSystem

from llama_core.chain.downloads import resolve
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, RunDirectoryError, StorageError
from llama_core.records.checkpoints import STATE, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.retention import Retention
from llama_core.storage import copies, folders, stores, upload
from llama_core.storage.copies import RemoteRun, copy_of_run, run_from_mirror
from llama_core.storage.folders import copy_folder
from llama_core.storage.mirror import Mirror, _json
from llama_core.storage.run_records import pack_records, unpack_records
from llama_core.storage.stores import checked_url, store_at
from llama_core.storage.upload import Uploads
from llama_core.training.checkpoint import Checkpointer

URL = "memory://team/mine"


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(stores, "_WAITS_SECONDS", (0.0,))
    monkeypatch.setattr(upload, "SETTLING_SECONDS", 0.0)
    copies.described_checkpoint.cache_clear()
    return MemoryFileSystem()


def run_with(path, *steps):
    run = RunDirectory(path)
    run.create()
    run.config.write_text("model: tiny_llama3_50m\n")
    for step in steps:
        save(run, step)
    return run


def save(run, step, content=b"weights"):
    folder = run.checkpoints / checkpoint_name(step)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "shard.bin").write_bytes(content * step)
    (folder / "config.yaml").write_text(run.config.read_text())
    write_json(folder / STATE, {"step": step, "tokens": 100 * step})
    write_manifest(folder, {})


def copied(run, url=URL, keep=9):
    return Uploads(run, Mirror(url), fingerprint="f" * 16, keep=Retention(keep)).copy_all()


def names(run):
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_copy_has_every_byte_of_the_checkpoint_and_the_records_of_the_run(tmp_path):
    run = run_with(tmp_path / "mine", 1, 2)
    write_json(run.plan, {"tp": 1})
    run.metrics_tail.write_text('{"step": 2}\n')
    assert copied(run) == ["step-00000002", "step-00000001"]
    again = RunDirectory(run_from_mirror(URL, tmp_path / "elsewhere", print))
    assert names(again) == ["step-00000002"]
    newest = "checkpoints/step-00000002"
    assert content(again.path / newest) == content(run.path / newest)
    for record in (run.config, run.plan, run.metrics_tail, run.mirror):
        assert (again.path / record.relative_to(run.path)).read_bytes() == record.read_bytes()


def test_nothing_is_copied_twice(tmp_path):
    run = run_with(tmp_path / "mine", 1, 2)
    copied(run)
    assert copied(run) == []


def test_a_step_that_was_trained_again_replaces_the_one_on_the_mirror(tmp_path):
    run = run_with(tmp_path / "mine", 1, 2)
    copied(run)
    (run.checkpoints / "step-00000002").rename(tmp_path / "old")
    save(run, 2, b"others!")
    assert copied(run) == ["step-00000002"]
    again = RunDirectory(run_from_mirror(URL, tmp_path / "elsewhere", print))
    assert (again.checkpoints / "step-00000002" / "deep" / "shard.bin").read_bytes() == b"others!others!"


def test_an_older_checkpoint_leaves_the_mirror_manifest_first_and_only_when_a_newer_one_is_whole(tmp_path, monkeypatch):
    run = run_with(tmp_path / "mine", 1, 2)
    copied(run)
    save(run, 3)
    calls = []
    write, remove = stores.Store.write, stores.Store.remove

    def away(self, name, content):
        raise OSError("away")

    def noted(self, name, content):
        calls.append(f"write {self.name}/{name}")
        write(self, name, content)

    def removed(self, names):
        calls.extend(f"remove {name}" for name in names)
        remove(self, names)

    monkeypatch.setattr(stores.Store, "remove", removed)
    monkeypatch.setattr(Mirror, "write_claim", lambda self, claim: write(self.store, "run.json", _json(asdict(claim))))
    monkeypatch.setattr(stores.Store, "write", away)
    with pytest.raises(StorageError, match="away"):
        copied(run, keep=1)
    assert calls == []
    assert list(Mirror(URL).contents().whole) == ["step-00000001", "step-00000002"]
    monkeypatch.setattr(stores.Store, "write", noted)
    copied(run, keep=1)
    assert list(Mirror(URL).contents().whole) == ["step-00000003"]
    assert calls[:2] == ["write step-00000003/manifest.json", "remove step-00000001/manifest.json"]
    assert calls.index("remove step-00000002/manifest.json") < calls.index("remove step-00000002/state.json")


def test_a_run_that_was_taken_from_the_mirror_removes_there_what_it_no_longer_keeps(tmp_path):
    copied(run_with(tmp_path / "mine", 1, 2), keep=2)
    again = RunDirectory(run_from_mirror(URL, tmp_path / "elsewhere", print))
    save(again, 3)
    copied(again, keep=2)
    assert list(Mirror(URL).contents().whole) == ["step-00000002", "step-00000003"]


def test_a_directory_that_has_what_the_mirror_has_goes_on_as_it_is_and_else_gets_what_is_newer(tmp_path):
    run = run_with(tmp_path / "runs" / "mine", 1)
    copied(run)
    lines = []
    assert run_from_mirror(URL, tmp_path / "runs", lines.append) == run.path
    assert "goes on from there" in lines[-1]
    elsewhere = RunDirectory(run_from_mirror(URL, tmp_path / "elsewhere", print))
    save(elsewhere, 2)
    copied(elsewhere)
    run_from_mirror(URL, tmp_path / "runs", print)
    assert names(run) == ["step-00000001", "step-00000002"]


def test_a_directory_of_another_run_is_not_written_to(tmp_path):
    copied(run_with(tmp_path / "mine", 1))
    other = run_with(tmp_path / "runs" / "mine", 1)
    before = content(other.path)
    with pytest.raises(RunDirectoryError, match="holds another run than memory://team/mine; move it away"):
        run_from_mirror(URL, tmp_path / "runs", print)
    assert content(other.path) == before


def test_of_two_runs_that_claim_a_mirror_at_the_same_moment_the_first_is_refused(tmp_path, monkeypatch):
    write = Mirror.write_claim

    def both(self, claim):
        write(self, claim)
        write(self, replace(claim, run_id="of the other", job="other"))

    monkeypatch.setattr(Mirror, "write_claim", both)
    with pytest.raises(RunDirectoryError, match="holds the checkpoints of another run"):
        copied(run_with(tmp_path / "mine", 1))
    assert list(Mirror(URL).contents().whole) == []


def test_a_checkpoint_whose_records_are_damaged_is_not_taken(tmp_path, memory):
    copied(run_with(tmp_path / "mine", 1, 2))
    records = memory.cat_file("/team/mine/step-00000002/records.tar")
    memory.pipe_file("/team/mine/step-00000002/records.tar", bytes([records[0] ^ 1]) + records[1:])
    again = RunDirectory(run_from_mirror(URL, tmp_path / "elsewhere", print))
    assert names(again) == ["step-00000001"]


def test_files_that_no_run_has_written_are_left_alone(tmp_path, memory):
    memory.pipe_file("/team/mine/precious.txt", b"mine")
    with pytest.raises(RunDirectoryError, match=r"holds files that no run has written \(precious.txt\)"):
        copied(run_with(tmp_path / "mine", 1))
    assert list(memory.find("/team")) == ["/team/mine/precious.txt"]


def test_a_copy_is_of_the_checkpoint_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copied(run_with(tmp_path / "mine", 1, 2, 3))
    assert names(RunDirectory(copy_of_run(URL, print, 2))) == ["step-00000002"]
    assert names(RunDirectory(copy_of_run(URL, print))) == ["step-00000002", "step-00000003"]
    assert len(names(RunDirectory(copy_of_run(URL, print, every=True)))) == 3
    with pytest.raises(StorageError, match="has no checkpoint of step 7; there are 1, 2, 3"):
        copy_of_run(URL, print, 7)


def test_an_address_brings_its_settings_before_its_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = run_with(tmp_path / "mine")
    run.config.write_text(RunConfig.from_mapping({"model": "tiny_llama3_150m"}).to_yaml())
    save(run, 1)
    copied(run)
    config = RunConfig.from_mapping({"training": {"init_from": URL}})
    assert config.spec.name == "tiny_llama3_150m"
    cached = copies.described_checkpoint(URL)
    assert not (cached / "deep" / "shard.bin").exists()
    asked = resolve(RunConfig.from_mapping({"training": {"objective": "distill", "teacher": URL, "init_from": URL}}))
    assert asked.config.training.teacher == asked.config.training.init_from == str(cached)
    assert [source.missing for source in asked.sources] == [["deep/shard.bin"]] * 2
    assert (copies.fetch_described(URL, print) / "deep" / "shard.bin").read_bytes() == b"weights"


def test_a_checkpoint_that_is_being_copied_stays_on_disk_until_it_has_been(tmp_path, monkeypatch):
    """Else a mirror that is slower than the run would never get a whole checkpoint."""
    run = run_with(tmp_path / "mine", 1)
    begun, go_on = Event(), Event()
    put = stores.Store.put

    def slow(self, file, name):
        begun.set()
        assert go_on.wait(60)
        put(self, file, name)

    monkeypatch.setattr(stores.Store, "put", slow)
    uploads = Uploads(run, Mirror(URL), fingerprint="f" * 16, keep=Retention(1))
    assert uploads.start() is None
    assert begun.wait(60)
    checkpointer = Checkpointer(run, keep=Retention(1))
    checkpointer.on_published, checkpointer.is_held = uploads.wake, uploads.holds
    for step in (2, 3):
        save(run, step)
        checkpointer._newest = checkpoint_name(step)
        checkpointer.on_published()
        checkpointer.remove_others()
    assert names(run) == ["step-00000001", "step-00000003"]
    go_on.set()
    assert uploads.wait(60)
    checkpointer.remove_others()
    uploads.stop()
    assert names(run) == list(Mirror(URL).contents().whole) == ["step-00000003"]


@pytest.mark.parametrize(
    "name",
    [
        "../outside.json",
        "/outside.json",
        "logs/submit.sh",
        "metrics/deep/part-1.parquet",
        "evaluations/jobs/../step-1.parquet",
    ],
)
def test_an_archive_of_records_writes_nothing_but_records(tmp_path, name):
    with tarfile.open(tmp_path / "records.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        archive.addfile(member)
    run = run_with(tmp_path / "deep" / "mine")
    before = content(tmp_path)
    with pytest.raises(StorageError, match="which is no record of a run"):
        unpack_records(tmp_path / "records.tar", run)
    assert content(tmp_path) == before


def test_a_link_in_an_archive_of_records_is_refused(tmp_path):
    with tarfile.open(tmp_path / "records.tar", "w") as archive:
        member = tarfile.TarInfo("config.yaml")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(StorageError, match="which is no record of a run"):
        unpack_records(tmp_path / "records.tar", run_with(tmp_path / "mine"))


def test_records_come_back_as_they_were(tmp_path):
    run = run_with(tmp_path / "mine")
    (run.metrics / "part-00000.parquet").write_bytes(b"one")
    (run.evaluations / "jobs").mkdir(parents=True)
    (run.evaluations / "step-00000001-ab.parquet").write_bytes(b"scores")
    (run.evaluations / "jobs" / "step-00000001.ended.json").write_bytes(b"{}")
    expected = content(run.path)
    pack_records(run, tmp_path / "records.tar")
    (run.metrics / "part-00001.parquet").write_bytes(b"later")
    unpack_records(tmp_path / "records.tar", run)
    assert content(run.path) == expected
    other = run_with(tmp_path / "other")
    unpack_records(tmp_path / "records.tar", other)
    assert content(other.path) == expected


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "ftp://host/folder",
            r"'ftp://host/folder' is no address of an object store; use s3://, gs://, az://, file://",
        ),
        ("s3:///prefix", "names no bucket; write s3://BUCKET/PREFIX"),
        (f"s3://AKIA:{SECRET}@bucket/prefix", r"s3://\*\*\*: an address with credentials"),
        ("s3://AKIA:abc/d@bucket/prefix", r"s3://\*\*\*: an address with credentials"),
        ("s3://bucket/prefix?versionId=1", "an address with credentials or a query"),
        ("s3://bucket/../other", r"has no \. or \.\."),
        ("runs/mine", "is no address of an object store"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line_without_its_secrets(url, said):
    with pytest.raises(StorageError, match=said) as caught:
        checked_url(url)
    with pytest.raises(ConfigError, match=rf"training.checkpoint_mirror: .*{said}") as refused:
        RunConfig.from_mapping({"training": {"checkpoint_mirror": url}})
    for error in (caught, refused):
        assert SECRET not in str(error.value)
        assert "\n" not in str(error.value)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(StorageError, match=r"s3:// needs the package 's3fs'; pip install"):
        store_at("s3://bucket/other-options")


def test_an_address_without_a_run_says_so():
    with pytest.raises(StorageError, match=r"memory://team/none holds no run; name PREFIX/RUN_NAME"):
        RemoteRun("memory://team/none", print)


def test_a_folder_is_copied_with_its_description_last_and_never_over_files(tmp_path, memory, monkeypatch):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    order = []
    put = stores.Store.put
    monkeypatch.setattr(stores.Store, "put", lambda self, file, name: order.append(name) or put(self, file, name))
    copy_folder(tmp_path, "memory://exports/mine")
    assert order == ["model.safetensors", "tokenizer.json", "config.json"]
    assert memory.cat_file("/exports/mine/config.json") == b"config.json"
    with pytest.raises(StorageError, match=r"holds files \(config.json\); choose another address"):
        folders.refuse_files_at("memory://exports/mine")


@pytest.fixture
def s3(monkeypatch):
    environment = {}
    with s3_server(environment) as server:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_what_a_bucket_answers_is_one_line(s3, tmp_path, monkeypatch):
    run = run_with(tmp_path / "mine", 1)
    with pytest.raises(StorageError, match=r"s3://absent: there is no such bucket; make the bucket, or correct"):
        copied(run, "s3://absent/mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError, match=r"give credentials that allow it"):
        copied(run, "s3://bucket/mine")


@pytest.mark.wide
def test_an_endpoint_that_is_away_is_one_line(s3, tmp_path):
    s3.stop()
    with pytest.raises(StorageError, match=r"s3://bucket/mine.*check the network and the store's endpoint") as away:
        copied(run_with(tmp_path / "mine", 1), "s3://bucket/mine")
    s3.start()
    assert "\n" not in str(away.value)


KILLED = """
import sys
from pathlib import Path
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import Retention
from llama_core.storage import stores
from llama_core.storage.mirror import Mirror, _json
from llama_core.storage.upload import Uploads
from llama_core.training.checkpoint import Checkpointer

put = stores.Store.put

def slow(self, file, name):
    put(self, file, name)
    if self.url.endswith("2") and "shard" in name:
        print("halfway", flush=True)
        sys.stdin.read()

stores.Store.put = slow
Uploads(RunDirectory(Path(sys.argv[1])), Mirror(sys.argv[2]), fingerprint="f", keep=Retention(9)).copy_all()
"""


@pytest.mark.wide
def test_a_process_killed_while_it_copies_leaves_the_earlier_checkpoints_on_the_mirror(s3, tmp_path):
    run = run_with(tmp_path / "mine", 1)
    url = f"{s3.url}/mine"
    copied(run, url)
    save(run, 2)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run.path), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(signal.SIGKILL)
    assert any("/step-00000002/" in name for name in s3.files())
    lines = []
    again = RunDirectory(run_from_mirror(url, tmp_path / "elsewhere", lines.append))
    assert names(again) == ["step-00000001"]
    assert "step-00000002 is not whole (it has no manifest: its upload did not end); taking the one before" in lines[0]
    assert copied(run, url) == ["step-00000002"]
    assert list(Mirror(url).contents().whole) == ["step-00000001", "step-00000002"]
