"""The estimate of adapters and experts, against the bytes that autograd saves and that a step counts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from tiers import cases, nightly
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_spec
from llama_core.config.parameter_counts import counts_in_words, num_frozen_parameters, num_trained_in_full
from llama_core.config.run import RunConfig
from llama_core.config.strategy import ATTENTION_MATRICES, MATRICES, TARGETS, LoRA, MoE
from llama_core.models.batch import Batch
from llama_core.models.block import Block
from llama_core.models.llama import Llama, with_adapters
from llama_core.models.moe import feed_forward, prepare_routers
from llama_core.models.rotation import rotation
from llama_core.planning.memory.estimate import estimate_memory, estimate_ranks
from llama_core.planning.memory.snapshots import StageSnapshots
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.work import Work
from llama_core.rehearsal.byte_counter import ByteCounter

TINY = replace(
    model_spec("tiny_llama3_50m"),
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=160,
    vocab_size=256,
)
MEDIUM = replace(
    model_spec("llama3_8b"),
    hidden_size=1024,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    ffn_size=3584,
    vocab_size=32_000,
)
SEQ_LEN = 32

targets = st.lists(st.sampled_from(MATRICES), min_size=1, unique=True).map(tuple)
adapters = st.builds(LoRA, lora_rank=st.sampled_from([1, 8, 64]), target_modules=targets)
plans = st.sampled_from(
    [
        ParallelPlan(),
        ParallelPlan(num_microbatches=2, recompute="full"),
        ParallelPlan(dp_shard=8, zero_stage=1, num_microbatches=2),
        ParallelPlan(dp_shard=8, zero_stage=2),
        ParallelPlan(dp_shard=8, zero_stage=3, recompute="selective"),
        ParallelPlan(tp=4, dp_shard=2, zero_stage=3),
        ParallelPlan(tp=2, pp=2, num_microbatches=4),
        ParallelPlan(pp=4, schedule="zb_h1", num_microbatches=8),
        ParallelPlan(pp=2, schedule="chimera", num_microbatches=2),
    ]
)


def estimate(spec, plan=None, *, seq_len=2048, precision="bf16"):
    plan = ParallelPlan() if plan is None else plan
    return estimate_memory(Work(spec, plan, seq_len, precision))


def ranks_of(spec, plan):
    return estimate_ranks(Work(spec, plan, 2048, "bf16"))


def sparse_block(spec):
    """Return a layer with experts, in the middle of a step."""
    block = Block(spec, feed_forward(spec, 0))
    prepare_routers(block, torch.ones(()))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    return block


def adapted_block(spec):
    return with_adapters(Llama(spec, compute_dtype=torch.bfloat16)).layers["0"]


def peaks_counted(spec, seq_len):
    """Return the peak bytes of a whole model's forward and backward on one row of fake tensors."""
    with torch.device("meta"):
        model = with_adapters(Llama(spec, compute_dtype=torch.bfloat16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        prepare_routers(model, torch.ones(()))
        with ByteCounter(block_bytes=1) as counter:
            counter.relabel(model.parameters(), "weights")
            tokens = torch.zeros(1, seq_len, dtype=torch.long)
            loss = model(tokens, Batch(tokens, torch.zeros_like(tokens), None))
            counter.phase = "backward"
            loss.backward()
    return {phase: peak.num_bytes for phase, peak in counter.peaks.items()}


def peaks_estimated(spec, seq_len):
    phases = estimate(spec, seq_len=seq_len).phases  # of a later step, when there are moments
    return {phase: sum(phases[phase].values()) - phases[phase]["moments"] for phase in ("forward", "backward")}


def bytes_kept(block, spec, *, follows_trained=True):
    """Return the bytes that the forward of a layer leaves for its backward, besides weights and rotation."""
    rotary = rotation(spec.rope(0), torch.arange(SEQ_LEN)[None])
    elsewhere = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *rotary)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    x_BSD = torch.randn(1, SEQ_LEN, spec.hidden_size, dtype=torch.bfloat16, requires_grad=follows_trained)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x_BSD, rotary, None).sum().backward()
    return sum(storage.nbytes() for place, storage in kept.items() if place not in elsewhere)


def bytes_estimated(spec, plan=None):
    """Return the bytes that a first and a later layer keep."""
    plan = ParallelPlan() if plan is None else plan
    return [layer.kept() for layer in Work(replace(spec, num_layers=2), plan, SEQ_LEN, "bf16").layers]


@pytest.fixture
def compiled():
    """Compile a layer as inductor does, which chooses what to keep, but generate no code."""
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    torch._dynamo.reset()
    yield partial(torch.compile, backend=backend)
    torch._dynamo.reset()


def adapted_spec(name, rank=64, names=ATTENTION_MATRICES):
    return replace(model_spec(name), lora=LoRA(lora_rank=rank, target_modules=names))


def with_experts(name, num_experts=8, experts_per_token=2, layers=None):
    moe = MoE(num_experts=num_experts, experts_per_token=experts_per_token, moe_layers=layers)
    return replace(model_spec(name), moe=moe)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "names", [("q_proj", "v_proj"), ("o_proj",), ATTENTION_MATRICES, ("down_proj",), ("up_proj",), MATRICES]
)
def test_the_estimate_of_a_frozen_layer_matches_the_bytes_autograd_saves(names, dropout):
    spec = replace(TINY, lora=LoRA(lora_rank=8, lora_dropout=dropout, target_modules=names))
    block = adapted_block(spec)
    assert [bytes_kept(block, spec, follows_trained=later) for later in (False, True)] == bytes_estimated(spec)


@pytest.mark.parametrize(("num_experts", "experts_per_token"), [(1, 1), (4, 1), (4, 2)])
def test_the_estimate_of_a_sparse_layer_matches_the_bytes_autograd_saves(num_experts, experts_per_token):
    spec = replace(TINY, moe=MoE(num_experts=num_experts, experts_per_token=experts_per_token))
    # of each expert and row a few numbers more
    assert [bytes_kept(sparse_block(spec), spec)] * 2 == pytest.approx(bytes_estimated(spec), abs=64)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("trainable", [(), ("*norm*",), ("*.wv.*",), ("*ffn_norm*", "*.wo.*", "*.w2.*"), ("*.w1.*",)])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_estimate_of_a_layer_trained_in_part_matches_the_bytes_autograd_saves(sparse, trainable, dropout):
    lora = LoRA(lora_rank=8, lora_dropout=dropout, target_modules=MATRICES)
    spec = replace(TINY, lora=lora, trainable=trainable, moe=MoE(num_experts=4) if sparse else None)
    block = adapted_block(spec)
    prepare_routers(block, torch.ones(()))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    kept = [bytes_kept(block, spec, follows_trained=later) for later in (False, True)]
    assert kept == pytest.approx(bytes_estimated(spec), abs=64)


COMPILED = {
    "dense": {},
    "GeGLU": {"activation": "gelu_tanh"},
    "clamped SwiGLU": {"activation": "clamped_swiglu"},
    "adapters": {"lora": LoRA(lora_rank=8, lora_dropout=0.1, target_modules=("q_proj", "up_proj", "down_proj"))},
    "experts": {"moe": MoE(num_experts=4)},
}


@pytest.mark.parametrize("kind", cases(COMPILED, narrow={"dense"}))
def test_the_estimate_of_a_compiled_layer_matches_the_bytes_its_partition_saves(kind, compiled):
    spec = replace(TINY, **kind)
    block = adapted_block(spec)
    prepare_routers(block, torch.ones(()))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    # the backward casts trained norms' weights again, and makes a token's probabilities, their sum and the gates again
    again = (0 if spec.lora else 2 * 2 * spec.hidden_size) + (SEQ_LEN * (4 * 4 + 4 + 2 * 2) if spec.moe else 0)
    kept = bytes_kept(compiled(block), spec)
    assert kept == pytest.approx(bytes_estimated(spec, ParallelPlan(compile=True))[1] - again, abs=64)


@pytest.mark.parametrize("seq_len", [256, nightly(4096)])
@pytest.mark.parametrize(
    "moe",
    [
        MoE(num_experts=4, experts_per_token=1),
        MoE(num_experts=8, experts_per_token=3),
        MoE(num_experts=4, expert_size=256, biases=True),
        MoE(num_experts=4, shared_size=512, gates="sigmoid", gate_inputs=True),
        MoE(num_experts=8, gates="sigmoid_chosen", gate_scale=2.5, expert_groups=4, groups_per_token=2),
    ],
    ids=lambda moe: str(moe.model_dump(exclude_defaults=True)),
)
def test_the_estimate_of_a_sparse_model_matches_a_counted_step(moe, seq_len):
    spec = replace(MEDIUM, moe=moe)
    # the estimate assumes that the gradients of all three expert tensors come at once
    assert peaks_estimated(spec, seq_len) == pytest.approx(peaks_counted(spec, seq_len), rel=5e-3)


@pytest.mark.parametrize(
    ("names", "seq_len", "dropout"),
    [
        (("q_proj", "v_proj"), 4096, 0.0),
        nightly(("k_proj", "up_proj"), 4096, 0.1),
        nightly(MATRICES, 4096, 0.0),
        (MATRICES, 4096, 0.1),
        nightly(MATRICES, 256, 0.0),
        nightly(("o_proj", "embed_tokens"), 4096, 0.1),
        (("gate_proj", "lm_head"), 4096, 0.1),
        (TARGETS, 256, 0.0),
    ],
)
def test_the_estimate_of_an_adapted_model_matches_a_counted_step(names, seq_len, dropout):
    spec = replace(MEDIUM, lora=LoRA(target_modules=names, lora_dropout=dropout))
    assert peaks_estimated(spec, seq_len) == pytest.approx(peaks_counted(spec, seq_len), rel=0.01)


@pytest.mark.parametrize("num_shards", [1, 8])
def test_frozen_weights_are_held_in_the_activations_dtype_and_adapters_with_gradients_and_moments(num_shards):
    spec = adapted_spec("llama3_8b")
    frozen = spec.num_parameters - spec.num_trainable_parameters
    plan = ParallelPlan(dp_shard=num_shards, zero_stage=3)
    states = (2 * frozen + 16 * spec.num_trainable_parameters) / num_shards
    assert estimate(spec, plan).state_bytes == pytest.approx(states, rel=1e-7)


@given(plans, adapters)
def test_adapters_hold_less_than_full_training_in_every_phase(plan, lora):
    dense = model_spec("llama3_8b")
    whole, adapted = (estimate(spec, plan).phases for spec in (dense, replace(dense, lora=lora)))
    assert all(sum(adapted[phase].values()) < sum(whole[phase].values()) for phase in whole)


@given(plans, adapters)
def test_a_higher_rank_holds_more(plan, lora):
    specs = [
        replace(model_spec("llama3_8b"), lora=lora.model_copy(update={"lora_rank": rank}))
        for rank in (lora.lora_rank, 2 * lora.lora_rank)
    ]
    lower, higher = (estimate(spec, plan).peak_bytes for spec in specs)
    assert lower < higher


def test_nothing_outside_the_layers_has_gradients_under_adapters():
    plan = ParallelPlan(pp=2, num_microbatches=2)
    spec = adapted_spec("llama3_8b")
    gradients = [rank.phases["optimizer"]["gradients"] for rank in ranks_of(spec, plan)]
    layers = [len(layers) for layers in plan.stage_layers(spec)]
    assert gradients == [4 * count * spec.num_adapter_parameters // spec.num_layers for count in layers]


def test_adapters_of_70b_fit_eight_devices_of_80_gb_where_full_training_does_not():
    plan, usable = ParallelPlan(dp_shard=8, zero_stage=3, recompute="full"), gpu_spec("h100").usable_bytes
    adapted = estimate(adapted_spec("llama3_70b"), plan, seq_len=8192)
    assert adapted.state_bytes / 1e9 == pytest.approx(18.2, abs=0.05)  # 17.6 of them frozen weights
    assert adapted.peak_bytes < usable / 2 < usable < estimate(model_spec("llama3_70b"), plan).state_bytes


@given(plans)
def test_one_expert_is_a_dense_layer_with_a_router(plan):
    dense = model_spec("llama3_8b")
    router = 16 * dense.num_layers * dense.hidden_size
    for whole, more in zip(ranks_of(dense, plan), ranks_of(with_experts("llama3_8b", 1, 1), plan), strict=True):
        assert whole.state_bytes < more.state_bytes <= whole.state_bytes + router
        assert whole.peak_bytes < more.peak_bytes


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_expert_parallel_copies_divide_the_experts_and_nothing_else(ep):
    spec = with_experts("llama3_8b")
    experts = spec.num_layers * 8 * spec.expert_parameters
    states = estimate(spec, ParallelPlan(dp_replicate=8, ep=ep)).state_bytes
    assert states == 16 * (spec.num_parameters - experts + experts // ep)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_expert_parallel_ranks_that_shard_hold_as_much_between_steps_and_gather_less(zero_stage):
    spec = with_experts("llama3_8b")
    alone, divided = (
        estimate(spec, ParallelPlan(dp_shard=8, zero_stage=zero_stage, ep=ep, num_microbatches=2)) for ep in (1, 4)
    )
    assert divided.state_bytes == pytest.approx(alone.state_bytes, rel=1e-7)
    assert divided.state_bytes == pytest.approx(16 * spec.num_parameters / 8, rel=1e-7)
    assert divided.phases["forward"]["communication"] < alone.phases["forward"]["communication"] / 2


@given(
    plans,
    st.sets(st.integers(0, 7), min_size=1),
    st.lists(st.integers(0, 8), min_size=4, max_size=4),
    st.sampled_from([SEQ_LEN, 2048]),
    st.sampled_from(["bf16", "fp32"]),
)
def test_the_layers_looked_at_have_the_peak_however_kinds_of_layers_alternate(
    plan, layers, recomputed, seq_len, precision
):
    spec = replace(MEDIUM, moe=MoE(num_experts=4, moe_layers=tuple(layers)))
    plan = replace(plan, recomputed_layers=tuple(recomputed[: plan.num_stages]))
    ranks = estimate_ranks(Work(spec, plan, seq_len, precision))
    with pytest.MonkeyPatch.context() as patch:
        every = property(lambda stage: range(stage.weights.num_layers)[::-1])
        patch.setattr(StageSnapshots, "_candidates", every)
        all_layers = estimate_ranks(Work(spec, plan, seq_len, precision))
    assert ranks == all_layers


@given(st.sets(st.integers(0, 31), min_size=1).map(sorted), plans)
def test_only_the_chosen_layers_hold_experts(layers, plan):
    spec = with_experts("llama3_8b", layers=tuple(layers))
    dense, some, all_sparse = (estimate(s, plan) for s in (model_spec("llama3_8b"), spec, with_experts("llama3_8b")))
    assert dense.peak_bytes < some.peak_bytes <= all_sparse.peak_bytes
    assert estimate(spec).state_bytes == 16 * spec.num_parameters


@given(st.integers(1, 7))
def test_a_token_is_kept_once_for_every_expert_it_goes_through(experts_per_token):
    dense, plan = model_spec("llama3_8b"), ParallelPlan()
    fewer, more = (
        estimate(with_experts("llama3_8b", 8, count), plan).phases["forward"]["activations"]
        for count in (experts_per_token, experts_per_token + 1)
    )
    # an expert's input and output; gate, silu(gate), up and their product; gate weights and indices
    assert more - fewer == 2048 * dense.num_layers * (2 * 2 * dense.hidden_size + 2 * 4 * dense.ffn_size + 30)


@pytest.mark.parametrize(
    ("strategy", "phrase"),
    [
        ({"strategy": "lora"}, "458.75K in adapters, 50.14M frozen"),
        ({"strategy": "lora", "trainable": ["*norm*"]}, "458.75K in adapters, 8.45K trained in full, 50.14M frozen"),
        (
            {"strategy": "hybrid", "moe": {"num_experts": 4}},
            "458.75K in adapters, 56.64M trained in full, 35.99M frozen",
        ),
    ],
)
def test_a_run_says_which_parameters_train(strategy, phrase):
    spec = RunConfig.from_mapping({"model": "tiny_llama3_50m"} | strategy).spec
    assert counts_in_words(spec) == phrase
    assert num_frozen_parameters(spec) + num_trained_in_full(spec) + spec.num_adapter_parameters == spec.num_parameters
