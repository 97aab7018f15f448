"""Compiled blocks make few graphs under every division of the work and compute the same numbers."""

from dataclasses import replace
from itertools import product

import parity
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from width import cases, wide

from llama_core.config.models import model_spec
from llama_core.config.strategy import MoE
from llama_core.errors import EnvironmentMismatchError
from llama_core.models.batch import Batch, Documents
from llama_core.models.llama import Llama
from llama_core.parallel import expert
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.context import apply_context_parallel
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.planning.plan import ParallelPlan

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=4, head_dim=16, ffn_size=96, vocab_size=128)
SPARSE = replace(SPEC, moe=MoE(num_experts=4))
RECOMPUTE = ["none", "selective", "full"]
DIVISIONS = {
    "alone": {},
    "FSDP": {"dp_shard": 2, "zero_stage": 3},
    "TP": {"tp": 2},
    "TP, whole sequences": {"tp": 2, "sequence_parallel": False},
    "CP": {"cp": 2, "zero_stage": 1},
    "PP": {"pp": 2},
    "TP x FSDP": {"tp": 2, "dp_shard": 2, "zero_stage": 2},
}
CASES = {f"{division}-{recompute}": (division, recompute) for division, recompute in product(DIVISIONS, RECOMPUTE)}


@pytest.fixture
def graphs():
    """Count the compiled graphs without generating code."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.set_default_backend(counter)
    yield lambda: counter.frame_count
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


def take_step(plan, spec=SPEC, *, fp8=False):
    model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.bfloat16, fp8=fp8).materialize()
    model.initialize_weights(0)
    tokens = torch.randint(0, SPEC.vocab_size, (1, 64))
    batch = Batch(tokens, tokens, torch.arange(64)[None] % 20)
    model.forward_backward([batch] * plan.num_microbatches, loss_scale=1.0, on_phase=lambda phase: None)


def take_step_of_a_rank(plan, spec=SPEC, **choices):
    """Take a step as one of the ranks of a plan, of which the others do not exist."""
    if plan.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        take_step(plan, spec, **choices)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("case", cases(CASES, narrow={"alone-none", "FSDP-full", "PP-none", "TP x FSDP-selective"}))
def test_all_blocks_share_one_graph_in_every_recompute_mode(graphs, case):
    division, recompute = case
    plan = ParallelPlan(**DIVISIONS[division], compile=True, recompute=recompute, num_microbatches=2)
    take_step_of_a_rank(plan)
    assert graphs() == 1


@pytest.mark.parametrize("division", cases(DIVISIONS, narrow={"TP"}))
def test_all_blocks_with_products_in_fp8_are_one_graph_too(graphs, division):
    take_step_of_a_rank(ParallelPlan(**division, compile=True, recompute="selective", num_microbatches=2), fp8=True)
    assert graphs() == 1


@pytest.mark.parametrize("case", cases(CASES, narrow={"alone-full", "TP-none"}))
def test_all_blocks_with_experts_are_one_graph_too(graphs, case):
    division, recompute = case
    plan = ParallelPlan(**DIVISIONS[division], compile=True, recompute=recompute, num_microbatches=2)
    take_step_of_a_rank(plan, SPARSE)
    assert graphs() == 1


def test_blocks_whose_tokens_travel_are_four_graphs(graphs, monkeypatch):
    # no other rank exists to say how many tokens it sends
    monkeypatch.setattr(expert, "_exchange", lambda x, num_to_receive, num_to_send, group: x.clone())
    take_step_of_a_rank(ParallelPlan(dp_replicate=2, ep=2, compile=True, num_microbatches=2), SPARSE)
    assert graphs() == 4


@pytest.mark.parametrize(
    ("recompute", "cp"),
    [("none", 1), ("selective", 2), wide("selective", 1), wide("full", 1), wide("none", 2), wide("full", 2)],
)
def test_documents_of_any_number_and_length_take_two_graphs(graphs, recompute, cp, request):
    """One for the first microbatch, and one for all others, where the number of documents may vary."""
    with torch.device("meta"):
        model = Llama(SPEC, compute_dtype=torch.bfloat16)
    if cp > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
        request.addfinalizer(dist.destroy_process_group)
        apply_context_parallel(model, dist.group.WORLD)
    recompute_and_compile(model, ParallelPlan(compile=True, recompute=recompute), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        for number, longest in ((3, 64), (5, 40), (2, 63), (9, 20)):
            documents = Documents(torch.zeros(number + 1, dtype=torch.int32), longest)
            model(tokens, tokens, tokens, documents).backward()
    assert graphs() == 2


def skip_code_generation():
    torch.compiler.set_default_backend("aot_eager")


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        (parity.UNTIED, DIVISIONS["FSDP"] | {"recompute": "full"}),
        wide(parity.UNTIED, DIVISIONS["TP"] | {"recompute": "full"}),
        wide(parity.UNTIED, DIVISIONS["TP"] | {"recompute": "selective"}),
        wide(parity.UNTIED, DIVISIONS["CP"] | {"recompute": "selective"}),
        wide(parity.ADAPTED, DIVISIONS["FSDP"]),
        wide(parity.HYBRID, DIVISIONS["FSDP"] | {"ep": 2}),
    ],
)
def test_compiled_blocks_match_one_uncompiled_process(spec, choices):
    plan = ParallelPlan(**choices, compile=True, num_microbatches=2)
    differences = parity.largest_differences(plan, spec=spec, fault=skip_code_generation)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    ("packages", "programs", "lacking"),
    [
        ((), ("gcc",), "Triton .pip install triton. on "),
        (("triton",), (), "a C compiler .gcc. on "),
        ((), (), "Triton .pip install triton. and a C compiler .gcc. on "),
    ],
)
def test_a_gpu_machine_that_cannot_compile_says_what_it_lacks(packages, programs, lacking, monkeypatch):
    monkeypatch.setattr("llama_core.parallel.recompute.find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
    monkeypatch.delenv("CC", raising=False)
    plan = ParallelPlan(compile=True)
    with torch.device("meta"), pytest.raises(EnvironmentMismatchError, match=f"^parallel.compile needs {lacking}"):
        recompute_and_compile(Llama(SPEC), plan, torch.device("cuda"))
