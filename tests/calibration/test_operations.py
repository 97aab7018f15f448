"""Every operation that a plan or a grid asks for can be built and timed, alone and on ranks that share the cores."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from tiers import wide

from llama_core.calibration.grid import grids
from llama_core.calibration.operations import prepare
from llama_core.calibration.ranks import measure_on_ranks
from llama_core.calibration.timing import measure
from llama_core.calibration.whole import time_whole
from llama_core.config.run import RunConfig

CPU = torch.device("cpu")
SMALL = {
    "model": "tiny_llama3_50m",
    "architecture": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 64,
                     "vocab_size": 256},
    "training": {"precision": "bf16", "seq_len": 32, "batch_size": 2, "steps": 4},
    "launch": {"device": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in grids(1) if not kind.endswith("backward")])
def test_the_smallest_point_of_each_grid_runs_and_has_the_gradients_it_is_asked_for(kind):
    prepared = prepare(kind, next(iter(grids(1)[kind].points())), CPU)
    out = prepared.run()
    has_backward = kind.replace("forward", "backward") in grids(1) and "forward" in kind
    assert bool(prepared.inputs) == has_backward
    if has_backward:
        gradients = torch.autograd.grad(out, prepared.inputs, torch.ones_like(out))
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_both_passes_of_an_operation_are_timed_at_once():
    queries = [("silu bf16 forward", (4096,)), ("silu bf16 backward", (4096,)), ("cast bf16 fp32", (64,))]
    begun = []
    found = measure(queries, CPU, lambda: not begun.append(1)).found
    assert set(found) == set(queries)
    assert all(timed.seconds > 0 for timed in found.values())
    assert len(begun) == 2


@wide
def test_ranks_measure_together_with_links_and_whole_layers():
    collectives = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
    queries = [(f"link {collective}", (2, 2**12)) for collective in collectives]
    answer = measure_on_ranks(2, queries, whole=RunConfig.from_mapping(SMALL), rows=2)
    assert set(answer.seconds) == set(queries)
    assert min(*answer.seconds.values(), *answer.layers, *answer.ends) > 0


@pytest.mark.parametrize(
    ("strategy", "ends_backward"), [({}, 2), ({"strategy": "lora"}, 1)], ids=["all weights", "adapters"]
)
def test_a_step_is_divided_where_it_enters_and_leaves_the_layers(strategy, ends_backward, monkeypatch):
    marks = count()
    timer = SimpleNamespace(mark=lambda: next(marks), between=lambda begin, end: end - begin)
    monkeypatch.setattr("llama_core.calibration.whole.timer_of", lambda device: timer)
    config = RunConfig.from_mapping({**SMALL, **strategy})
    # the clock counts its readings: a forward has three intervals and a backward three, or two if it ends in the layers
    assert time_whole(config, 2, CPU) == ((1, 1), (2, ends_backward))
