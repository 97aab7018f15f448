"""The commands of docs/storage.md, with a real S3 server and an empty disk."""

import os
import shutil
import subprocess
import sys

import pytest
from s3_server import SECRET, s3_server

from llama_core.config.run import RunConfig
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.storage.mirror import Mirror

pytestmark = [pytest.mark.wide, pytest.mark.xdist_group("storage")]
SIZES = {"hidden_size": 32, "num_layers": 2, "head_dim": 8, "ffn_size": 64, "vocab_size": 258}
TRAIN = [
    *(f"--set=architecture.{key}={value}" for key, value in SIZES.items()),
    *("--data=texts.txt", "--device=cpu", "--gpus=2", "--mixed-precision=fp32", "--seq-len=32", "--batch-size=4"),
    *("--checkpoint-every=2", "--no-benchmark", "--set=tracking.tensorboard=false", "--set=launch.preflight=off"),
]
MIRROR = "--set=training.checkpoint_mirror=s3://bucket/runs"
URL = "s3://bucket/runs/mine"


@pytest.fixture(scope="module")
def s3():
    environment = {}
    with s3_server(environment) as server:
        server.environment = environment
        yield server


@pytest.fixture(scope="module")
def folder(s3, tmp_path_factory):
    """A directory in which a run has been trained and mirrored, and then lost."""
    path = tmp_path_factory.mktemp("storage")
    (path / "texts.txt").write_text("\n\n".join(f"text number {number} of some" for number in range(200)))
    trained = shell(s3, path, "train", *TRAIN, MIRROR, "--steps=4", "--run-dir=runs/mine")
    assert trained.returncode == 0, trained.stderr
    files = [file.read_bytes() for file in (path / "runs").rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in content for content in files)
    shutil.move(path / "runs", path / "kept")
    return path


def shell(s3, folder, *arguments):
    environment = os.environ | s3.environment | {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "training_infra.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_lost_run_goes_on_from_its_address_with_all_its_steps(s3, folder):
    went_on = shell(s3, folder, "train", "--resume", f"--run-dir={URL}", "--steps=6")
    assert went_on.returncode == 0, went_on.stderr
    assert f"copying {URL}/step-00000004" in went_on.stderr
    run = RunDirectory(folder / "runs" / "mine")
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3, 4, 5, 6]
    assert list(whole(s3)) == [path.name for path in list_checkpoints(run)]
    again = shell(s3, folder, "train", "--resume", f"--run-dir={URL}", "--steps=6")
    assert again.returncode == 0, again.stderr
    assert "runs/mine is here already, with step-00000006" in again.stderr


def whole(s3):
    os.environ.update(s3.environment)
    try:
        return Mirror(URL).contents().whole
    finally:
        for name in s3.environment:
            os.environ.pop(name)


def test_another_run_of_that_name_is_refused_in_one_line_before_it_trains(s3, folder):
    other = folder / "elsewhere"
    other.mkdir()
    shutil.copy(folder / "texts.txt", other)
    refused = shell(s3, other, "train", *TRAIN, MIRROR, "--steps=4", "--run-dir=runs/mine")
    assert refused.returncode == 2
    (line,) = (line for line in refused.stderr.splitlines() if line.startswith("error"))
    assert f"{URL} holds the checkpoints of another run" in line
    assert not (other / "runs" / "mine" / "checkpoints").exists()


def test_weights_at_an_address_are_generated_from_exported_and_begun_with(s3, folder):
    written = shell(s3, folder, "generate", URL, "--prompt=text", "--max-new-tokens=4", "--step=4")
    assert written.returncode == 0, written.stderr
    local = shell(s3, folder, "generate", "kept/mine", "--prompt=text", "--max-new-tokens=4", "--step=4")
    assert written.stdout == local.stdout
    evaluated = shell(s3, folder, "evaluate", URL, "--step=4", "--data=texts.txt", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    exported = shell(s3, folder, "export-hf", URL, "--step=4", "--out=s3://bucket/exports/mine")
    assert exported.returncode == 0, exported.stderr
    assert "exports/mine/config.json" in s3.files()
    again = shell(s3, folder, "export-hf", URL, "--step=4", "--out=s3://bucket/exports/mine")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    begun = shell(s3, folder, "train", f"--init-from={URL}", *TRAIN, "--steps=1", "--run-dir=runs/second")
    assert begun.returncode == 0, begun.stderr
    second = RunConfig.load(folder / "runs" / "second" / "config.yaml")
    assert second.training.init_from is not None
    assert second.training.checkpoint_mirror is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--run-dir=s3://bucket/runs/new"], "is an address, and a run trains in a directory here; add"),
        (["train", "--resume", "--run-dir=s3://bucket/runs/none"], "holds no run; name PREFIX/RUN_NAME"),
        (["train", "--resume", "--run-dir=s3://absent/runs/none"], "make the bucket, or correct the address"),
        (["generate", "s3://bucket/runs/none", "--prompt=text"], "holds no run; name PREFIX/RUN_NAME"),
        (["logs", URL], "logs takes the directory of a run here, not an address"),
        (["train", "--init-from=ftp://host/run"], "is no address of an object store"),
        (["train", f"--init-from=s3://AKIA:{SECRET}@bucket/run"], "give credentials as the store's own tools take"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(s3, tmp_path, arguments, said):
    refused = shell(s3, tmp_path, *arguments)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert said in refused.stderr
    assert SECRET not in refused.stderr
