"""A cache directory that others may write to: they can neither change what somebody trains on nor keep them from it."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from corpora import write_jsonl

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.data.tokenising import tokenised
from llama_core.data.tokenizer import ByteTokenizer
from llama_core.errors import DataError

pytestmark = pytest.mark.root

NOBODY = 65534
SPEC = model_spec("tiny_llama3_50m")


@pytest.fixture
def source(tmp_path):
    return str(write_jsonl(tmp_path / "data.jsonl", ["what the user wrote"]))


@pytest.fixture(params=[0o1777, 0o777], ids=["sticky", "open"])
def shared(request, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(request.param)
    os.chown(folder, NOBODY, NOBODY)
    return folder


def shard(source, folder):
    data = DataConfig(source=source, cache_dir=str(folder))
    (only,) = tokenised(source, data, ByteTokenizer(), SPEC, None).cache.shards
    return only


def text(source, folder):
    return ByteTokenizer().decode(shard(source, folder).tokens.tolist())


def plant(entry, folder):
    """Put somebody else's entry with other tokens where ours would be."""
    planted = folder / entry.name
    shutil.copytree(entry, planted)
    tokens = np.fromfile(planted / "tokens.bin", "<u2")
    tokens[tokens < 256] = ord("!")
    tokens.tofile(planted / "tokens.bin")
    for path in (planted, *planted.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return planted


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o600, 0o755), (0o644, 0o700), (0o644, 0o755)])
def test_whoever_cannot_read_a_file_cannot_read_its_tokens(file_mode, folder_mode):
    with TemporaryDirectory() as name:  # pytest's are all private
        Path(name).chmod(0o755)
        folder = Path(name, "data")
        folder.mkdir()
        source = write_jsonl(folder / "data.jsonl", ["what the user wrote"])
        source.chmod(file_mode)
        folder.chmod(folder_mode)
        mode = shard(str(source), Path(name, "cache")).path.stat().st_mode
    is_public = (file_mode, folder_mode) == (0o644, 0o755)
    assert bool(mode & 0o077) is is_public


def test_tokens_of_somebody_else_are_not_trained_on(source, shared, tmp_path):
    planted = plant(shard(source, tmp_path / "private").path, shared)
    assert text(source, shared) == "what the user wrote"
    assert text(source, shared) == "what the user wrote"
    assert planted.exists()


def test_nobody_else_may_change_what_is_kept_there(source, shared):
    before = os.umask(0)
    try:
        kept = shard(source, shared).path
    finally:
        os.umask(before)
    assert not kept.parent.stat().st_mode & 0o077
    assert kept.parent.parent == shared


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_ours_that_somebody_else_has_made_first_is_one_line(source, shared, tmp_path, kind):
    (tmp_path / "theirs").mkdir()
    own = shared / "user-0"
    {"folder": own.mkdir, "link": lambda: own.symlink_to(tmp_path / "theirs")}[kind]()
    os.lchown(own, NOBODY, NOBODY)
    with pytest.raises(DataError, match=r"user-0 is not ours alone.*choose another data\.cache_dir"):
        shard(source, shared)


def test_a_cache_directory_of_ones_own_is_used_as_it_is(source, tmp_path):
    assert shard(source, tmp_path / "mine").path.parent == tmp_path / "mine"
