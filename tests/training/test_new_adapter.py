"""An adapter that is a row, a module and its operations trains, and is resumed and merged, on one rank or two."""

from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO

import numpy as np
import pytest
import torch
import toy_adapter
from distributed import run_ranks
from one_batch import ROWS, SEQ_LEN, OneBatch
from test_stored_weights import filled
from tiers import cases, nightly
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from toy_adapter import FACTORS

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.config.run import RunConfig
from llama_core.models.llama import build_llama
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import newest_checkpoint
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.runs.export import export_run
from llama_core.training.trainer import Trainer

PLANS = {
    "alone": ParallelPlan(microbatch_size=ROWS),
    "tp2": ParallelPlan(tp=2, microbatch_size=ROWS),
    "zero3": ParallelPlan(dp_shard=2, zero_stage=3, microbatch_size=ROWS // 2),
}
pytestmark = pytest.mark.xdist_group("kinds of adapters")  # so that each is trained once
KINDS = {name: name for name in sorted({*ADAPTERS, FACTORS.name} - {DEFAULT_ADAPTER})}
METHODS = cases(KINDS, narrow={FACTORS.name})


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ADAPTERS, FACTORS.name, FACTORS)


def config_of(method):
    return RunConfig.from_mapping(
        {
            "model": "llama3_8b",
            "architecture": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 8,
                "ffn_size": 64,
                "vocab_size": 128,
            },
            "strategy": "lora",
            "lora": {"method": method, "target_modules": "all-linear"} | dict.fromkeys(ADAPTERS[method].sizes, 4),
            "training": {
                "batch_size": ROWS,
                "seq_len": SEQ_LEN,
                "precision": "fp32",
                "learning_rate": 0.01,
                "lr_schedule": "constant",
                "checkpoint_every": 3,
            },
            "data": {"num_workers": 0},
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
        }
    )


def train(path, method, plan, steps):
    """Train or go on to step ``steps``, and return every weight by name."""
    toy_adapter.register()
    config = config_of(method)
    run = RunDirectory(path)
    run.create()
    run.config.write_text(config.to_yaml())
    one = Trainer(run, config, plan, batches=OneBatch(plan), validation={}, total_steps=steps)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        one.fit()
    return {name: _whole(parameter.detach()) for name, parameter in one.engine.model.named_parameters()}


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def train_twice(path, method, plan):
    """Train a run that nothing disturbs and one that is resumed, and return every weight of each by name."""
    undisturbed = train(path / "undisturbed", method, plan, 6)
    train(path / "resumed", method, plan, 3)
    return undisturbed, train(path / "resumed", method, plan, 6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that gives the folder and the weights of ``train_twice`` under a plan, trained once."""

    @cache
    def of(method, name):
        path = tmp_path_factory.mktemp(f"{method}-{name}")
        plan = PLANS[name]
        if plan.world_size == 1:
            return path, *train_twice(path, method, plan)
        return path, *run_ranks(plan.world_size, train_twice, path, method, plan)[0]

    return of


def losses_of(path):
    return read_metrics(RunDirectory(path)).column("loss").to_pylist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tp2", nightly("alone"), nightly("zero3")])
def test_the_loss_falls_and_a_resumed_run_is_the_same_to_the_bit(trained, name, method):
    path, undisturbed, resumed = trained(method, name)
    losses = losses_of(path / "undisturbed")
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert losses_of(path / "resumed") == losses
    assert undisturbed.keys() == resumed.keys()
    for weight, value in undisturbed.items():
        assert np.array_equal(resumed[weight], value), weight


@pytest.fixture
def run(trained, method):
    """A run of a kind of adapter, trained under tensor parallelism."""
    path, *_ = trained(method, "tp2")
    return RunDirectory(path / "resumed")


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_holds_the_weights_of_the_rows_with_their_states_and_nothing_else(run, method):
    metadata = FileSystemReader(newest_checkpoint(run)).read_metadata().state_dict_metadata
    shapes = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith("model.")
    }
    assert shapes == config_of(method).spec.adapter_shapes


@pytest.mark.parametrize("method", METHODS)
def test_merged_weights_compute_what_was_trained(run, method, tmp_path):
    spec = config_of(method).spec
    expected = filled(spec, newest_checkpoint(run))
    plain = config_of(method).with_overrides("strategy=standard", "lora={}").spec
    merged = filled(plain, export_run(run, tmp_path / "merged", merged=True))
    tokens_BS = torch.randint(0, 128, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens_BS), expected(tokens_BS), rtol=0, atol=1e-5)
        drawn = build_llama(plain, device="cpu", seed=0)(tokens_BS)
        assert (merged(tokens_BS) - drawn).abs().max() > 1e-3
