import math
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from threading import enumerate as threads

import pytest
import torch
from distributed import run_ranks
from parity import native_engine
from test_stored_weights import save_folder
from tiers import cases, nightly
from torch.utils._python_dispatch import TorchDispatchMode
from toy_objective import MASKED

from llama_core.config.run import RunConfig
from llama_core.config.settings import UNNAMED
from llama_core.errors import DataError, NonFiniteError, StoppedError, WeightsError
from llama_core.models.batch import Batch
from llama_core.objectives.registry import OBJECTIVES
from llama_core.parallel.ranks import is_first_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.held_out import HeldOutRows
from llama_core.records.metrics import read_metrics
from llama_core.records.timelines import read_lanes
from llama_core.training import saving
from llama_core.training.engine import train_step
from llama_core.training.trainer import Trainer

FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "head_dim": 8, "ffn_size": 64, "vocab_size": 128}
SPEC = RunConfig.from_mapping({"architecture": FEW_PARAMETERS}).spec
BATCH_SIZE, SEQ_LEN = 4, 16


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


class Counting:
    """Batches that depend only on how many came before."""

    def __init__(self):
        self.taken = 0

    def next_batch(self):
        self.taken += 1
        return batch(self.taken)

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def batch(seed, rows=BATCH_SIZE, packed=True):
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, SPEC.vocab_size, (rows, SEQ_LEN + 1), generator=generator)
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[:, seed % SEQ_LEN] = -100
    positions_BS = torch.arange(SEQ_LEN).expand(rows, -1) % 7 if packed else None
    return Batch(tokens_BS[:, :-1], targets_BS, positions_BS)


def config(strategy="standard", lora=None, moe=None, num_workers=None, **training):
    settings = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "precision": "fp32", "checkpoint_every": 5} | training
    return RunConfig.from_mapping(
        {
            "architecture": FEW_PARAMETERS,
            "strategy": strategy,
            "lora": lora or {},
            "moe": moe or {},
            "data": {"num_workers": num_workers},
            "training": settings,
            "launch": {"device": "cpu"},
            "tracking": {"tensorboard": False},
        }
    )


def trainer(
    run,
    steps=10,
    plan=None,
    validation=None,
    batches=None,
    timed_batches=None,
    should_stop=lambda: False,
    **training,
):
    settings = config(steps=steps, **training)
    run.config.write_text(settings.to_yaml())
    return Trainer(
        run,
        settings,
        plan or ParallelPlan(microbatch_size=BATCH_SIZE),
        batches=batches or Counting(),
        timed_batches=timed_batches,
        validation={} if validation is None else {UNNAMED: validation},
        total_steps=steps,
        should_stop=should_stop,
    )


def alone(num_microbatches=1, dtype=torch.float32):
    return native_engine(ParallelPlan(num_microbatches=num_microbatches), SPEC, dtype, weight_dtype=dtype)


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.engine.model.state_dict().items()}


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def losses(run):
    return read_metrics(run).column("loss").to_pylist()


def test_neither_the_first_step_nor_the_first_evaluation_compiles_anything(run, monkeypatch):
    """What they compile stalls all ranks, and in a pipeline one stage after another."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = trainer(
        run,
        steps=2,
        plan=ParallelPlan(microbatch_size=BATCH_SIZE, compile=True),
        validation=lambda: [batch(99)],
        eval_every=1,
    )
    made = [graphs["unique_graphs"]]
    begin = compiled._begin_step

    def begin_and_count(may_update):
        made.append(graphs["unique_graphs"])
        return begin(may_update)

    monkeypatch.setattr(compiled, "_begin_step", begin_and_count)
    compiled.fit()
    of_training_and_evaluation = 2
    assert [*made[1:], graphs["unique_graphs"]] == 3 * [made[0] + of_training_and_evaluation]


def test_the_same_seed_gives_the_same_losses_and_weights_bit_for_bit(tmp_path):
    results = []
    for name in ("one", "other"):
        run = RunDirectory(tmp_path / name)
        run.create()
        one = trainer(run)
        one.fit()
        results.append((losses(run), weights(one)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def test_another_seed_gives_other_losses(run, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.create()
    trainer(run, steps=1).fit()
    trainer(other, steps=1, seed=1).fit()
    assert losses(run) != losses(other)


def test_training_lowers_the_loss_of_a_repeated_batch(run):
    class Same(Counting):
        def next_batch(self):
            return batch(1)

    trainer(run, steps=30, batches=Same(), learning_rate=1e-2).fit()
    assert losses(run)[-1] < 0.5 * losses(run)[0]


@pytest.mark.parametrize(
    "trained", [{}, {"num_workers": 2}, {"strategy": "lora", "lora": {"lora_dropout": 0.2}, "num_workers": 1}]
)
def test_a_stopped_run_continues_bit_for_bit(run, tmp_path, trained):
    """Whether or not batches are read ahead; the run that is not stopped never does."""
    whole = RunDirectory(tmp_path / "whole")
    whole.create()
    undisturbed = trainer(whole, **trained | {"num_workers": 0})
    undisturbed.fit()

    first = trainer(run, **trained)
    first.stop.should_stop = lambda: first.step == 4
    with pytest.raises(StoppedError, match="stopped after step 4 of 10"):
        first.fit()
    second = trainer(run, **trained)
    assert (second.step, second.progress.tokens) == (4, 4 * BATCH_SIZE * SEQ_LEN)
    second.fit()
    assert losses(run) == losses(whole)
    assert read_metrics(run).column("step").to_pylist() == list(range(1, 11))
    assert_equal(weights(second), weights(undisturbed))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "flipped": flip_a_bit,
    "truncated": lambda file: os.truncate(file, 1000),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", cases(DAMAGE, narrow=["flipped"]))
def test_a_run_whose_newest_checkpoint_is_damaged_equals_an_undisturbed_one_bit_for_bit(run, tmp_path, damage):
    whole = RunDirectory(tmp_path / "whole")
    whole.create()
    undisturbed = trainer(whole, steps=5, checkpoint_every=2)
    undisturbed.fit()
    first = trainer(run, steps=5, checkpoint_every=2)
    first.stop.should_stop = lambda: first.step == 3
    with pytest.raises(StoppedError):
        first.fit()
    damage(run.checkpoints / "step-00000003" / "__0_0.distcp")
    second = trainer(run, steps=5, checkpoint_every=2)
    assert second.step == 2
    second.fit()
    assert losses(run) == losses(whole)
    assert_equal(weights(second), weights(undisturbed))


def test_a_step_that_is_read_late_changes_no_record_and_no_weight(run, tmp_path):
    ahead, at_once = trainer(run, validation=lambda: [batch(99)], eval_every=3), RunDirectory(tmp_path / "at-once")
    at_once.create()
    expected = trainer(at_once, validation=lambda: [batch(99)], eval_every=3)
    expected.fit()
    ahead.runs_ahead, most = True, 0
    finish = ahead._finish_steps

    def watch(under_way):
        nonlocal most
        stop = finish(under_way)
        most = max(most, len(under_way))
        return stop

    ahead._finish_steps = watch
    ahead.fit()
    assert most == 1
    columns = ["step", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss"]
    assert read_metrics(run).select(columns) == read_metrics(at_once).select(columns)
    assert_equal(weights(ahead), weights(expected))


def test_a_run_ahead_stops_after_the_steps_under_way_and_loses_none(run):
    one = trainer(run)
    one.runs_ahead = True
    one.stop.should_stop = lambda: one.step == 3  # seen once step 4 is under way
    with pytest.raises(StoppedError, match="stopped after step 4 of 10"):
        one.fit()
    assert read_metrics(run).column("step").to_pylist() == [1, 2, 3, 4]
    assert trainer(run).step == 4


class HostTraffic(TorchDispatchMode):
    """Lists the operators that read a value from the device, or bring one from the host: on a GPU these wait."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "lift_fresh", "_unique2")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.WAITING:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


MOE = {"num_experts": 4, "experts_per_token": 2}


@pytest.mark.parametrize(
    "trained",
    [{}, {"strategy": "moe", "moe": MOE}, {"strategy": "lora", "lora": {"lora_dropout": 0.2}}],
    ids=["dense", "moe", "lora"],
)
def test_a_step_neither_reads_from_the_device_nor_sends_to_it(run, trained):
    one, next_batch = trainer(run, precision="bf16", **trained), batch(1)
    one.batches.source.next_batch = lambda: next_batch
    begun = one._begin_step(None)  # the optimizer makes its state
    with HostTraffic() as traffic:
        one._begin_step(begun.updated)
    assert traffic.seen == ["aten::lift_fresh"]  # this rank's memory and whether to stop, from pinned memory


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_accumulated_gradients_match_the_whole_batch(microbatch_size):
    """In float64, so that only the order of the sums differs: 1e-12 is some hundred roundings."""

    def stepped(size):
        engine = alone(BATCH_SIZE // size, torch.float64)
        whole = batch(3)
        # rows with unequal numbers of targets: a mean of means would be another loss
        whole.targets_BS[0, :9] = -100
        result = train_step(
            engine,
            whole.split(size),
            learning_rate=1e-2,
            max_grad_norm=0.1,
        )
        return result, dict(engine.model.named_parameters())

    expected, expected_weights = stepped(BATCH_SIZE)
    got, got_weights = stepped(microbatch_size)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.grad_norm, expected.grad_norm, rtol=1e-10, atol=0)
    torch.testing.assert_close(got_weights, expected_weights, rtol=0, atol=1e-8)


def test_gradients_are_clipped_to_their_global_norm():
    engine = alone()
    norms = []
    engine.optimizer.register_step_post_hook(  # the fused kernel leaves the gradients clipped
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in engine.model.parameters()]))
    )
    result = train_step(engine, [batch(1)], learning_rate=0.0, max_grad_norm=0.05)
    assert result.grad_norm > 0.05
    assert float(norms[0]) == pytest.approx(0.05, rel=1e-4)


def test_an_untrained_model_has_the_loss_of_guessing():
    held_out = HeldOutRows.of(*alone().evaluate([batch(1), batch(2)]))
    assert held_out.mean == pytest.approx(math.log(SPEC.vocab_size), rel=0.02)
    assert held_out.counts == (SEQ_LEN - 1,) * 2 * BATCH_SIZE


def test_the_held_out_loss_does_not_depend_on_how_it_is_batched():
    engine = alone()
    losses_of_whole, counts_of_whole = engine.evaluate([batch(1)])
    losses_by_row, counts_by_row = engine.evaluate(batch(1).split(1))
    assert losses_by_row == pytest.approx(losses_of_whole, rel=1e-6)
    assert counts_by_row == counts_of_whole


def test_bf16_trains_to_the_loss_of_fp32_within_its_rounding(tmp_path):
    final = {}
    for precision in ("fp32", "bf16"):
        run = RunDirectory(tmp_path / precision)
        run.create()
        trainer(run, steps=20, precision=precision, learning_rate=3e-3).fit()
        final[precision] = losses(run)[-1]
    assert final["bf16"] == pytest.approx(final["fp32"], rel=0.01)


def test_evaluation_happens_when_due_and_after_the_last_step(run):
    summary = trainer(run, steps=7, eval_every=3, validation=lambda: [batch(99)]).fit()
    evaluated = read_metrics(run).select(["step", "eval_loss"]).to_pylist()
    assert [row["step"] for row in evaluated if row["eval_loss"] is not None] == [3, 6, 7]
    assert summary.eval_loss == evaluated[-1]["eval_loss"]
    assert summary.eval_tokens == int(batch(99).num_targets())


LOSSES = {2: 5.0, 3: 1.0, 4: 2.0, 6: 3.0, 8: 4.0, 9: 6.0}
"""A held-out loss after each step that is evaluated below: the lowest comes where no checkpoint is saved."""


def with_losses(run, losses=LOSSES, **settings):
    """Return a trainer whose held-out losses after each step are given."""
    made = trainer(run, validation=lambda: [batch(99)], **settings)
    made.held_out.rows = lambda: {UNNAMED: HeldOutRows((losses[made.step],), (1,))}
    return made


def steps_saved(run):
    return [checkpoint_step(path) for path in list_checkpoints(run)]


def test_the_best_checkpoint_is_kept_also_by_a_run_that_is_resumed_after_it(run):
    settings = {"steps": 9, "checkpoint_every": 2, "eval_every": 3, "keep_best": 1, "keep_checkpoints": 1}
    first = with_losses(run, **settings)
    first.stop.should_stop = lambda: first.step == 5
    with pytest.raises(StoppedError):
        first.fit()
    assert steps_saved(run) == [4, 5]
    with_losses(run, **settings).fit()
    assert steps_saved(run) == [4, 9]
    evaluated = read_metrics(run).select(["step", "eval_loss"]).to_pylist()
    assert {row["step"]: row["eval_loss"] for row in evaluated if row["eval_loss"] is not None} == LOSSES


WITHOUT_A_LOWER_LOSS = "no lower held-out loss than 1.0000 of step 3 in 3 evaluations (training.patience=3)"
IMPATIENT = {"steps": 20, "checkpoint_every": 2, "eval_every": 3, "keep_best": 1, "keep_checkpoints": 1}


@pytest.mark.parametrize("stopped_after", [nightly(1), nightly(4), 5, nightly(7)])
def test_a_run_ends_early_once_patience_runs_out_however_often_it_is_resumed(run, stopped_after):
    """After evaluations of steps 2, 3, 4, 6 and 8: the third since the lowest loss is that of step 8."""
    first = with_losses(run, **IMPATIENT, patience=3)
    first.stop.should_stop = lambda: first.step == stopped_after
    with pytest.raises(StoppedError):
        first.fit()
    second = with_losses(run, **IMPATIENT, patience=3)
    summary = second.fit()
    assert (summary.steps, summary.ended_early) == (8, WITHOUT_A_LOWER_LOSS)
    assert steps_saved(run) == [4, 8]
    assert f"ended early: {WITHOUT_A_LOWER_LOSS}" in summary.summary()
    assert with_losses(run, **IMPATIENT, patience=3).is_over
    assert not with_losses(run, **IMPATIENT, patience=4).is_over


def test_a_run_that_has_used_up_its_patience_at_its_last_step_has_not_ended_early(run):
    assert with_losses(run, **IMPATIENT | {"steps": 8}, patience=3).fit().ended_early == ""


def ranks_with_other_losses(path):
    run = RunDirectory(path)
    losses = {step: float(step if is_first_rank() else 20 - step) for step in range(1, 11)}
    plan = ParallelPlan(dp_shard=2, zero_stage=3, microbatch_size=BATCH_SIZE)
    made = with_losses(run, losses, steps=10, eval_every=1, patience=2, plan=plan)
    return made.fit().steps


def test_ranks_that_know_other_losses_still_end_after_the_same_step(run):
    assert run_ranks(2, ranks_with_other_losses, run.path) == [3, 3]


def test_batches_without_what_the_objective_reads_are_refused_by_name(run, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, MASKED.name, MASKED)
    with pytest.raises(DataError, match=r"training\.objective=masked reads mask of every token.*give batches"):
        trainer(run, steps=1, objective="masked").fit()


def test_a_summary_has_the_unit_of_the_objective(run, monkeypatch):
    class WithMasks(Counting):
        def next_batch(self):
            rows = super().next_batch()
            return replace(rows, per_token={"mask": (rows.tokens_BS % 2).float()})

    monkeypatch.setitem(OBJECTIVES, MASKED.name, MASKED)
    validation = WithMasks().next_batch()
    one = trainer(run, steps=1, objective="masked", batches=WithMasks(), validation=lambda: [validation])
    summary = one.fit()
    assert f"held-out loss {summary.eval_loss:.4f} nats/kept token" in summary.summary()
    counts = (validation.targets_BS != -100) & (validation.tokens_BS % 2 == 1)
    assert 0 < summary.eval_tokens == int(counts.sum())


def test_evaluation_uses_no_dropout(run, tmp_path):
    evaluated = []
    for dropout in (0.0, 0.9):
        run = RunDirectory(tmp_path / str(dropout))
        run.create()
        # steps too small to change any weight
        settings = {"strategy": "lora", "lora": {"lora_dropout": dropout}, "learning_rate": 1e-30, "weight_decay": 0.0}
        one = trainer(run, steps=1, validation=lambda: [batch(99)], **settings)
        for name, parameter in one.engine.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(parameter)
        evaluated.append((one.fit().eval_loss, losses(run)))
    (plain, trained_plain), (dropping, trained_dropping) = evaluated
    assert plain == dropping
    assert trained_plain != trained_dropping


def test_a_step_records_its_routing_and_a_loss_without_the_auxiliary_ones(run, tmp_path):
    moe = {"num_experts": 4, "balance_loss_coefficient": 0.0, "moe_layers": [1]}
    trainer(run, steps=2, strategy="moe", moe=moe).fit()
    first, last = read_metrics(run).to_pylist()
    # of the one layer that has experts, and of each expert only where a step is looked at
    assert first["expert_load/layer_1"] == first["expert_load"]
    assert first["router_entropy/layer_1"] == pytest.approx(first["router_entropy"])
    assert not first["expert_shares"]
    ((layer, shares),) = last["expert_shares"]
    assert layer == "1"
    assert sum(shares) == pytest.approx(1)
    assert max(shares) * 4 == pytest.approx(last["expert_load"])
    assert last["unused_experts"] == sum(share == 0 for share in shares) == 0
    assert 1 < first["expert_load"] <= 4
    assert 0.99 < first["balance_loss"] < 2
    assert first["router_entropy"] == pytest.approx(math.log(4), abs=0.01)
    assert first["router_z_loss"] == pytest.approx(math.log(4) ** 2, rel=0.01)
    assert first["loss"] == pytest.approx(math.log(SPEC.vocab_size), rel=0.01)
    dense = RunDirectory(tmp_path / "dense")
    dense.create()
    trainer(dense, steps=1).fit()
    assert "expert_load" not in read_metrics(dense).column_names


@pytest.mark.nightly
def test_the_balance_loss_spreads_tokens_that_all_went_to_one_expert(run):
    moe = {"num_experts": 4, "experts_per_token": 1, "balance_loss_coefficient": 1.0}
    unbalanced = trainer(run, steps=40, strategy="moe", moe=moe, learning_rate=1e-2, lr_schedule="constant")
    with torch.no_grad():
        for block in unbalanced.engine.model.layers.values():
            router = block.feed_forward.router.weight
            router[0], router[1:] = router[0].abs(), 0.0
        unbalanced.engine.model.tok_embeddings.weight.abs_()
    unbalanced.fit()
    loads = read_metrics(run).column("expert_load").to_pylist()
    assert loads[0] == 4.0
    assert sum(loads[-10:]) / 10 < 3.0


def test_the_parts_of_a_step_add_up_to_its_time(run):
    trainer(run, steps=2).fit()
    for row in read_metrics(run).to_pylist():
        parts = row["data_seconds"] + row["forward_backward_seconds"] + row["optimizer_seconds"]
        assert parts == pytest.approx(row["step_seconds"])
        assert 0 < row["backward_seconds"] < row["forward_backward_seconds"]
        assert row["tokens_per_second"] == pytest.approx(BATCH_SIZE * SEQ_LEN / row["step_seconds"])


PIPELINE = ParallelPlan(pp=2, microbatch_size=1, num_microbatches=BATCH_SIZE)


def train_in_a_pipeline(path):
    one = trainer(RunDirectory(path), steps=1, plan=PIPELINE)
    peaks = one.fit().memory_by_rank_bytes
    one.benchmark("a device")
    return peaks


def test_a_pipeline_records_when_its_actions_ran_and_the_peak_of_every_rank(run):
    peaks, same = run_ranks(2, train_in_a_pipeline, run.path)
    assert peaks == same
    assert len(peaks) == 2
    assert min(peaks) > 0
    for lane, actions in zip(read_lanes(run, 2), PIPELINE.build_schedule().actions, strict=True):
        assert lane.actions == tuple(map(str, actions))
        edges = [edge for span in zip(lane.begins, lane.ends, strict=True) for edge in span]
        assert edges == sorted(edges)


def test_peak_memory_is_never_below_held_memory(run):
    trainer(run, steps=3).fit()
    for row in read_metrics(run).to_pylist():
        assert row["memory_peak_bytes"] >= row["memory_allocated_bytes"] > 0


class Poisoned(Counting):
    """Makes a gradient of the model NaN for a range of batches."""

    def __init__(self, trainer_of, first, last):
        super().__init__()
        self.trainer_of, self.first, self.last = trainer_of, first, last

    def next_batch(self):
        model = self.trainer_of().engine.model
        poison = self.first <= self.taken + 1 <= self.last
        for handle in getattr(self, "handles", []):
            handle.remove()
        self.handles = [model.norm.weight.register_hook(lambda grad: grad * math.nan)] if poison else []
        return super().next_batch()


def poisoned(run, first, last, **settings):
    box = []
    one = trainer(run, batches=Poisoned(lambda: box[0], first, last), **settings)
    box.append(one)
    return one


def test_a_non_finite_step_is_skipped_and_the_run_continues(run):
    one = poisoned(run, 3, 4, steps=6, max_skipped_steps=2)
    one.fit()
    rows = read_metrics(run).to_pylist()
    assert [row["step"] for row in rows if row["skipped"]] == [3, 4]
    assert all(torch.isfinite(tensor).all() for tensor in one.engine.model.state_dict().values())


def test_too_many_non_finite_steps_in_a_row_stop_the_run_and_keep_the_last_good_checkpoint(run):
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 9; training\.max_skipped_steps=2"):
        poisoned(run, 7, 20, steps=20, max_skipped_steps=2).fit()
    resumed = trainer(run, steps=20)
    assert resumed.step == 5
    assert all(torch.isfinite(tensor).all() for tensor in resumed.engine.model.state_dict().values())


@pytest.mark.parametrize("stopped_after", [0, 1])
def test_a_run_without_one_finite_step_does_not_finish_whatever_it_may_skip(run, stopped_after):
    if stopped_after:
        with pytest.raises(StoppedError):
            poisoned(run, 1, 2, steps=2, max_skipped_steps=5, should_stop=lambda: True).fit()
    with pytest.raises(NonFiniteError, match=r"not finite in any of the 2 steps, so nothing was trained"):
        poisoned(run, 1, 2, steps=2, max_skipped_steps=5).fit()
    assert not (run.checkpoints / "step-00000002").exists()


def test_a_resumed_run_finishes_although_only_steps_before_were_finite(run):
    with pytest.raises(StoppedError):
        trainer(run, steps=2, should_stop=lambda: True).fit()
    assert poisoned(run, 1, 2, steps=2).fit().steps == 2


NOT_FINITE = "layers.1.attention.wo.weight"


def make_not_finite(engine):
    with torch.no_grad():
        engine.model.get_parameter(NOT_FINITE)[3, 5] = math.nan


@pytest.fixture
def not_finite(tmp_path):
    """A folder of weights, one of which has a NaN."""
    engine = alone()
    engine.initialize_weights(seed=1)
    make_not_finite(engine)
    return save_folder(tmp_path / "folder", engine.model)


def words_about(folder):
    file = rf"{folder}/model-0000\d-of-00002\.safetensors"
    return f"before any update, because the weights are not finite: model.layers.1.self_attn.o_proj.weight in {file}$"


@pytest.mark.parametrize("choices", [{}, {"strategy": "lora"}, {"on_bad_step": "rollback"}], ids=str)
def test_a_first_loss_that_is_not_finite_names_the_weight_that_made_it_and_its_file(run, not_finite, choices):
    with pytest.raises(NonFiniteError, match=words_about(not_finite)) as ended:
        trainer(run, steps=2, init_from=str(not_finite), **choices).fit()
    assert ended.value.next_action.startswith("start from other weights")
    assert len(losses(run)) == 1


def reason_on_a_rank(path, folder):
    with pytest.raises(NonFiniteError) as ended:
        plan = ParallelPlan(tp=2, microbatch_size=BATCH_SIZE)
        trainer(RunDirectory(path), steps=2, plan=plan, init_from=str(folder)).fit()
    return str(ended.value)


def test_all_ranks_end_with_the_weight_of_the_rank_that_holds_it(run, not_finite):
    first, second = run_ranks(2, reason_on_a_rank, run.path, not_finite)
    assert first == second
    assert re.search(words_about(not_finite), first)


def test_weights_of_a_checkpoint_that_are_not_finite_are_named_when_it_is_resumed(run):
    begun = trainer(run, steps=3, checkpoint_every=2)
    begun.metrics.on_step = lambda record: make_not_finite(begun.engine) if record.step == 2 else None
    begun.fit()
    shutil.rmtree(run.checkpoints / "step-00000003")
    with pytest.raises(NonFiniteError, match=f"not finite: {NOT_FINITE} of {run.checkpoints}/step-00000002$"):
        trainer(run, steps=3).fit()


def test_timed_steps_are_counted_after_warmup_and_leave_no_trace(run):
    one = trainer(run, steps=2)
    one.fit()
    record = one.benchmark("a device")
    assert len(record.step_seconds) == one.config.benchmark.steps
    assert min(record.step_seconds) <= record.median_seconds <= max(record.step_seconds)
    assert record.tokens_per_second == pytest.approx(BATCH_SIZE * SEQ_LEN / record.median_seconds)
    assert record.mfu is not None
    assert 0 < record.mfu < 1  # of the rate of products on this machine
    assert read_metrics(run).num_rows == 2
    assert trainer(run, steps=2).step == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_crashing_run_completes_the_checkpoint_being_written(run, num_workers):
    class Broken(Counting):
        def next_batch(self):
            if self.taken == 3:
                raise MemoryError
            return super().next_batch()

    one = trainer(run, batches=Broken(), checkpoint_every=3, num_workers=num_workers)
    one.checkpointer.poll = lambda: None  # as if the disk were slow
    with pytest.raises(MemoryError):
        one.fit()
    assert trainer(run).step == 3
    assert not [thread for thread in threads() if thread.name.startswith("supply")]


def test_steps_that_others_disturbed_are_timed_again_and_the_least_disturbed_count(run, monkeypatch):
    """Threads wait 900 s, 400 s, 500 s and 600 s for a core: all are shares of far more than the time that passes."""
    one = trainer(run, steps=2)
    one.fit()
    waited = iter([0.0, 900.0, 900.0, 1300.0, 1300.0, 1800.0, 1800.0, 2400.0])
    monkeypatch.setattr("llama_core.training.measure.core_wait_seconds", lambda: next(waited))
    record = one.benchmark("a device")
    assert record.num_timings == 4
    assert next(waited, None) is None
    assert record.disturbance
    quiet = iter([0.0, 900.0, 900.0, 900.0])
    monkeypatch.setattr("llama_core.training.measure.core_wait_seconds", lambda: next(quiet))
    record = one.benchmark("a device")
    assert (record.num_timings, record.waiting_threads) == (2, 0.0)


def test_timed_steps_continue_the_data_after_training_and_end_its_thread(run, monkeypatch):
    monkeypatch.setattr("llama_core.training.measure.core_wait_seconds", lambda: None)  # else they may be timed again
    batches = Counting()
    one = trainer(run, steps=2, batches=batches, num_workers=1)
    one.fit()
    one.benchmark("a device")
    timing = one.config.benchmark
    assert one.batches.state_dict() == {"taken": 2 + timing.warmup_steps + timing.steps}
    assert not [thread for thread in threads() if thread.name.startswith("supply")]


def test_the_memory_of_checkpoints_is_kept_between_them_and_given_up_at_the_end(run, monkeypatch):
    stagers = []

    class Stager(saving.KeptStager):
        def __init__(self, *, on_gpu):
            super().__init__(on_gpu=on_gpu)
            stagers.append(self)
            self.places, self.is_closed = [], False

        def stage(self, state):
            staged = super().stage(state)
            self.places.append({name: value.data_ptr() for name, value in staged["model"].items()})
            return staged

        def close(self):
            super().close()
            self.is_closed = True

    monkeypatch.setattr(saving, "KeptStager", Stager)
    one = trainer(run, steps=3, checkpoint_every=1)
    one.fit()
    (stager,) = stagers
    assert len(stager.places) == 3
    assert stager.places[0] == stager.places[1] == stager.places[2]
    assert stager.is_closed


def test_the_held_out_loss_of_no_tokens_is_not_a_number(run):
    summary = trainer(run, steps=1, validation=lambda: []).fit()
    assert math.isnan(summary.eval_loss)
    assert summary.eval_tokens == 0


def test_a_run_starts_with_the_weights_of_another_and_needs_them_only_until_it_has_saved(run, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.create()
    first = trainer(other, steps=3)
    first.fit()
    checkpoint = str(other.checkpoints / "step-00000003")
    begun = trainer(run, steps=2, init_from=checkpoint)
    assert begun.step == 0
    assert_equal(weights(begun), weights(first))
    begun.fit()
    shutil.rmtree(other.path)
    resumed = trainer(run, steps=2, init_from=checkpoint)
    assert resumed.step == 2
    assert_equal(weights(resumed), weights(begun))


def test_a_checkpoint_has_the_settings_that_it_was_trained_with_whatever_was_edited_meanwhile(run):
    begun = trainer(run, steps=1)
    run.config.write_text("model: llama3_8b\n")
    begun.fit()
    assert RunConfig.load(run.checkpoints / "step-00000001" / "config.yaml") == begun.config


def test_a_run_does_not_start_with_damaged_weights(run, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.create()
    trainer(other, steps=1).fit()
    checkpoint = other.checkpoints / "step-00000001"
    content = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(WeightsError, match=f"{checkpoint} is damaged .*; start from another checkpoint of its run"):
        trainer(run, steps=2, init_from=str(checkpoint))


@pytest.mark.parametrize("begins_with", [nightly("seed"), "checkpoint"])
def test_resumed_adapters_keep_their_frozen_base_weights(run, tmp_path, begins_with):
    other = RunDirectory(tmp_path / "other")
    other.create()
    trainer(other, steps=3, seed=7).fit()
    frozen = {"seed": {"seed": 7}, "checkpoint": {"init_from": str(other.checkpoints / "step-00000003")}}
    begun = trainer(run, steps=2, strategy="lora", **frozen[begins_with])
    before = weights(begun)
    begun.fit()
    resumed = trainer(run, steps=2, strategy="lora", **frozen[begins_with])
    assert resumed.step == 2
    assert_equal(weights(resumed), weights(begun))
    changed = {name for name, weight in weights(begun).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_weights_missing_when_the_job_starts_are_one_line(run, tmp_path):
    with pytest.raises(WeightsError, match="does not exist; name a folder on this disk"):
        trainer(run, init_from=str(tmp_path / "gone"))


def test_timed_steps_take_their_own_batches(run, monkeypatch):
    monkeypatch.setattr("llama_core.training.measure.core_wait_seconds", lambda: None)  # else they may be timed again
    trained, timed = Counting(), Counting()
    one = trainer(run, steps=2, batches=trained, timed_batches=timed)
    one.fit()
    one.benchmark("a device")
    timing = one.config.benchmark
    assert trained.state_dict() == {"taken": 2}
    assert timed.state_dict() == {"taken": timing.warmup_steps + timing.steps}


def test_an_evaluation_has_a_loss_for_each_name_and_one_over_all_their_tokens(run):
    one = trainer(run, steps=2, eval_every=1)
    one.held_out.batches = {"a": lambda: [batch(99)], "b": lambda: [batch(98), batch(97)]}
    summary = one.fit()
    rows = summary.named_eval_rows
    assert {name: len(held_out.counts) for name, held_out in rows.items()} == {"a": BATCH_SIZE, "b": 2 * BATCH_SIZE}
    total = sum(held_out.mean * held_out.count for held_out in rows.values())
    assert summary.eval_loss == pytest.approx(total / summary.eval_tokens, rel=1e-12)
    recorded = [dict(row) for row in read_metrics(run).column("eval_losses").to_pylist()]
    assert [set(losses) for losses in recorded] == [{"a", "b"}, {"a", "b"}]
    assert recorded[-1] == {name: held_out.mean for name, held_out in rows.items()}
