from dataclasses import replace

import pytest

from llama_core.config.hardware import HALF_RATE_DIM, gpu_spec
from llama_core.config.models import model_spec
from llama_core.optimizers.traits import Trained
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.compute import MEMORY_SHARE, MODEL_SHAPES, StageCompute
from llama_core.planning.time.kernels import FP8_ROUNDING_BYTES
from llama_core.planning.time.matmul_flops import layer_matmul_parameters
from llama_core.planning.work import Work

SPEC = model_spec("llama2_7b")  # all sides of its matrices are at least 4096, and so are its tokens here
SEQ_LEN = 4096
H100 = gpu_spec("h100")
ENDLESS_MEMORY = replace(H100, memory_bandwidth=1e30)
NONE = Trained(0, 0)
ENDLESS_FLOPS = replace(H100, bf16_flops=1e30)
SLOW_MEMORY = replace(ENDLESS_FLOPS, memory_bandwidth=1e10)  # so slow that starting kernels takes no time
PRODUCT_RATE = H100.bf16_flops * H100.matmul_share * MODEL_SHAPES * 4096 / (4096 + HALF_RATE_DIM)


def compute(device, plan=ParallelPlan(), spec=SPEC, documents="none", precision="bf16"):  # noqa: B008 - frozen
    return StageCompute(Work(spec, plan, SEQ_LEN, precision, documents), device)


def products(*names):
    hidden, ffn = SPEC.hidden_size, SPEC.ffn_size
    sizes = dict.fromkeys(("wq", "wk", "wv", "wo"), hidden * hidden) | dict.fromkeys(("w1", "w2", "w3"), hidden * ffn)
    return sum(2 * SEQ_LEN * sizes[name] / PRODUCT_RATE for name in names or sizes)


def test_with_endless_bandwidth_a_layer_takes_its_products_and_half_of_its_scores():
    scores = 4 * SEQ_LEN * SEQ_LEN * SPEC.q_size / 2 / (H100.bf16_flops * H100.attention_share)
    forward, backward = compute(ENDLESS_MEMORY, documents="varlen").layer("none")
    assert forward == pytest.approx(products() + scores)
    assert backward == pytest.approx(2 * products() + 2.5 * scores)


def test_full_recomputation_runs_the_forward_again_except_its_last_product():
    layer = compute(ENDLESS_MEMORY).layer
    again = layer("full").backward - layer("none").backward
    assert again == pytest.approx(layer("none").forward - products("w2"))


def test_selective_recomputation_repeats_two_products():
    layer = compute(ENDLESS_MEMORY).layer
    assert layer("selective").backward - layer("none").backward == pytest.approx(products("wk", "w3"))


@pytest.mark.parametrize(("window", "share"), [(1024, 0.4375), (2048, 0.75), (4096, 1), (9000, 1)])
def test_a_window_skips_the_scores_before_it_unless_it_is_a_mask(window, share):
    windowed = replace(SPEC, sliding_window=window)
    plain, skipped = (compute(H100, spec=spec, documents="varlen").attention() for spec in (SPEC, windowed))
    assert tuple(skipped) == pytest.approx([share * seconds for seconds in plain], rel=1e-3)
    assert compute(H100, spec=windowed, documents="mask").attention() == compute(H100, documents="mask").attention()


def test_a_document_mask_computes_every_score():
    skipped, masked = (compute(H100, documents=kind).attention() for kind in ("varlen", "mask"))
    assert masked == pytest.approx(skipped.plus(skipped))


def test_rows_without_documents_are_faster_where_torch_prefers_cudnn():
    """Not in fp32, nor around a ring, whose blocks need the sums of the flash kernel."""

    def ratio(device, precision="bf16", **degrees):
        plan = ParallelPlan(**degrees)
        kinds = (compute(device, plan, documents=kind, precision=precision) for kind in ("varlen", "none"))
        documents, whole = (kind.attention().forward for kind in kinds)
        return documents / whole

    assert ratio(H100) == pytest.approx(H100.causal_share / H100.attention_share) == pytest.approx(0.5 / 0.31)
    for one in (ratio(gpu_spec("a100")), ratio(H100, "fp32"), ratio(H100, cp=2, zero_stage=1)):
        assert one == 1


def test_weights_that_are_cast_once_an_update_are_not_cast_in_the_layers():
    each, once = (compute(ENDLESS_FLOPS, ParallelPlan(num_microbatches=count)) for count in (1, 2))
    weights = layer_matmul_parameters(SPEC)
    in_layers = (
        each.layer("none").forward - once.layer("none").forward,
        each.optimizer(Trained(0, 0)),
        once.optimizer(Trained(0, 0)),
    )
    assert in_layers == pytest.approx((once.copying(6 * weights), 0, 0))
    all_of_them = Trained(weights, 0)
    assert once.optimizer(all_of_them) - each.optimizer(all_of_them) == pytest.approx(once.copying(6 * weights))


def test_tensor_parallel_ranks_divide_products_and_scores():
    alone, divided = (compute(ENDLESS_MEMORY, ParallelPlan(tp=tp)).attention() for tp in (1, 4))
    assert divided.forward == pytest.approx(alone.forward / 4)
    narrow = compute(ENDLESS_MEMORY, ParallelPlan(tp=32)).layer("none").forward  # sides of 128 run at half rate
    assert narrow > compute(ENDLESS_MEMORY).layer("none").forward / 32 * 1.3


def test_a_single_rank_casts_weights_in_the_forward_and_makes_their_gradients_in_fp32():
    alone, gathered = (
        compute(ENDLESS_FLOPS, plan).layer("none") for plan in (ParallelPlan(), ParallelPlan(dp_shard=2, zero_stage=3))
    )
    speed = H100.memory_bandwidth * MEMORY_SHARE
    assert alone.forward - gathered.forward == pytest.approx((4 + 2) * SPEC.layer_parameters / speed)
    of_norms = (4 + 2) * SPEC.layer_parameters / speed / 1000
    assert alone.backward - gathered.backward == pytest.approx(0, abs=of_norms)


def test_gradients_are_added_to_those_of_earlier_microbatches():
    once, thrice = (
        compute(ENDLESS_FLOPS, ParallelPlan(num_microbatches=count, recompute="full")).layer("full").backward
        for count in (1, 3)
    )
    assert thrice - once == pytest.approx(2 / 3 * once_added(), rel=1e-3)


def once_added():
    return 3 * 4 * SPEC.layer_parameters / (H100.memory_bandwidth * MEMORY_SHARE)


def seconds_of_accesses(forward, backward, size, **sizes):
    """Return what a layer takes for some accesses of each of ``size`` 16-bit numbers per token."""
    moved = SEQ_LEN * size * 2 / SLOW_MEMORY.memory_bandwidth / MEMORY_SHARE
    return pytest.approx((forward * moved, backward * moved), **sizes)


def test_eager_norms_and_additions_touch_each_tensor_once_per_kernel():
    spec = replace(SPEC, num_heads=1, num_kv_heads=1, head_dim=1, ffn_size=1)  # little but the residual stream
    norms, additions, shared_inputs = (2 * 2, 2 * (3 + 2)), (2 * 3, 2 * 3), (0, 3 * (2 + 1))
    layer = compute(SLOW_MEMORY, *shards(False), spec=spec).layer("none")
    assert layer == seconds_of_accesses(*map(sum, zip(norms, additions, shared_inputs, strict=True)), 4096, rel=1e-2)


@pytest.mark.parametrize(("compiled", "forward", "backward"), [(False, 2 + 3, 3 * 3), (True, 3, 5)])
def test_the_activation_touches_each_tensor_once_per_kernel(compiled, forward, backward):
    narrow, wide = (
        compute(SLOW_MEMORY, *shards(compiled), spec=replace(SPEC, ffn_size=size)).layer("none") for size in (4, 4004)
    )
    added = [more - less for more, less in zip(wide, narrow, strict=True)]
    assert added == seconds_of_accesses(forward, backward, 4000)


def test_compiled_kernels_touch_about_a_third_of_the_bytes():
    eager, compiled = (compute(ENDLESS_FLOPS, sharded).layer("none") for sharded in shards(False, True))
    assert sum(compiled) < sum(eager) * 0.35


def shards(*compiled):
    return [ParallelPlan(dp_shard=2, zero_stage=3, compile=flag) for flag in compiled]


def test_the_loss_reads_every_logit_twice_and_writes_it_once():
    spec = model_spec("llama3_8b")
    head = compute(ENDLESS_FLOPS, spec=spec).head()
    speed = H100.memory_bandwidth * MEMORY_SHARE
    table = spec.embedding_parameters * 2 * 4  # the head's gradient, added to in fp32
    norm = 2 * SEQ_LEN * spec.hidden_size * 2
    assert head.forward == pytest.approx((SEQ_LEN * 128_256 * 3 * 2 + table + norm) / speed, rel=1e-3)
    # the forward has computed the gradients: the backward scales them
    assert head.backward == pytest.approx((table + 2 * norm) / speed, rel=0.05)


def test_fp8_halves_the_time_of_a_layers_products_and_of_nothing_else():
    usual, fast = (compute(ENDLESS_MEMORY, precision=precision) for precision in ("bf16", "fp8"))
    saved = [ours - theirs for ours, theirs in zip(usual.layer("none"), fast.layer("none"), strict=True)]
    assert saved == pytest.approx([products() / 2, products()], rel=1e-2)
    assert fast.head() == usual.head()


def test_rounding_to_fp8_reads_every_operand_of_every_product():
    usual, fast = (compute(replace(H100, bf16_flops=1e30, fp8_flops=1e30), precision=p) for p in ("bf16", "fp8"))
    added = [ours - theirs for ours, theirs in zip(fast.layer("none"), usual.layer("none"), strict=True)]
    hidden, ffn, weights = SPEC.hidden_size, SPEC.ffn_size, layer_matmul_parameters(SPEC)
    given, returned = SEQ_LEN * (6 * hidden + ffn), SEQ_LEN * (5 * hidden + 2 * ffn)
    speed = H100.memory_bandwidth * MEMORY_SHARE
    assert added[0] == pytest.approx(FP8_ROUNDING_BYTES[False] * (given + weights) / speed)
    assert added[1] == pytest.approx(FP8_ROUNDING_BYTES[False] * (given + 2 * returned + weights) / speed)


def test_the_ends_of_a_pipeline_have_the_embedding_and_the_head_besides_their_layers():
    stages = compute(H100)
    ends = replace(stages.work.stages[0], layers=stages.work.layers[:2], modes=("none", "full"))
    inner = replace(ends, embedding=None, final_norm=None, head=None)
    assert stages.stage(inner) == pytest.approx(stages.layer("none").plus(stages.layer("full")))
    assert stages.stage(ends) == pytest.approx(stages.stage(inner).plus(stages.embedding()).plus(stages.head()))


def test_an_update_reads_and_writes_forty_bytes_per_parameter():
    assert compute(H100).optimizer(Trained(1e9, 0)) == pytest.approx(40e9 / (H100.memory_bandwidth * MEMORY_SHARE))
