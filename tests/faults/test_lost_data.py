"""The data, the token cache, or a shard is damaged."""

import os
import re
import shutil
import signal

import pytest
from disks import pid_of, while_stopped
from faulty_run import STEPS, Fault, FaultyRun, where

from llama_core.chain.prepare import prepare_run
from llama_core.errors import RunDirectoryError
from llama_core.launch.outcome import read_outcome
from llama_core.runs.diagnosis import diagnose
from llama_core.runs.loading import load_config
from training_infra import cli

STOP = {"signal": "SIGSTOP"}
IN_STEP_3 = Fault("forward", STOP)
WHILE_TRAINING = "while it trains"


@pytest.fixture
def own(tmp_path, texts):
    """A run with data and a token cache of its own."""
    data = tmp_path / "texts.jsonl"
    shutil.copyfile(texts, data)
    return FaultyRun(tmp_path, data)


def change(path):
    path.write_text(path.read_text().replace("long", "short"))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(harm, marks=pytest.mark.fault(f"data file {name}", phase=WHILE_TRAINING), id=name)
        for name, harm in {"changed": change, "truncated": truncate, "deleted": os.unlink}.items()
    ],
)
def test_a_run_trains_on_its_tokens_whatever_becomes_of_the_data_and_resumes_only_on_the_same(
    harm, own, undisturbed, texts, promise, capsys
):
    data = own.folder / "texts.jsonl"
    acts = (lambda: harm(data), lambda: os.kill(pid_of(own), signal.SIGKILL))
    outcome = own.train(Fault("forward", STOP, step=4, times=2), while_stopped(own, *acts))
    assert (outcome.status, outcome.step) == ("crashed", 4)
    assert own.rows() == undisturbed.rows()[:4]
    capsys.readouterr()
    assert cli.main(["train", "--run-dir", str(own.run.path), "--resume"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(r"does not exist|made on other data", line), line
    shutil.copyfile(texts, data)
    diagnosis = own.resume()
    own.equals(undisturbed)
    promise(f"trains on; resumed only on the same data, in one line; {where(diagnosis)}; equal")


@pytest.mark.fault("token cache deleted", phase=WHILE_TRAINING)
def test_a_run_keeps_the_tokens_that_it_has_opened(own, undisturbed, promise):
    outcome = own.train(IN_STEP_3, while_stopped(own, own.forget_tokens))
    assert outcome.status == "finished"
    own.equals(undisturbed)
    promise("finished; equal")


@pytest.mark.fault("token cache truncated", phase=WHILE_TRAINING)
def test_a_run_whose_token_cache_is_cut_short_names_that_and_builds_it_again(own, undisturbed, promise):
    def cut_short():
        (tokens,) = own.token_cache.glob("shard-*/tokens.bin")
        os.truncate(tokens, 0)

    outcome = own.train(IN_STEP_3, while_stopped(own, cut_short))
    assert outcome.status == "crashed"
    assert re.search(r"rank \d was killed by signal 7 \(SIGBUS\): a file that it had mapped", outcome.reason)
    diagnosis = own.resume()
    own.equals(undisturbed)
    promise(f"crashed, names the cause; built again, {where(diagnosis)}; equal")


@pytest.mark.fault("a second run in the directory", phase=WHILE_TRAINING)
def test_a_second_run_in_a_directory_is_refused_and_the_first_is_unharmed(own, undisturbed, promise):
    def start_more():
        config = load_config(own.run)
        with pytest.raises(RunDirectoryError, match="already holds this run, and its job is running"):
            prepare_run(config, own.run.path)
        with pytest.raises(RunDirectoryError, match="holds a run of another configuration"):
            prepare_run(config.with_overrides("training.seed=7"), own.run.path)

    outcome = own.train(IN_STEP_3, while_stopped(own, start_more))
    assert outcome.status == "finished"
    own.equals(undisturbed)
    promise("refused in one line; the first is unharmed")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(harm, marks=pytest.mark.fault(f"shard {name}", phase="resumed by one rank"), id=name)
        for name, harm in {"with a flipped bit": flip, "truncated": truncate, "missing": os.unlink}.items()
    ],
)
def test_another_number_of_ranks_leaves_out_a_damaged_checkpoint_too(
    harm, undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    outcome = run.train(Fault("checkpoint: staging", {"signal": "SIGKILL"}, rank=1, step=6))
    assert outcome.status == "crashed"
    newest = run.run.checkpoints / (run.run.checkpoints / "latest").read_text().strip()
    harm(newest / "__1_0.distcp")
    (before,) = [one.step for one in diagnose(run.run).checkpoints if not one.problem]
    assert cli.main(["train", "--run-dir", str(run.run.path), "--resume", "--gpus", "1"]) == 0
    assert read_outcome(run.run).status == "finished"
    ours, theirs = run.rows(), undisturbed.rows()
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-5)
    promise(f"from step {before}; equal to rounding")
