"""Nothing that comes from outside is executed."""

import re
from pathlib import Path

from flows.serve import _DEFAULTS
from llama_core.launch.places import fresh_folder, private_place

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for name in ("llama_core", "training_infra", "reports", "tasks", "flows")
    for path in (ROOT / name).rglob("*.py")
]


def test_nobody_else_may_open_the_folders_of_our_own_pickles(tmp_path):
    (tmp_path / "logs" / "submitit").mkdir(parents=True, mode=0o755)
    place, folder = private_place(tmp_path / "logs"), fresh_folder(tmp_path / "logs")
    assert [path.stat().st_mode & 0o777 for path in (place, folder)] == [0o700, 0o700]


def test_pickles_do_not_lie_behind_a_link_through_a_folder_that_others_may_write_to(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("open/own", "mine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    for name, target in {"straight": "mine", "around": "open/own"}.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    assert private_place(tmp_path / "straight" / "logs") == tmp_path / "straight" / "logs" / "submitit"
    assert tmp_path / "home" in private_place(tmp_path / "around" / "logs").parents


def places(pattern):
    """Return the files with a line that matches."""
    found = ((path.relative_to(ROOT).as_posix(), path.read_text()) for path in SOURCES)
    return {name for name, text in found if re.search(pattern, text)}


def test_pickles_are_loaded_in_three_files_and_shells_nowhere():
    assert places(r"pickle\.(loads?\(|_?Unpickler)") == {
        "llama_core/data/templates/rendering.py",  # what its parent writes to its standard input, which is plain values
        "llama_core/data/shards/worker.py",  # what its parent writes to its standard input
        "llama_core/launch/rank/loader.py",  # a dataloader, from a private folder
    }
    assert not places(r"(?<![\w.])(eval|exec)\(|os\.(system|popen)\(|shell=|yaml\.(unsafe_|full_)?load\(|marshal\.")
    assert not places(r"torch\.load\((?!value, weights_only=True\))")


def test_the_prefect_server_listens_on_this_machine_only():
    assert _DEFAULTS["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
