"""An ordinary user trains, stops and resumes; another user changes nothing, and is told why in one line."""

import json
import os
import pwd
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest
from waiting import eventually

from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json

pytestmark = [pytest.mark.wide, pytest.mark.root]

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "reports", sysconfig.get_path("purelib"))
SIZES = ("hidden_size=64", "num_layers=2", "ffn_size=128", "head_dim=16", "vocab_size=512")
SMALL = [
    *(f"--set=architecture.{size}" for size in SIZES),
    *("--device=cpu", "--gpus=2", "--seq-len=32", "--batch-size=2", "--set=training.eval_sequences=2"),
    *("--set=benchmark.steps=0", "--steps=100000"),
]
COMMANDS = """
import contextlib, io, json, sys
from training_infra.cli import main
for arguments in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = main(arguments)
    print(json.dumps([code, errors.getvalue()]))
"""


class User:
    """Somebody with a home of their own."""

    def __init__(self, name, home, umask):
        found = pwd.getpwnam(name)
        self.home, self.uid = home, found.pw_uid
        home.mkdir()
        os.chown(home, found.pw_uid, found.pw_gid)
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        environment |= {"HOME": str(home), "PYTHONPATH": ":".join(map(str, PATHS))}
        self.as_them = {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": [], "umask": umask}
        self.as_them |= {"cwd": home, "env": environment, "text": True}

    def python(self, *arguments):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([self.interpreter, *arguments], **self.as_them, **pipes)

    def infra(self, *arguments):
        """Return the exit code, output and errors of a command."""
        process = self.python("-m", "training_infra.cli", *arguments)
        out, errors = process.communicate()
        return process.returncode, out, errors

    def answers(self, commands):
        """Return the exit code and the errors of each command."""
        out, errors = self.python("-c", COMMANDS, json.dumps(commands)).communicate()
        assert out.count("\n") == len(commands), errors
        return [tuple(json.loads(line)) for line in out.splitlines()]

    @cached_property
    def interpreter(self):
        for interpreter in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
            with suppress(OSError):  # of another user's home
                done = subprocess.run([interpreter, "-c", "import training_infra"], **self.as_them, check=False)
                if done.returncode == 0:
                    return interpreter
        pytest.skip(f"other users cannot run {sys.executable} or read {ROOT}")


@pytest.fixture
def users():
    """Two users, of whom the first keeps files private."""
    if os.getuid():
        pytest.skip("needs root, to become two other users")
    with tempfile.TemporaryDirectory() as name:  # not pytest's own, which is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        yield User("daemon", folder / "first", 0o077), User("nobody", folder / "second", 0o022)


def files_of(folder):
    """Return every file with what would change if somebody wrote to it."""
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return {path: (stat.st_mode, stat.st_uid, stat.st_mtime_ns, stat.st_size) for path, stat in found}


def test_a_user_trains_stops_and_resumes_and_another_user_gets_one_line_and_changes_nothing(users):
    user, other = users
    run = RunDirectory(user.home / "mine")
    training = user.python("-m", "training_infra.cli", "train", *SMALL, "--run-dir=mine")
    eventually(lambda: run.heartbeat.exists() or training.poll() is not None)
    code, told, errors = user.infra("cancel", "mine")
    assert (code, training.communicate()[1].count("\n")) == (0, 1), errors
    outcome = read_json(run.outcome)
    assert outcome["status"] == "cancelled"
    again = "training-infra train --run-dir mine --resume"
    assert told == f"mine: stopped after step {outcome['step']}, with a checkpoint of it; continue with: {again}\n"
    code, _, errors = user.infra("train", "--resume", "--run-dir=mine", f"--steps={outcome['step'] + 2}")
    assert (code, read_json(run.outcome)["status"]) == (0, "finished"), errors
    reading = [["doctor", str(run.path)], ["logs", str(run.path)], ["generate", str(run.path), "--prompt=x"]]
    writing = [["report", str(run.path)]]
    answers = user.answers(reading + writing)
    assert [code for code, _ in answers] == [0, 0, 0, 0], answers
    assert {path.lstat().st_uid for path in user.home.rglob("*")} == {user.uid}
    assert not [path for path in (run.path, *run.path.rglob("*")) if path.stat().st_mode & 0o077]

    writing += [["train", "--resume", f"--run-dir={run.path}"], ["train", *SMALL, f"--run-dir={user.home / 'new'}"]]
    for open_to_all in (False, True):
        if open_to_all:
            subprocess.run(["chmod", "-R", "a+rX", user.home], check=True)
        before = files_of(user.home)
        asked = reading + writing
        for arguments, (code, errors) in zip(asked, other.answers(asked), strict=True):
            if open_to_all and arguments in reading:
                assert code == 0, (arguments, errors)
            else:
                assert code == 2, (arguments, errors)
                assert errors.startswith("error: ") and errors.count("\n") == 1, errors
                assert str(user.home) in errors and ("denied" in errors or "belongs to daemon" in errors), errors
        assert files_of(user.home) == before
