"""Whatever kind of adapter is trained, every plan gives the numbers of one process; the bound is that of parity."""

from dataclasses import replace

import pytest
import toy_adapter
from parity import HYBRID, PRINCIPAL, UNTIED, largest_differences
from test_parity import ADAPTED_PLANS, PLANS
from tiers import cases

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.config.strategy import MATRICES, LoRA
from llama_core.planning.plan import ParallelPlan

DIVIDED = ADAPTED_PLANS | {
    "tp2 sp": PLANS["tp2 sp"],
    "zero3 dp2": ParallelPlan(dp_shard=2, zero_stage=3, num_microbatches=2),
}
KINDS = [*sorted(ADAPTERS.keys() - {DEFAULT_ADAPTER}), toy_adapter.FACTORS.name]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ADAPTERS, toy_adapter.FACTORS.name, toy_adapter.FACTORS)


def adapted(kind, spec=UNTIED):
    return replace(spec, lora=LoRA(method=kind, target_modules=MATRICES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", cases(DIVIDED, narrow={"tp2 sp"}))
def test_a_kind_of_adapter_matches_one_process(plan, kind):
    differences = largest_differences(plan, spec=adapted(kind), fault=toy_adapter.register)
    assert max(differences.values()) < 1e-8, differences


def test_kinds_of_adapters_train_beside_experts_too():
    spec = adapted("factors", HYBRID)
    differences = largest_differences(PLANS["tp2 sp"], spec=spec, fault=toy_adapter.register)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(DIVIDED, narrow={"zero3 dp2"}))
def test_adapters_that_begin_as_principal_parts_match_one_process(plan):
    differences = largest_differences(plan, spec=PRINCIPAL)
    assert max(differences.values()) < 1e-8, differences
