from dataclasses import replace

import pytest

from llama_core.config.models import model_spec
from llama_core.parallel.zero import POWERSGD_RANK as ENGINES_RANK
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.communication import POWERSGD_RANK, communication
from llama_core.planning.work import Work

SPEC = model_spec("llama3_8b")
SEQ_LEN = 8192


def sent(plan, spec=SPEC, precision="bf16", pp_rank=None):
    """Return the transfers of a rank as {(collective, axis): (count, bytes sent)}."""
    records = communication(Work(spec, plan, SEQ_LEN, precision), pp_rank=pp_rank)
    return {(record.collective, record.axis): (record.count, record.sent_bytes) for record in records}


@pytest.mark.parametrize("num_copies", [2, 8])
def test_copies_of_a_model_send_its_gradients_twice_for_any_number_of_microbatches(num_copies):
    _, num_bytes = sent(ParallelPlan(dp_replicate=num_copies, num_microbatches=3))["all_reduce", "replicate"]
    assert num_bytes == 2 * (num_copies - 1) / num_copies * SPEC.num_parameters * 4


def test_bf16_halves_the_gradient_bytes_and_powersgd_sends_under_a_hundredth():
    plan = ParallelPlan(dp_replicate=8)
    whole, halved, factored = (
        sent(replace(plan, gradient_compression=compression))["all_reduce", "replicate"][1]
        for compression in ("none", "bf16", "powersgd")
    )
    assert halved == whole / 2
    assert factored < whole / 100
    assert POWERSGD_RANK == ENGINES_RANK


@pytest.mark.parametrize(("zero_stage", "gathers", "reductions"), [(1, 1, 1), (2, 1, 5)])
def test_zero_gathers_weights_once_and_reduces_gradients_once_or_with_every_microbatch(zero_stage, gathers, reductions):
    traffic = sent(ParallelPlan(dp_shard=4, zero_stage=zero_stage, num_microbatches=5))
    assert traffic["all_gather", "shard"][1] == gathers * 3 / 4 * SPEC.num_parameters * 2
    assert traffic["reduce_scatter", "shard"][1] == reductions * 3 / 4 * SPEC.num_parameters * 4


def test_zero_3_moves_every_parameter_three_times_a_microbatch_but_gathers_the_embedding_and_the_head_once():
    traffic = sent(ParallelPlan(dp_shard=4, zero_stage=3, num_microbatches=5))
    tables = 2 * SPEC.embedding_parameters + SPEC.hidden_size
    assert traffic["all_gather", "shard"][1] == 5 * 3 / 4 * (2 * SPEC.num_parameters - tables) * 2
    assert traffic["reduce_scatter", "shard"][1] == 5 * 3 / 4 * SPEC.num_parameters * 4


def test_gradient_shards_are_summed_over_the_copies():
    traffic = sent(ParallelPlan(dp_shard=4, dp_replicate=2, zero_stage=3))
    assert traffic["all_reduce", "replicate"][1] == pytest.approx(SPEC.num_parameters / 4 * 4)


def test_context_parallel_ranks_shard_weights_with_the_data_parallel_ones():
    both = sent(ParallelPlan(dp_shard=2, cp=2, zero_stage=1))
    assert both["all_gather", "shard"] == sent(ParallelPlan(dp_shard=4, zero_stage=1))["all_gather", "shard"]


@pytest.mark.parametrize(("recompute", "gathers", "sums"), [("none", 4, 4), ("selective", 6, 5), ("full", 6, 5)])
def test_tensor_parallelism_gathers_and_scatters_the_stream_four_times_a_layer(recompute, gathers, sums):
    traffic = sent(ParallelPlan(tp=8, num_microbatches=3, microbatch_size=2, recompute=recompute))
    stream = 2 * SEQ_LEN * SPEC.hidden_size * 2
    for collective, per_layer in (("all_gather", gathers), ("reduce_scatter", sums)):
        count = 3 * (32 * per_layer + 2)  # and at the embedding and the head
        assert traffic[collective, "tp"] == (count, count * stream * 7 / 8)


def test_without_sequence_parallelism_an_all_reduce_replaces_each_pair():
    divided, whole = (sent(ParallelPlan(tp=8, sequence_parallel=flag)) for flag in (True, False))
    pairs = divided["all_gather", "tp"][1] + divided["reduce_scatter", "tp"][1]
    assert whole["all_reduce", "tp"][1] == pairs
    assert ("all_gather", "tp") not in whole


@pytest.mark.parametrize("cp", [2, 4])
def test_the_ring_passes_keys_and_values_once_forward_and_twice_backward(cp):
    count, num_bytes = sent(ParallelPlan(cp=cp, zero_stage=1, num_microbatches=3))["send", "cp"]
    elements = 32 * (cp - 1) / cp * 2 * SEQ_LEN * SPEC.kv_size
    assert count == 3 * 32 * 3 * (cp - 1)
    assert num_bytes == 3 * elements * (2 + 2 + 4)  # the gradients that follow in the backward are fp32


@pytest.mark.parametrize("cp", [2, 4])
def test_exchanged_heads_send_what_attention_takes_and_returns_once_each_way(cp):
    plan = ParallelPlan(cp=cp, attention="ulysses", zero_stage=1, num_microbatches=3)
    count, num_bytes = sent(plan)["all_to_all", "cp"]
    assert count == 3 * 32 * 4 * 2
    elements = 32 * (cp - 1) / cp * (SEQ_LEN // cp) * 2 * (SPEC.q_size + SPEC.kv_size)
    assert num_bytes == 3 * elements * (2 + 2)


@pytest.mark.parametrize(
    ("schedule", "chunks", "boundaries"), [("gpipe", 1, 3), ("1f1b", 1, 3), ("interleaved", 2, 7), ("chimera", 1, 3)]
)
def test_every_microbatch_crosses_every_boundary_between_ranks_twice(schedule, chunks, boundaries):
    plan = ParallelPlan(pp=4, schedule=schedule, num_chunks=chunks, num_microbatches=8)
    sends = [sent(plan, pp_rank=rank)["send", "pp"] for rank in range(4)]
    assert [sum(column) for column in zip(*sends, strict=True)] == [
        2 * boundaries * 8,
        2 * boundaries * 8 * SEQ_LEN * SPEC.hidden_size * 2,
    ]


def test_halves_of_a_microbatch_are_half_as_large_and_twice_as_many():
    whole, halves = (
        sent(ParallelPlan(pp=2, schedule=name, num_microbatches=4, microbatch_size=2))["send", "pp"]
        for name in ("chimera", "chimera_halving")
    )
    assert halves == (2 * whole[0], whole[1])


def test_the_turning_point_of_zbv_needs_no_transfer():
    plan = ParallelPlan(pp=4, schedule="zbv", num_microbatches=8)
    assert sum(sent(plan, pp_rank=rank)["send", "pp"][0] for rank in range(4)) == 2 * 8 * 6  # of 7 boundaries


def test_chimeras_replicas_sum_all_their_gradients():
    plan = ParallelPlan(pp=2, schedule="chimera", num_microbatches=2)
    count, num_bytes = sent(plan)["all_reduce", "pp"]
    assert num_bytes == SPEC.num_parameters * 4  # twice (2 - 1)/2: each rank has every stage
    assert count == 1


def test_a_tied_embedding_is_summed_only_over_the_ends_of_the_pipeline():
    tied = model_spec("tiny_llama3_50m")
    traffic = {rank: sent(ParallelPlan(pp=4, num_microbatches=4), tied, pp_rank=rank) for rank in range(4)}
    with_sum = [rank for rank, records in traffic.items() if ("all_reduce", "pp") in records]
    assert with_sum == [0, 3]
    assert traffic[0]["all_reduce", "pp"] == (1, tied.embedding_parameters * 4)
    assert not sent(ParallelPlan(num_microbatches=4), tied)


@pytest.mark.parametrize(
    "plan", [ParallelPlan(tp=2, pp=2, dp_shard=2, zero_stage=3), ParallelPlan(tp=4, pp=4, num_microbatches=8)], ids=str
)
def test_fp32_activations_double_their_traffic(plan):
    narrow, wide = (sent(plan, precision=precision) for precision in ("bf16", "fp32"))
    doubled = {key for key in narrow if key[1] in {"tp", "pp"} and key[0] != "all_reduce"}
    assert {key: wide[key][1] for key in doubled} == {key: 2 * narrow[key][1] for key in doubled}
