import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention.varlen import varlen_attn

from llama_core.models.block_attention import GROUPED_HEADS
from llama_core.rehearsal.byte_counter import FLASH_ROWS, ByteCounter


def test_a_tensor_counts_from_its_creation_to_its_release_in_whole_blocks():
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


def test_relabelling_tensors_corrects_an_earlier_peak():
    with ByteCounter(block_bytes=1) as counter:
        early = torch.zeros(25)
        late = torch.zeros(25) + early  # 100 bytes of zeros are dropped
        counter.relabel([early, late], "activations")
    peak = counter.peaks["forward"]
    assert (peak.categories["activations"], peak.categories["temporaries"]) == (200, 100)


def test_a_tensor_created_after_a_peak_does_not_change_it():
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


def test_the_total_matches_torchs_own_tracker_to_the_byte():
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


def most_in_backward_of_documents(num_kv_heads, num_tokens=256, num_heads=8, head_dim=64):
    with FakeTensorMode(), ByteCounter(block_bytes=1) as counter:
        q, k, v = (
            torch.empty(num_tokens, heads, head_dim, dtype=torch.bfloat16, requires_grad=True)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        documents = (torch.zeros(2, dtype=torch.int32),) * 2 + (num_tokens,) * 2
        out = varlen_attn(q, k, v, *documents, window_size=(-1, 0), **GROUPED_HEADS)
        upstream, before = torch.empty_like(out), counter.total_bytes
        counter.phase = "backward"
        out.backward(upstream)
    return counter.peaks["backward"].num_bytes - before


def test_the_backward_of_documents_holds_fp32_sums_and_gradients_for_every_query_head_while_it_runs():
    of_head = 256 * 64 * 2
    gradients, zeros = (8 + 2 * 8) * of_head, 8 * 256 * 4 + 16  # autograd makes zeros for the kernel's other results
    sums = (256 + FLASH_ROWS) * 8 * (64 + 1) * 4
    assert most_in_backward_of_documents(8) == gradients + zeros + sums
    fewer, expanded = 2 * (8 - 2) * of_head, 2 * 8 * of_head
    assert most_in_backward_of_documents(2) == most_in_backward_of_documents(8) - fewer + expanded


def peak_of_gradient(function):
    """Return the most bytes that a backward holds, over those of its input."""
    point = torch.ones(1 << 16, requires_grad=True) * 1.0
    result = function(point)
    upstream = torch.ones_like(result)
    with ByteCounter() as counter:
        counter.phase = "backward"
        torch.autograd.grad(result, point, upstream)
    return counter.peaks["backward"].num_bytes / (4 << 16)


def test_two_gradients_are_summed_in_the_memory_of_the_first():
    """As autograd does without a dispatch mode; three factors of one tensor have gradients of two at once."""
    assert peak_of_gradient(lambda x: x * 2 + x * 3 + x * 4) == 2


def test_a_gradient_that_is_a_view_is_not_summed_in_place():
    """At the peak there are two gradients, their sum, and what the backward starts from, which is viewed too."""
    assert peak_of_gradient(lambda x: x * 2 + x.view(256, 256).mul(3).view(-1)) == 4
