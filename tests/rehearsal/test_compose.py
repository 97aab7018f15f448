from collections import Counter
from dataclasses import replace

import pytest
from width import wide

from llama_core.config import models
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.compose import Hosting, compose, one_pass, renamed_layers, situations, telling_actions
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
    """Return bytes by phase and category, FLOPs and transfers, without zeros."""
    peaks = {phase: {name: size for name, size in peak.items() if size} for phase, peak in step.peaks.items()}
    return peaks, step.flops, dict(step.transfers)


def traced_in_full(trace):
    """Return the same of a whole trace, from its counter."""
    counter = trace.counter
    peaks = {phase: {name: n for name, n in peak.categories.items() if n} for phase, peak in counter.peaks.items()}
    return peaks, counter.flops, dict(sum((span.transfers for span in counter.spans), Counter()))


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
    wide(TIED.name, plan_of("zbv")),
    *((SPEC.name, plan) for plan in NARROW_PLANS),
    *(wide(SPEC.name, plan) for plan in PLANS[len(NARROW_PLANS) :]),
    wide(TIED.name, plan_of("interleaved", dp_shard=2, zero_stage=3)),
]


@pytest.mark.parametrize(("model", "plan"), CASES, ids=lambda value: getattr(value, "summary", lambda: value)())
def test_a_composed_step_matches_the_traced_one_in_bytes_flops_and_transfers(model, plan):
    config = RunConfig.from_mapping({"model": model}, ("training.precision=bf16", "training.seq_len=16"))
    rank = plan.world_size // plan.pp * (plan.pp // 2)  # the last of two pipeline ranks, and a middle one of four
    whole, few = trace_rank(config, plan, rank, in_full=True), trace_rank(config, plan, rank)
    assert len(few.met) <= len(whole.met)
    assert parts(compose(few.recording(), whole.met)) == traced_in_full(whole)


@pytest.mark.parametrize("plan", [*PLANS, plan_of("1f1b", pp=8, num_microbatches=64)], ids=ParallelPlan.summary)
def test_the_traced_actions_cover_every_situation_that_a_rank_meets(plan):
    for actions, hosting in actions_of(plan):
        kept = telling_actions(actions, hosting)
        assert set(situations(kept, hosting)) >= set(situations(actions, hosting))
        assert kept == [action for action in actions if action in set(kept)]


def test_the_traced_actions_of_1f1b_do_not_grow_with_the_number_of_microbatches():
    kept = [
        [len(telling_actions(*rank)) for rank in actions_of(plan_of("1f1b", pp=4, num_microbatches=count))]
        for count in (16, 64)
    ]
    assert kept[0] == kept[1]
    assert max(kept[1]) < 60  # of 256 computations and transfers


@pytest.mark.parametrize("schedule", schedule_names())
def test_one_pass_runs_every_stage_that_a_rank_hosts(schedule):
    for actions, hosting in actions_of(plan_of(schedule)):
        assert {action.stage for action in one_pass(actions)} == set(hosting.stages)


def test_places_are_named_after_another_ranks_layers():
    assert renamed_layers("the gradient of layers.1.ffn_norm", {0: 4, 1: 15}) == "the gradient of layers.15.ffn_norm"
