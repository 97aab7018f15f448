"""Whatever is trained for, every plan gives the numbers of one process; the bound is that of ``test_parity``."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed import run_ranks
from parity import (
    ADAPTED,
    NUM_TOP,
    SEQ_LEN,
    SPARSE,
    TIED,
    UNTIED,
    held_out_microbatches,
    largest_differences,
    make_batch,
    native_engine,
)
from test_parity import PLANS
from tiers import cases, nightly, wide
from toy_objective import Masked
from weighted_objective import Weighted

from llama_core.models.batch import with_places
from llama_core.models.distill import Distill
from llama_core.models.kto import Kto
from llama_core.models.preferences import Dpo, Orpo
from llama_core.planning.plan import ParallelPlan

DIVISIONS = {name: PLANS[name] for name in ("tp2 sp", "cp2", "pp2 zero3 dp2")}
"""Every way to divide tokens and stages."""
MASKED = Masked()
WEIGHTED = Weighted()
DPO = Dpo(beta=0.5, label_smoothing=0.1)
ORPO = Orpo(beta=0.5)
DISTILL = Distill(top_k=NUM_TOP, weight=0.7)
KTO = Kto(beta=0.05, desirable_weight=1.0, undesirable_weight=1.5)
PAIRED = {
    "tp2 dp2": ParallelPlan(tp=2, dp_replicate=2, num_microbatches=2),
    "pp2 1f1b": PLANS["pp2 1f1b"],
    "cp2": PLANS["cp2"],
    "zero3 dp2": ParallelPlan(dp_shard=2, zero_stage=3, num_microbatches=2),
}
PREPARED = PAIRED | {name: PLANS[name] for name in ("pp2 zbv", "pp2 chimera", "tp2 cp2", "zero2 dp2")}


@pytest.mark.parametrize("plan", cases(DIVISIONS, narrow={"cp2", "pp2 zero3 dp2"}))
def test_an_objective_that_reads_a_number_of_each_token_matches_one_process(plan):
    differences = largest_differences(plan, objective=MASKED)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("name", ["dp2", nightly("tp2"), "tp2 sp", nightly("tp2 zero3 dp2"), "cp2"])
def test_an_objective_of_whole_logits_matches_one_process(name):
    differences = largest_differences(PLANS[name], objective=WEIGHTED)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("objective", cases({"masked": MASKED, "weighted": WEIGHTED}, narrow={"weighted"}))
@pytest.mark.parametrize("name", [nightly("zero2 dp2"), wide("tp2 pp2")])
def test_objectives_match_one_process_with_adapters_too(name, objective):
    differences = largest_differences(PLANS[name], spec=ADAPTED, objective=objective)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("spec", cases({"adapters": ADAPTED, "whole": UNTIED}, narrow=["adapters"]))
@pytest.mark.parametrize("plan", cases(PAIRED, narrow={"cp2", "zero3 dp2"}))
def test_pairs_of_answers_match_one_process(plan, spec):
    """With cp2 the tokens of an answer are on two ranks; a pair has its loss on one, and its gradient on both."""
    differences = largest_differences(plan, spec=spec, objective=DPO)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["pp2 zb_h1", "pp2 zbv", "pp2 chimera", "tp2 cp2", "pp2 cp2", "cp4", "tp2 zero3 dp2"])
def test_pairs_of_answers_match_one_process_under_every_kind_of_plan(name):
    differences = largest_differences(PLANS[name], objective=DPO)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.nightly
def test_pairs_of_answers_match_one_process_with_experts():
    differences = largest_differences(PLANS["tp2 cp2"], spec=SPARSE, objective=ORPO)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(PREPARED, narrow=["pp2 1f1b"]))
@pytest.mark.parametrize("spec", cases({"adapters": ADAPTED, "whole": UNTIED}, narrow=["adapters"]))
def test_a_divergence_of_the_whole_step_is_that_of_one_process(plan, spec):
    """Both forwards of a step, the one over mismatched answers and the one that trains, run under the plan."""
    differences = largest_differences(plan, spec=spec, objective=KTO)
    assert max(differences.values()) < 1e-8, differences


TAUGHT = PAIRED | {name: PLANS[name] for name in ("tp2 sp", "tp2 cp2", "pp2 zero3 dp2", "pp2 chimera", "zero2 dp2")}


@pytest.mark.parametrize("documents", cases({"documents": True, "rows": False}, narrow=["documents"]))
@pytest.mark.parametrize("spec", cases({"adapters": ADAPTED, "whole": UNTIED, "tied": TIED}, narrow=["whole"]))
@pytest.mark.parametrize("plan", cases(TAUGHT, narrow={"tp2 dp2", "cp2", "pp2 1f1b", "zero3 dp2"}))
def test_distillation_matches_one_process(plan, spec, documents):
    differences = largest_differences(plan, spec=spec, objective=DISTILL, documents=documents)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("documents", cases({"documents": True, "rows": False}, narrow=["documents"]))
@pytest.mark.parametrize("plan", cases(TAUGHT, narrow={"tp2 dp2", "cp2", "pp2 1f1b", "zero3 dp2"}))
def test_a_teacher_says_the_same_under_a_plan_as_in_one_process(plan, documents):
    alone = said_by_teacher(ParallelPlan(num_microbatches=plan.batch_size), plan.num_stages, documents)
    for said in run_ranks(plan.world_size, said_by_teacher, plan, plan.num_stages, documents):
        np.testing.assert_allclose(said, alone, rtol=1e-9, atol=1e-9)


def said_by_teacher(plan, num_stages, documents):
    """What a model with drawn weights says of all tokens of some rows: [rows, tokens, 2 k + 1]."""
    spec = replace(UNTIED, num_layers=max(3, num_stages + 1))
    engine = native_engine(plan, spec, torch.float64, weight_dtype=torch.float64)
    rows = [with_places(batch) for batch in held_out_microbatches(plan, documents)]
    return engine.measure_rows(DISTILL.of_reference, DISTILL.num_referred(SEQ_LEN), rows).numpy()


def test_the_tests_of_an_objective_notice_another_objective():
    """The mask leaves out half of the targets, so neither the loss nor the gradients are those of the next token."""
    differences = largest_differences(PLANS["dp2"], objective=MASKED, fault=_all_targets)
    assert differences["losses"] > 1e-3
    assert differences["gradients"] > 1e-3


def _all_targets():
    Masked.loss = super(Masked, Masked).loss
    Masked.count = super(Masked, Masked).count


def test_the_mask_of_the_tests_leaves_some_tokens_and_takes_others():
    mask = make_batch(0, 4, documents=True).per_token["mask"]
    assert 0 < int((mask > 0).sum()) < mask.numel()
