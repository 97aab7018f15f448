"""Replicas whose bits differ: which ranks are compared, what is found, and how the run goes on."""

import platform
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from parity import HYBRID, OTHER_SPARSE, TIED, UNTIED, native_engine, own_microbatches
from test_trainer import BATCH_SIZE, Counting, assert_equal, losses, trainer
from tiers import cases, wide

from llama_core.errors import StoppedError, WrongDeviceError
from llama_core.models.layers import local_part
from llama_core.parallel import replicas, zero
from llama_core.parallel.ranks import own_rank
from llama_core.parallel.replicas import HASH_BITS, ReplicaSets, bit_hash
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.rollbacks import Rollback, data_skips, read_rollbacks
from llama_core.training.engine import train_step
from llama_core.training.parts.part import LoopPart, RunProgress
from llama_core.training.parts.replicas import ReplicaCheck
from llama_core.training.reports import Reports

CPU = torch.device("cpu")
LOOKS, SAVES, STEPS = 3, 4, 10
FLIPPED_AT, FOUND_AT = 5, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool]


@given(st.data())
def test_every_flipped_bit_changes_the_hash(data):
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=6))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=len(dtypes), max_size=len(dtypes)).filter(any))
    tensors = [torch.randn(size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    before = bit_hash(tensors, CPU)
    place = data.draw(st.sampled_from([place for place, size in enumerate(sizes) if size]))
    bits = tensors[place].view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = bit_hash(tensors, CPU)
    assert before != after
    assert 0 <= after < 2**HASH_BITS and after == after.floor()


def test_the_hash_depends_on_neither_the_chunks_nor_gaps_in_memory_but_on_every_place(monkeypatch):
    monkeypatch.setitem(replicas.CHUNK_ELEMENTS, "cpu", 7)
    matrix = torch.randn(5, 9)
    hashed = bit_hash([matrix], CPU)
    assert hashed == bit_hash([matrix.T.contiguous().T], CPU)
    assert hashed != bit_hash([matrix.flip(0)], CPU)
    assert hashed != bit_hash([matrix.flip(1)], CPU)


def test_the_ranks_without_the_hash_of_the_majority_are_named_and_all_without_a_majority():
    sets = ReplicaSets(((0, 1, 2), (3, 4), (2, 3, 4)), {})
    assert [sets.slots[1, 3], sets.slots[2, 3], sets.slots[2, 2]] == [0, 1, 1]
    first, second = [1.0, 1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 3.0, 3.0, 3.0]
    assert sets.differing([first, second]) == {}
    assert sets.differing([[1.0, 9.0, 1.0, 2.0, 2.0], second]) == {0: (1,)}
    assert sets.differing([[1.0, 1.0, 1.0, 2.0, 9.0], second]) == {1: (3, 4)}
    assert sets.differing([first, [0.0, 0.0, 3.0, 9.0, 8.0]]) == {2: (2, 3, 4)}


def test_a_rollback_that_leaves_no_data_out_leaves_those_of_others_out():
    skip = Rollback(8, 11, "", {"taken": 11}, 0.0)
    again = Rollback(4, 9, "", None, 0.0)
    assert data_skips([skip, again]) == {8: {"taken": 11}}


class Flip(LoopPart):
    """Flips a bit of one rank, once, after the update of a step."""

    def __init__(self, one, rank, at, state=None, name="layers.1.attention.wq.", bit=20):
        self.one, self.rank, self.at, self.state, self.name, self.bit = one, rank, at, state, name, bit

    def step_begun(self):
        if self.one.step != self.at or own_rank() != self.rank:
            return
        self.at = 0
        for name, parameter, states in self.one.engine.replicated():
            if name.startswith(self.name):
                tensor = local_part(parameter if self.state is None else states[self.state]).detach()
                tensor.view(torch.int32).view(-1)[-1:] ^= 1 << self.bit
                return


def train(path, plan, flips=(), stops_after=STEPS, **settings):
    """Train on a rank; return its part of each parameter."""
    settings = {"steps": STEPS, "checkpoint_every": SAVES, "replica_check_every": LOOKS} | settings
    one = trainer(RunDirectory(path), plan=plan, batches=Counting(), **settings)
    one.stop.should_stop = lambda: one.step == stops_after
    one.parts = (*(Flip(one, *flip) for flip in flips), *one.parts)
    with suppress(StoppedError):
        one.fit()
    return [local_part(parameter).detach().numpy().copy() for _, parameter, _ in one.engine.replicated()]


def ending(path, *arguments, **settings):
    """Train on a rank until replicas differ for good; return the error."""
    with pytest.raises(WrongDeviceError) as caught:
        train(path, *arguments, **settings)
    return str(caught.value), caught.value.hosts


def new_run(path):
    run = RunDirectory(path)
    run.create()
    return run


DP2 = ParallelPlan(dp_replicate=2, microbatch_size=BATCH_SIZE)
HSDP = ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=3, microbatch_size=BATCH_SIZE)
TP_DP = ParallelPlan(tp=2, dp_replicate=2, microbatch_size=BATCH_SIZE)
PP_DP = ParallelPlan(pp=2, dp_replicate=2, num_microbatches=2, microbatch_size=BATCH_SIZE // 2, schedule="1f1b")


@pytest.mark.parametrize(
    ("plan", "rank", "replicas_of_it", "state"),
    [
        (DP2, 1, [0, 1], None),
        wide(DP2, 0, [0, 1], "exp_avg"),
        wide(HSDP, 3, [1, 3], None),
        wide(HSDP, 0, [0, 2], "exp_avg_sq"),
        wide(TP_DP, 2, [0, 2], None),
        wide(PP_DP, 3, [2, 3], None),
    ],
)
def test_a_flipped_bit_is_named_at_the_next_look_and_the_run_ends_as_if_it_had_not_been(
    tmp_path, plan, rank, replicas_of_it, state
):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(plan.world_size, train, clean.path, plan)
    flipped = run_ranks(plan.world_size, train, broken.path, plan, [(rank, FLIPPED_AT, state)])
    assert not clean.rollbacks.exists()
    (rollback,) = read_rollbacks(broken)
    assert (rollback.step, rollback.bad_step, rollback.data) == (4, FOUND_AT, None)
    assert [suspect.rank for suspect in rollback.suspects] == replicas_of_it
    of_state = f"{state} of " if state else ""
    assert f" are replicas, but differ in {of_state}layers.1.attention.wq.weight" in rollback.reason
    assert losses(broken) == losses(clean)
    assert_equal(flipped, expected)


@pytest.mark.wide
def test_of_three_replicas_the_one_that_differs_is_named(tmp_path):
    run = new_run(tmp_path / "run")
    plan = ParallelPlan(dp_replicate=3, microbatch_size=BATCH_SIZE)
    run_ranks(3, train, run.path, plan, [(1, FLIPPED_AT)])
    (rollback,) = read_rollbacks(run)
    (suspect,) = rollback.suspects
    assert suspect.rank == 1
    assert rollback.reason == f"{suspect} differs from the other replicas in layers.1.attention.wq.weight"


@pytest.mark.wide
def test_a_run_that_is_asked_to_stop_saves_no_checkpoint_of_replicas_that_differ(tmp_path):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(2, train_until_5, clean.path, [])
    flipped = run_ranks(2, train_until_5, broken.path, [(0, FLIPPED_AT)])
    assert [rollback.bad_step for rollback in read_rollbacks(broken)] == [FLIPPED_AT]
    assert [checkpoint_step(path) for path in list_checkpoints(broken)] == [4, 5]
    assert_equal(flipped, expected)


def train_until_5(path, flips):
    return train(path, DP2, flips, stops_after=FLIPPED_AT)


@pytest.mark.wide
def test_a_step_without_a_finite_loss_is_not_blamed_on_its_data_if_replicas_differ(tmp_path):
    clean, broken = (new_run(tmp_path / name) for name in ("clean", "broken"))
    expected = run_ranks(2, train_rarely_checked, clean.path, [])
    of_an_exponent = 30
    flipped = run_ranks(2, train_rarely_checked, broken.path, [(1, FLIPPED_AT, None, "norm.", of_an_exponent)])
    (rollback,) = read_rollbacks(broken)
    assert (rollback.step, rollback.bad_step) == (4, FLIPPED_AT + 1)
    assert losses(broken) == losses(clean)
    assert_equal(flipped, expected)


def train_rarely_checked(path, flips):
    return train(path, DP2, flips, replica_check_every=1000, on_bad_step="rollback")


@pytest.mark.wide
def test_a_frozen_weight_is_read_again_as_no_checkpoint_has_it(tmp_path):
    run = new_run(tmp_path / "run")
    ours, theirs = run_ranks(2, train_adapters, run.path)
    (rollback,) = read_rollbacks(run)
    assert rollback.reason.endswith("layers.0.feed_forward.w1.weight")
    assert_equal(ours, theirs)


def train_adapters(path):
    return train(path, DP2, [(1, FLIPPED_AT, None, "layers.0.feed_forward.w1.weight")], strategy="lora")


@pytest.mark.wide
def test_a_device_that_is_suspected_twice_ends_the_run_and_so_does_a_bit_before_the_first_checkpoint(tmp_path):
    run = new_run(tmp_path / "run")
    for reason, hosts in run_ranks(2, ending, run.path, DP2, [(1, 5), (1, 7)]):
        assert reason.startswith("step 8: rank 0 on ") and reason.endswith(" may also have been wrong in step 6")
        assert hosts == (platform.node(),)
    assert [checkpoint_step(path) for path in list_checkpoints(run)] == [4]
    early = new_run(tmp_path / "early")
    for reason, _ in run_ranks(2, ending, early.path, DP2, [(1, 1)]):
        assert reason.startswith("step 3: ") and reason.endswith("; there is no checkpoint yet to return to")


def hashed(plan, spec, optimizer, moments):
    """Train on a rank; return the sets of ranks that hold the same, and those that differ after some step."""
    zero.POWERSGD_START_STEP = 2
    engine = native_engine(plan, spec, optimizer=optimizer, moments=moments)
    progress = RunProgress()
    reports = Reports()
    check = ReplicaCheck(1, plan, progress, engine=engine, reports=reports, device=CPU, is_due=lambda step: False)
    sets = ReplicaSets.find(((name, parameter) for name, parameter, _ in engine.replicated()), plan)
    differing = {}
    for step in range(4):
        train_step(engine, own_microbatches(step, plan), learning_rate=1e-3, max_grad_norm=1.0)
        progress.step += 1
        check.step_begun()
        values, names = reports.send(CPU)
        differing |= sets.differing(list(reports.of_ranks(values.tolist(), names).values()))
    return sets.ranks, differing


SETS = {
    "no replicas": (ParallelPlan(dp_shard=2, zero_stage=3), UNTIED, ()),
    "tensor-parallel": (ParallelPlan(tp=2), UNTIED, ()),
    "context-parallel": (ParallelPlan(cp=2), UNTIED, ((0, 1),)),
    "tied ends of a pipeline": (ParallelPlan(pp=2, num_microbatches=2), TIED, ((0, 1),)),
    "both directions of Chimera": (
        ParallelPlan(pp=2, schedule="chimera", dp_shard=2, zero_stage=2, num_microbatches=4),
        UNTIED,
        ((0, 2), (1, 3)),
    ),
    "experts": (ParallelPlan(dp_replicate=4, ep=2), OTHER_SPARSE, ((0, 1, 2, 3), (0, 2), (1, 3))),
    "adapters": (ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=3), HYBRID, ((0, 2), (1, 3))),
    "PowerSGD": (ParallelPlan(dp_replicate=2, gradient_compression="powersgd"), UNTIED, ((0, 1),)),
}


@pytest.mark.parametrize("case", cases(SETS, narrow=()))
@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", "fp32"), ("muon", "fp32"), ("adamw", "bf16")])
def test_ranks_that_are_compared_agree_in_a_sound_run(case, optimizer, moments):
    plan, spec, sets = case
    spec = replace(spec, num_layers=max(3, plan.num_stages + 1))
    for found, differing in run_ranks(plan.world_size, hashed, plan, spec, optimizer, moments):
        assert set(found) == set(sets)
        assert differing == {}
