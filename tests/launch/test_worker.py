"""The worker as a real process, training a tiny model on the built-in sample."""

import gc
import json
import os
import re
import shutil
import sys
import time

import pytest
import torch
from distributed import FORKS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.optimizer import register_optimizer_step_post_hook

from llama_core.chain.prepare import prepare_run
from llama_core.config.overrides import Override
from llama_core.config.recorded import load_recorded
from llama_core.config.run import RunConfig
from llama_core.errors import LossSpikeError, RunDirectoryError, WrongDeviceError
from llama_core.launch.logs import NOTABLE
from llama_core.launch.outcome import read_outcome
from llama_core.launch.rank.worker import run_to_end
from llama_core.launch.verdict import STOPPED_EXIT
from llama_core.records.activity import read_activity
from llama_core.records.checkpoints import checkpoint_name, write_manifest
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, read_typed
from llama_core.records.goodput import read_goodput
from llama_core.records.measurements import TrainingSummary
from llama_core.records.metrics import read_metrics
from llama_core.runs.decay import branch_off

pytestmark = pytest.mark.xdist_group("worker")

STEPS = 20
STEP_SECONDS = 0.1
"""How long a step takes at least, so that a checkpoint is on disk before many more follow."""
FEW_PARAMETERS = {"hidden_size": 64, "num_layers": 2, "ffn_size": 128, "head_dim": 16, "vocab_size": 512}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def configuration(cache, **training):
    settings = {"batch_size": 4, "seq_len": 128, "steps": STEPS, "precision": "fp32", "checkpoint_every": 10}
    return RunConfig.from_mapping(
        {
            "architecture": FEW_PARAMETERS,
            "training": settings | {"eval_sequences": 2, "keep_checkpoints": 4} | training,
            "data": {"cache_dir": str(cache)},
            "launch": {"device": "cpu"},
            "benchmark": {"warmup_steps": 0, "steps": 2},
        }
    )


def prepared(path, cache, **training):
    return prepare_run(configuration(cache, **training), path)


def start(run, *options):
    """Start a worker whose steps take ``STEP_SECONDS``."""
    process = FORKS.Process(target=_work, args=(run, options, STEP_SECONDS))
    process.start()
    return process


def exit_code(process):
    process.join()
    return process.exitcode


def work(run, *options):
    """Run a worker to its end; return its exit code and its output."""
    process = FORKS.Process(target=_work, args=(run, options, 0.0))
    process.start()
    return exit_code(process), _output(run).read_text()


def _output(run):
    return run.path.with_name(f"{run.name}.log")


def _work(run, options, step_seconds):
    from llama_core.launch.rank import worker

    gc.freeze()  # collections need not go through the imported modules
    with _output(run).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    register_optimizer_step_post_hook(lambda *args: time.sleep(step_seconds))
    sys.argv = ["worker", str(run.path), *options]
    sys.exit(worker.main())


def some_texts(folder):
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n} " * 9}) + "\n" for n in range(500)))
    return path


def wait_until(process, condition):
    while not condition():
        assert process.is_alive(), "the worker has ended too early"
        time.sleep(0.01)


def step_of(run):
    return read_json(run.heartbeat)["step"] if run.heartbeat.exists() else 0


def losses(run):
    return read_metrics(run).select(["step", "loss", "grad_norm", "eval_loss"]).to_pylist()


def final_state(run, tmp_path):
    """Every tensor of the newest checkpoint: weights and both moments."""
    path = tmp_path / f"{run.name}.pt"
    dcp_to_torch_save(run.checkpoints / f"step-{STEPS:08d}", path)
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    run = prepared(tmp_path_factory.mktemp("runs") / "undisturbed", cache)
    code, output = work(run)
    assert code == 0, output
    return run


def test_a_finished_run_leaves_its_whole_record(undisturbed):
    assert read_outcome(undisturbed).status == "finished"
    assert [row["step"] for row in losses(undisturbed)] == list(range(1, STEPS + 1))
    summary = read_json(undisturbed.training)
    assert summary["eval_loss"] < losses(undisturbed)[0]["loss"]
    assert 0 < summary["bigram_entropy"] < summary["unigram_entropy"]
    assert len(read_json(undisturbed.benchmark)["step_seconds"]) == 2
    assert list((undisturbed.logs / "tensorboard").glob("events*"))
    assert read_activity(undisturbed).doing == "timing steps"
    goodput = read_goodput(undisturbed)
    assert {part for part, seconds in goodput.total.items() if not seconds} <= {"recomputed", "queue", "stopped"}
    assert goodput.seconds == pytest.approx(sum(map(sum, (parts.values() for parts in goodput.attempts))))


@pytest.mark.wide
def test_a_run_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(undisturbed, cache, tmp_path):
    """Every logged loss and norm, every weight, every moment: kill -9 after the tenth step changes none of them."""
    run = prepared(tmp_path / "killed", cache)
    process = start(run)
    wait_until(process, lambda: step_of(run) >= 12 and (run.checkpoints / "step-00000010").exists())
    process.kill()
    process.join()
    assert not (run.checkpoints / f"step-{STEPS:08d}").exists()
    assert not run.outcome.exists()
    half_written = run.path / ".heartbeat.json.0123.tmp"  # as another kill may leave it
    half_written.touch()

    code, output = work(run)
    assert code == 0, output
    assert "resuming after step 10" in output
    assert not half_written.exists()
    assert losses(run) == losses(undisturbed)
    ours, theirs = final_state(run, tmp_path), final_state(undisturbed, tmp_path)
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    moments = [name for name in theirs["optimizer"] if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert len(moments) == 2 * len(theirs["model"])
    for name in moments:
        assert torch.equal(ours["optimizer"][name], theirs["optimizer"][name]), name


THREE_DOMAINS = {"wiki": 60, "code": 30, "math": 10}


def on_mixture(cache, folder, **training):
    sources = {}
    for name, weight in THREE_DOMAINS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {n} " * 40}) + "\n" for n in range(60)))
        sources[name] = {"path": str(path), "weight": weight}
    config = configuration(cache, eval_every=10, seq_len=32, **training)
    return config.with_overrides(Override("data.sources", sources))


def rows_read(run, step):
    return read_json(run.checkpoints / checkpoint_name(step) / "state.json")["data"]["order"]["read"]


def test_a_run_on_a_mixture_killed_and_resumed_equals_an_undisturbed_one_bit_for_bit(cache, tmp_path):
    """Weights change after the checkpoint and before the kill, and sequences have twice the length after it."""
    stages = [{"from_tokens": 11 * 128, "weights": {"math": 90}}, {"from_tokens": 15 * 128, "seq_len": 64}]
    config = on_mixture(cache, tmp_path).with_overrides(Override("data.stages", stages))
    whole = prepare_run(config, tmp_path / "whole")
    assert work(whole)[0] == 0
    run = prepare_run(config, tmp_path / "killed")
    process = start(run)
    wait_until(process, lambda: step_of(run) >= 12 and (run.checkpoints / "step-00000010").exists())
    process.kill()
    process.join()
    code, output = work(run)
    assert code == 0, output
    assert "resuming after step 10" in output
    assert losses(run) == losses(whole)
    assert read_json(run.training)["named_eval_rows"] == read_json(whole.training)["named_eval_rows"]
    assert set(read_json(run.training)["named_eval_rows"]) == set(THREE_DOMAINS)
    assert {name: rows_read(run, 10)[name] for name in THREE_DOMAINS} == {"wiki": 24, "code": 12, "math": 4}
    assert rows_read(run, 20) == rows_read(whole, 20)
    assert sum(rows_read(run, 20).values()) == 15 * 4 + 5 * 2
    assert {name: rows_read(run, 20)[f"{name}@64"] for name in THREE_DOMAINS} == {"wiki": 6, "code": 3, "math": 1}
    assert read_metrics(run).column("tokens").to_pylist() == [128 * step for step in range(1, STEPS + 1)]
    ours, theirs = final_state(run, tmp_path), final_state(whole, tmp_path)
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)


def test_a_run_goes_on_with_other_weights_and_one_more_source_if_that_is_allowed(cache, tmp_path):
    config = on_mixture(cache, tmp_path, steps=10)
    run = prepare_run(config, tmp_path / "run")
    assert work(run)[0] == 0
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"text": f"more {n} " * 40}) + "\n" for n in range(60)))
    changes = ["training.steps=20", "data.sources.math.weight=90", f"data.sources.more={{path: {more}, weight: 20}}"]
    other = config.with_overrides(*changes)
    with pytest.raises(RunDirectoryError, match="--resume --allow-data-change"):
        prepare_run(other, run.path, resume=True)
    prepare_run(other, run.path, resume=True, allow_data_change=True)
    prepare_run(other, run.path, resume=True)  # no checkpoint has the new data yet, but the run's settings do
    code, output = work(run)
    assert code == 0, output
    said = "the data changed after step 10: code goes on after 12 sequences; math goes on after 4 sequences; wiki goes"
    assert said in output
    (change,) = read_data_changes(run).changes
    assert (change.step, change.row, change.new) == (10, 40, ("more",))
    assert change.kept == rows_read(run, 10) == {"wiki": 24, "code": 12, "math": 4}
    assert rows_read(run, 20) == {"wiki": 36, "code": 18, "math": 22, "more": 4}
    with pytest.raises(RunDirectoryError, match=r"data\.sources\.math\.weight is 90"):
        prepare_run(config.with_overrides("training.steps=30"), run.path, resume=True)


@pytest.mark.nightly
def test_a_damaged_part_of_the_metrics_costs_a_resumed_run_only_its_steps(undisturbed, cache, tmp_path):
    run = prepared(tmp_path / "damaged", cache)
    process = start(run)
    wait_until(process, lambda: step_of(run) >= 12 and (run.checkpoints / "step-00000010").exists())
    process.kill()
    process.join()
    os.truncate(run.metrics / "part-00000.parquet", 100)
    code, output = work(run)
    assert code == 0, output
    assert "part-00000.parquet is damaged" in output
    assert read_outcome(run).status == "finished"
    assert 0 < len(losses(run)) < STEPS
    assert losses(run) == losses(undisturbed)[-len(losses(run)) :]


def test_every_step_of_a_run_killed_before_its_first_checkpoint_is_on_disk(cache, tmp_path):
    run = prepared(tmp_path / "killed", cache, steps=1000, checkpoint_every=0)
    process = start(run)
    wait_until(process, lambda: step_of(run) >= 3)
    process.kill()
    process.join()
    assert [row["step"] for row in losses(run)] == list(range(1, step_of(run) + 1))


@pytest.mark.nightly
def test_a_run_that_ends_early_is_finished_and_goes_on_only_with_more_patience(cache, tmp_path):
    """Its learning rate is too small to change a weight, so no evaluation is better than the first."""

    def end_with(patience, *, resume=True):
        settings = {"learning_rate": 1e-30, "warmup_steps": 0, "eval_every": 1, "patience": patience}
        run = prepare_run(configuration(cache, **settings), tmp_path / "run", resume=resume)
        assert work(run)[0] == 0
        return read_outcome(run), read_typed(run.training, TrainingSummary).ended_early

    outcome, ended = end_with(2, resume=False)
    assert re.fullmatch(r"no lower held-out loss than .* of step 1 in 2 evaluations \(training.patience=2\)", ended)
    assert (outcome.status, outcome.step, outcome.reason) == ("finished", 3, f"3 steps of {STEPS}: {ended}")
    assert [end_with(patience)[0].step for patience in (2, 4, 3)] == [3, 5, 5]


@pytest.mark.wide
def test_a_branch_is_resumed_like_any_run_and_decays_as_the_whole_one(cache, tmp_path):
    stable = {"lr_schedule": "wsd", "warmup_steps": 2, "checkpoint_every": 2, "decay_fraction": 0.25}
    whole = prepared(tmp_path / "whole", cache, **stable, steps=8)
    longer = prepared(tmp_path / "longer", cache, **stable, steps=10)
    for run in (whole, longer):
        assert work(run, "--only", "train")[0] == 0
    branch = branch_off(longer, tmp_path / "branch", num_steps=2, step=6)
    prepare_run(load_recorded(branch), branch.path, resume=True)
    code, output = work(branch, "--only", "train")
    assert code == 0, output
    assert losses(branch) == losses(whole)


def test_a_trained_run_without_a_benchmark_is_only_timed(undisturbed):
    before = read_json(undisturbed.training)
    undisturbed.benchmark.unlink()
    undisturbed.outcome.unlink()
    code, output = work(undisturbed)
    assert code == 0, output
    assert read_json(undisturbed.training) == before
    assert undisturbed.benchmark.exists()


def test_a_run_asked_to_stop_first_saves_a_checkpoint_of_its_last_step(cache, tmp_path):
    run = prepared(tmp_path / "stopped", cache, steps=1000, checkpoint_every=0)
    process = start(run)
    wait_until(process, lambda: step_of(run) >= 2)
    process.terminate()
    assert exit_code(process) == STOPPED_EXIT
    outcome = read_outcome(run)
    assert (outcome.status, outcome.next_action) == ("cancelled", "start it again with --resume")
    assert (run.checkpoints / "latest").read_text() == f"step-{outcome.step:08d}\n"
    assert not [line for line in _output(run).read_text().splitlines() if line.startswith(NOTABLE)], "it is no error"


@pytest.mark.nightly
def test_a_run_asked_to_stop_after_its_last_step_times_no_steps(cache, tmp_path):
    config = configuration(cache, steps=1).with_overrides("benchmark.steps=100000")
    run = prepare_run(config, tmp_path / "stopped")
    process = start(run)
    wait_until(process, run.training.exists)
    process.terminate()
    assert exit_code(process) == STOPPED_EXIT
    assert (read_outcome(run).status, read_outcome(run).step) == ("cancelled", 1)
    assert not run.benchmark.exists()


def test_a_run_resumes_only_on_its_own_data(undisturbed, cache, tmp_path):
    run = prepared(tmp_path / "other-data", cache)
    run.config.write_text(configuration(cache).with_overrides(f"data.source={some_texts(tmp_path)}").to_yaml())
    shutil.copytree(undisturbed.checkpoints, run.checkpoints)
    for checkpoint in run.checkpoints.glob("step-*"):  # as if the files of the same source had changed
        shutil.copyfile(run.config, checkpoint / run.config.name)
        write_manifest(checkpoint, {})
    code, output = work(run)
    assert code == 2
    assert "the checkpoint was made on other data" in read_outcome(run).reason
    assert "Traceback" not in output


def test_a_diverging_run_ends_as_non_finite_with_its_last_good_checkpoint(cache, tmp_path):
    run = prepared(
        tmp_path / "diverges",
        cache,
        learning_rate=1e30,
        lr_schedule="constant",
        warmup_steps=0,
        checkpoint_every=1,
        max_skipped_steps=1,
    )
    code, output = work(run)
    assert code == 1
    assert "Traceback" not in output
    outcome = read_outcome(run)
    assert outcome.status == "non-finite"
    assert "2 steps in a row" in outcome.reason
    assert list(run.checkpoints.glob("step-*"))


def test_a_run_that_a_spike_ends_records_the_remedy_of_the_trainer(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()

    def build(should_stop):
        raise LossSpikeError("step 7: loss 9 is too much", "leave out its data")

    outcome = run_to_end(run, build)
    assert (outcome.status, outcome.next_action) == ("loss-spike", "leave out its data")


def test_a_run_that_replicas_end_names_the_nodes_to_look_at(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()

    def build(should_stop):
        raise WrongDeviceError("step 8: rank 0 and rank 3 differ", ["node1", "node2"])

    outcome = run_to_end(run, build)
    assert outcome.status == "node-failure"
    assert outcome.next_action.startswith("look at the devices of node1,node2 (")


@pytest.mark.wide
@pytest.mark.root
def test_a_full_disk_ends_the_run_and_leaves_its_last_checkpoint_complete(cache, disk_of):
    run = prepared(disk_of("3m") / "run", cache, checkpoint_every=2)
    code, output = work(run)
    outcome = read_outcome(run)
    assert code == 1, output
    assert outcome.status == "crashed"
    assert outcome.reason.startswith("cannot save the checkpoint of step ")
    assert re.search(rf"the disk of {run.checkpoints} is full: .* needed, .* free; step-", outcome.reason)
    assert outcome.next_action == "free some space there, or lower training.keep_checkpoints, then --resume"
    assert "Traceback" not in output
    newest = (run.checkpoints / "latest").read_text().strip()
    assert outcome.reason.endswith(f"{newest} is complete")
    dcp_to_torch_save(run.checkpoints / newest, cache / "whole.pt")


def test_data_without_a_usable_document_is_a_wrong_request(cache, tmp_path):
    """Here the data disappears between submission and the start of the job."""
    texts = some_texts(tmp_path)
    run = prepare_run(configuration(cache).with_overrides(f"data.source={texts}"), tmp_path / "run")
    texts.write_text("")
    code, output = work(run)
    assert code == 2
    assert read_outcome(run).status == "bad-config"
    assert read_outcome(run).reason == f"data source '{texts}': no document to train on"
    assert "Traceback" not in output


@pytest.mark.nightly
def test_a_run_refused_for_its_data_can_start_once_the_data_is_fixed(cache, tmp_path):
    texts = some_texts(tmp_path)
    config = configuration(cache, steps=2).with_overrides(f"data.source={texts}")
    run = prepare_run(config, tmp_path / "run")
    texts.write_text("")
    assert work(run)[0] == 2
    some_texts(tmp_path)
    assert prepare_run(config, tmp_path / "run") == run
    code, output = work(run)
    assert code == 0, output
    with pytest.raises(RunDirectoryError, match="already holds this run"):
        prepare_run(config, tmp_path / "run")


@pytest.mark.nightly
def test_a_benchmark_alone_times_steps_and_trains_nothing(cache, tmp_path):
    run = prepared(tmp_path / "timed", cache)
    code, output = work(run, "--only", "benchmark")
    assert code == 0, output
    assert run.benchmark.exists()
    assert not run.training.exists()
    assert read_metrics(run).num_rows == 0
