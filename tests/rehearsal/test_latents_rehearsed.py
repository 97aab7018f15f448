"""The estimate of a model whose keys are made from latents is what its rehearsal counts."""

import pytest
from test_adapters_rehearsed import PLANS, assert_estimated
from tiers import cases, nightly

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan

SIZES = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "head_dim": 96}
LATENTS = {"kv_rank": 128, "query_rank": 192, "rope_dim": 32, "value_dim": 64, "score_factor": 1.2}
ALL_PLANS = PLANS | {
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
    "cp2 ulysses": ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
    "tp2 cp2": ParallelPlan(tp=2, cp=2, num_microbatches=2),
}
OTHERS = {
    "fp32, one matrix to queries": ("fp32", {"query_rank": 0, "value_dim": 0}, {}),
    "cuda": ("bf16", {}, {"launch": {"device": "cuda"}}),
    "adapters": ("bf16", {}, {"strategy": "lora", "lora": {"target_modules": "all-linear"}}),
    "nf4": ("bf16", {}, {"strategy": "lora", "lora": {"base": "nf4", "target_modules": "all-linear"}}),
}


@pytest.mark.parametrize("plan", cases(ALL_PLANS, narrow={"tp2"}))
@pytest.mark.parametrize(
    ("precision", "changes", "settings"),
    [("bf16", {}, {}), *(nightly(*one) for one in OTHERS.values())],
    ids=["bf16", *OTHERS],
)
def test_the_estimates_of_latents_are_what_their_rehearsal_counts(plan, precision, changes, settings):
    training = {"precision": precision, "seq_len": 256, "batch_size": plan.batch_size}
    model = {"model": "tiny_llama3_50m", "architecture": SIZES | LATENTS | changes}
    assert_estimated(RunConfig.from_mapping(model | {"training": training} | settings), plan)
