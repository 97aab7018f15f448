"""Nothing that comes from outside is executed."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from flows.serve import _DEFAULTS
from llama_core.errors import CheckpointError
from llama_core.launch.jobs.submission import _fresh_folder, private_place
from llama_core.parallel.deepspeed import saved_weights
from llama_core.training.reading import PlainPlanner, PlainReader

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for name in ("llama_core", "training_infra", "reports", "tasks", "flows")
    for path in (ROOT / name).rglob("*.py")
]


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def load(folder, state):
    dcp.load(state, storage_reader=PlainReader(folder), planner=PlainPlanner(), no_dist=True)
    return state


def test_a_checkpoint_is_read_as_torch_wrote_it(tmp_path):
    state = {
        "weights": torch.arange(6.0).reshape(2, 3),
        "group": {"lr": 0.1, "betas": (0.9, 0.95), "fused": True, "name": None},
    }
    save(tmp_path, state)
    loaded = load(tmp_path, {"weights": torch.zeros(2, 3), "group": {"lr": 0, "betas": 0, "fused": 0, "name": 0}})
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["group"] == state["group"]


def test_a_checkpoint_of_a_python_that_pickles_enums_by_name_is_read(tmp_path, monkeypatch):
    """As Debian 12's 3.11.2 does."""
    by_name = lambda self, protocol: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    save(tmp_path, {"weights": torch.arange(6.0)})
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(load(tmp_path, {"weights": torch.zeros(6)})["weights"], torch.arange(6.0))


class Attribute:
    """Is unpickled as an attribute of something."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


@pytest.mark.parametrize(
    "of", [(Metadata, "__init__"), (torch.Size, "mro"), (_MEM_FORMAT_ENCODING, "__class__"), (torch.float32, "to_real")]
)
def test_no_other_attribute_of_anything_is_reached(tmp_path, of):
    save(tmp_path, {"weights": torch.zeros(2)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(*of)))
    with pytest.raises(dcp.CheckpointException, match="which torch does not write"):
        load(tmp_path, {"weights": torch.zeros(2)})


def test_metadata_that_run_code_are_refused(tmp_path):
    save(tmp_path / "saved", {"weights": torch.zeros(2)})
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(dcp.CheckpointException, match="mkdir, which torch does not write"):
        load(tmp_path / "saved", {"weights": torch.zeros(2)})
    assert not (tmp_path / "ran").exists()


def test_numbers_that_run_code_are_refused(tmp_path):
    save(tmp_path / "saved", {"lr": Bomb(tmp_path / "ran")})
    with pytest.raises(dcp.CheckpointException):
        load(tmp_path / "saved", {"lr": 0.1})
    assert not (tmp_path / "ran").exists()


def test_pickles_that_others_may_write_are_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    (tmp_path / "model.pt").chmod(0o666)
    with pytest.raises(CheckpointError, match="another user"):
        saved_weights(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nobody_else_may_open_the_folders_of_our_own_pickles(tmp_path):
    (tmp_path / "logs" / "submitit").mkdir(parents=True, mode=0o755)
    place, folder = private_place(tmp_path / "logs"), _fresh_folder(tmp_path / "logs")
    assert [path.stat().st_mode & 0o777 for path in (place, folder)] == [0o700, 0o700]


def places(pattern):
    """Return the files with a line that matches."""
    found = ((path.relative_to(ROOT).as_posix(), path.read_text()) for path in SOURCES)
    return {name for name, text in found if re.search(pattern, text)}


def test_pickles_are_loaded_in_two_files_and_shells_nowhere():
    assert places(r"pickle\.(loads?\(|Unpickler)") == {
        "llama_core/launch/rank/loader.py",  # a dataloader, from a private folder
        "llama_core/training/reading.py",  # torch's metadata, without other classes
    }
    assert not places(r"(?<![\w.])(eval|exec)\(|os\.(system|popen)\(|shell=|yaml\.(unsafe_|full_)?load\(|marshal\.")
    assert not places(r"torch\.load\((?!value, weights_only=True\))")


def test_the_prefect_server_listens_on_this_machine_only():
    assert _DEFAULTS["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
