"""An optimizer that is a row and a function trains, and its states are saved and restored, on one rank and on two."""

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
import toy_optimizer
from distributed import run_ranks
from one_batch import ROWS, SEQ_LEN, OneBatch
from tiers import nightly
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from toy_optimizer import SIGNUM

from llama_core.config.run import RunConfig, TrainingConfig
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import newest_checkpoint
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.training.optimizer import build_optimizer
from llama_core.training.trainer import Trainer

ALONE = ParallelPlan(microbatch_size=ROWS)
SHARDED = ParallelPlan(dp_shard=2, zero_stage=1, microbatch_size=ROWS // 2)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, SIGNUM.name, SIGNUM)


def trainer(path, plan, steps, **training):
    config = RunConfig.from_mapping(
        {
            "architecture": {"hidden_size": 32, "num_layers": 2, "head_dim": 8, "ffn_size": 64, "vocab_size": 128},
            "training": {
                "optimizer": "signum",
                "batch_size": ROWS,
                "seq_len": SEQ_LEN,
                "precision": "fp32",
                "learning_rate": 0.002,
                "lr_schedule": "constant",
                "checkpoint_every": 3,
            }
            | training,
            "data": {"num_workers": 0},
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
        }
    )
    run = RunDirectory(path)
    run.create()
    run.config.write_text(config.to_yaml())
    return Trainer(run, config, plan, batches=OneBatch(plan), validation={}, total_steps=steps)


def train(path, plan, steps, optimizer="signum", moments="fp32"):
    """Train or go on to step ``steps``, and return the whole of every weight and state by name."""
    toy_optimizer.register()
    one = trainer(path, plan, steps, optimizer=optimizer, moments=moments)
    one.fit()
    names = {parameter: name for name, parameter in one.engine.model.named_parameters()}
    return {
        f"{names[parameter]} {state}": _whole(tensor)
        for parameter, states in one.engine.optimizer.state.items()
        for state, tensor in (states | {"weight": parameter.detach()}).items()
    }


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone().numpy()


def under(plan, function, *arguments):
    """Return what a function returns here, or on the first rank of a plan of several."""
    if plan.world_size == 1:
        return function(*arguments)
    return run_ranks(plan.world_size, function, *arguments)[0]


def train_twice(path, plan, *optimizer):
    """Train a run that nothing disturbs and one that is resumed, and return what ``train`` does of each."""
    undisturbed = train(path / "undisturbed", plan, 6, *optimizer)
    train(path / "resumed", plan, 3, *optimizer)
    return undisturbed, train(path / "resumed", plan, 6, *optimizer)


@pytest.mark.parametrize(
    ("plan", "optimizer", "states"),
    [
        (ALONE, ("signum",), {"momentum"}),
        nightly(SHARDED, ("signum",), {"momentum"}),
        nightly(SHARDED, ("muon",), {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}),
        (ALONE, ("adamw", "bf16"), {"exp_avg", "exp_avg_sq", "step"}),
        nightly(SHARDED, ("adamw", "bf16"), {"exp_avg", "exp_avg_sq", "step"}),
        (SHARDED, ("muon", "bf16"), {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}),
    ],
    ids=[
        "alone-signum",
        "sharded-signum",
        "sharded-muon",
        "alone-adamw-bf16",
        "sharded-adamw-bf16",
        "sharded-muon-bf16",
    ],
)
def test_the_loss_falls_and_a_resumed_run_is_the_same_to_the_bit(plan, optimizer, states, tmp_path):
    undisturbed, resumed = under(plan, train_twice, tmp_path, plan, *optimizer)
    losses, again = (
        read_metrics(RunDirectory(tmp_path / name)).column("loss").to_pylist() for name in ("undisturbed", "resumed")
    )
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]
    assert again == losses
    assert {name.split()[1] for name in undisturbed} == {"weight"} | states
    assert undisturbed.keys() == resumed.keys()
    for name, tensor in undisturbed.items():
        assert np.array_equal(resumed[name], tensor), name


@pytest.mark.parametrize(
    "plan",
    [
        SHARDED,
        nightly(replace(SHARDED, zero_stage=1, zero_backend="deepspeed", offload="optimizer")),
        replace(SHARDED, zero_stage=3, zero_backend="deepspeed"),
    ],
    ids=lambda plan: f"{plan.zero_backend}-{plan.zero_stage}-{plan.offload}",
)
def test_ranks_that_shard_the_states_learn_what_one_learns_also_when_resumed(plan, tmp_path):
    losses, _ = run_ranks(2, losses_of_a_resumed_run, tmp_path / "two", plan)
    # in another order, sums of fp32 differ in their last bits, which decide some signs
    assert losses == pytest.approx(losses_of(tmp_path / "one", ALONE, 6), rel=1e-3)


def losses_of_a_resumed_run(path, plan):
    losses_of(path, plan, 4)
    return losses_of(path, plan, 6)


def losses_of(path, plan, steps):
    """Train or go on to step ``steps``, and return every loss."""
    toy_optimizer.register()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # DeepSpeed says much
        trainer(path, plan, steps).fit()
    return read_metrics(RunDirectory(path)).column("loss").to_pylist()


@pytest.mark.parametrize(
    ("optimizer", "rtol", "atol"),
    [
        (("muon",), 1e-3, 1e-5),
        # in another order, sums of fp32 differ in their last bits, which may round a moment to the other neighbour:
        # some of the last bits of bf16, and as much of an update, which is the learning rate at most
        (("adamw", "bf16"), 2**-6, 0.05 * 0.002),
    ],
    ids=["muon", "adamw-bf16"],
)
def test_a_run_goes_on_under_another_plan(optimizer, rtol, atol, tmp_path):
    undisturbed = train(tmp_path / "undisturbed", ALONE, 6, *optimizer)
    under(SHARDED, train, tmp_path / "moved", SHARDED, 3, *optimizer)
    moved = train(tmp_path / "moved", ALONE, 6, *optimizer)
    assert undisturbed.keys() == moved.keys()
    for name, tensor in undisturbed.items():
        np.testing.assert_allclose(moved[name], tensor, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "moments", "each"), [("signum", "fp32", 8), ("adamw", "fp32", 12), ("adamw", "bf16", 8)]
)
def test_a_checkpoint_is_as_large_as_the_row_says(optimizer, moments, each, tmp_path):
    one = trainer(tmp_path / "run", ALONE, 1, optimizer=optimizer, moments=moments)
    one.fit()
    tensors = [
        entry
        for entry in FileSystemReader(newest_checkpoint(one.run)).read_metadata().state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata) and entry.size  # the count of steps has none
    ]
    saved = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    assert saved == one.config.checkpoint_bytes == each * one.config.spec.num_parameters


def test_a_group_learns_at_the_rate_that_the_row_gives_it(tmp_path):
    """An update of Signum is the rate times a sign; the constant schedule begins at once."""
    one = trainer(tmp_path / "run", ALONE, 1, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in one.engine.model.named_parameters()}
    one.fit()
    moved = {
        name: float((parameter.detach() - before[name]).abs().max())
        for name, parameter in one.engine.model.named_parameters()
    }
    assert moved["norm.weight"] == pytest.approx(4 * moved["tok_embeddings.weight"], rel=0.01)
    assert moved["tok_embeddings.weight"] == pytest.approx(0.002)


def test_an_optimizer_that_takes_no_decay_decays_nothing(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "signum", replace(SIGNUM, keys=()))
    (group,) = build_optimizer(nn.Linear(2, 2), TrainingConfig(optimizer="signum")).param_groups
    assert group["weight_decay"] == 0.0


def test_the_groups_of_adamw_are_those_that_checkpoints_of_earlier_versions_hold():
    (group,) = build_optimizer(nn.Linear(2, 2), TrainingConfig()).param_groups
    assert group.keys() == torch.optim.AdamW([nn.Parameter(torch.ones(1))]).param_groups[0].keys()
