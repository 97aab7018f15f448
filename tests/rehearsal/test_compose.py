from collections import Counter
from dataclasses import replace

import pytest
from tiers import nightly

from llama_core.config import models
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.compose import BytesChange, Hosting, compose, covering_actions, renamed_layers, steps
from llama_core.rehearsal.folding import FoldedStage
from llama_core.rehearsal.trace import trace_rank
from llama_core.schedules.registry import schedule_names

SPEC = ModelSpec("composed", "llama3", 64, 4, 4, 2, 16, 128, 512, 1e4, 1e-5, 4096, 64)
TIED = replace(SPEC, name="composed_tied", tied_embeddings=True)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    for spec in (SPEC, TIED):
        monkeypatch.setitem(models._REGISTRY, spec.name, spec)


def plan_of(schedule="1f1b", **choices):
    sizes = {
        "num_chunks": 2 if schedule == "interleaved" else 1,
        "microbatch_size": 1 + (schedule == "chimera_halving"),
    }
    return ParallelPlan(**({"schedule": schedule, "pp": 2, "num_microbatches": 6} | sizes | choices))


def parts(step):
    """Return bytes by phase and category, where they peak, FLOPs and transfers, without zeros."""
    peaks = {phase: {name: size for name, size in peak.items() if size} for phase, peak in step.peaks.items()}
    return peaks, step.places, step.flops, dict(step.transfers)


def traced_in_full(trace):
    """Return the same of a whole trace, from its counter."""
    counter = trace.counter
    peaks = {phase: {name: n for name, n in peak.categories.items() if n} for phase, peak in counter.peaks.items()}
    places = {phase: peak.where for phase, peak in counter.peaks.items()}
    return peaks, places, counter.flops, dict(sum((segment.transfers for segment in counter.segments), Counter()))


def actions_of(plan, spec=SPEC):
    """Yield each pipeline rank's actions and what it hosts."""
    for pp_rank, actions in enumerate(plan.build_schedule().with_communication()):
        yield actions, Hosting.of(plan, spec, pp_rank)


NARROW_PLANS = [
    plan_of("chimera", dp_shard=2, zero_stage=3),
    plan_of("1f1b", recompute="full", recomputed_layers=(2, 1)),
]
PLANS = [
    *NARROW_PLANS,
    plan_of(pp=1, dp_replicate=2, num_microbatches=4),
    plan_of(pp=1, dp_shard=2, dp_replicate=2, zero_stage=2, num_microbatches=4),
    plan_of(pp=1, tp=2, cp=2, zero_stage=3, num_microbatches=4),
    *(plan_of(schedule) for schedule in schedule_names()),
    plan_of("1f1b", pp=4, dp_shard=2, zero_stage=3),
    plan_of("chimera", dp_shard=2, zero_stage=1),
    plan_of("interleaved", dp_shard=2, dp_replicate=2, zero_stage=3),
    plan_of("1f1b", tp=2),
]
CASES = [
    nightly(TIED.name, plan_of("zbv")),
    *((SPEC.name, plan) for plan in NARROW_PLANS),
    *(nightly(SPEC.name, plan) for plan in PLANS[len(NARROW_PLANS) :]),
    nightly(TIED.name, plan_of("interleaved", dp_shard=2, zero_stage=3)),
]


@pytest.mark.parametrize(("model", "plan"), CASES, ids=lambda value: getattr(value, "summary", lambda: value)())
def test_a_composed_step_matches_the_traced_one_in_bytes_flops_and_transfers(model, plan):
    config = RunConfig.from_mapping({"model": model}, ("training.precision=bf16", "training.seq_len=16"))
    rank = plan.world_size // plan.pp * (plan.pp // 2)  # the last of two pipeline ranks, and a middle one of four
    whole, few = trace_rank(config, plan, rank, in_full=True), trace_rank(config, plan, rank)
    assert len(few.met) <= len(whole.met)
    assert parts(compose(few.recording, whole.met)) == traced_in_full(whole)


FOLDED_PLANS = [
    plan_of(pp=1, dp_shard=2, zero_stage=3, num_microbatches=1, recompute="full"),
    nightly(plan_of("1f1b", recompute="selective", recomputed_layers=(8, 0))),
    nightly(plan_of(pp=1, dp_replicate=2, num_microbatches=2)),
    nightly(plan_of(pp=1, tp=2, num_microbatches=2)),
    nightly(plan_of(pp=1, dp_shard=2, dp_replicate=2, zero_stage=2, num_microbatches=3)),
    nightly(plan_of(pp=1, dp_shard=3, zero_stage=3, num_microbatches=2)),  # which do not divide the rows evenly
    nightly(plan_of("chimera", tp=2, dp_shard=2, zero_stage=3)),
]


@pytest.mark.parametrize("plan", FOLDED_PLANS, ids=ParallelPlan.summary)
def test_a_step_of_which_equal_layers_are_left_out_matches_that_of_all_layers(plan):
    deep = ("training.precision=bf16", "training.seq_len=16", f"architecture.num_layers={8 * plan.pp}")
    config = RunConfig.from_mapping({"model": SPEC.name}, deep)
    whole, few = trace_rank(config, plan, 0, in_full=True), trace_rank(config, plan, 0)
    assert any(stage.gaps for stage in few.stages)
    assert parts(compose(few.recording, whole.met)) == traced_in_full(whole)


def change(growth, layer):
    return BytesChange(
        Counter(activations=growth), {"forward": (Counter(activations=growth + 1), f"layers.{layer}.w2")}, 5, Counter()
    )


def test_layers_that_are_left_out_change_what_both_layers_beside_the_gap_change():
    stage = FoldedStage(range(10), [range(3, 7)])
    assert list(stage) == [0, 1, 2, 7, 8, 9]
    begun, forward = (None, change(9, 0)), [(layer, change(4, layer)) for layer in (2, 7)]
    whole = stage.unfolded([begun, *forward])
    assert (whole.growth["activations"], whole.flops) == (9 + 6 * 4, 7 * 5)
    assert whole.rises["forward"] == (Counter(activations=9 + 6 * 4 + 1), "layers.7.w2")
    shrinking = stage.unfolded([begun, *((layer, change(-4, layer)) for layer in (7, 2))])
    assert shrinking.rises["forward"] == (Counter(activations=10), "layers.0.w2")
    assert stage.unfolded([begun, (2, change(4, 2)), (7, change(5, 7))]) is None


@pytest.mark.parametrize("plan", [*PLANS, plan_of("1f1b", pp=8, num_microbatches=64)], ids=ParallelPlan.summary)
def test_the_traced_actions_cover_every_step_of_a_ranks_work(plan):
    for actions, hosting in actions_of(plan):
        kept = covering_actions(actions, hosting)
        assert set(steps(kept, hosting)) >= set(steps(actions, hosting))
        assert kept == [action for action in actions if action in set(kept)]


def test_the_traced_actions_of_1f1b_do_not_grow_with_the_number_of_microbatches():
    kept = [
        [len(covering_actions(*rank)) for rank in actions_of(plan_of("1f1b", pp=4, num_microbatches=count))]
        for count in (16, 64)
    ]
    assert kept[0] == kept[1]
    assert max(kept[1]) < 60  # of 256 computations and transfers


def test_places_are_named_after_another_ranks_layers():
    assert (
        renamed_layers("the gradient of layers.1.ffn_norm", {0: 4, 1: 15}.__getitem__)
        == "the gradient of layers.15.ffn_norm"
    )
