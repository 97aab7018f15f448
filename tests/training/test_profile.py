"""Profiles: what kind of work a step's time goes to, and how much of it hides behind other work."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.nn import functional as F
from torch.profiler import profile

from llama_core.models.attention import attend
from llama_core.models.loss import linear_cross_entropies, linear_cross_entropy
from llama_core.training.profile import length, summarize, union

MICROSECONDS = 1e-6
INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ends: (min(ends), max(ends))))


@given(INTERVALS)
def test_a_union_covers_every_point_once(intervals):
    covered = {point for begin, end in intervals for point in range(begin, end)}
    merged = union(intervals)
    assert length(merged) == len(covered)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


def test_operators_count_with_the_work_they_are_part_of():
    x = torch.randn(256, 256, requires_grad=True)
    heads = torch.randn(1, 2, 64, 16, requires_grad=True)
    with profile() as profiler:
        F.silu(x @ x).sum().backward()
        attend(heads, heads, heads, None).sum().backward()
    events = profiler.events()
    seconds = summarize(0, events).seconds
    assert {"matrix products", "attention", "norms, activations and other"} <= seconds.keys()
    assert seconds["attention"] > sum(e.self_cpu_time_total for e in events if "flash" in e.name) / 1e6
    assert sum(seconds.values()) == pytest.approx(sum(event.self_cpu_time_total for event in events) / 1e6)


def test_the_head_and_its_loss_are_found_on_a_cpu():
    hidden = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(128, 32, requires_grad=True)
    targets = torch.randint(128, (64,))
    with profile() as profiler:
        linear_cross_entropy(hidden, weight, targets).backward()
        linear_cross_entropies(hidden, weight, targets).sum().backward()
    events = profiler.events()
    products = sum(event.self_cpu_time_total for event in events if event.name == "aten::mm") / 1e6
    seconds = summarize(0, events).seconds
    assert seconds["head and loss"] > products > 0
    assert "matrix products" not in seconds


def test_an_exchange_shares_the_kernel_of_a_send():
    exchanged, sent = kernel("ncclDevKernel_SendRecv", 0, 3), kernel("ncclDevKernel_SendRecv", 3, 4)
    events = [operator("c10d::alltoall_base_", exchanged), operator("c10d::send", sent), exchanged, sent]
    record = summarize(0, events)
    assert record.seconds == {"all-to-all": 3, "send": 1}
    assert record.exposed == {"all-to-all": pytest.approx(3), "send": pytest.approx(1)}


def kernel(name, begin_s, end_s):
    span = SimpleNamespace(start=begin_s * 1e6, end=end_s * 1e6, elapsed_us=lambda: (end_s - begin_s) * 1e6)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=span, is_user_annotation=False)


def operator(name, *kernels, within=None):
    launched = [SimpleNamespace(name=one.name, duration=one.time_range.elapsed_us()) for one in kernels]
    return SimpleNamespace(
        name=name, device_type=DeviceType.CPU, kernels=launched, cpu_parent=within, is_user_annotation=False
    )


def test_kernels_of_a_gpu_tell_idle_time_and_what_hides_transfers():
    product, norm = kernel("nvjet_hsh_128x256", 0, 4), kernel("triton_red_fused_0", 6, 7)
    gather, late = kernel("ncclDevKernel_AllGather", 3, 5), kernel("ncclDevKernel_ReduceScatter", 7, 10)
    update = kernel("void at::native::multi_tensor_apply_kernel", 12, 13)
    step = operator("Optimizer.step#AdamW.step")
    events = [
        operator("aten::mm", product),
        operator("CompiledFunction", norm),
        operator("c10d::_allgather_base_", gather),
        operator("c10d::_reduce_scatter_base_", late),
        operator("aten::add_", update, within=step),
        *(product, norm, gather, late, update),
    ]
    record = summarize(3, events)
    assert record.seconds == {
        "matrix products": 4,
        "norms, activations and other": 1,
        "all-gather": 2,
        "reduce-scatter": 3,
        "optimizer": 1,
    }
    assert (record.rank, record.span_seconds) == (3, 13)
    assert record.idle_seconds == pytest.approx(3)  # from 5 to 6 and from 10 to 12
    assert record.exposed_seconds == pytest.approx(4)  # from 4 to 5 and from 7 to 10
    assert record.communication_seconds == 5
    assert record.exposed == {"all-gather": pytest.approx(1), "reduce-scatter": pytest.approx(3)}
    assert {row[0]: row[2] for row in record.rows()}["idle"] == "23.1%"


def recorded(number, name, device, begin_us, end_us, *, annotation=False):
    """Return an event as torch's profiler makes it from a trace."""
    return FunctionEvent(
        number, name, 1, begin_us, end_us, device_type=device, use_device="cuda", is_user_annotation=annotation
    )


def test_an_annotation_on_the_device_is_not_a_kernel():
    product = recorded(1, "aten::mm", DeviceType.CPU, 0, 10)
    product.append_kernel("nvjet_mm", 0, 100)
    region = recorded(2, "Optimizer.step#AdamW.step", DeviceType.CPU, 12, 20, annotation=True)
    region.append_kernel("Optimizer.step#AdamW.step", 0, 400)
    on_device = [
        recorded(3, "nvjet_mm", DeviceType.CUDA, 5, 105),
        recorded(4, "Optimizer.step#AdamW.step", DeviceType.CUDA, 5, 405, annotation=True),
        recorded(5, "Memset (Device)", DeviceType.CUDA, 305, 405),
    ]
    events = EventList([product, region, *on_device], use_device="cuda")
    events._build_tree()
    record = summarize(0, events)
    assert record.seconds == {"matrix products": pytest.approx(100 * MICROSECONDS)}
    assert record.span_seconds == pytest.approx(400 * MICROSECONDS)
    assert record.idle_seconds == pytest.approx(200 * MICROSECONDS)
