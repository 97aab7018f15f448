"""A dataloader in the caller's process, for several devices: the numbers match those of one process."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import training_infra
from llama_core.errors import ConfigError, RequestError, TrainingFailedError
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.records.preflight import read_preflights

FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 128}
QUICKLY = {"device": "cpu", "precision": "fp32", "tensorboard": False, "checkpoint_every": 0, "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def orchestrator(num_gpus, **settings):
    return training_infra.quick_start(
        "tiny_llama3_50m", "standard", num_gpus, **FEW_PARAMETERS | QUICKLY | {"steps": 1} | settings
    )


def batches(rows=14):
    """Return batches of 4 sequences, and a shorter last one."""
    return list(torch.randint(0, 128, (rows, 17), generator=torch.Generator().manual_seed(0)).split(4))


class Shuffled:
    """Gives its batches in a different order in every process, and records that this process read them."""

    def __init__(self, readers):
        self.readers = readers

    def __iter__(self):
        (self.readers / str(os.getpid())).touch()
        order = torch.randperm(4, generator=torch.Generator().manual_seed(os.getpid()))
        yield from (batches(16)[place] for place in order)

    def __len__(self):
        return 4


def losses(one):
    return read_metrics(RunDirectory(one.run_dir)).column("loss").to_pylist()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process, then its held-out loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("alone"))
        one = orchestrator(1, steps=4)
        summary = one.launch_training(batches(), batches(6))
        return [*losses(one), summary.eval_loss]


@pytest.mark.wide
@pytest.mark.parametrize(
    "degrees", [{}, pytest.param({"pp": 2, "tp": 1}, marks=pytest.mark.nightly)], ids=["data-parallel", "pipeline"]
)
def test_local_ranks_train_as_one_process_does(alone, degrees):
    one = orchestrator(2, steps=4, **degrees)
    summary = one.launch_training(batches(), batches(6))
    assert [*losses(one), summary.eval_loss] == pytest.approx(alone, rel=1e-4)  # sums in another order
    assert RunDirectory(one.run_dir).report.exists()


@pytest.mark.nightly
def test_ranks_call_a_loader_function_and_share_its_batches(tmp_path):
    one, readers = orchestrator(2, steps=2), tmp_path / "readers"
    readers.mkdir()
    one.launch_training(partial(Shuffled, readers))
    assert len(losses(one)) == 2
    in_ranks = {path.name for path in readers.iterdir()} - {str(os.getpid())}  # this process looks at the sizes
    assert len(in_ranks) == 1  # two would train on batches of two orders


def test_a_loader_that_cannot_be_pickled_is_refused_with_the_torchrun_command(tmp_path):
    class Here(list):
        def __reduce__(self):
            raise TypeError("it holds a socket")

    with pytest.raises(ConfigError, match=r"TypeError: it holds a socket.*torchrun --nproc-per-node=2 \S+"):
        orchestrator(2).launch_training(Here(batches()))
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
def test_a_larger_batch_than_the_first_is_refused():
    uneven = [batches()[0][:2], *batches()]
    with pytest.raises(RequestError, match="a batch of 4 sequences after one of 2") as caught:
        orchestrator(2, steps=3).launch_training(uneven)
    assert "\n" not in str(caught.value)


class Broken(torch.utils.data.Dataset):
    """A data set whose third item cannot be read."""

    def __len__(self):
        return 8

    def __getitem__(self, place):
        if place == 2:
            raise KeyError("the third line has no text")
        return batches()[0][0]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_loader_that_raises_is_one_line_with_the_log_that_has_the_traceback(num_workers):
    one = orchestrator(1, steps=4)
    loader = torch.utils.data.DataLoader(Broken(), batch_size=1, num_workers=num_workers)
    with pytest.raises(TrainingFailedError) as caught:
        one.launch_training(loader)
    log = RunDirectory(one.run_dir).logs / "rank-00000.log"
    assert str(caught.value) == (
        f"crashed after step 2: KeyError: 'the third line has no text'; read {log}, fix the cause, then resume=True"
    )
    assert "step 2/4" in log.read_text()
    assert "in __getitem__" in log.read_text()


def test_slurm_starts_no_ranks_for_a_loader():
    with pytest.raises(ConfigError, match=r"launcher=slurm: a job cannot read the dataloader.*srun --ntasks=2"):
        orchestrator(2, launcher="slurm").launch_training(batches())


def test_one_of_several_processes_starts_no_ranks_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this is one of 2 processes started by torchrun or srun"):
        orchestrator(2).launch_training()
    assert not (tmp_path / "runs").exists()


SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_live_dataloader import batches, losses, orchestrator

one = orchestrator({gpus}, steps=4)
summary = one.launch_training(batches(), batches(6))
again = orchestrator({gpus}, steps=1)
again.launch_training(batches())
told = [[*losses(one), summary.eval_loss], losses(again)]
Path("told-" + os.environ["RANK"] + ".json").write_text(json.dumps(told))
"""


def torchrun(tmp_path, num_ranks, gpus):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), gpus=gpus))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", script]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.wide
def test_under_torchrun_the_started_processes_are_the_ranks(tmp_path, alone):
    done = torchrun(tmp_path, 2, 2)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        first, again = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert first == pytest.approx(alone, rel=1e-4)
        assert len(again) == 1
    runs = [RunDirectory(path) for path in (tmp_path / "runs").iterdir()]
    assert [len(read_preflights(run)[0].ranks) for run in runs] == [2, 2]


@pytest.mark.nightly
def test_under_torchrun_another_number_of_processes_is_refused(tmp_path):
    done = torchrun(tmp_path, 2, 4)
    assert done.returncode != 0
    assert "num_gpus=4, but 2 processes were started; use num_gpus=2" in done.stderr
