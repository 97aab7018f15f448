"""A run's losses and weights depend on its seed, data and plan, and on no setting beside them, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed import run_ranks
from parity import UNTIED, train
from test_trainer import BATCH_SIZE, Counting, assert_equal, batch, config, weights
from tiers import cases

from llama_core.chain.planned import with_keys
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.metrics import read_metrics
from llama_core.training.trainer import Trainer

PLAN = ParallelPlan(microbatch_size=2, num_microbatches=BATCH_SIZE // 2)
SETTINGS = {
    "a checkpoint after every step": {"training": {"checkpoint_every": 1, "keep_checkpoints": 1}},
    "a checkpoint after every third step": {"training": {"checkpoint_every": 3}},
    "checkpoints when they lose the least time": {"training": {"checkpoint_every": "auto"}},
    "the best checkpoint kept": {"training": {"checkpoint_every": 2, "keep_best": 1}},
    "evaluation after every step": {"training": {"eval_every": 1}},
    "rollbacks that do not happen": {"training": {"on_bad_step": "rollback"}},
    "TensorBoard": {"tracking": {"tensorboard": True}},
    "Weights & Biases": {"tracking": {"wandb": "offline"}},
    "full recomputation": {"plan": {"recompute": "full"}},
    "selective recomputation": {"plan": {"recompute": "selective"}},
    "recomputation of one layer": {"plan": {"recompute": "full", "recomputed_layers": (1,)}},
}
"""What may differ between two runs that are to have the same bits."""
FEW = ["a checkpoint after every step", "evaluation after every step", "full recomputation", "selective recomputation"]


def trained(path, plan=None, **sections):
    """Return losses and gradient norms of the steps, and the weights after them."""
    run = RunDirectory(path)
    run.create()
    settings = with_keys(config(steps=5, checkpoint_every=0), **sections)
    run.config.write_text(settings.to_yaml())
    trainer = Trainer(
        run,
        settings,
        replace(PLAN, **plan or {}),
        batches=Counting(),
        validation={"": lambda: [batch(99)]},
        total_steps=5,
    )
    trainer.fit()
    return read_metrics(run).select(["step", "loss", "grad_norm"]).to_pylist(), weights(trainer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("different", cases(SETTINGS, narrow=FEW))
def test_a_setting_beside_the_training_changes_no_bit_of_it(plain, tmp_path, different):
    steps, after = trained(tmp_path / "run", **different)
    assert steps == plain[0]
    assert_equal(after, plain[1])


SCHEDULES = {
    "gpipe": ParallelPlan(pp=2, schedule="gpipe", num_microbatches=4),
    "1f1b": ParallelPlan(pp=2, num_microbatches=4),
    "interleaved": ParallelPlan(pp=2, schedule="interleaved", num_chunks=2, num_microbatches=4),
    "chimera": ParallelPlan(pp=2, schedule="chimera", num_microbatches=4),
    "zb_h1": ParallelPlan(pp=2, schedule="zb_h1", num_microbatches=4),
    "zbv": ParallelPlan(pp=2, schedule="zbv", num_microbatches=4),
}


def train_under_every_schedule():
    """Return all results of each, which include the weights that this rank holds."""
    return {name: train(plan, UNTIED, torch.float32, documents=True) for name, plan in SCHEDULES.items()}


@pytest.mark.nightly
def test_a_schedule_repeats_its_bits_and_differs_from_another_only_in_rounding():
    first, second = run_ranks(2, train_under_every_schedule), run_ranks(2, train_under_every_schedule)
    for one, other in zip(first, second, strict=True):
        for schedule, results in one.items():
            for kind, values in results.items():
                for name, value in values.items():
                    assert np.array_equal(value, other[schedule][kind][name]), (schedule, kind, name)
            losses = results["losses"][""], one["gpipe"]["losses"][""]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
