import errno
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from parity import TRAINING, native_engine
from torch.distributed import distributed_c10d

from llama_core.config.models import ModelSpec
from llama_core.errors import CheckpointError, PlanError
from llama_core.models.batch import Batch
from llama_core.parallel.ranks import has_lost_the_others, is_first_rank, wait_for_all
from llama_core.planning.plan import ParallelPlan
from llama_core.records import checkpoints as records
from llama_core.records.checkpoints import newest_checkpoint
from llama_core.records.checksums import file_sum
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import Retention
from llama_core.training.checkpoint import Checkpointer, lacks_room
from llama_core.training.engine import train_step
from llama_core.training.reading import PlainReader
from llama_core.training.saving import BackgroundSaver

SPEC = ModelSpec("test", "llama3", 16, 2, 2, 1, 8, 32, 32, 1e4, 1e-5, 128, 32)
TEST_PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def run_in(folder):
    run = RunDirectory(folder / "run")
    run.create()
    run.config.write_text("model: tiny_llama3_50m\n")
    return run


@pytest.fixture
def run(tmp_path):
    return run_in(tmp_path)


def trained(steps, seed=0):
    engine = native_engine(ParallelPlan(), SPEC, seed=seed)
    for step in range(steps):
        tokens = torch.full((1, 8), step)
        train_step(engine, [Batch(tokens, tokens, None)], learning_rate=0.1, max_grad_norm=1.0)
    return engine


def save(run, *steps, keep=5):
    checkpointer = Checkpointer(run, keep=Retention(keep), num_bytes=977 * 2**10)
    for step in steps:
        checkpointer.save(step, trained(step), {"tokens": 10 * step})
    checkpointer.finish()


def names(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_checkpoint_loads_bit_for_bit(run):
    save(run, 3)
    loaded, expected = trained(0, seed=1), trained(3)
    state = Checkpointer(run, keep=Retention(1)).load(loaded)
    assert state == {"step": 3, "tokens": 30}
    assert_equal(loaded.model.state_dict(), expected.model.state_dict())
    assert_equal(loaded.optimizer.state_dict()["state"], expected.optimizer.state_dict()["state"])


def test_training_while_a_checkpoint_is_written_does_not_change_it(run):
    checkpointer = Checkpointer(run, keep=Retention(1))
    engine = trained(2)
    checkpointer.save(2, engine, {})
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    checkpointer.finish()
    loaded = trained(0, seed=1)
    Checkpointer(run, keep=Retention(1)).load(loaded)
    assert_equal(loaded.model.state_dict(), trained(2).model.state_dict())


def test_a_deepspeed_checkpoint_is_not_mistaken_for_a_damaged_one(run):
    save(run, 1, 2)
    (run.checkpoints / "step-00000002" / "deepspeed.json").write_text("{}")
    with pytest.raises(PlanError, match=r"step-00000002 was written by DeepSpeed.*parallel.zero_backend=deepspeed"):
        Checkpointer(run, keep=Retention(1)).load(trained(0))


def test_a_run_without_checkpoints_starts_from_scratch(run):
    assert Checkpointer(run, keep=Retention(1)).load(trained(0)) is None


def test_only_the_newest_checkpoints_are_kept_and_latest_names_the_last(run):
    save(run, 1, 2, 3, 4, keep=2)
    assert names(run) == ["latest", "step-00000003", "step-00000004"]
    assert (run.checkpoints / "latest").read_text() == "step-00000004\n"


def test_a_process_killed_while_it_deletes_a_checkpoint_leaves_the_others_intact(run, monkeypatch):
    save(run, 1, 2)

    def killed(path):
        next(path.glob("*.distcp")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(run, 3, keep=1)
    monkeypatch.undo()
    left = records.list_checkpoints(run)
    assert [path.name for path in left] == ["step-00000002", "step-00000003"]
    assert [records.find_problem(path) for path in left] == ["", ""]
    assert Checkpointer(run, keep=Retention(1)).load(trained(0))["step"] == 3
    assert names(run) == ["latest", "step-00000002", "step-00000003"]


def test_a_checkpoint_carries_the_configuration_of_its_run(run):
    save(run, 1)
    assert (run.checkpoints / "step-00000001" / "config.yaml").read_text() == run.config.read_text()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(file, bit=12_345):
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


DAMAGE = {
    "flipped": lambda path: flip(path / "__0_0.distcp"),
    "flipped state": lambda path: flip(path / "state.json"),
    "flipped manifest": lambda path: flip(path / "manifest.json"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "renamed": lambda path: (path / "__0_0.distcp").rename(path / "__0_1.distcp"),
    "truncated": lambda path: truncate(path / "__0_0.distcp"),
    "missing": lambda path: (path / "__0_0.distcp").unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "no index": lambda path: (path / "index.jsonl").unlink(),
    "no state": lambda path: (path / "state.json").unlink(),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory):
    """The checkpoints of a run, to be copied."""
    saved = run_in(tmp_path_factory.mktemp("saved"))
    save(saved, 1, 2)
    return saved.checkpoints


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_skipped_with_a_warning(run, saved_twice, caplog, damage):
    shutil.copytree(saved_twice, run.checkpoints, dirs_exist_ok=True)
    damage(run.checkpoints / "step-00000002")
    with caplog.at_level(logging.WARNING):
        state = Checkpointer(run, keep=Retention(2)).load(trained(0))
    assert state["step"] == 1
    assert "step-00000002 is damaged" in caplog.text
    assert records.find_problem(run.checkpoints / "step-00000002")
    assert not records.find_problem(run.checkpoints / "step-00000001")


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "llama_core.training.checkpoint"]


def test_the_line_on_a_damaged_checkpoint_names_the_file_and_what_is_wrong_with_it(run, caplog):
    save(run, 1, 2, 3)
    flip(run.checkpoints / "step-00000003" / "__0_0.distcp")
    truncate(run.checkpoints / "step-00000002" / "__0_0.distcp")
    with caplog.at_level(logging.WARNING):
        Checkpointer(run, keep=Retention(2)).load(trained(0))
    first, second = said(caplog)
    assert re.fullmatch(
        r"checkpoint step-00000003 is damaged \(__0_0.distcp has the checksum [0-9a-f]{8}, but [0-9a-f]{8} was "
        r"written\); trying the one before",
        first,
    )
    assert re.match(r"checkpoint step-00000002 is damaged \(__0_0.distcp has \d+ of \d+ bytes\);", second)


def test_the_checksums_of_shards_are_those_on_disk_and_were_taken_without_reading_them(run, monkeypatch):
    read = []
    monkeypatch.setattr(records, "file_sum", lambda path: read.append(path.name) or file_sum(path))
    save(run, 1)
    path = run.checkpoints / "step-00000001"
    files = {".metadata", "__0_0.distcp", "config.yaml", "index.jsonl", "state.json"}
    assert records.recorded_sums(path) == {name: file_sum(path / name) for name in files}
    assert sorted(read) == ["config.yaml", "state.json"]


def test_the_index_that_is_saved_says_what_torchs_metadata_say(run):
    save(run, 1)
    path = run.checkpoints / "step-00000001"
    indexed = PlainReader(path).read_metadata()
    pickled = dcp.FileSystemReader(path).read_metadata()
    assert indexed.state_dict_metadata == pickled.state_dict_metadata
    assert indexed.storage_data == pickled.storage_data


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(run):
    save(run, 10, 20)
    flip(run.checkpoints / "step-00000020" / "__0_0.distcp")
    checkpointer, engine = Checkpointer(run, keep=Retention(2)), trained(0)
    assert checkpointer.load(engine)["step"] == 10
    for step, kept in ((15, (10, 15, 20)), (30, (15, 30))):
        checkpointer.save(step, engine, {})
        checkpointer.finish()
        assert names(run) == ["latest", *(f"step-{kept_step:08d}" for kept_step in kept)]


class WritesForEver:
    def save(self, folder):
        return Future()


def waits_for_a_rank_that_is_gone(path):
    """Return whether a rank that waits for its checkpoint finds out that the first one no longer answers."""
    store = distributed_c10d._get_default_store()
    checkpointer = Checkpointer(RunDirectory(path), keep=Retention(1))
    checkpointer.save(1, WritesForEver(), {})
    if is_first_rank():
        store.wait(["ended"])
        return None
    distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    try:
        checkpointer.finish()
    except RuntimeError as error:
        return has_lost_the_others(error)
    finally:
        store.set("ended", "")


def test_a_rank_whose_threads_wait_to_write_finds_out_that_another_is_gone(run):
    """The threads themselves wait for a day, because writing may take hours."""
    assert run_ranks(2, waits_for_a_rank_that_is_gone, run.path) == [None, True]


def ranks_and_a_damaged_shard(path):
    """Save two steps on each rank, damage a shard of the other rank in the second, and load."""
    run = RunDirectory(path)
    engine = native_engine(ParallelPlan(dp_shard=2, zero_stage=3), SPEC)
    checkpointer = Checkpointer(run, keep=Retention(2))
    for step in (1, 2):
        checkpointer.save(step, engine, {})
    checkpointer.finish()
    wait_for_all()
    if is_first_rank():
        flip(run.checkpoints / "step-00000002" / "__1_0.distcp")
    wait_for_all()
    lines = io.StringIO()
    logging.basicConfig(stream=lines, format="%(message)s", force=True)
    return Checkpointer(run, keep=Retention(2)).load(engine)["step"], lines.getvalue()


@pytest.mark.nightly
def test_ranks_agree_to_leave_a_checkpoint_of_which_one_finds_a_shard_damaged(run):
    (first, line), (second, silence) = run_ranks(2, ranks_and_a_damaged_shard, run.path)
    assert (first, second) == (1, 1)
    assert "step-00000002 is damaged (__1_0.distcp has the checksum" in line
    assert silence == ""


def test_a_checkpoint_with_corrupt_metadata_is_skipped(run, caplog):
    save(run, 1, 2)
    file = run.checkpoints / "step-00000002" / ".metadata"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert Checkpointer(run, keep=Retention(2)).load(trained(0))["step"] == 1


def test_a_checkpoint_is_not_deleted_in_favour_of_a_later_damaged_one(run):
    save(run, 1, 10, 20)
    for later in ("step-00000010", "step-00000020"):
        truncate(run.checkpoints / later / "__0_0.distcp")
    save(run, 2, keep=1)
    assert newest_checkpoint(run).name == "step-00000002"


def test_a_run_without_a_readable_checkpoint_does_not_silently_start_over(run):
    save(run, 1, 2)
    (run.checkpoints / "step-00000001" / "__0_0.distcp").unlink()
    flip(run.checkpoints / "step-00000002" / "__0_0.distcp")
    (run.checkpoints / ".step-00000003.writing").mkdir()
    before = sorted(run.path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(run, keep=Retention(1)).load(trained(0))
    assert re.fullmatch(
        rf"none of the 2 checkpoints in {run.checkpoints} can be read \(step-00000002: __0_0.distcp has the checksum "
        r".*; step-00000001: __0_0.distcp is missing\); restore one from a backup, or move them away to start over, "
        rf"and continue with: training-infra train --run-dir {run.path} --resume",
        str(caught.value),
    )
    assert sorted(run.path.rglob("*")) == before


def test_a_half_written_checkpoint_is_removed(run):
    save(run, 1)
    shutil.copytree(run.checkpoints / "step-00000001", run.checkpoints / ".step-00000002.writing")
    assert Checkpointer(run, keep=Retention(1)).load(trained(0))["step"] == 1
    assert names(run) == ["latest", "step-00000001"]


def saver(num_files):
    return BackgroundSaver(torch.device("cpu"), num_files)


def test_several_files_of_a_rank_are_one_checkpoint(tmp_path):
    state = {f"weight {n}": torch.full((4,), n) for n in range(8)}
    sums = saver(4).save(state, tmp_path, None).result()
    assert len(list(tmp_path.glob("*.distcp"))) == 4
    assert sums == {file.name: file_sum(file) for file in tmp_path.iterdir()}
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert_equal(loaded, state)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_3.distcp"])
def test_a_file_that_cannot_be_written_fails_the_checkpoint_whichever_thread_writes_it(tmp_path, file):
    (tmp_path / file).mkdir()
    written = saver(4).save({f"weight {n}": torch.zeros(4) for n in range(8)}, tmp_path, None)
    with pytest.raises(dcp.CheckpointException, match="Is a directory"):
        written.result()
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.root
@pytest.mark.parametrize("num_files", [1, 4])
def test_a_full_disk_is_known_whichever_thread_meets_it(disk_of, num_files):
    written = saver(num_files).save({f"weight {n}": torch.zeros(2**16) for n in range(8)}, disk_of("1m"), None)
    assert lacks_room(written.exception())


def test_ranks_agree_on_who_writes_what_only_once(tmp_path, caplog):
    one, state = saver(1), {"weight": torch.zeros(4), "step": 7}
    with caplog.at_level(logging.INFO, "torch.distributed.checkpoint"):
        for step, times in ((1, 0), (2, 1), (3, 2)):
            one.save({"weight": torch.full((4,), float(step)), "step": step}, tmp_path / str(step), None).result()
            assert caplog.text.count("No change in the local plan") == times
    saver(1).save({"other": torch.zeros(8)}, tmp_path / "other", None).result()
    one.save({"weight": torch.full((4,), 4.0), "step": 4}, tmp_path / "4", None).result()
    dcp.load(state, checkpoint_id=tmp_path / "4", no_dist=True)
    assert_equal(state, {"weight": torch.full((4,), 4.0), "step": 4})


def test_a_second_save_waits_for_the_first_because_both_use_the_same_memory(tmp_path):
    weights, one = torch.zeros(2**20), saver(1)
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        one.save({"weights": weights.fill_(step)}, tmp_path / str(step), None)
    one.close()
    one.save({"weights": weights}, tmp_path, None).result()
    for step in (1, 2):
        loaded = {"weights": torch.zeros_like(weights)}
        dcp.load(loaded, checkpoint_id=tmp_path / str(step), no_dist=True)
        assert_equal(loaded["weights"], torch.full_like(weights, step))


@pytest.mark.root
def test_a_full_disk_keeps_the_previous_checkpoint_and_says_so_in_one_line(disk_of):
    small_disk = disk_of("1m")
    run = RunDirectory(small_disk / "run")
    run.create()
    run.config.write_text("")
    save(run, 1)
    (small_disk / "ballast").write_bytes(b"\0" * (shutil.disk_usage(small_disk).free - 8192))
    with pytest.raises(CheckpointError) as caught:
        save(run, 2)
    assert re.fullmatch(
        rf"cannot save the checkpoint of step 2: the disk of {run.checkpoints} is full: over 977.00 KiB needed, "
        r"\d.* free; step-00000001 is complete",
        str(caught.value),
    )
    assert names(run) == ["latest", "step-00000001"]
    assert Checkpointer(run, keep=Retention(1)).load(trained(0))["step"] == 1


def test_an_old_checkpoint_that_cannot_be_deleted_costs_room_but_not_the_run(run, monkeypatch, caplog):
    save(run, 1)

    def refuse(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("llama_core.training.checkpoint.shutil.rmtree", refuse)
        save(run, 2, keep=1)
        save(run, 3, keep=1)
    assert names(run)[-1] == "step-00000003"
    assert f"{run.checkpoints}/step-00000001 cannot be deleted and takes up room: Operation not perm" in caplog.text
    assert Checkpointer(run, keep=Retention(1)).load(trained(0))["step"] == 3


@pytest.mark.nightly
def test_a_process_killed_while_saving_leaves_the_earlier_checkpoints(run):
    """The process saves repeatedly and is killed in the middle of a save."""
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from test_checkpoint import Checkpointer, Retention, RunDirectory, trained\n"
        "checkpointer, engine = Checkpointer(RunDirectory(Path(sys.argv[1])), keep=Retention(2)), trained(1)\n"
        "for step in range(1, 10_000):\n"
        "    checkpointer.save(step, engine, {}); print(step, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, run.path, *TEST_PATHS], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) == 4:
            process.kill()
            break
    process.wait()
    assert Checkpointer(run, keep=Retention(2)).load(trained(0))["step"] >= 3


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.5), (0.1, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_goes_on_with_another_decay_decays_as_much(run, optimizer, before, after):
    """Whichever decay the checkpoint had: the groups of parameters, which hold it, are saved with the states."""

    def engine_with(decay):
        training = TRAINING.model_copy(update={"weight_decay": decay})
        return native_engine(ParallelPlan(), SPEC, optimizer=optimizer, training=training)

    tokens = torch.arange(8)[None]
    begun = engine_with(before)
    train_step(begun, [Batch(tokens, tokens, None)], learning_rate=0.1, max_grad_norm=1.0)
    checkpointer = Checkpointer(run, keep=Retention(1), num_bytes=2**20)
    checkpointer.save(1, begun, {})
    checkpointer.finish()
    weights = {}
    for decay in (before, after):
        engine = engine_with(decay)
        Checkpointer(run, keep=Retention(1)).load(engine)
        start = {name: value.clone() for name, value in engine.model.state_dict().items()}
        train_step(engine, [Batch(tokens, tokens, None)], learning_rate=0.1, max_grad_norm=1.0)
        weights[decay] = engine.model.state_dict()
    name = "layers.0.attention.wq.weight"
    torch.testing.assert_close(weights[before][name] - weights[after][name], 0.1 * (after - before) * start[name])
