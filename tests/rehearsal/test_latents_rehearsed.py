"""The estimate of a model whose keys are made from latents is what its rehearsal counts."""

import pytest
from test_adapters_rehearsed import PLANS, assert_estimated
from tiers import cases

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan

SIZES = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "head_dim": 96}
LATENTS = {"kv_rank": 128, "query_rank": 192, "rope_dim": 32, "value_dim": 64, "score_factor": 1.2}
DIVIDED_ROWS = {
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
    "cp2 ulysses": ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
    "tp2 cp2": ParallelPlan(tp=2, cp=2, num_microbatches=2),
}
WHOLE = {
    "bf16": ("bf16", {}, {}),
    "fp32, one matrix to queries": ("fp32", {"query_rank": 0, "value_dim": 0}, {}),
    "cuda": ("bf16", {}, {"launch": {"device": "cuda"}}),
}
ADAPTED = {
    "adapters": ("bf16", {}, {"strategy": "lora", "lora": {"target_modules": "all-linear"}}),
    "nf4": ("bf16", {}, {"strategy": "lora", "lora": {"base": "nf4", "target_modules": "all-linear"}}),
}


def cases_of(models):
    """Return the parameters of some models, by name; all but the first are nightly."""
    marks = {name: [] if name == "bf16" else [pytest.mark.nightly] for name in models}
    return [pytest.param(*one, id=name, marks=marks[name]) for name, one in models.items()]


def request(plan, precision, changes, settings):
    training = {"precision": precision, "seq_len": 256, "batch_size": plan.batch_size}
    model = {"model": "tiny_llama3_50m", "architecture": SIZES | LATENTS | changes}
    return RunConfig.from_mapping(model | {"training": training} | settings)


@pytest.mark.parametrize(("precision", "changes", "settings"), cases_of(WHOLE | ADAPTED))
@pytest.mark.parametrize("plan", cases(PLANS, narrow={"tp2"}))
def test_the_estimates_of_latents_are_what_their_rehearsal_counts(plan, precision, changes, settings):
    assert_estimated(request(plan, precision, changes, settings), plan)


@pytest.mark.parametrize("plan", cases(DIVIDED_ROWS, narrow=()))
@pytest.mark.parametrize(("precision", "changes", "settings"), cases_of(WHOLE))
def test_the_estimates_of_divided_rows_are_too(plan, precision, changes, settings):
    """But for adapters, in whose backward more of a ring with as many key heads as query heads is seen than counted."""
    assert_estimated(request(plan, precision, changes, settings), plan)
