"""Every way to divide the work gives the numbers of one process.

In float64 two orders of the same sums differ by about 1e-16; AdamW divides by small second moments and makes that 1e-13
in the weights after two steps. 1e-8 leaves room for larger models and still catches every fault.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from distributed import run_ranks
from document_kernel import DENSE, attention_per_document
from parity import (
    ADAPTED,
    ADAPTED_LATENT,
    ADAPTED_RELATIVE,
    HYBRID,
    LATENT,
    LLAMA4,
    OF_GPT_OSS,
    OTHER_SPARSE,
    RELATIVE,
    SEQ_LEN,
    SPARSE,
    SPARSE_RELATIVE,
    TIED,
    UNFUSED_RELATIVE,
    UNTIED,
    largest_differences,
    train,
    weights_by_rank,
)
from tiers import cases, nightly

from llama_core.config.strategy import LoRA
from llama_core.models import block_attention, layers
from llama_core.parallel import apply, context, document_chunks, gathered_attention, gradients, ring, tensor
from llama_core.parallel import zero as data
from llama_core.planning.plan import ParallelPlan

PLANS = {
    "dp2": ParallelPlan(dp_replicate=2, num_microbatches=2),
    "dp3": ParallelPlan(dp_replicate=3, num_microbatches=2),
    "dp4": ParallelPlan(dp_replicate=4, num_microbatches=2),
    "hsdp2x2": ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "zero1 dp2": ParallelPlan(dp_shard=2, zero_stage=1, num_microbatches=2),
    "zero2 dp2": ParallelPlan(dp_shard=2, zero_stage=2, num_microbatches=2),
    "zero3 dp4": ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=2),
    "tp2": ParallelPlan(tp=2, sequence_parallel=False, num_microbatches=2),
    "tp2 sp": ParallelPlan(tp=2, num_microbatches=2),
    "pp2 gpipe": ParallelPlan(pp=2, schedule="gpipe", num_microbatches=4),
    "pp2 1f1b": ParallelPlan(pp=2, num_microbatches=4),
    "pp2 1f1b, 1 microbatch": ParallelPlan(pp=2, num_microbatches=1, microbatch_size=2),
    "pp2 interleaved": ParallelPlan(pp=2, schedule="interleaved", num_chunks=2, num_microbatches=4),
    "pp2 chimera": ParallelPlan(pp=2, schedule="chimera", num_microbatches=4),
    "pp2 zb_h1": ParallelPlan(pp=2, schedule="zb_h1", num_microbatches=4),
    "pp2 zbv": ParallelPlan(pp=2, schedule="zbv", num_microbatches=4),
    "pp4 gpipe": ParallelPlan(pp=4, schedule="gpipe", num_microbatches=6),
    "pp4 1f1b": ParallelPlan(pp=4, num_microbatches=6),
    "pp4 1f1b, 3 microbatches": ParallelPlan(pp=4, num_microbatches=3),
    "pp4 interleaved": ParallelPlan(pp=4, schedule="interleaved", num_chunks=2, num_microbatches=4),
    "pp4 chimera, N=4": ParallelPlan(pp=4, schedule="chimera", num_microbatches=4),
    "pp4 chimera, N=8": ParallelPlan(pp=4, schedule="chimera", num_microbatches=8),
    "pp4 chimera, N=10": ParallelPlan(pp=4, schedule="chimera", num_microbatches=10),
    "pp4 chimera_doubling, N=8": ParallelPlan(pp=4, schedule="chimera_doubling", num_microbatches=8),
    "pp4 chimera_doubling, N=10": ParallelPlan(pp=4, schedule="chimera_doubling", num_microbatches=10),
    "pp4 chimera_halving, N=4": ParallelPlan(pp=4, schedule="chimera_halving", num_microbatches=4, microbatch_size=2),
    "pp4 zb_h1": ParallelPlan(pp=4, schedule="zb_h1", num_microbatches=6),
    "pp4 zbv": ParallelPlan(pp=4, schedule="zbv", num_microbatches=8),
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
    "cp4": ParallelPlan(cp=4, num_microbatches=2),
    "cp2, full recompute": ParallelPlan(cp=2, recompute="full", num_microbatches=2, microbatch_size=2),
    "cp2 zero3 dp2": ParallelPlan(cp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "tp2 cp2": ParallelPlan(tp=2, cp=2, num_microbatches=2),
    "pp2 cp2": ParallelPlan(pp=2, cp=2, num_microbatches=2),
    "tp2 pp2": ParallelPlan(tp=2, pp=2, num_microbatches=4),
    "tp2 dp2": ParallelPlan(tp=2, dp_replicate=2, num_microbatches=2),
    "tp2 zero3 dp2": ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "pp2 dp2": ParallelPlan(pp=2, dp_replicate=2, num_microbatches=2),
    "pp2 zero1 dp2": ParallelPlan(pp=2, dp_shard=2, zero_stage=1, num_microbatches=4),
    "pp2 zero2 dp2": ParallelPlan(pp=2, dp_shard=2, zero_stage=2, num_microbatches=4),
    "pp2 zero3 dp2": ParallelPlan(pp=2, dp_shard=2, zero_stage=3, num_microbatches=4),
    "pp2 chimera zero2 dp2": ParallelPlan(pp=2, schedule="chimera", dp_shard=2, zero_stage=2, num_microbatches=4),
    "pp2 chimera hsdp2x2": ParallelPlan(
        pp=2, schedule="chimera", dp_shard=2, dp_replicate=2, zero_stage=3, num_microbatches=4
    ),
    "pp2 interleaved hsdp2x2": ParallelPlan(
        pp=2, schedule="interleaved", num_chunks=2, dp_shard=2, dp_replicate=2, zero_stage=2, num_microbatches=4
    ),
    "tp2 pp2 zero2 dp2": ParallelPlan(tp=2, pp=2, dp_shard=2, zero_stage=2, num_microbatches=2),
    "zero3 dp2, full recompute": ParallelPlan(dp_shard=2, zero_stage=3, recompute="full", num_microbatches=2),
    "tp2 sp, math attention": ParallelPlan(tp=2, attention="math", recompute="selective", num_microbatches=2),
    "tp2 sp, selective recompute": ParallelPlan(tp=2, recompute="selective", num_microbatches=2),
    "pp2 1f1b, adaptive recompute": ParallelPlan(
        pp=2, recompute="selective", recomputed_layers=(2, 1), num_microbatches=4
    ),
}
TIED_PLANS = ("zero3 dp4", "tp2 sp", "pp2 1f1b", "pp4 chimera, N=8", "pp2 zbv", "tp2 pp2")
ADAPTED_PLANS = {
    name: PLANS[name]
    for name in (
        "hsdp2x2",
        "tp2 cp2",
        "tp2 zero3 dp2",
        "tp2 pp2",
        "pp2 interleaved",
        "pp4 chimera, N=8",
        "pp2 chimera zero2 dp2",
        "pp2 zbv",
        "zero3 dp2, full recompute",
        "tp2 sp, selective recompute",
    )
}

SPARSE_PLANS = {
    name: PLANS[name]
    for name in (
        "zero2 dp2",
        "hsdp2x2",
        "tp2 cp2",
        "tp2 zero3 dp2",
        "tp2 pp2",
        "cp2 zero3 dp2",
        "pp2 chimera zero2 dp2",
        "pp2 zb_h1",
        "pp2 zbv",
        "zero3 dp2, full recompute",
        "tp2 sp, selective recompute",
    )
} | {
    "ep2": ParallelPlan(dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 dp2": ParallelPlan(dp_replicate=4, ep=2, num_microbatches=2),
    "ep2 tp2": ParallelPlan(tp=2, dp_replicate=2, ep=2, num_microbatches=2),
    "ep2 tp2 zero3": ParallelPlan(tp=2, dp_shard=2, ep=2, zero_stage=3, num_microbatches=2),
    "ep2 pp2": ParallelPlan(pp=2, dp_replicate=2, ep=2, num_microbatches=4),
    "ep2 pp2 chimera zero2": ParallelPlan(pp=2, schedule="chimera", dp_shard=2, ep=2, zero_stage=2, num_microbatches=4),
    "ep2 cp2 zero1": ParallelPlan(cp=2, dp_shard=2, ep=2, zero_stage=1, num_microbatches=2),
    "ep2 zero2 dp2": ParallelPlan(dp_shard=4, ep=2, zero_stage=2, num_microbatches=2),
    "ep2 zero3 dp2": ParallelPlan(dp_shard=4, ep=2, zero_stage=3, num_microbatches=2),
    "ep4 hsdp2x2": ParallelPlan(dp_shard=2, dp_replicate=2, ep=4, zero_stage=2, num_microbatches=2),
    "ep4 on 2 nodes": ParallelPlan(dp_replicate=4, ep=4, ep_nodes=2, num_microbatches=2),
    "ep4 on 2 nodes, hsdp2x2": ParallelPlan(
        dp_shard=2, dp_replicate=2, ep=4, ep_nodes=2, zero_stage=2, recompute="full", num_microbatches=2
    ),
    "ep2 on 2 nodes, tp2 zero3": ParallelPlan(tp=2, dp_shard=2, ep=2, ep_nodes=2, zero_stage=3, num_microbatches=2),
    "ep2, full recompute": ParallelPlan(dp_replicate=2, ep=2, recompute="full", num_microbatches=2),
    "ep2, selective recompute": ParallelPlan(dp_replicate=2, ep=2, recompute="selective", num_microbatches=2),
    "compiled": ParallelPlan(compile=True, recompute="selective", num_microbatches=4),
}
FOLDED_PLANS = {
    "ep2": ParallelPlan(tp=2, expert_tp=1, ep=2, num_microbatches=2),
    "ep2 dp2": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_replicate=2, num_microbatches=2),
    "ep4": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_replicate=2, num_microbatches=2),
    "ep2 zero1 dp2": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=1, num_microbatches=2),
    "ep4 zero2": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, zero_stage=2, num_microbatches=2),
    "ep4 on 2 nodes": ParallelPlan(tp=2, expert_tp=1, ep=4, ep_nodes=2, dp_replicate=2, num_microbatches=2),
    "ep4 zero3": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, zero_stage=3, num_microbatches=2),
    "ep2 zero3 dp2": ParallelPlan(tp=2, expert_tp=1, ep=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "ep4 hsdp2x2": ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, dp_replicate=2, zero_stage=3, num_microbatches=2),
    "ep2 cp2 zero1": ParallelPlan(tp=2, expert_tp=1, ep=2, cp=2, zero_stage=1, num_microbatches=2),
    "ep4 cp2 zero3": ParallelPlan(tp=2, expert_tp=1, ep=4, cp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
    "ep2 pp2 chimera": ParallelPlan(tp=2, expert_tp=1, ep=2, pp=2, schedule="chimera", num_microbatches=4),
    "ep2, full recompute": ParallelPlan(tp=2, expert_tp=1, ep=2, recompute="full", num_microbatches=2),
    "ep2, selective recompute": ParallelPlan(tp=2, expert_tp=1, ep=2, recompute="selective", num_microbatches=2),
    "ep2, compiled": ParallelPlan(tp=2, expert_tp=1, ep=2, compile=True, num_microbatches=2),
}
"""Plans under which tensor-parallel ranks have whole experts."""

RELATIVE_PLANS = {
    name: (PLANS | SPARSE_PLANS)[name]
    for name in (
        "tp2 dp2",
        "tp2 sp, selective recompute",
        "tp2",
        "tp2 cp2",
        "cp2",
        "pp2 1f1b",
        "pp2 zbv",
        "zero3 dp4",
        "zero3 dp2, full recompute",
        "compiled",
    )
}

HYBRID_PLANS = {
    name: (PLANS | SPARSE_PLANS)[name]
    for name in (
        "hsdp2x2",
        "tp2 dp2",
        "tp2 cp2",
        "pp2 chimera zero2 dp2",
        "pp2 zbv",
        "zero3 dp2, full recompute",
        "tp2 sp, selective recompute",
        "ep2 dp2",
        "ep2 tp2 zero3",
        "ep2 zero3 dp2",
        "ep2 pp2",
    )
}

DOCUMENT_PLANS = {
    name: PLANS[name] for name in ("cp2", "cp4", "cp2, full recompute", "cp2 zero3 dp2", "tp2 cp2", "pp2 cp2")
}

NARROW = {
    "dp3",
    "pp2 interleaved",
    "pp2 zbv",
    "pp4 chimera, N=10",
    "tp2 pp2 zero2 dp2",
    "zero3 dp2, full recompute",
    "tp2 sp, selective recompute",
}
"""Every way to divide the work, alone or combined with another."""


@pytest.mark.parametrize("plan", cases(PLANS, narrow=NARROW))
def test_a_plan_matches_one_process(plan):
    differences = largest_differences(plan)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases({name: PLANS[name] for name in TIED_PLANS}, narrow={"pp2 zbv"}))
def test_a_tied_embedding_is_one_parameter_wherever_it_is_held(plan):
    differences = largest_differences(plan, spec=TIED)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    "plan",
    cases(ADAPTED_PLANS, narrow={"tp2 sp, selective recompute"}),
)
def test_adapters_match_one_process_and_nothing_else_trains(plan):
    differences = largest_differences(plan, spec=ADAPTED)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    "plan",
    cases(SPARSE_PLANS, narrow={"ep2 tp2", "pp2 zbv", "ep4 on 2 nodes"}),
)
def test_experts_match_one_process(plan):
    differences = largest_differences(plan, spec=SPARSE)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(SPARSE_PLANS, narrow={"ep2 tp2 zero3", "tp2 sp, selective recompute"}))
def test_experts_with_other_traits_match_one_process(plan):
    differences = largest_differences(plan, spec=OTHER_SPARSE)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(FOLDED_PLANS, narrow={"ep2 zero1 dp2"}))
@pytest.mark.parametrize(
    "spec",
    [OTHER_SPARSE, *(nightly(spec) for spec in (SPARSE, OF_GPT_OSS, HYBRID))],
    ids=["other", "plain", "gpt_oss", "adapted"],
)
def test_whole_experts_on_tensor_parallel_ranks_match_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.wide
@pytest.mark.parametrize("plan", cases(HYBRID_PLANS, narrow={"ep2 zero3 dp2"}))
def test_adapters_beside_experts_match_one_process(plan):
    differences = largest_differences(plan, spec=HYBRID)
    assert max(differences.values()) < 1e-8, differences


PLACEMENT_PLANS = {name: RELATIVE_PLANS[name] for name in ("tp2", "tp2 sp, selective recompute", "compiled")}


@pytest.mark.parametrize(
    ("norms", "name"),
    [
        ("post", "tp2 sp, selective recompute"),
        ("both", "tp2"),
        *(nightly(norms, name) for norms, name in (("post", "tp2"), ("both", "tp2 sp, selective recompute"))),
        *(nightly(norms, "compiled") for norms in ("post", "both")),
    ],
)
def test_norms_after_attention_and_feed_forward_match_one_process(norms, name):
    differences = largest_differences(
        PLACEMENT_PLANS[name], spec=replace(ADAPTED, norms=norms, trainable=("*_norm.*",))
    )
    assert max(differences.values()) < 1e-8, differences
    differences = largest_differences(PLACEMENT_PLANS[name], spec=replace(UNTIED, norms=norms))
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(RELATIVE_PLANS, narrow={"tp2 cp2"}))
@pytest.mark.parametrize("spec", [RELATIVE, nightly(ADAPTED_RELATIVE)], ids=["trained", "adapted"])
def test_the_traits_of_relatives_match_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    "plan", cases({name: plan for name, plan in RELATIVE_PLANS.items() if plan.cp == 1}, narrow={"tp2"})
)
def test_a_soft_cap_beside_the_traits_of_relatives_matches_one_process(plan):
    differences = largest_differences(plan, spec=UNFUSED_RELATIVE)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases({name: SPARSE_PLANS[name] for name in ("ep2 tp2", "ep2 zero3 dp2")}, narrow=()))
def test_the_traits_of_relatives_beside_experts_match_one_process(plan):
    differences = largest_differences(plan, spec=SPARSE_RELATIVE)
    assert max(differences.values()) < 1e-8, differences


OF_GPT_OSS_PLANS = {
    name: (PLANS | SPARSE_PLANS)[name]
    for name in ("tp2 sp, selective recompute", "cp2", "pp2 1f1b", "pp2 zbv", "zero3 dp4", "ep2 tp2 zero3", "compiled")
}


@pytest.mark.parametrize("plan", cases(OF_GPT_OSS_PLANS, narrow={"tp2 sp, selective recompute"}))
@pytest.mark.parametrize(
    "spec",
    [OF_GPT_OSS, nightly(replace(OF_GPT_OSS, lora=LoRA(lora_rank=4), trainable=("*.sinks", "*.wo.bias")))],
    ids=["trained", "adapted"],
)
def test_a_gpt_oss_matches_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


LATENT_PLANS = {
    name: PLANS[name]
    for name in (
        "tp2",
        "tp2 sp, selective recompute",
        "tp2 cp2",
        "tp2 zero3 dp2",
        "pp2 zbv",
        "zero3 dp2, full recompute",
    )
} | {
    "cp2 ulysses": ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
    "tp2 math compiled": ParallelPlan(tp=2, attention="math", compile=True, num_microbatches=2),
}


@pytest.mark.parametrize("plan", cases(LATENT_PLANS, narrow={"tp2 sp, selective recompute"}))
@pytest.mark.parametrize("spec", [LATENT, nightly(ADAPTED_LATENT)], ids=["trained", "adapted"])
def test_keys_made_from_latents_match_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases(SPARSE_PLANS, narrow={"tp2 cp2"}))
def test_a_llama_4_matches_one_process(plan):
    differences = largest_differences(plan, spec=LLAMA4)
    assert max(differences.values()) < 1e-8, differences


PREDICTION_PLANS = {
    name: (PLANS | SPARSE_PLANS)[name]
    for name in (
        *("dp2", "zero1 dp2", "zero3 dp4", "hsdp2x2", "tp2", "tp2 sp, selective recompute", "cp2", "compiled"),
        *("pp2 1f1b", "pp2 interleaved", "pp2 zbv", "pp4 chimera, N=8", "pp2 zero3 dp2", "pp2 chimera hsdp2x2"),
        *("tp2 cp2", "tp2 pp2 zero2 dp2", "zero3 dp2, full recompute"),
    )
}


@pytest.mark.parametrize("plan", cases(PREDICTION_PLANS, narrow={"tp2 cp2", "pp2 zbv"}))
@pytest.mark.parametrize(
    "spec",
    [replace(UNTIED, mtp_layers=2), *(nightly(replace(spec, mtp_layers=1)) for spec in (TIED, RELATIVE, OTHER_SPARSE))],
    ids=["plain", "tied", "relative", "experts"],
)
def test_prediction_modules_match_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("plan", cases({"zero3 dp4": PLANS["zero3 dp4"]}, narrow=()))
def test_experts_that_the_sharding_ranks_cannot_share_are_sharded_by_their_rows(plan):
    differences = largest_differences(plan, spec=replace(SPARSE, moe=SPARSE.moe.model_copy(update={"num_experts": 6})))
    assert max(differences.values()) < 1e-8, differences


def _take_documents(shortest_piece=1):
    """Let attention take documents as on CUDA, and cut all that have ``shortest_piece`` tokens for a chunk."""
    gathered_attention.VARLEN = DENSE
    document_chunks.SHORTEST_PIECE = shortest_piece
    shard_batch = apply.shard_batch
    apply.shard_batch = lambda batch, cp_rank, cp_size: shard_batch(batch.with_documents(), cp_rank, cp_size)


@pytest.mark.parametrize("plan", cases(DOCUMENT_PLANS, narrow={"cp4", "pp2 cp2"}))
@pytest.mark.parametrize(
    "spec",
    [replace(RELATIVE, attention_chunk=0), nightly(UNTIED), nightly(SPARSE)],
    ids=["windows", "dense", "experts"],
)
def test_rows_cut_by_document_match_one_process(spec, plan):
    differences = largest_differences(plan, spec=spec, fault=_take_documents)
    assert max(differences.values()) < 1e-8, differences


ULYSSES_PLANS = {
    "cp2": ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
    "cp4": ParallelPlan(cp=4, attention="ulysses", num_microbatches=2),
    "cp2, selective recompute": ParallelPlan(
        cp=2, attention="ulysses", recompute="selective", num_microbatches=2, microbatch_size=2
    ),
    "cp2, compiled": ParallelPlan(cp=2, attention="ulysses", recompute="full", compile=True, num_microbatches=2),
    "cp2 zero3 dp2": ParallelPlan(cp=2, attention="ulysses", dp_shard=2, zero_stage=3, num_microbatches=2),
    "tp2 cp2": ParallelPlan(tp=2, cp=2, attention="ulysses", num_microbatches=2),
    "pp2 cp2": ParallelPlan(pp=2, cp=2, attention="ulysses", num_microbatches=2),
}


@pytest.mark.parametrize("plan", cases(ULYSSES_PLANS, narrow={"cp2, selective recompute", "tp2 cp2"}))
@pytest.mark.parametrize("spec", [RELATIVE, nightly(UNTIED), nightly(SPARSE)], ids=["windows", "dense", "experts"])
def test_exchanged_heads_match_one_process(spec, plan):
    if spec.num_kv_heads % plan.ranks_of_heads:
        spec = replace(spec, num_heads=8, num_kv_heads=4)
    differences = largest_differences(plan, spec=spec)
    assert max(differences.values()) < 1e-8, differences


def _take_whole_documents():
    """Let attention of whole rows take documents as on CUDA."""
    layers.varlen_attn = attention_per_document
    block_attention.VARLEN = DENSE
    cut_batch = apply.cut_batch
    apply.cut_batch = lambda batch, cp_rank, cp_size: cut_batch(batch.with_documents(), cp_rank, cp_size)


def test_exchanged_heads_with_the_kernel_for_documents_match_one_process():
    differences = largest_differences(ULYSSES_PLANS["cp2"], spec=RELATIVE, fault=_take_whole_documents)
    assert max(differences.values()) < 1e-8, differences


def test_documents_too_short_to_cut_match_one_process():
    differences = largest_differences(PLANS["cp2"], fault=partial(_take_documents, shortest_piece=SEQ_LEN))
    assert max(differences.values()) < 1e-8, differences


def _losses_with_dropout(plan):
    torch.manual_seed(0)
    lora = LoRA(
        lora_rank=4, lora_dropout=0.5, target_modules=("q_proj", "up_proj")
    )  # every rank has their whole inputs
    return train(plan, replace(UNTIED, num_layers=2, lora=lora), torch.float64, documents=False)["losses"][""]


@pytest.mark.parametrize("recompute", [nightly("full"), "selective"])
def test_tensor_parallel_ranks_drop_the_same_elements_even_when_recomputing(recompute):
    (expected,) = run_ranks(1, _losses_with_dropout, ParallelPlan(num_microbatches=4))
    for losses in run_ranks(2, _losses_with_dropout, ParallelPlan(tp=2, num_microbatches=4, recompute=recompute)):
        np.testing.assert_allclose(losses, expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "spec"), [("cp2", UNTIED), nightly("pp4 chimera, N=8", UNTIED), nightly("tp2 cp2", RELATIVE)]
)
def test_rows_of_one_document_match_one_process_too(name, spec):
    differences = largest_differences(PLANS[name], spec=spec, documents=False)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("name", ["dp2", nightly("tp2 pp2")])
def test_fp32_differs_by_rounding_alone(name):
    """A loss is a mean of 100 terms, each rounded by 6e-8; AdamW changes the few updates near zero by 1e-3."""
    differences = largest_differences(PLANS[name], dtype=torch.float32)
    assert max(differences[kind] for kind in ("losses", "norms", "gradients", "evaluation")) < 1e-5, differences
    assert differences["weights"] < 1e-3, differences


def _targets_of_other_ranks_not_counted():
    apply.ParallelModel._count = lambda self, pieces: sum(piece.num_targets() for piece in pieces)


def _gradients_not_averaged():
    data.Copies.prepare = lambda self, *, last: setattr(self.replica, "require_backward_grad_sync", False)


def _copies_not_averaged():
    shard = data.fully_shard
    data.fully_shard = lambda module, *, mesh, **options: shard(module, mesh=mesh["shard"], **options)


def _gradients_not_completed():
    gradients.Gradients.complete = lambda self: None


def _gradients_summed_over_the_wrong_ranks():
    apply.Mesh.groups_across_pipeline = lambda self, pp_ranks: self.weights.get_group("tp")


def _norm_counts_copies():
    gradients._num_shards = lambda parameter: 1


def _embedding_not_summed():
    tensor.Partial = tensor.Replicate


def _stream_gradient_scaled():
    from llama_core.parallel import pipeline

    send = pipeline._Execution._send
    pipeline._Execution._send = lambda self, x, stage, microbatch: send(self, x * 1.001, stage, microbatch)


def _tokens_of_a_block_reversed():
    forward = ring._Hop.__init__

    def broken(self, block, spare, group):
        forward(self, block.flip(-2), spare, group)

    ring._Hop.__init__ = broken


def _keys_laid_out_wrongly():
    _take_documents()
    held = gathered_attention.held_documents

    def broken(*args, **place):
        documents = held(*args, **place)
        return documents._replace(key_places=documents.key_places.roll(1, dims=1))

    context.held_documents = broken


def _experts_not_averaged():
    gradients.is_divided_over = lambda parameter, axis: False


FAULTS = {
    "dp2": _gradients_not_averaged,
    "hsdp2x2": _copies_not_averaged,
    "zero3 dp4": _targets_of_other_ranks_not_counted,
    "tp2 sp": _gradients_not_completed,
    "tp2": _embedding_not_summed,
    "tp2 pp2": _norm_counts_copies,
    "pp2 1f1b": _stream_gradient_scaled,
    "pp4 chimera, N=4": _gradients_not_completed,
    "pp2 chimera": _gradients_summed_over_the_wrong_ranks,
    "cp2": _tokens_of_a_block_reversed,
}


@pytest.mark.parametrize("name", [name if name in NARROW else nightly(name) for name in FAULTS])
def test_a_broken_collective_is_detected(name):
    differences = largest_differences(PLANS[name], fault=FAULTS[name])
    assert max(differences.values()) > 1e-6, differences


def test_keys_laid_out_in_another_order_are_detected():
    differences = largest_differences(PLANS["cp2"], fault=_keys_laid_out_wrongly)
    assert max(differences.values()) > 1e-3, differences


@pytest.mark.parametrize(("name", "fault"), [("ep2", _experts_not_averaged), nightly("tp2", _gradients_not_completed)])
def test_a_broken_collective_of_experts_is_detected(name, fault):
    differences = largest_differences((PLANS | SPARSE_PLANS)[name], spec=SPARSE, fault=fault)
    assert max(differences.values()) > 1e-3, differences


@pytest.mark.parametrize("spec", [UNTIED, nightly(TIED)])
def test_the_two_replicas_of_a_chimera_stage_stay_the_same_to_the_bit(spec):
    ranks = weights_by_rank(PLANS["pp4 chimera, N=4"], spec)
    for down, up in ((0, 3), (1, 2)):
        assert ranks[down].keys() == ranks[up].keys()
        assert all((ranks[down][name] == ranks[up][name]).all() for name in ranks[down])
