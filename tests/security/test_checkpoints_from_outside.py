"""A checkpoint of somebody else runs no code, changes nothing in the process that reads it, and makes nothing hang."""

import json
import math
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import CheckpointError
from llama_core.parallel import deepspeed
from llama_core.parallel.deepspeed import saved_weights
from llama_core.training.index import INDEX, Entry, StoredBlock, index_lines
from llama_core.training.reading import PlainPlanner, PlainReader

SHARD = "__0_0.distcp"


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    write_index(folder)


def load(folder, state):
    dcp.load(state, storage_reader=PlainReader(folder), planner=PlainPlanner(), no_dist=True)
    return state


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "saved", {"weights": torch.arange(6.0), "lr": 0.5})
    return tmp_path / "saved"


def write_index(folder, **changes):
    """Write the index of a checkpoint, with some keys of the part or the entry of its weights changed."""
    lines = [json.loads(line) for line in index_lines(dcp.FileSystemReader(folder).read_metadata())]
    weights = next((line for line in lines if line["name"] == "weights"), {})
    for key, value in changes.items():
        (weights if key in weights else weights["parts"][0])[key] = value
    (folder / INDEX).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_checkpoint_is_read_as_torch_wrote_it(tmp_path):
    state = {
        "weights": torch.arange(6.0).reshape(2, 3),
        "group": {"lr": 0.1, "betas": (0.9, 0.95), "fused": True, "name": None},
    }
    save(tmp_path, state)
    loaded = load(tmp_path, {"weights": torch.zeros(2, 3), "group": {"lr": 0, "betas": 0, "fused": 0, "name": 0}})
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["group"] == state["group"]


def test_torchs_own_metadata_are_not_read(folder, tmp_path):
    """They are a pickle."""
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert torch.equal(load(folder, {"weights": torch.zeros(6)})["weights"], torch.arange(6.0))
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{INDEX}: No such file or directory"):
        PlainReader(folder)
    assert not (tmp_path / "ran").exists()


def test_numbers_that_run_code_are_refused(tmp_path):
    save(tmp_path / "saved", {"lr": Bomb(tmp_path / "ran")})
    with pytest.raises(dcp.CheckpointException, match=f"{SHARD} does not hold what was saved there"):
        load(tmp_path / "saved", {"lr": 0.1})
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_runs_code_is_refused(folder, tmp_path):
    torch.save(Bomb(tmp_path / "ran"), folder / SHARD)
    write_index(folder, begin=0, num_bytes=(folder / SHARD).stat().st_size)
    with pytest.raises(dcp.CheckpointException, match=f"{SHARD} does not hold what was saved there"):
        load(folder, {"weights": torch.zeros(6)})
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def of_deepspeed(tmp_path, monkeypatch):
    """A folder whose file a test writes, of DeepSpeed at stage 2."""
    for variable, value in (("DS_ACCELERATOR", "cpu"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, value)  # as DeepSpeed's import sets them, but only for the test
    (tmp_path / "saved" / "deepspeed").mkdir(parents=True)
    return tmp_path / "saved"


def file_of(folder):
    return folder / "deepspeed" / "mp_rank_00_model_states.pt"


def saved_pickle(file, content):
    """Write what torch.save writes, but with another pickle in it."""
    torch.save({}, file)
    with zipfile.ZipFile(file) as whole:
        members = {member: whole.read(member) for member in whole.namelist()}
    with zipfile.ZipFile(file, "w") as other:
        for member, old in members.items():
            other.writestr(member, content if member.endswith("data.pkl") else old)


SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
PLANTED = b"N}X\x07\x00\x00\x00plantedNs\x86b"
BEHIND_DEEPSPEED = {
    "a call": b"cposix\nmkdir\nX\x03\x00\x00\x00ran\x85R",
    "an attribute of something": SCALER + b"cbuiltins\ngetattr\n(cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
    b"X\x08\x00\x00\x00__init__tR",
    "something set on a class": SCALER + PLANTED,
    "something set on a stage": STAGE + b"K\x02\x85R" + PLANTED,
    "something set on the function that makes a stage": STAGE + PLANTED,
}


@pytest.mark.parametrize("opcodes", BEHIND_DEEPSPEED.values(), ids=BEHIND_DEEPSPEED.keys())
def test_files_of_deepspeed_run_nothing_and_set_nothing_whoever_owns_them(of_deepspeed, monkeypatch, opcodes):
    saved_pickle(file_of(of_deepspeed), b"\x80\x02" + opcodes + b".")
    monkeypatch.chdir(of_deepspeed)
    with pytest.raises(CheckpointError, match="a file is damaged, or holds something else than DeepSpeed writes"):
        saved_weights(of_deepspeed)
    assert not Path("ran").exists()


def test_a_stage_that_is_pickled_by_its_name_is_read(of_deepspeed):
    """As by Debian 12's 3.11.2; the file then lacks something else."""
    by_name = b"cbuiltins\ngetattr\n(" + STAGE + b"X\x09\x00\x00\x00gradientstR"
    saved_pickle(file_of(of_deepspeed), b"\x80\x02}X\x05\x00\x00\x00stage" + by_name + b"s.")
    with pytest.raises(CheckpointError, match="is not a model state checkpoint"):
        saved_weights(of_deepspeed)


def in_a_tar(file, bomb):
    """Write a file in torch's format of 2016, which is read by other code."""
    torch.save(bomb, file.with_name("pickle"), _use_new_zipfile_serialization=False)
    with tarfile.open(file, "w") as tar:
        for member in ("sys_info", "pickle", "storages", "tensors"):
            tar.add(file.with_name("pickle"), member)
    file.with_name("pickle").unlink()


@pytest.mark.parametrize(
    "write",
    [
        lambda file, bomb: torch.save(bomb, file),
        lambda file, bomb: torch.save(bomb, file, _use_new_zipfile_serialization=False),
        in_a_tar,
        lambda file, bomb: file.write_bytes(pickle.dumps(bomb, protocol=2)),
    ],
    ids=["zip", "legacy", "tar", "bare"],
)
def test_files_of_deepspeed_in_every_format_of_torch_run_nothing(of_deepspeed, tmp_path, write):
    write(file_of(of_deepspeed), Bomb(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=f"cannot read {of_deepspeed}"):
        saved_weights(of_deepspeed)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_is_exchanged_while_deepspeed_is_imported_runs_nothing(of_deepspeed, tmp_path, monkeypatch):
    link = tmp_path / "step-00000001"
    link.symlink_to(of_deepspeed)
    (tmp_path / "other" / "deepspeed").mkdir(parents=True)
    torch.save(Bomb(tmp_path / "ran"), file_of(tmp_path / "other"))

    def exchange(device_type):
        link.unlink()
        link.symlink_to(tmp_path / "other")

    monkeypatch.setattr(deepspeed, "_import_deepspeed", exchange)
    with pytest.raises(CheckpointError, match="a file is damaged, or holds something else than DeepSpeed writes"):
        saved_weights(link)
    assert not (tmp_path / "ran").exists()


def test_a_pipe_among_the_files_of_deepspeed_makes_nothing_hang(of_deepspeed):
    os.mkfifo(file_of(of_deepspeed))
    with pytest.raises(CheckpointError, match="it is no regular file"):
        saved_weights(of_deepspeed)


@pytest.mark.parametrize("exchange", [os.mkfifo, lambda file: file.symlink_to("../../private")], ids=["pipe", "link"])
def test_what_takes_the_place_of_a_file_of_deepspeed_after_it_was_opened_is_not_read(
    of_deepspeed, monkeypatch, exchange
):
    """DeepSpeed lists and opens the files one after another."""
    from deepspeed.utils import zero_to_fp32

    torch.save("theirs", file_of(of_deepspeed))
    torch.save("private", of_deepspeed.parent / "private")
    found = []

    def exchanged(folder):
        file_of(of_deepspeed).unlink()
        exchange(file_of(of_deepspeed))
        found.append(torch.load(zero_to_fp32.get_model_state_file(folder, 2), weights_only=True))
        raise RuntimeError("enough")

    monkeypatch.setattr(zero_to_fp32, "get_model_state_files", exchanged)
    with pytest.raises(CheckpointError, match="enough"):
        saved_weights(of_deepspeed)
    assert found == ["theirs"]


def test_how_others_read_files_of_torch_is_left_as_it_was(of_deepspeed, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    before = (dict(os.environ), set(torch.serialization.get_safe_globals()))
    torch.save(Bomb(tmp_path / "ran"), file_of(of_deepspeed))
    with pytest.raises(CheckpointError):
        saved_weights(of_deepspeed)
    assert (dict(os.environ), set(torch.serialization.get_safe_globals())) == before


def test_a_tensor_that_starts_a_process_group_is_refused(folder, monkeypatch):
    """torch lets its restricted unpickler make a DeviceMesh, once DTensor is imported."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for variable, value in rendezvous.items():
        monkeypatch.setenv(variable, value)
    mesh = b"ctorch.distributed.device_mesh\nDeviceMesh\n(X\x03\x00\x00\x00cpu]K\x00atR"
    saved_pickle(folder / SHARD, b"\x80\x02" + mesh + b".")
    write_index(folder, begin=0, num_bytes=(folder / SHARD).stat().st_size)
    with pytest.raises(dcp.CheckpointException, match=f"{SHARD} does not hold what was saved there"):
        load(folder, {"weights": torch.zeros(6)})
    started = dist.is_initialized()
    if started:
        dist.destroy_process_group()
    assert not started


def test_a_number_does_not_take_the_place_of_a_tensor(tmp_path):
    save(tmp_path, {"weights": 7})
    with pytest.raises(dcp.CheckpointException, match="weights is a tensor, but the checkpoint has another value"):
        load(tmp_path, {"weights": torch.zeros(6)})


def test_the_index_says_what_torchs_metadata_say(folder):
    pickled = dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").unlink()
    indexed = PlainReader(folder).read_metadata()
    assert indexed.state_dict_metadata == pickled.state_dict_metadata
    assert indexed.storage_data == pickled.storage_data
    assert load(folder, {"weights": torch.zeros(6), "lr": 0})["lr"] == 0.5


ELSEWHERE = ["../secret.distcp", "/etc/passwd", "..", "", "__0_0.distcp/", "a/__0_0.distcp", "__0_0.distcp\n", "\0"]


@pytest.mark.parametrize("file", ELSEWHERE)
def test_no_file_outside_the_checkpoint_is_read(folder, file):
    write_index(folder, file=file)
    with pytest.raises(CheckpointError, match=rf"{INDEX} is no index of a checkpoint \(parts\.0\.file"):
        PlainReader(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "load"}, "has the dtype 'load', which torch does not know"),
        ({"dtype": "Tensor"}, "has the dtype 'Tensor', which torch does not know"),
        ({"shape": [2**62]}, f"has 6 of its {2**62} elements"),
        ({"shape": []}, "has a part with another number of dims"),
        ({"parts": []}, "has 0 of its 6 elements"),
        ({"dtype": None}, "is no tensor, but is in several parts"),
        ({"shape": [-6]}, r"\(shape\.0: input should be greater than or equal to 0"),
        ({"shape": [10**30]}, r"\(shape\.0: input should be less than"),
        ({"shape": [1] * 100}, r"\(shape: tuple should have at most 64 items"),
        ({"begin": None}, r"\(parts\.0\.begin: input should be a valid integer"),
    ],
)
def test_an_index_that_contradicts_itself_is_one_line(folder, changes, problem):
    write_index(folder, **changes)
    with pytest.raises(CheckpointError, match=problem):
        PlainReader(folder)


OVERLAPPING = "has parts that overlap or lie outside of it"


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ([6], [([100], [6])]),
        ([6], [([0], [3]), ([1], [3])]),
        ([6], [([0], [3]), ([0], [3])]),
        ([2, 2], [([0, 0], [2, 1]), ([1, 0], [1, 2])]),
        ([2, 3], [([0, 0], [1, 3]), ([0, 0], [1, 1]), ([1, 1], [1, 2])]),
        ([1] * 64, [([1] * 64, [1] * 64)]),
    ],
)
def test_memory_that_nobody_has_written_is_not_taken_for_weights(shape, boxes):
    parts = tuple(StoredBlock(tuple(begin), tuple(size), SHARD, 0, 0) for begin, size in boxes)
    assert Entry("weights", "float32", tuple(shape), parts).problem() == OVERLAPPING


@given(st.data())
def test_parts_that_tile_a_tensor_are_taken_and_no_others(data):
    """Cut a tensor at random, and then move a part."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        begin, size = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, size[dim]))
        boxes += [
            (begin, (*size[:dim], at, *size[dim + 1 :])),
            ((*begin[:dim], begin[dim] + at, *begin[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :])),
        ]
    parts = [StoredBlock(begin, size, SHARD, 0, 0) for begin, size in boxes]
    assert Entry("weights", "float32", shape, tuple(parts)).problem() == ""
    moved = max(parts, key=lambda part: math.prod(part.shape))
    elsewhere = replace(moved, offsets=(moved.offsets[0] + 1, *moved.offsets[1:]))
    others = [part for part in parts if part is not moved]
    assert Entry("weights", "float32", shape, (elsewhere, *others)).problem() == OVERLAPPING


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"parts":' * 50_000, b"{}", b"\xff\xfe", b"9" * 100_000, b"\n", b"null"],
    ids=["lists", "mappings", "empty", "bytes", "digits", "line", "null"],
)
def test_a_file_that_is_no_index_is_one_line(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{INDEX} is no index of a checkpoint"):
        PlainReader(folder)


def test_a_huge_index_is_refused_before_it_is_read(folder):
    os.truncate(folder / INDEX, 2**40)  # a sparse file, which takes no room
    with pytest.raises(CheckpointError, match=f"{INDEX} has 1.00 TiB; at most 4.00 GiB are read"):
        PlainReader(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_folders_and_links_are_not_read_as_an_index(folder, make):
    (folder / INDEX).unlink()
    make(folder / INDEX)
    with pytest.raises(CheckpointError, match=f"cannot read .*{INDEX}: "):
        PlainReader(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("other")])
def test_pipes_folders_and_links_are_not_read_as_tensors(folder, make):
    (folder / SHARD).rename(folder / "other")
    make(folder / SHARD)
    with pytest.raises(dcp.CheckpointException, match=SHARD):
        load(folder, {"weights": torch.zeros(6)})
