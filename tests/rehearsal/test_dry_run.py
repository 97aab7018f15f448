import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from architectures import NUM_TURNS, with_every_trait
from distributed import run_ranks
from tiers import nightly

from llama_core.config import models
from llama_core.config.model_types import GPT_OSS
from llama_core.config.models import ModelSpec
from llama_core.config.rope import YarnScaling
from llama_core.config.run import RunConfig
from llama_core.config.strategy import MoE
from llama_core.errors import PlanError
from llama_core.models.loss import default_chunk_tokens
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.ends import loss_chunk_tokens
from llama_core.planning.search.auto import choose_plan
from llama_core.planning.time.communication import communication
from llama_core.planning.time.step_time import flops_per_token, hardware_flops_per_token
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse
from llama_core.rehearsal.trace import trace_steps
from llama_core.training.engine import build_model
from llama_core.units import MIB

TIED = ModelSpec("tied", "llama3", 64, 4, 4, 2, 16, 192, 512, 1e4, 1e-5, 4096, 256, tied_embeddings=True)
UNTIED = ModelSpec("untied", "llama3", 128, 6, 8, 8, 16, 344, 2048, 1e4, 1e-5, 4096, 512)
MEDIUM = ModelSpec("medium", "llama3", 512, 4, 8, 4, 64, 1536, 8192, 1e4, 1e-5, 4096, 512)
MEDIUM_TIED = replace(MEDIUM, name="medium_tied", vocab_size=24576, tied_embeddings=True)
EVEN = replace(MEDIUM, name="even", vocab_size=64)
MANY_HEADS = replace(MEDIUM, name="many_heads", num_kv_heads=8, default_seq_len=4096, vocab_size=512)
RELATIVES = [
    replace(
        with_every_trait(MEDIUM, turn, windowed_layers=(1, 2)),
        name=f"relative{turn}",
        head_dim=48,
        rope_scaling=YarnScaling(4.0, 128),
        windowed_rope_theta=100.0,
    )
    for turn in range(NUM_TURNS)
]
"""Llamas with every trait of the relatives, one for each value."""
RELATIVE = RELATIVES[0]
OF_GPT_OSS = replace(
    MEDIUM,
    **GPT_OSS.of_model,
    name="relative_gpt_oss",
    sliding_window=64,
    windowed_layers=(0, 2),
    rope_scaling=YarnScaling(4.0, 128, truncate=False),
    moe=MoE(num_experts=4, **GPT_OSS.of_experts),
)
WIDE_VOCABULARY = ModelSpec("wide_vocabulary", "llama3", 256, 3, 4, 1, 64, 512, 32000, 1e4, 1e-5, 4096, 128)

WIDE_TIED = replace(WIDE_VOCABULARY, name="wide_tied", num_layers=4, tied_embeddings=True)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    for spec in (
        TIED,
        UNTIED,
        MEDIUM,
        MEDIUM_TIED,
        EVEN,
        MANY_HEADS,
        *RELATIVES,
        OF_GPT_OSS,
        WIDE_VOCABULARY,
        WIDE_TIED,
    ):
        monkeypatch.setitem(models._REGISTRY, spec.name, spec)


def request(model, *overrides):
    return RunConfig.from_mapping({"model": model, "training": {"precision": "bf16", "batch_size": 1}}, overrides)


def shape(microbatch_size=1, num_microbatches=1, recompute="none"):
    return (
        f"parallel.microbatch_size={microbatch_size}",
        f"training.batch_size={microbatch_size * num_microbatches}",
        f"parallel.recompute={recompute}",
    )


def rehearsed_and_estimated(config):
    plan = choose_plan(config, None)
    return rehearse(config, plan).profile, estimated(config, plan)


SMALL_CASES = list(
    product(("tied", "untied", "wide_vocabulary", RELATIVE.name), ("bf16", "fp32"), (shape(4), shape(2, 2, "full")))
)


@pytest.mark.parametrize(
    ("model", "precision", "shape"),
    [
        *SMALL_CASES[::3],
        (OF_GPT_OSS.name, "bf16", shape(2)),
        *(nightly(*c) for c in SMALL_CASES[1::3] + SMALL_CASES[2::3]),
    ],
    ids=str,
)
def test_the_estimate_is_within_one_percent_of_the_bytes_counted_on_the_real_step(model, precision, shape):
    rehearsed, estimated = rehearsed_and_estimated(request(model, f"training.precision={precision}", *shape))
    assert estimated.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        nightly("tiny_llama3_50m", shape(2, 2, "full")),
        ("tiny_llama3_150m", ("training.precision=fp32", "training.seq_len=1024", *shape(2))),
        nightly("llama3_8b", ("data.document_mask=false", *shape(recompute="full"))),
    ],
    ids=str,
)
def test_the_estimate_holds_for_models_of_the_registry(model, overrides):
    rehearsed, estimated = rehearsed_and_estimated(request(model, *overrides))
    assert estimated.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.01)


@pytest.mark.parametrize("model", ["tied", "wide_vocabulary"])
def test_estimate_and_rehearsal_agree_on_every_category_at_the_end_of_the_forward(model):
    rehearsed, estimated = rehearsed_and_estimated(request(model, *shape(2, 2)))
    counted = rehearsed.phases["forward"]
    for category in ("weights", "gradients", "moments", "activations", "loss"):
        assert estimated.phases["forward"][category] == pytest.approx(counted[category], rel=0.03)


def test_the_optimizer_holds_sixteen_bytes_per_parameter_and_no_temporaries():
    held = rehearse(request("untied"), ParallelPlan()).profile.phases["optimizer"]
    states = held["weights"] + held["gradients"] + held["moments"]
    # every parameter has a step counter beside its moments, and the smallest block is 512 bytes
    num_tensors = 9 * UNTIED.num_layers + 3
    assert states == 16 * UNTIED.num_parameters + 512 * num_tensors
    assert held["temporaries"] < 1024 * num_tensors


@pytest.mark.parametrize("mtp_layers", [0, 2])
def test_the_flops_are_the_closed_form_plus_the_scores_that_flash_attention_recomputes(mtp_layers):
    modules = f"architecture.mtp_layers={mtp_layers}"
    config = request("tiny_llama3_50m", "architecture.num_layers=2", modules, *shape(2))
    tokens, spec = 2 * 2048, config.spec
    scores_again = 2 * spec.num_blocks * spec.q_size * 2048
    expected = tokens * (flops_per_token(spec, 2048) + scores_again)
    assert rehearse(config, choose_plan(config, None)).flops == pytest.approx(expected, rel=1e-6)


def test_recomputation_adds_the_layers_forward_except_their_last_product():
    config = request("untied", *shape(recompute="full"))
    tokens = config.seq_len
    scores_again = 2 * UNTIED.num_layers * UNTIED.q_size * tokens
    not_recomputed = 2 * UNTIED.num_layers * UNTIED.hidden_size * UNTIED.ffn_size  # w2, whose output nobody needs
    expected = tokens * (hardware_flops_per_token(UNTIED, tokens, "full") + scores_again - not_recomputed)
    assert rehearse(config, choose_plan(config, None)).flops == pytest.approx(expected, rel=1e-6)


def on(device, precision="bf16"):
    return f"launch.device={device}", "data.document_mask=false", f"training.precision={precision}", *shape(4)


@pytest.mark.parametrize(
    ("model", "precision", "compiled"),
    [
        ("medium", "fp8", "true"),
        ("wide_vocabulary", "bf16", "false"),
        nightly("medium", "bf16", "false"),
        nightly("medium", "bf16", "true"),
        nightly("wide_vocabulary", "fp8", "true"),
    ],
)
def test_the_estimate_of_a_run_on_cuda_is_as_close(model, precision, compiled):
    config = request(model, *on("cuda", precision), f"parallel.compile={compiled}")
    rehearsed, estimated = rehearsed_and_estimated(config)
    assert estimated.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.01)


def test_sums_in_fp16_hold_their_operands_in_fp32():
    peaks = {
        precision: [profile.phases["forward"]["loss"] for profile in rehearsed_and_estimated(config)]
        for precision in ("bf16", "fp16")
        for config in [request("wide_vocabulary", f"training.precision={precision}", *shape(4))]
    }
    rehearsed, estimated = (peaks["fp16"][i] - peaks["bf16"][i] for i in range(2))
    assert rehearsed == pytest.approx(estimated, rel=1e-3)


def test_on_cuda_the_same_flops_need_no_logits_in_fp32():
    usual, fused = (rehearse(request("wide_vocabulary", *on(device)), ParallelPlan()) for device in ("cpu", "cuda"))
    tokens, (vocab_size, hidden_size) = 128, (32000, 256)
    rows_of_logits, rows_of_gradient = tokens // 16 * vocab_size * 4, vocab_size // 16 * hidden_size * 2
    saved = usual.profile.phases["forward"]["loss"] - fused.profile.phases["forward"]["loss"]
    assert saved == pytest.approx(rows_of_logits + rows_of_gradient + tokens * hidden_size * 2, rel=0.01)
    assert fused.flops == usual.flops


def test_products_in_fp8_are_counted_as_those_in_bf16_are():
    usual, fast = (
        rehearse(request("wide_vocabulary", *on("cuda", precision)), ParallelPlan()) for precision in ("bf16", "fp8")
    )
    assert fast.flops == usual.flops
    assert fast.profile.peak_bytes == pytest.approx(usual.profile.peak_bytes, rel=0.01)


def test_layers_with_a_window_and_layers_without_have_a_mask_and_a_rotation_each():
    settings = [
        ["architecture.windowed_layers=[1, 2]"],
        ["architecture.windowed_layers=[1, 2]", "architecture.windowed_rope_theta=0"],
        ["architecture.windowed_layers=[]", "architecture.windowed_rope_theta=0"],
    ]
    held = []
    for asked in settings:
        profiles = rehearsed_and_estimated(request(RELATIVE.name, *asked))
        held.append([profile.phases["forward"]["activations"] for profile in profiles])
    rotation = 4 * RELATIVE.default_seq_len * RELATIVE.head_dim
    mask = 2 * RELATIVE.default_seq_len**2
    own_rotation, own_mask = ([more - less for more, less in zip(*pair, strict=True)] for pair in pairwise(held))
    assert own_rotation == [rotation, rotation]
    assert own_mask == [mask, mask]


def test_accumulating_over_microbatches_multiplies_the_flops_and_not_the_activations():
    once, thrice = (
        rehearse(config, choose_plan(config, None))
        for config in (request("untied", *shape(1, count)) for count in (1, 3))
    )
    inputs = 2 * 3 * 8 * UNTIED.default_seq_len
    assert thrice.flops == 3 * once.flops
    # with several microbatches the cast weights are kept between them, as weights
    phases = [result.profile.phases["forward"] for result in (once, thrice)]
    kept = [phase["activations"] + phase["weights"] for phase in phases]
    assert kept[1] == kept[0] + inputs


def test_the_result_names_the_place_of_the_peak():
    result = rehearse(request("untied"), ParallelPlan())
    assert result.profile.peak_phase == "forward"
    assert "after the loss began" in result.peak_at
    assert result.as_dict()["peak_bytes"] == result.profile.peak_bytes


@pytest.mark.parametrize("spec", models._VARIANTS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_planner_knows_the_chunks_of_the_loss(spec, dtype):
    sizes = (spec.vocab_size, spec.hidden_size)
    assert loss_chunk_tokens(*sizes, dtype.itemsize) == default_chunk_tokens(*sizes, dtype)


def pipeline(schedule, **choices):
    return ParallelPlan(schedule=schedule, **({"pp": 2, "num_microbatches": 4} | choices))


def zero(stage, **choices):
    return ParallelPlan(zero_stage=stage, **({"dp_shard": 4, "num_microbatches": 2} | choices))


PLANS = {
    "copies": ParallelPlan(dp_replicate=2, num_microbatches=2),
    "tp2": ParallelPlan(tp=2),
    "tp4 whole sequence": ParallelPlan(tp=4, sequence_parallel=False, num_microbatches=2),
    "cp2": ParallelPlan(cp=2, num_microbatches=2),
    "cp8 full": ParallelPlan(cp=8, zero_stage=3, recompute="full", microbatch_size=2),
    "tp2 cp2 zero3 selective": ParallelPlan(tp=2, cp=2, zero_stage=3, recompute="selective", num_microbatches=2),
    "ulysses cp2": ParallelPlan(cp=2, attention="ulysses", num_microbatches=2),
    "ulysses cp4 full": ParallelPlan(cp=4, attention="ulysses", zero_stage=3, recompute="full", microbatch_size=2),
    "ulysses tp2 cp2 selective": ParallelPlan(tp=2, cp=2, attention="ulysses", recompute="selective"),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3 full": zero(3, dp_shard=16, recompute="full", num_microbatches=1),
    "tp2 zero2": zero(2, tp=2),
    "1f1b": pipeline("1f1b", pp=4),
    "interleaved": pipeline("interleaved", num_chunks=2),
    "chimera halving": pipeline("chimera_halving", microbatch_size=2, num_microbatches=3),
    "zbv": pipeline("zbv"),
    "1f1b selective": pipeline("1f1b", recompute="selective", num_microbatches=2),
    "1f1b partly full": pipeline("1f1b", recompute="full", recomputed_layers=(2, 1), num_microbatches=2),
    "1f1b copies": pipeline("1f1b", dp_replicate=2, num_microbatches=2),
    "chimera": pipeline("chimera"),
    "chimera zero2": pipeline("chimera", zero_stage=2, dp_shard=2),
    "chimera one way zero1": pipeline("chimera", num_microbatches=1, zero_stage=1, dp_shard=2),
    "chimera once zero1": pipeline("chimera", num_microbatches=2, zero_stage=1, dp_shard=2),
    "tp2 1f1b zero3": pipeline("1f1b", tp=2, zero_stage=3, dp_shard=2, num_microbatches=2),
    "compiled": ParallelPlan(compile=True, microbatch_size=8),
    "compiled tp2 selective": ParallelPlan(compile=True, tp=2, recompute="selective", num_microbatches=2),
    "compiled 1f1b zero3": pipeline("1f1b", compile=True, dp_shard=2, zero_stage=3),
}
PHASES = ("forward", "backward", "optimizer")
PRECISE = ("training.precision=fp32", "data.document_mask=true")
HALF = ("training.precision=bf16", "data.document_mask=false")
KERNEL = ("training.precision=bf16", "data.document_mask=true", "launch.device=cuda")
CUDA = (*HALF, "launch.device=cuda")
TWO_LAYERS = (*HALF, "architecture.num_layers=2")
NARROW = ("cp2", "zero2", "1f1b partly full", "tp2 1f1b zero3")
CASES = [
    *(("medium", HALF, name) for name in NARROW),
    *(nightly("medium", HALF, name) for name in PLANS if name not in NARROW),
    ("even", (*KERNEL, "training.seq_len=4096"), "cp8 full"),
    nightly("many_heads", KERNEL, "cp8 full"),
    ("even", (*KERNEL, "training.seq_len=4096"), "ulysses cp4 full"),
    ("many_heads", (*PRECISE, "training.seq_len=2048"), "ulysses cp4 full"),
    *(nightly("many_heads", KERNEL, f"ulysses {name}") for name in ("cp2", "cp4 full", "tp2 cp2 selective")),
    *(nightly("medium", KERNEL, name) for name in ("cp2", "tp2 cp2 zero3 selective")),
    *(nightly("many_heads", KERNEL, name) for name in ("cp2", "tp2 cp2 zero3 selective")),
    ("medium", CUDA, "compiled tp2 selective"),
    *(nightly("medium", CUDA, name) for name in PLANS if name != "compiled tp2 selective"),
    nightly(RELATIVE.name, CUDA, "compiled tp2 selective"),
    *(nightly(RELATIVE.name, CUDA, name) for name in ("tp2", "cp2", "zero3 full", "zbv")),
    *(nightly(RELATIVE.name, PRECISE, name) for name in ("tp2", "cp2", "1f1b partly full")),
    nightly(RELATIVE.name, KERNEL, "tp2 cp2 zero3 selective"),
    (OF_GPT_OSS.name, CUDA, "tp2"),
    *(nightly(OF_GPT_OSS.name, CUDA, name) for name in ("compiled tp2 selective", "cp2", "zero3 full", "zbv")),
    *(nightly(OF_GPT_OSS.name, PRECISE, name) for name in ("tp2", "cp2", "1f1b partly full")),
    ("medium", PRECISE, "tp2"),
    nightly("medium", PRECISE, "cp2"),
    *(nightly("medium_tied", HALF, name) for name in ("zero3", "chimera", "chimera once zero1")),
    nightly("medium_tied", (*HALF, "training.seq_len=64"), "zero3 full"),
]


def medium(model="medium", overrides=HALF):
    return RunConfig.from_mapping({"model": model}, overrides)


def estimated(config, plan, pp_rank=None):
    return estimate_memory(Work.of(config, plan), pp_rank=pp_rank)


def rehearsed_ranks(config, plan):
    """Return the rehearsal of the first rank of every pipeline rank."""
    return rehearse(config, plan).ranks


@pytest.mark.parametrize(("model", "overrides", "name"), CASES, ids=str)
def test_the_estimate_of_every_pipeline_rank_is_within_three_percent_of_its_rehearsal(model, overrides, name):
    config, plan = medium(model, overrides), PLANS[name]
    counted = [rehearsal.profile.peak_bytes for rehearsal in rehearsed_ranks(config, plan)]
    assert [estimated(config, plan, pp_rank).peak_bytes for pp_rank in range(plan.pp)] == pytest.approx(
        counted, rel=0.03
    )


@pytest.mark.parametrize(
    "plan",
    [
        pipeline("1f1b", num_microbatches=2, zero_stage=2, dp_shard=2),
        nightly(pipeline("chimera", zero_stage=2, dp_shard=2)),
        nightly(pipeline("1f1b", pp=4, zero_stage=3, dp_shard=2)),
    ],
    ids=ParallelPlan.summary,
)
def test_both_phases_of_a_rank_with_a_large_tied_embedding_are_estimated_within_half_a_percent(plan):
    config = medium("wide_tied")
    for rank in rehearsed_ranks(config, plan):
        estimate = estimated(config, plan, rank.pp_rank)
        for phase in ("forward", "backward"):
            counted = sum(rank.profile.phases[phase].values())
            assert sum(estimate.phases[phase].values()) == pytest.approx(counted, rel=0.005)


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        (zero(3, dp_shard=2, ep=2, num_microbatches=1), None),  # experts of their own on every rank
        nightly(zero(3, ep=2, num_microbatches=1), None),
        (zero(3, ep=2, num_microbatches=1), 2),
        nightly(zero(3, ep=2, recompute="full"), None),
        nightly(zero(2, ep=2), 2),
        nightly(zero(1, ep=4), None),
        (zero(3, dp_shard=4, ep=4, ep_nodes=2, num_microbatches=1), 2),
        nightly(zero(2, dp_shard=4, ep=2, ep_nodes=2, tp=2, recompute="full"), None),
        nightly(zero(1, ep=2), None),
        nightly(zero(1, tp=2, expert_tp=1, ep=4), None),
        (zero(1, tp=2, expert_tp=1, ep=2, dp_shard=2), None),  # the same ranks as of the rest
        nightly(zero(2, tp=2, expert_tp=1, ep=2), None),
        nightly(zero(3, tp=2, expert_tp=1, ep=2), None),
        nightly(zero(3, tp=2, expert_tp=1, ep=8, recompute="full"), 2),
        nightly(zero(0, tp=2, expert_tp=1, ep=4, dp_shard=1, dp_replicate=2), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_experts_on_other_ranks_than_the_rest_are_estimated_within_half_a_percent(plan, layers, device, monkeypatch):
    moe = MoE(num_experts=8, expert_size=1024, moe_layers=layers)
    monkeypatch.setitem(models._REGISTRY, "sparse", replace(MEDIUM, name="sparse", vocab_size=512, moe=moe))
    config = medium("sparse", ("training.precision=bf16", f"launch.device={device}"))
    counted = rehearse(config, plan).profile.peak_bytes
    assert estimated(config, plan).peak_bytes == pytest.approx(counted, rel=0.005)


@pytest.mark.parametrize(
    ("plan", "precision", "documents"),
    [
        (zero(3, cp=2, dp_shard=1, num_microbatches=1), "bf16", False),
        (zero(3, cp=4, dp_shard=1, num_microbatches=1, recompute="full"), "bf16", False),
        nightly(zero(3, cp=4, dp_shard=1, num_microbatches=1), "fp32", False),
        (zero(3, cp=2, dp_shard=1, num_microbatches=1), "fp32", True),  # the kernel with an additive mask
    ],
    ids=str,
)
def test_keys_of_every_query_head_go_around_a_ring_as_estimated(plan, precision, documents, monkeypatch):
    """With as many heads as queries have, the ring's blocks and their gradients are the peak of the backward."""
    spec = replace(MEDIUM, name="all_heads", vocab_size=512, num_kv_heads=MEDIUM.num_heads, ffn_size=MEDIUM.hidden_size)
    monkeypatch.setitem(models._REGISTRY, spec.name, spec)
    config = medium(
        spec.name, (f"training.precision={precision}", "launch.device=cuda", f"data.document_mask={documents}")
    )
    result = rehearse(config, plan)
    assert "attention" in result.peak_at
    assert estimated(config, plan).peak_bytes == pytest.approx(result.profile.peak_bytes, rel=0.002)


@pytest.mark.parametrize("name", ["zero1", "zero3", "tp2", "1f1b copies"])
def test_estimate_and_rehearsal_of_many_ranks_agree_on_every_category_at_the_end_of_the_forward(name):
    config, plan = medium(), PLANS[name]
    last = plan.pp - 1
    counted = rehearse(config, plan, last * plan.world_size // plan.pp).profile.phases["forward"]
    estimate = estimated(config, plan, last).phases["forward"]
    for category in ("weights", "gradients", "moments", "activations", "loss", "communication"):
        assert estimate[category] == pytest.approx(counted.get(category, 0), rel=0.03, abs=2**20)


@pytest.mark.nightly
def test_a_large_model_under_tensor_and_pipeline_parallelism_is_estimated_within_one_percent():
    config = RunConfig.from_mapping({"model": "llama3_8b"}, (*HALF, "training.seq_len=2048"))
    plan = ParallelPlan(tp=2, pp=4, num_microbatches=4)
    assert estimated(config, plan, 0).peak_bytes == pytest.approx(
        rehearse(config, plan, 0).profile.peak_bytes, rel=0.01
    )


@pytest.mark.parametrize(
    ("model", "plan"),
    [("medium", pipeline("1f1b", pp=4)), ("wide_vocabulary", pipeline("1f1b", num_microbatches=1))],
    ids=["many under way", "a large head"],
)
def test_the_rank_that_is_rehearsed_by_default_is_the_fullest(model, plan):
    config = medium(model)
    peaks = [rehearsal.profile.peak_bytes for rehearsal in rehearsed_ranks(config, plan)]
    assert rehearse(config, plan).rank == peaks.index(max(peaks)) * plan.world_size // plan.pp


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, pp=2),
        nightly(pipeline("chimera", num_microbatches=2)),
        nightly(pipeline("zb_h1", num_microbatches=2)),
    ],
    ids=ParallelPlan.summary,
)
def test_all_ranks_together_compute_as_much_as_one_device(plan):
    config = medium(overrides=TWO_LAYERS)
    alone = rehearse(config, ParallelPlan(num_microbatches=plan.batch_size)).flops
    assert sum(rehearse(config, plan, rank).flops for rank in range(plan.world_size)) == alone


def test_a_ring_skips_the_scores_of_blocks_that_no_query_sees():
    config = medium(overrides=TWO_LAYERS)
    spec = config.spec
    tokens = config.seq_len
    alone, ring = (
        sum(rehearse(config, plan, rank).flops for rank in range(plan.world_size))
        for plan in (ParallelPlan(), ParallelPlan(cp=2))
    )
    scores = 14 * spec.num_layers * spec.q_size * tokens**2  # two products in the forward and five in the backward
    assert alone - ring == scores // 4  # of (2 * 2) blocks one is above the diagonal, and two halves are skipped


def test_the_last_rank_counts_its_queries_against_whole_documents_too():
    config = medium(overrides=KERNEL)
    alone, last = (rehearse(config, plan, plan.cp - 1).flops for plan in (ParallelPlan(), ParallelPlan(cp=2)))
    assert last == alone / 2


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        (ParallelPlan(tp=2, pp=2, dp_shard=2, zero_stage=3, num_microbatches=2), 0),
        nightly(ParallelPlan(dp_replicate=2, dp_shard=2, zero_stage=2, num_microbatches=2), 0),
        (ParallelPlan(cp=2, zero_stage=3), 0.02),  # first and last rank of a ring see halves of keys and of queries
        (ParallelPlan(dp_shard=3, zero_stage=3), 0.01),  # three do not divide 512 rows: the last shard is smaller
    ],
    ids=str,
)
def test_ranks_differ_only_by_their_place_in_the_pipeline(plan, tolerance):
    config, ranks_per_stage = medium(overrides=TWO_LAYERS), plan.world_size // plan.pp
    for stand_in in rehearse(config, plan).ranks:
        furthest = rehearse(config, plan, stand_in.rank + ranks_per_stage - 1).ranks[0]  # on every other axis
        assert furthest.profile.peak_bytes == pytest.approx(stand_in.profile.peak_bytes, rel=tolerance, abs=0)
        assert (furthest.pp_rank, furthest.flops) == (stand_in.pp_rank, stand_in.flops)


def test_the_result_lists_every_rank_and_names_the_fullest_and_the_least_full():
    result = rehearse(medium(), pipeline("1f1b", pp=4, num_microbatches=8))
    peaks = [rank.profile.peak_bytes for rank in result.ranks]
    assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
    assert (result.fullest.profile.peak_bytes, result.least_full.profile.peak_bytes) == (max(peaks), min(peaks))
    record = result.as_dict()
    assert [rank["peak_bytes"] for rank in record["ranks"]] == peaks
    assert (record["peak_bytes"], record["rank"]) == (max(peaks), result.rank)


def test_a_rank_that_shares_anothers_trace_gives_the_same_result_as_alone():
    config, plan = request("untied", "architecture.num_layers=4"), pipeline("1f1b", pp=4, num_microbatches=5)
    for rank in rehearse(config, plan).ranks:
        assert replace(rank, idle_share=None) == rehearse(config, plan, rank.rank).ranks[0]


@pytest.mark.parametrize(
    ("model", "plan", "overrides"),
    [
        ("medium", ParallelPlan(dp_shard=2, dp_replicate=2, zero_stage=3, num_microbatches=2), HALF),
        ("medium", ParallelPlan(cp=2, zero_stage=3, recompute="full"), HALF),
        ("medium", ParallelPlan(cp=2, tp=2, recompute="selective", num_microbatches=2), KERNEL),
        nightly("medium", ParallelPlan(cp=4, zero_stage=3, recompute="full"), KERNEL),
        nightly("medium", ParallelPlan(tp=2, pp=2, recompute="selective", num_microbatches=6), HALF),
        ("medium", pipeline("interleaved", num_chunks=2, dp_shard=2, zero_stage=3), HALF),
        nightly("medium", pipeline("chimera", num_microbatches=8), HALF),
        *((spec.name, ParallelPlan(tp=2, num_microbatches=2), HALF) for spec in RELATIVES),
        nightly(RELATIVE.name, ParallelPlan(tp=2, sequence_parallel=False), HALF),
        nightly("medium", ParallelPlan(tp=2, pp=2, num_microbatches=2), (*HALF, "architecture.mtp_layers=2")),
        nightly("medium", ParallelPlan(cp=2, zero_stage=3, recompute="full"), (*HALF, "architecture.mtp_layers=1")),
        nightly(RELATIVE.name, ParallelPlan(cp=2, tp=2, recompute="selective", num_microbatches=2), KERNEL),
    ],
    ids=lambda value: (
        value.summary() if isinstance(value, ParallelPlan) else value if isinstance(value, str) else value[-1]
    ),
)
def test_the_rehearsed_traffic_matches_the_arithmetic(model, plan, overrides):
    config = medium(model, overrides)
    work = Work.of(config, plan)
    for rank in rehearse(config, plan).ranks:
        expected = {
            (traffic.collective, traffic.axis): (traffic.count, traffic.num_bytes)
            for traffic in communication(work, pp_rank=rank.pp_rank)
        }
        counted = {
            (traffic.collective, "pp" if traffic.axis == "holders" else traffic.axis): (
                traffic.count,
                traffic.num_bytes,
            )
            for traffic in rank.traffic
            if traffic.axis not in {"world", "vocabulary"}
        }
        assert counted == expected


@pytest.mark.parametrize(("pp", "num_microbatches"), [nightly(2, 4), (4, 8)])
def test_equal_stages_wait_as_long_as_the_closed_form_of_1f1b_says(pp, num_microbatches):
    config = request("even")
    result = rehearse(config, pipeline("1f1b", pp=pp, num_microbatches=num_microbatches))
    expected = (pp - 1) / (num_microbatches + pp - 1)
    # only the head makes the stages unequal; it is a hundredth of the FLOPs
    assert [rank.idle_share for rank in result.ranks] == pytest.approx([expected] * pp, abs=0.02)


def test_one_rank_waits_for_nobody():
    assert rehearse(medium(), ParallelPlan()).ranks[0].idle_share == 0


def test_the_overhead_of_cuda_is_listed_apart_and_not_counted():
    plan = zero(3)
    on_cuda, on_cpu = (
        rehearse(medium(overrides=(*PRECISE, f"launch.device={name}")), plan) for name in ("cuda", "cpu")
    )
    assert on_cpu.device_overhead is None
    assert on_cuda.profile.phases["optimizer"] == on_cpu.profile.phases["optimizer"]
    parts = {part.name: part.num_bytes for part in on_cuda.device_overhead.parts}
    assert set(parts) >= {"context", "cublas", "nccl", "fragmentation", "repeated key/value heads"}
    assert parts["cublas"] == 2 * 32 * MIB  # of an H100
    # fp32 keys and values of 4 more heads of 64 elements, in all layers
    assert parts["repeated key/value heads"] == 2 * 4 * 4 * 64 * MEDIUM.default_seq_len * MEDIUM.num_layers


def test_a_rehearsal_leaves_no_process_group_and_no_hook_behind():
    before = sys.excepthook
    rehearse(medium(), ParallelPlan(tp=2))
    assert not dist.is_initialized()
    assert sys.excepthook is before


def test_plans_over_equal_meshes_can_be_rehearsed_one_after_another():
    config = medium(overrides=TWO_LAYERS)
    rehearse(config, zero(3, tp=2, dp_shard=2), rank=3)
    rehearse(config, ParallelPlan(tp=4), rank=2)
    held = rehearse(config, zero(2, tp=2, dp_shard=2), rank=0).profile.state_bytes
    assert held == pytest.approx(4 * config.spec.num_parameters, rel=0.01)


def test_a_rank_that_the_plan_does_not_have_is_refused():
    with pytest.raises(PlanError, match="rank 2 is not one of the plan's ranks 0 to 1"):
        rehearse(medium(), ParallelPlan(tp=2), rank=2)


def test_a_plan_that_deepspeed_shards_is_refused_in_one_line():
    with pytest.raises(PlanError, match=r"\A.*parallel\.zero_backend=native.*\Z"):
        rehearse(medium(), ParallelPlan(dp_shard=2, zero_stage=3, zero_backend="deepspeed"))


def refusal_among_others():
    with pytest.raises(PlanError) as error:
        rehearse(RunConfig(), ParallelPlan(tp=2))
    return str(error.value)


def test_a_rehearsal_among_connected_ranks_is_refused():
    assert [refusal.split(",")[0] for refusal in run_ranks(2, refusal_among_others)] == [
        "this process is already rank 0 of 2",
        "this process is already rank 1 of 2",
    ]


SMALL = (
    *("training.seq_len=256", "architecture.num_layers=2", "architecture.hidden_size=256", "architecture.num_heads=8"),
    *("architecture.num_kv_heads=4", "architecture.head_dim=32", "architecture.ffn_size=768"),
    "architecture.vocab_size=4096",
)


def bytes_of_a_real_step(precision, plan):
    config = RunConfig.from_mapping({}, (*SMALL, f"training.precision={precision}"))
    model = build_model(config, plan, torch.device("cpu"))
    peaks = trace_steps(model, config, in_full=True).counter.peaks
    return [peaks[phase].num_bytes for phase in PHASES]


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (ParallelPlan(tp=2, num_microbatches=2), "bf16"),
        nightly(ParallelPlan(cp=2, num_microbatches=2), "bf16"),
        nightly(ParallelPlan(cp=2, attention="ulysses", num_microbatches=2), "bf16"),
        nightly(ParallelPlan(dp_replicate=2, num_microbatches=2), "fp32"),
        (ParallelPlan(dp_shard=2, zero_stage=3, num_microbatches=2), "bf16"),
    ],
    ids=str,
)
def test_a_rehearsal_counts_the_bytes_of_a_step_on_real_ranks(plan, precision):
    config = RunConfig.from_mapping({}, (*SMALL, f"training.precision={precision}"))
    phases = rehearse(config, plan, rank=1).profile.phases
    rehearsed = [sum(phases[phase].values()) for phase in PHASES]
    # usually exact; a scalar or a message in flight may live a little longer
    assert run_ranks(2, bytes_of_a_real_step, precision, plan)[1] == pytest.approx(rehearsed, rel=2e-3)


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(tp=2)], ids=["whole", "divided"])
def test_both_gradients_of_a_tied_table_are_summed_in_place_unless_tensor_parallel_ranks_divide_it(plan, monkeypatch):
    tied = replace(WIDE_VOCABULARY, name="wide_tied", num_kv_heads=4, tied_embeddings=True)
    monkeypatch.setitem(models._REGISTRY, tied.name, tied)
    config = request(tied.name, *shape())
    assert estimated(config, plan).peak_bytes == pytest.approx(rehearse(config, plan).profile.peak_bytes, rel=1e-3)
