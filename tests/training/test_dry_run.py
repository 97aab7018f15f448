import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from llama_core.config import models
from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.loss import default_chunk_tokens
from llama_core.planning.auto import choose_plan
from llama_core.planning.cost import flops_per_token, hardware_flops_per_token
from llama_core.planning.memory import estimate_memory, loss_chunk_tokens
from llama_core.planning.plan import ParallelPlan
from llama_core.training.byte_counter import ByteCounter
from llama_core.training.dry_run import rehearse

TIED = ModelSpec("tied", "llama3", 64, 4, 4, 2, 16, 192, 512, 1e4, 1e-5, 4096, 256, tied_embeddings=True)
UNTIED = ModelSpec("untied", "llama3", 128, 6, 8, 8, 16, 344, 2048, 1e4, 1e-5, 4096, 512)
WIDE_VOCABULARY = ModelSpec("wide_vocabulary", "llama3", 256, 3, 4, 1, 64, 512, 32000, 1e4, 1e-5, 4096, 128)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    for spec in (TIED, UNTIED, WIDE_VOCABULARY):
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
    estimate = estimate_memory(
        config.spec,
        plan,
        seq_len=config.seq_len,
        precision=config.training.precision,
        document_mask=config.data.document_mask,
    )
    return rehearse(config, plan).profile, estimate


@pytest.mark.parametrize("shape", [shape(), shape(4), shape(2, 2), shape(2, 1, "full"), shape(2, 2, "full")], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", ["tied", "untied", "wide_vocabulary"])
def test_the_estimate_is_within_one_percent_of_the_bytes_counted_on_the_real_step(model, precision, shape):
    rehearsed, estimated = rehearsed_and_estimated(request(model, f"training.precision={precision}", *shape))
    assert estimated.peak_bytes == pytest.approx(rehearsed.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("tiny_llama3_50m", shape(4)),
        ("tiny_llama3_50m", shape(2, 2, "full")),
        ("tiny_llama3_150m", ("training.precision=fp32", "training.seq_len=1024", *shape(2))),
        ("llama3_8b", ("data.document_mask=false", *shape())),
        ("llama3_8b", ("data.document_mask=false", *shape(recompute="full"))),
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


def test_the_flops_are_those_of_the_closed_form_and_of_flash_attentions_second_look_at_the_scores():
    config = request("tiny_llama3_50m", *shape(2))
    tokens, spec = 2 * 2048, config.spec
    scores_again = 2 * spec.num_layers * spec.q_size * 2048
    expected = tokens * (flops_per_token(spec, 2048) + scores_again)
    assert rehearse(config, choose_plan(config, None)).flops == pytest.approx(expected, rel=1e-6)


def test_recomputation_adds_the_layers_forward_but_for_their_last_product():
    config = request("untied", *shape(recompute="full"))
    tokens = config.seq_len
    scores_again = 2 * UNTIED.num_layers * UNTIED.q_size * tokens
    not_recomputed = 2 * UNTIED.num_layers * UNTIED.hidden_size * UNTIED.ffn_size  # w2, whose output nobody needs
    expected = tokens * (hardware_flops_per_token(UNTIED, tokens, "full") + scores_again - not_recomputed)
    assert rehearse(config, choose_plan(config, None)).flops == pytest.approx(expected, rel=1e-6)


def test_accumulating_over_microbatches_multiplies_the_flops_and_not_the_activations():
    once, thrice = (
        rehearse(config, choose_plan(config, None))
        for config in (request("untied", *shape(1, count)) for count in (1, 3))
    )
    inputs = 2 * 3 * 8 * UNTIED.default_seq_len
    assert thrice.flops == 3 * once.flops
    kept = [result.profile.phases["forward"]["activations"] for result in (once, thrice)]
    assert kept[1] == kept[0] + inputs


def test_the_result_names_the_place_of_the_peak():
    result = rehearse(request("untied"), ParallelPlan())
    assert result.profile.peak_phase == "forward"
    assert "after the loss began" in result.peak_at
    assert result.as_dict()["peak_bytes"] == result.profile.peak_bytes


def test_more_than_one_rank_is_refused():
    with pytest.raises(PlanError, match="one device, not 8"):
        rehearse(request("untied"), ParallelPlan(dp_shard=8, zero_stage=3))


@pytest.mark.parametrize("spec", models._VARIANTS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_planner_knows_the_chunks_of_the_loss(spec, dtype):
    assert loss_chunk_tokens(spec, dtype.itemsize) == default_chunk_tokens(spec.vocab_size, spec.hidden_size, dtype)


def test_a_tensor_counts_from_its_making_to_its_release_in_whole_blocks():
    with ByteCounter(block_bytes=512) as counter:
        first = torch.zeros(100)  # 400 bytes: one block
        second = torch.zeros(200)  # 800 bytes: two
        view = first[10:20]
        assert counter.total_bytes == 3 * 512
        del first
        assert counter.total_bytes == 3 * 512
        del view, second
        assert counter.total_bytes == 0
    assert counter.peaks["forward"].num_bytes == 3 * 512


def test_a_peak_is_corrected_by_what_its_bytes_became():
    with ByteCounter(block_bytes=1) as counter:
        early = torch.zeros(25)
        late = torch.zeros(25) + early  # 100 bytes of zeros are dropped
        counter.relabel([early, late], "activations")
    peak = counter.peaks["forward"]
    assert (peak.categories["activations"], peak.categories["temporaries"]) == (200, 100)


def test_a_tensor_born_after_a_peak_does_not_change_it():
    with ByteCounter(block_bytes=1) as counter:
        torch.zeros(1000)
        small = torch.zeros(1)
        counter.relabel([small], "weights")
    assert counter.peaks["forward"].categories["weights"] == 0


def test_products_count_two_flops_per_multiply_add():
    with ByteCounter() as counter:
        total = torch.zeros(3, 5)
        torch.mm(torch.ones(3, 4), torch.ones(4, 5), out=total)
        total.addmm_(torch.ones(3, 4), torch.ones(4, 5))
    assert counter.flops == 2 * 2 * 3 * 4 * 5


def train_step(model, optimizer):
    model(torch.zeros(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def small_network():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def test_the_total_equals_that_of_torchs_own_tracker_to_the_byte():
    with FakeTensorMode():
        model, optimizer = small_network()
        with ByteCounter(block_bytes=1) as counter:
            counter.relabel(model.parameters(), "weights")
            train_step(model, optimizer)
            train_step(model, optimizer)
        model, optimizer = small_network()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            train_step(model, optimizer)
            tracker.reset_mod_stats()
            train_step(model, optimizer)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert max(peak.num_bytes for peak in counter.peaks.values()) == theirs
