"""A checkpoint of one plan loads under every other."""

from itertools import pairwise

import pytest
import torch
from distributed import run_ranks
from parity import SPARSE, TIED, UNTIED, native_engine, own_microbatches, undefined
from tiers import nightly
from torch.distributed.tensor import DTensor

from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import Retention
from llama_core.training.checkpoint import Checkpointer
from llama_core.training.engine import train_step

BATCH_SIZE = 4
PLANS = {
    "alone": ParallelPlan(num_microbatches=4),
    "dp4": ParallelPlan(dp_replicate=4),
    "zero3 dp4": ParallelPlan(dp_shard=4, zero_stage=3),
    "hsdp": ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
    "tp2 zero1 dp2": ParallelPlan(tp=2, dp_shard=2, zero_stage=1, num_microbatches=2),
    "pp4 chimera": ParallelPlan(pp=4, schedule="chimera", num_microbatches=4),
    "pp2 interleaved": ParallelPlan(pp=2, schedule="interleaved", num_chunks=2, num_microbatches=4),
    "cp2": ParallelPlan(cp=2, num_microbatches=4),
    "ep2 tp2": ParallelPlan(tp=2, dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 pp2": ParallelPlan(pp=2, dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 zero3 dp2": ParallelPlan(dp_shard=4, ep=2, zero_stage=3),
    "ep4 over tp2": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, zero_stage=1, num_microbatches=2),
    "ep2 over tp2 zero3": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=3, num_microbatches=2),
}


def steps(path, plan, spec, first, last):
    """Continue from the newest checkpoint, if any, to step ``last``; save it; return losses, weights and moments."""
    engine = native_engine(plan, spec, torch.float64, weight_dtype=torch.float64)
    if first:
        engine.set_weights(undefined)
    checkpointer = Checkpointer(RunDirectory(path), keep=Retention(2))
    state = checkpointer.load(engine)
    assert (state["step"] if state else 0) == first
    loaded = everything(engine)
    losses = []
    for step in range(first, last):
        share = own_microbatches(step, plan)
        losses.append(float(train_step(engine, share, learning_rate=1e-3, max_grad_norm=1.0).loss))
        checkpointer.save(step + 1, engine, {})  # every step: later saves reuse the first one's plan and memory
    checkpointer.finish()
    return losses, loaded, everything(engine)


def everything(engine):
    """Return the whole of every weight and moment that this rank has a part of, by name."""
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    tensors = dict(engine.model.named_parameters()) | {
        f"{names[parameter]}.{key}": value
        for parameter, state in engine.optimizer.state.items()
        for key, value in state.items()
    }
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()
        for name, tensor in tensors.items()
    }


def run_under(path, plan, spec, first, last):
    if plan.world_size == 1:
        ranks = [steps(path, plan, spec, first, last)]
    else:
        ranks = run_ranks(plan.world_size, steps, path, plan, spec, first, last)
    loaded, final = ({}, {})
    for _, before, after in ranks:
        loaded |= before
        final |= after
    return ranks[0][0], loaded, final


@pytest.fixture
def path(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.config.write_text("model: test\n")
    return run.path


def assert_same(loaded, saved, way):
    assert loaded.keys() == saved.keys(), way
    for name, value in saved.items():
        assert (loaded[name] == value).all(), f"{name}, {way}"


def journey(path, names, spec):
    """Train two steps under each plan in turn, and check that it loads what the one before has saved.

    Return the losses of all steps, and how many tensors there are.
    """
    losses, _, saved = run_under(path, PLANS[names[0]], spec, 0, 2)
    for leg, (one, other) in enumerate(pairwise(names), start=1):
        more, loaded, trained = run_under(path, PLANS[other], spec, 2 * leg, 2 * leg + 2)
        assert_same(loaded, saved, f"from {one} to {other}")
        losses += more
        saved = trained
    return losses, len(saved)


MANY = ["hsdp", "pp2 interleaved", "tp2 pp2", "dp4", "cp2", "alone"]
MANY += ["tp2 pp2", "zero3 dp4", "pp4 chimera", "tp2 zero1 dp2"]


@pytest.mark.parametrize("names", [["tp2 pp2", "alone"], nightly(MANY)], ids=["two", "many"])
def test_a_run_continues_under_another_plan_with_the_same_weights_moments_and_losses(path, tmp_path, names):
    losses, num_tensors = journey(path, names, UNTIED)
    assert num_tensors == 4 * (3 + UNTIED.num_layers * 9)
    undisturbed = RunDirectory(tmp_path / "undisturbed")
    undisturbed.create()
    undisturbed.config.write_text("model: test\n")
    expected, _, _ = run_under(undisturbed.path, PLANS["alone"], UNTIED, 0, len(losses))
    assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.nightly
def test_a_tied_embedding_is_saved_once_and_loaded_by_both_ends_of_a_pipeline(path):
    _, _, saved = run_under(path, PLANS["zero3 dp4"], TIED, 0, 2)
    _, loaded, _ = run_under(path, PLANS["tp2 pp2"], TIED, 2, 3)
    assert "output.weight" not in loaded
    for name, value in saved.items():
        assert (loaded[name] == value).all(), name


@pytest.mark.nightly
def test_experts_are_found_wherever_they_were(path):
    journey(path, ["ep2 tp2", "alone", "ep2 zero3 dp2", "ep2 pp2", "dp4"], SPARSE)


@pytest.mark.nightly
def test_whole_experts_are_found_wherever_they_were(path):
    journey(path, ["ep4 over tp2", "alone", "ep2 over tp2 zero3", "ep2 tp2", "ep4 over tp2"], SPARSE)
