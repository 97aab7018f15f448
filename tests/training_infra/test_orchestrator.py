import inspect
import os
import signal
import subprocess
import sys

import pytest
import torch
from tiers import cases, nightly, wide
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import training_infra
from llama_core.errors import ConfigError, DataError, StoppedError
from llama_core.launch.outcome import read_outcome
from llama_core.records.directory import RunDirectory
from llama_core.records.job import Outcome
from llama_core.records.metrics import read_metrics
from llama_core.runs.stopping import stopped

FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 128}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def orchestrator(**settings):
    defaults = {"device": "cpu", "precision": "fp32", "tensorboard": False, "checkpoint_every": 0}
    return training_infra.quick_start("tiny_llama3_50m", "standard", 1, **FEW_PARAMETERS | defaults | settings)


def tokens(rows=16, length=17):
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(0))


def batches(count=4):
    return list(tokens(4 * count).split(4))


def losses(orchestrator):
    return read_metrics(RunDirectory(orchestrator.run_dir)).column("loss").to_pylist()


def test_every_exported_name_of_the_package_exists():
    assert all(getattr(training_infra, name) for name in training_infra.__all__)
    assert set(training_infra.__all__) == set(training_infra._HOMES)


def test_settings_are_found_by_the_last_word_of_their_key():
    config = orchestrator(batch_size=16, learning_rate=1e-4, steps=9, source="x.jsonl").config
    assert (config.training.batch_size, config.training.learning_rate, config.training.steps) == (16, 1e-4, 9)
    assert config.data.source == "x.jsonl"
    assert config.benchmark.steps == 5


def test_settings_of_a_section_inside_another_are_found_too():
    config = orchestrator(factor=4, time_limit_min=30).config
    assert (config.architecture.rope_scaling.factor, config.launch.slurm.time_limit_min) == (4, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchsize": 3}, "unknown setting 'batchsize'; did you mean 'batch_size'"),
        ({"batch_size": "many"}, "training.batch_size='many': input should be a valid integer"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        orchestrator().configure(**settings)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="unknown strategy 'lra'"):
        training_infra.quick_start("tiny_llama3_50m", strategy="lra")


def test_the_configuration_is_printed_with_its_plan_and_memory(capsys):
    orchestrator().print_configuration()
    printed = capsys.readouterr().out
    for word in ("tiny_llama3_50m", "1 rank", "peak", "fits"):
        assert word in printed


def test_the_dry_run_agrees_with_the_estimate():
    one = orchestrator(batch_size=4, seq_len=64)
    assert one.dry_run().profile.peak_bytes == pytest.approx(one.estimate_memory().profile.peak_bytes, rel=0.05)


LOADERS = {
    "tensors": batches(),
    "pairs": [(one[:, :-1], one[:, 1:]) for one in batches()],
    "mappings": [{"input_ids": one} for one in batches()],
    "labelled": [{"input_ids": one, "labels": one.clone()} for one in batches()],
    "masked": [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in batches()],
    "lists": [{"input_ids": one.tolist(), "labels": one.tolist()} for one in batches()],
    "numpy": [one.numpy().astype("uint16") for one in batches()],
    "loader": DataLoader(TensorDataset(tokens()[:, :-1], tokens()[:, 1:]), batch_size=4),
}


@pytest.fixture(scope="module")
def of_tensors(tmp_path_factory):
    """The losses of plain tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tensors"))
        one = orchestrator()
        one.launch_training(LOADERS["tensors"])
        return losses(one)


@pytest.mark.parametrize("loader", cases(LOADERS, narrow={"loader"}))
def test_the_same_tokens_train_the_same_in_every_form_of_batch(of_tensors, loader):
    one = orchestrator()
    summary = one.launch_training(loader)
    assert summary.steps == 4
    assert losses(one) == of_tensors


def test_a_shorter_last_batch_is_trained_on_too():
    loader = DataLoader(TensorDataset(tokens()[:10]), batch_size=4)
    summary = orchestrator(epochs=1.0, microbatch_size=1).launch_training([rows for (rows,) in loader])
    assert (summary.steps, summary.tokens) == (3, 10 * (tokens().shape[1] - 1))


def test_masked_targets_are_not_trained_on():
    """Masking half of a batch gives the loss of the other half alone."""
    half = batches(1)[0].clone()
    mask = torch.ones_like(half)
    mask[:, 9:] = 0
    masked, alone = orchestrator(), orchestrator()
    masked.launch_training([{"input_ids": half, "attention_mask": mask}])
    alone.launch_training([half[:, :9]])
    assert losses(masked) == pytest.approx(losses(alone), rel=1e-6)


def test_a_validation_loader_gives_the_held_out_loss_and_the_report_is_written():
    one = orchestrator(epochs=2.0)
    summary = one.launch_training(batches(3), batches(1))
    assert summary.steps == 6
    assert summary.eval_loss is not None
    assert summary.eval_tokens == 4 * 16
    assert RunDirectory(one.run_dir).report.exists()


@pytest.mark.wide
def test_training_without_a_loader_is_a_job_on_the_sample():
    one = orchestrator(steps=3, seq_len=32, batch_size=2, vocab_size=512, eval_sequences=2)
    summary = one.launch_training()
    assert summary.steps == 3
    assert summary.unigram_entropy > 0
    assert RunDirectory(one.run_dir).job.exists()


class Interrupted(list):
    """Raises a real interrupt after some batches, as Ctrl-C does."""

    def __iter__(self):
        for number, one in enumerate(super().__iter__()):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield one


def test_an_interrupted_run_continues_where_it_stopped(tmp_path, monkeypatch):
    whole = orchestrator()
    whole.launch_training(batches(6))

    one = orchestrator()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # and put it back
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4, with a checkpoint of it; continue") as stop:
        one.launch_training(Interrupted(batches(6)), run_dir=tmp_path / "run")
    assert isinstance(stop.value, StoppedError)
    assert read_outcome(RunDirectory(tmp_path / "run")).status == "cancelled"
    again = orchestrator()
    again.launch_training(batches(6), run_dir=tmp_path / "run", resume=True)
    assert losses(again) == losses(whole)


SCRIPT = f"""
import os
import signal
import torch
import training_infra
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with it ignored
{FEW_PARAMETERS = }
{"".join(map(inspect.getsource, (Interrupted, orchestrator, tokens, batches)))}
"""


@pytest.mark.parametrize(
    ("launch", "code", "told"),
    [
        wide(
            "orchestrator().launch_training(Interrupted(batches(6)), run_dir='run')",
            130,
            "stopped after step 4, with a checkpoint of it; continue with: "
            "launch_training(..., run_dir='run', resume=True)\n",
        ),
        nightly(
            "orchestrator().launch_training(lambda: signal.raise_signal(signal.SIGINT), run_dir='run')",
            130,
            "interrupted\n",
        ),
        nightly(
            "try: orchestrator().launch_training(Interrupted(batches(6)))\nexcept KeyboardInterrupt: pass",
            0,
            "",
        ),
    ],
    ids=["while training", "before", "caught"],
)
def test_an_interrupted_script_ends_in_one_line_unless_it_handles_interrupts(launch, code, told):
    ended = subprocess.run([sys.executable, "-c", SCRIPT + launch], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, told)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "the dataloader is empty"),
        ([["text"]], "a batch of type list is not understood"),
        ([{"text": 1}], "a batch of type dict with keys 'text' is not understood"),
        (5, "'int' is not a dataloader; give an iterable of batches"),
        ([(torch.zeros(2, 9).long(), torch.full((2, 9), -100))], "a batch has no target to train on"),
        ([torch.zeros(4, dtype=torch.long)], r"must be \[sequences, tokens\]"),
        ([torch.full((2, 9), 500)], "token 500 is not in the model's vocabulary of 128"),
        ([torch.zeros(2, 9)], "tokens must be integers, not torch.float32"),
        ([torch.full((2, 9), -5)], "token -5 is not in the model's vocabulary of 128"),
    ],
)
def test_a_loader_without_token_batches_is_refused_in_one_line(tmp_path, loader, message):
    with pytest.raises(DataError, match=message):
        orchestrator().launch_training(loader)
    assert not (tmp_path / "runs").exists()


def test_a_wrong_validation_loader_is_refused_before_training(tmp_path):
    for loader in ([], [torch.zeros(2, 9)]):
        with pytest.raises(DataError):
            orchestrator().launch_training(batches(), loader, run_dir=tmp_path / "run")
        assert not (tmp_path / "run" / "training.json").exists()


def test_a_run_on_a_loader_says_how_to_continue_from_python(tmp_path):
    config = orchestrator().config.with_overrides("data.source=dataloader", "training.steps=3")
    run = RunDirectory(tmp_path)
    run.config.write_text(config.to_yaml())
    told = str(stopped(run, Outcome("cancelled", "", 2, "", "")))
    assert told.startswith("stopped after step 2, with no checkpoint yet; start over with: ")
    assert told.endswith(f"launch_training(..., run_dir='{tmp_path}', resume=True)")


def test_requirements_are_numbers_and_sentences():
    needs = training_infra.estimate_requirements("llama2_7b", batch_size=16, sequence_length=2048, num_gpus=4)
    assert needs["memory_per_gpu_gb"] > 16 * 6.738 / 4  # the states alone, divided by ZeRO-3
    assert sum(needs["categories"].values()) == pytest.approx(needs["memory_per_gpu_gb"] * 1e9)
    assert needs["fits"] is True
    assert isinstance(needs["recommendations"], list)


def test_a_model_that_does_not_fit_gets_a_recommendation():
    needs = training_infra.estimate_requirements("llama3_8b", num_gpus=1, gpu_type="h100")
    assert needs["fits"] is False
    assert "128.5 GB" in needs["recommendations"][0]


def test_the_environment_is_a_record_of_errors_warnings_and_facts():
    found = training_infra.validate_environment()
    assert set(found) == {"errors", "warnings", "facts", "problems"}
    assert not found["errors"]


def test_a_loader_that_gives_its_batches_only_once_is_refused():
    with pytest.raises(DataError, match="a generator gives its batches only once"):
        orchestrator(steps=2).launch_training(batch for batch in batches())
    with pytest.raises(DataError, match="a list_iterator gives its batches only once"):
        orchestrator(steps=2).launch_training(batches(), iter(batches()))


class Stream(IterableDataset):
    def __iter__(self):
        yield from tokens()


def test_loaders_over_a_stream_train_for_the_requested_steps():
    loader = DataLoader(Stream(), batch_size=4)
    with pytest.raises(ConfigError, match="the dataloader has no length"):
        orchestrator().launch_training(loader)
    one = orchestrator(steps=5)
    one.launch_training(loader, loader)
    assert len(losses(one)) == 5
