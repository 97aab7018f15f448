"""A base in NF4: every plan gives the numbers of one process; the bound is that of parity."""

from dataclasses import replace

import pytest
from parity import HYBRID, PACKED, largest_differences
from test_parity import ADAPTED_PLANS, PLANS
from tiers import cases

DIVIDED = ADAPTED_PLANS | {name: PLANS[name] for name in ("zero3 dp4", "dp3")}


@pytest.mark.parametrize("plan", cases(DIVIDED, narrow={"pp2 zbv"}))
def test_a_plan_matches_one_process(plan):
    differences = largest_differences(plan, spec=PACKED)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.nightly
def test_experts_beside_it_match_one_process():
    sizes = {"hidden_size": 128, "head_dim": 32, "ffn_size": 256}
    moe = HYBRID.moe.with_widths(128, 256)
    spec = replace(HYBRID, **sizes, moe=moe, lora=HYBRID.lora.model_copy(update={"base": "nf4"}))
    differences = largest_differences(PLANS["tp2 zero3 dp2"], spec=spec)
    assert max(differences.values()) < 1e-8, differences
