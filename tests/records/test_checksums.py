import os
import random
import zlib
from array import array

import pytest

from llama_core.records.checkpoints import MANIFEST, STATE, find_problem, is_complete, write_manifest
from llama_core.records.checksums import FileSum, SummedFile, file_sum
from llama_core.records.files import read_json, write_json


@pytest.fixture
def checkpoint(tmp_path):
    """Files as small as can be, with the manifest of a checkpoint."""
    path = tmp_path / "step-00000001"
    (path / "deepspeed").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "deepspeed/rank_0.pt"):
        (path / name).write_bytes(random.Random(name).randbytes(40))
    write_json(path / STATE, {"step": 1, "tokens": 64})
    write_manifest(path, {})
    return path


def test_a_checkpoint_as_it_was_written_is_intact(checkpoint):
    assert find_problem(checkpoint) == ""


def test_every_flipped_bit_is_found(checkpoint):
    files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file()]
    assert len(files) == 5  # the manifest is one of them
    draw = random.Random(0)
    for _ in range(200):
        file = draw.choice(files)
        content = file.read_bytes()
        bit = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert find_problem(checkpoint), (file.name, bit)
        file.write_bytes(content)
    assert find_problem(checkpoint) == ""


def test_every_truncation_is_found_without_reading(checkpoint):
    file = checkpoint / "__0_0.distcp"
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        assert find_problem(checkpoint, read=False) == f"__0_0.distcp has {length} of 40 bytes"
    file.write_bytes(content + b"\0")
    assert not is_complete(checkpoint)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "deepspeed/rank_0.pt", "state.json", "manifest.json"])
def test_a_file_that_is_missing_or_renamed_is_named(checkpoint, name):
    (checkpoint / name).rename(checkpoint / "other")
    assert find_problem(checkpoint, read=False) == f"{name} is missing"
    (checkpoint / "other").unlink()
    assert find_problem(checkpoint) == f"{name} is missing"


def test_files_that_have_changed_places_are_found(checkpoint):
    first, second = checkpoint / "__0_0.distcp", checkpoint / ".metadata"
    first.rename(checkpoint / "other")
    second.rename(first)
    (checkpoint / "other").rename(second)
    assert "has the checksum" in find_problem(checkpoint)


def test_a_file_that_cannot_be_read_is_named(checkpoint):
    name = "x" * 300
    write_manifest(checkpoint, {name: FileSum(40, "00000000")})
    assert find_problem(checkpoint) == f"{name} cannot be read: File name too long"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "it is no regular file"),
        (os.mkdir, "it is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a link, and links inside a run are not followed"),
    ],
    ids=["pipe", "folder", "link"],
)
def test_nothing_but_files_is_read(checkpoint, make, problem):
    """A pipe or a device would be read without end."""
    (checkpoint / "__0_0.distcp").unlink()
    make(checkpoint / "__0_0.distcp")
    for read in (False, True):
        assert find_problem(checkpoint, read=read) == f"__0_0.distcp cannot be read: {problem}"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/dev/zero", "is missing"),
        ("../../secret", "cannot be read: it leads out of its folder"),
        ("deepspeed/../../secret", "cannot be read: it leads out of its folder"),
    ],
)
def test_nothing_outside_the_checkpoint_is_read(checkpoint, name, problem):
    manifest = read_json(checkpoint / MANIFEST)
    manifest["files"][name] = {"num_bytes": 0, "crc32": "00000000"}
    write_json(checkpoint / MANIFEST, manifest)
    assert find_problem(checkpoint) == f"{name} {problem}"


def test_the_checksum_is_the_published_crc32(tmp_path):
    (tmp_path / "file").write_bytes(b"123456789")  # the check value of the algorithm's catalogues
    assert file_sum(tmp_path / "file") == FileSum(9, "cbf43926")


def test_the_checksum_does_not_depend_on_how_a_file_is_written(tmp_path):
    content = random.Random(0).randbytes(10_000)
    with (tmp_path / "file").open("wb") as file:
        summed, start = SummedFile(file), 0
        for end in (0, 1, 800, 801, 10_000):
            piece = memoryview(content)[start:end]
            summed.write(piece if len(piece) % 8 else array("d", bytes(piece)))
            start = end
    assert (tmp_path / "file").read_bytes() == content
    assert summed.sum() == file_sum(tmp_path / "file") == FileSum(10_000, f"{zlib.crc32(content):08x}")
