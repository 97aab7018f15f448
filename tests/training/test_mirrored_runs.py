"""Runs whose checkpoints are mirrored to a real S3 server, and runs that go on from there on an empty disk."""

import logging
import shutil
from pathlib import Path

import pytest
from s3_server import BUCKET, SECRET, s3_server
from test_trainer import assert_equal, losses, trainer, weights
from waiting import eventually

from llama_core.errors import RunDirectoryError, StoppedError
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.storage import upload
from llama_core.storage.copies import run_from_mirror
from llama_core.storage.mirror import Mirror


@pytest.fixture
def s3(monkeypatch, tmp_path):
    environment = {}
    with s3_server(environment) as server:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(upload, "SETTLING_SECONDS", 0.0)
        monkeypatch.setattr(upload, "FIRST_WAIT_SECONDS", 0.05)
        monkeypatch.setattr(upload, "LONGEST_WAIT_SECONDS", 0.1)
        yield server


def run_at(path):
    run = RunDirectory(path)
    run.create()
    return run


def mirrored(run, s3, steps=6, **training):
    return trainer(run, steps=steps, **({"checkpoint_every": 2, "checkpoint_mirror": s3.url} | training))


def stop_after(one, step):
    one.stop.should_stop = lambda: one.step == step
    with pytest.raises(StoppedError):
        one.fit()


def whole(s3, name="mine"):
    return list(Mirror(f"{s3.url}/{name}").contents().whole)


def steps_here(run):
    return [path.name for path in list_checkpoints(run)]


def test_a_run_goes_on_from_its_mirror_on_an_empty_disk_bit_for_bit(s3, tmp_path):
    undisturbed = trainer(run_at(tmp_path / "whole"), steps=6, checkpoint_every=2)
    undisturbed.fit()
    run = run_at(tmp_path / "mine")
    stop_after(mirrored(run, s3), 5)
    shutil.rmtree(run.path)

    again = RunDirectory(run_from_mirror(f"{s3.url}/mine", tmp_path / "elsewhere", lambda line: None))
    second = mirrored(again, s3)
    assert second.step == 5
    second.fit()
    assert losses(again) == losses(RunDirectory(tmp_path / "whole"))
    assert_equal(weights(second), weights(undisturbed))
    assert whole(s3) == ["step-00000005", "step-00000006"]


@pytest.mark.wide
def test_the_mirror_keeps_what_the_run_keeps(s3, tmp_path):
    run = run_at(tmp_path / "mine")
    mirrored(run, s3, steps=6, checkpoint_every=1).fit()
    assert whole(s3) == steps_here(run) == ["step-00000005", "step-00000006"]
    left = {name.split("/")[2] for name in s3.files() if "/step-" in name}
    assert left == {"step-00000005", "step-00000006"}


def test_no_credential_is_in_a_file_of_the_run_or_of_the_mirror(s3, tmp_path, caplog):
    run = run_at(tmp_path / "mine")
    with caplog.at_level(logging.DEBUG, logger="llama_core"):
        mirrored(run, s3, steps=2).fit()
    files = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert files
    assert not any(SECRET.encode() in content for content in (*files, *s3.files().values()))
    assert SECRET not in caplog.text


def test_a_second_run_of_the_same_name_is_refused_before_its_first_step(s3, tmp_path):
    mirrored(run_at(tmp_path / "one" / "mine"), s3, steps=2).fit()
    before = s3.files()
    other = mirrored(run_at(tmp_path / "two" / "mine"), s3, steps=2)
    with pytest.raises(RunDirectoryError, match=r"s3://bucket/runs/mine holds the checkpoints of another run"):
        other.fit()
    assert other.step == 0
    assert s3.files() == before


@pytest.mark.wide
def test_a_run_does_not_wait_for_a_bucket_that_is_away_and_its_checkpoints_arrive_when_it_is_back(s3, tmp_path, caplog):
    run = run_at(tmp_path / "mine")
    one = mirrored(run, s3, steps=4, checkpoint_every=1)
    come_back = one.saves.end

    def back(error):
        come_back(error)
        eventually(lambda: "trying again" in caplog.text)
        assert one.step == 4  # all steps were taken without the bucket
        s3.start()

    one.saves.end = back
    s3.stop()
    one.fit()
    assert "does not answer" in caplog.text
    assert whole(s3) == steps_here(run) == ["step-00000003", "step-00000004"]


@pytest.mark.wide
def test_a_store_that_throttles_is_asked_again(s3, tmp_path):
    run = run_at(tmp_path / "mine")
    one = mirrored(run, s3, steps=2, checkpoint_every=1)
    throttle = one.saves.begin

    def begin():
        throttle()
        s3.refusals.extend(["SlowDown"] * 20)

    one.saves.begin = begin
    one.fit()
    assert s3.num_refused == 20
    assert whole(s3) == ["step-00000001", "step-00000002"]


@pytest.mark.wide
def test_what_an_ended_run_could_not_copy_is_copied_when_it_is_resumed(s3, tmp_path, monkeypatch, caplog):
    run = run_at(tmp_path / "mine")
    stop_after(mirrored(run, s3), 2)
    put = upload.Uploads._copy
    monkeypatch.setattr(upload.Uploads, "_copy", lambda self, path: (_ for _ in ()).throw(OSError("away")))
    one = mirrored(run, s3)
    one.parts[-4]._patience_s = 0.2
    stop_after(one, 4)
    assert whole(s3) == ["step-00000002"]
    assert "lacks the last checkpoint; it is copied by: training-infra train --run-dir" in caplog.text
    monkeypatch.setattr(upload.Uploads, "_copy", put)
    mirrored(run, s3, steps=4).fit()
    assert whole(s3) == ["step-00000002", "step-00000004"]


def truncated(s3, name):
    system = s3.system()
    content = system.cat_file(name)
    system.pipe_file(name, content[: len(content) // 2])


def flipped(s3, name):
    system = s3.system()
    content = bytearray(system.cat_file(name))
    content[len(content) // 2] ^= 1
    system.pipe_file(name, bytes(content))


def without_manifest(s3, name):
    s3.system().rm_file(str(Path(name).parent / "manifest.json"))


@pytest.mark.wide
@pytest.mark.parametrize("damage", [truncated, flipped, without_manifest])
def test_the_checkpoint_before_one_that_is_not_whole_is_taken_with_a_line(s3, tmp_path, damage):
    run = run_at(tmp_path / "mine")
    stop_after(mirrored(run, s3), 4)
    damage(s3, f"{BUCKET}/runs/mine/step-00000004/__0_0.distcp")
    lines = []
    again = RunDirectory(run_from_mirror(f"{s3.url}/mine", tmp_path / "elsewhere", lines.append))
    assert steps_here(again) == ["step-00000002"]
    assert any("step-00000004 is not whole" in line and "taking the one before" in line for line in lines)
    second = mirrored(again, s3, steps=4)
    assert second.step == 2


def test_a_job_that_another_one_has_taken_over_writes_no_manifest(s3, tmp_path, caplog):
    run = run_at(tmp_path / "mine")
    first = mirrored(run, s3, steps=4)
    saved = first.saves.after_step

    def take_over(step):
        if step.step == 3:
            copy = shutil.copytree(run.path, tmp_path / "copy" / "mine")
            upload.Uploads(
                RunDirectory(copy), Mirror(f"{s3.url}/mine"), fingerprint="0" * 16, keep=first.checkpointer.keep
            ).claim()
        saved(step)

    first.saves.after_step = take_over
    first.fit()
    assert "another job has taken it over" in caplog.text
    assert "step-00000004" not in whole(s3)
