"""Compiled blocks make few graphs under every division of the work and compute the same numbers."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import parity
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tiers import cases, nightly
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.config.models import model_spec
from llama_core.config.strategy import LoRA, MoE
from llama_core.errors import EnvironmentMismatchError, PlanError
from llama_core.models.batch import Batch, Documents
from llama_core.models.llama import Llama
from llama_core.parallel import expert, recompute, zero
from llama_core.parallel.apply import ParallelModel
from llama_core.parallel.context import apply_context_parallel
from llama_core.parallel.recompute import recompute_and_compile
from llama_core.planning.plan import ParallelPlan

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=4, head_dim=16, ffn_size=96, vocab_size=128)
SPARSE = replace(SPEC, moe=MoE(num_experts=4))
PACKED = replace(SPEC, hidden_size=128, head_dim=32, ffn_size=256, lora=LoRA(base="nf4"))
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
WITH_EXPERTS = ("alone-full", "FSDP-none", "TP-none", "TP, whole sequences-selective", "CP-full", "PP-selective")
"""Each division and each mode; the dense cases have every combination."""


@pytest.fixture
def graphs():
    """Count the compiled graphs without generating code."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.set_default_backend(counter)
    yield lambda: counter.frame_count
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


def make_batch():
    tokens = torch.randint(0, SPEC.vocab_size, (1, 64))
    return Batch(tokens, tokens, torch.arange(64)[None] % 20)


def built(plan, spec=SPEC, *, fp8=False):
    model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=torch.bfloat16, fp8=fp8).materialize()
    model.initialize_weights(0)
    return model


def take_step(model):
    microbatches = [make_batch()] * model.plan.num_microbatches
    model.forward_backward(microbatches, loss_scale=1.0, on_phase=lambda phase: None)


@contextmanager
def one_rank_of(plan):
    """Be one of the ranks of a plan, of which the others do not exist."""
    if plan.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def take_step_of_a_rank(plan, spec=SPEC, **choices):
    with one_rank_of(plan):
        take_step(built(plan, spec, **choices))


@pytest.mark.parametrize("case", cases(CASES, narrow={"FSDP-full", "TP x FSDP-selective"}))
def test_all_blocks_share_one_graph_in_every_recompute_mode(graphs, case):
    division, recompute = case
    plan = ParallelPlan(**DIVISIONS[division], compile=True, recompute=recompute, num_microbatches=2)
    take_step_of_a_rank(plan)
    assert graphs() == 1


@pytest.mark.wide
@pytest.mark.parametrize(
    "division", cases({name: DIVISIONS[name] for name in ("TP", "CP", "TP x FSDP")}, narrow={"TP"})
)
def test_all_blocks_with_products_in_fp8_are_one_graph_too(graphs, division):
    take_step_of_a_rank(ParallelPlan(**division, compile=True, recompute="selective", num_microbatches=2), fp8=True)
    assert graphs() == 1


@pytest.mark.wide
@pytest.mark.parametrize(
    "division", cases({name: DIVISIONS[name] for name in ("alone", "TP", "CP", "TP x FSDP")}, narrow={"TP"})
)
def test_all_blocks_over_matrices_in_nf4_are_one_graph_too(graphs, division):
    """But for the first, whose input has no gradient."""
    plan = ParallelPlan(**division, compile=True, recompute="selective", num_microbatches=2)
    take_step_of_a_rank(plan, PACKED)
    assert graphs() == 2


@pytest.mark.parametrize("case", cases({name: CASES[name] for name in WITH_EXPERTS}, narrow={"TP-none"}))
def test_all_blocks_with_experts_are_one_graph_too(graphs, case):
    division, recompute = case
    plan = ParallelPlan(**DIVISIONS[division], compile=True, recompute=recompute, num_microbatches=2)
    take_step_of_a_rank(plan, SPARSE)
    assert graphs() == 1


def test_all_blocks_with_sinks_biases_and_a_shared_expert_are_one_graph_too(graphs):
    moe = SPARSE.moe.model_copy(update={"biases": True, "shared_size": 64})
    spec = replace(SPARSE, attention_sinks=True, o_bias=True, moe=moe)
    take_step_of_a_rank(ParallelPlan(tp=2, compile=True, num_microbatches=2), spec)
    assert graphs() == 1


@pytest.mark.wide
def test_blocks_whose_tokens_travel_are_four_graphs(graphs, monkeypatch):
    # no other rank exists to say how many tokens it sends
    monkeypatch.setattr(expert, "exchange", lambda x, num_to_receive, num_to_send, group: x.clone())
    take_step_of_a_rank(ParallelPlan(dp_replicate=2, ep=2, compile=True, num_microbatches=2), SPARSE)
    assert graphs() == 4


@pytest.mark.parametrize(
    ("recompute", "cp"),
    [
        ("selective", 2),
        nightly("none", 1),
        nightly("selective", 1),
        nightly("full", 1),
        nightly("none", 2),
        nightly("full", 2),
    ],
)
def test_documents_of_any_number_and_length_share_one_graph(graphs, recompute, cp, request):
    """Evaluation, without gradients, has one of its own."""
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
        made = []
        for is_training in (True, False):
            for number in (2, 3, 5, 9):
                documents = Documents(torch.zeros(number + 1, dtype=torch.int32), 64)
                with torch.set_grad_enabled(is_training):
                    loss = model(tokens, Batch(tokens, tokens, tokens, documents))
                if is_training:
                    loss.backward()
                made.append(graphs())
    assert made == 4 * [1] + 4 * [2]


@pytest.mark.wide
def test_the_kernel_for_documents_is_recomputed_within_the_graph_of_a_tensor_parallel_block(graphs):
    """Recomputing torch's own attention there fails, so that the graph would have to be within the recomputation."""
    plan = ParallelPlan(tp=2, compile=True, recompute="full", num_microbatches=1)
    kinds = {"compute_dtype": torch.bfloat16, "documents": "varlen"}
    with one_rank_of(plan):
        parallel = ParallelModel(SPEC, plan, device=torch.device("cpu"), **kinds)
        with FakeTensorMode(allow_non_fake_inputs=True):
            parallel.model.to_empty(device="cpu")
            tokens = torch.zeros(2, 64, dtype=torch.int64)
            documents = Documents(torch.zeros(4, dtype=torch.int32), 64)
            parallel.model(tokens, Batch(tokens, tokens, tokens, documents)).backward()
    assert graphs() == 1


def count_graphs_of_copies():
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.set_default_backend(counter)
    zero.DistributedDataParallel = partial(zero.DistributedDataParallel, bucket_cap_mb=0.05)
    take_step(built(ParallelPlan(dp_replicate=2, compile=True, num_microbatches=2)))
    return counter.frame_count


@pytest.mark.wide
def test_copies_whose_blocks_fill_several_buckets_of_gradients_compile_whole_blocks():
    assert run_ranks(2, count_graphs_of_copies) == [1, 1]


PARTLY = replace(SPEC, lora=LoRA(lora_rank=4, target_modules=("q_proj",)), trainable=("layers.2.attention.wv.weight",))
"""One layer has a trait that the others lack, and the input of the first one needs no gradient."""
WARMED = {
    "alone": (SPEC, {}, 1, 1),
    "two kinds of recomputation": (SPEC, {"recompute": "selective", "recomputed_layers": (2,)}, 2, 2),
    "three kinds of layers": (PARTLY, {}, 3, 2),
    "ZeRO 3": (SPEC, DIVISIONS["FSDP"] | {"recompute": "full"}, 1, 1),
    "TP": (SPEC, DIVISIONS["TP"], 1, 1),
    "CP": (SPEC, DIVISIONS["CP"], 1, 1),
    "PP": (SPEC, DIVISIONS["PP"], 1, 1),
    "interleaved, ZeRO 1": (
        SPEC,
        {"pp": 2, "schedule": "interleaved", "num_chunks": 2, "dp_shard": 2, "zero_stage": 1},
        1,
        1,
    ),
}
"""Model, plan, and the graphs of training and of evaluation."""


@pytest.mark.parametrize("case", cases(WARMED, narrow={"alone", "TP"}))
def test_neither_a_step_nor_an_evaluation_compiles_what_was_compiled_before(graphs, case):
    spec, choices, of_training, of_evaluation = case
    plan = ParallelPlan(**choices, compile=True, num_microbatches=2)
    with one_rank_of(plan):
        model = built(plan, spec)
        model.compile_blocks(make_batch())
        assert graphs() == of_training
        take_step(model)
        take_step(model)
        assert graphs() == of_training
        with torch.no_grad():
            model.compile_blocks(make_batch())
        assert graphs() == of_training + of_evaluation
        model.evaluate([make_batch()])
        assert graphs() == of_training + of_evaluation


ADAPTED = replace(SPEC, lora=LoRA(lora_rank=4, target_modules=("all-linear",)))
LENGTHS = (32, 64)


@pytest.mark.parametrize(("spec", "per_length"), [(SPEC, 4), (ADAPTED, 6)], ids=["all weights", "adapters"])
def test_every_kind_of_input_has_its_graphs_at_every_length(graphs, spec, per_length):
    """More than torch's own limit of 8, beyond which it would run blocks uncompiled, with a warning.

    With adapters, the input of the first block has no gradient.
    """
    model = built(ParallelPlan(compile=True), spec)
    compile_every_kind(model)
    assert graphs() == len(LENGTHS) * per_length


def compile_every_kind(model):
    for length, has_documents, is_training in product(LENGTHS, (True, False), (True, False)):
        tokens = torch.zeros((2, length), dtype=torch.int64)
        positions = torch.arange(length).expand(2, -1) % 20 if has_documents else None
        with torch.set_grad_enabled(is_training):
            model.compile_blocks(Batch(tokens, tokens, positions))


def test_blocks_that_need_too_many_graphs_say_so(graphs, monkeypatch):
    monkeypatch.setattr(recompute, "MAX_GRAPHS", 2)
    model = built(ParallelPlan(compile=True))
    with pytest.raises(PlanError, match=r"parallel.compile: .* more than 2 graphs.*set parallel.compile=false"):
        compile_every_kind(model)


def compile_before_training():
    train = parity.train_step

    def warmed(engine, *arguments, **named):
        example = parity.make_batch(7, engine.parallel.plan.rows_per_forward, documents=True)
        engine.parallel.compile_blocks(example)
        with torch.no_grad():
            engine.parallel.compile_blocks(example)
        return train(engine, *arguments, **named)

    parity.train_step = warmed


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        (parity.UNTIED, {"dp_shard": 2, "zero_stage": 3}),
        nightly(parity.TIED, {"pp": 2, "schedule": "interleaved", "num_chunks": 2, "dp_shard": 2, "zero_stage": 1}),
        nightly(parity.UNTIED, {"dp_replicate": 2}),
        nightly(parity.TIED, {"pp": 2, "schedule": "chimera", "dp_shard": 2, "zero_stage": 2}),
        nightly(parity.ADAPTED, {"tp": 2}),
        nightly(parity.UNTIED, {"cp": 2, "dp_shard": 2, "zero_stage": 2}),
        nightly(parity.HYBRID, {"dp_shard": 2, "ep": 2, "zero_stage": 3}),
    ],
)
def test_compiling_blocks_before_every_step_changes_no_number(spec, choices):
    plan = ParallelPlan(**choices, num_microbatches=4)
    differences = parity.largest_differences(plan, spec=spec, fault=compile_before_training)
    assert max(differences.values()) < 1e-8, differences


def skip_code_generation():
    torch.compiler.set_default_backend("aot_eager")


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        (parity.UNTIED, DIVISIONS["FSDP"] | {"recompute": "full"}),
        nightly(parity.UNTIED, DIVISIONS["TP"] | {"recompute": "full"}),
        nightly(parity.UNTIED, DIVISIONS["TP"] | {"recompute": "selective"}),
        nightly(parity.UNTIED, DIVISIONS["CP"] | {"recompute": "selective"}),
        nightly(parity.ADAPTED, DIVISIONS["FSDP"]),
        nightly(parity.DORA, DIVISIONS["FSDP"] | {"recompute": "full"}),
        nightly(parity.DORA, DIVISIONS["TP"]),
        nightly(parity.HYBRID, DIVISIONS["FSDP"] | {"ep": 2}),
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
        (("triton",), (), "a C compiler .gcc or clang. on "),
        ((), (), "Triton .pip install triton. and a C compiler .gcc or clang. on "),
    ],
)
def test_a_gpu_machine_that_cannot_compile_says_what_it_lacks(packages, programs, lacking, monkeypatch):
    monkeypatch.setattr("llama_core.machine.toolchain.find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
    monkeypatch.delenv("CC", raising=False)
    plan = ParallelPlan(compile=True)
    with torch.device("meta"), pytest.raises(EnvironmentMismatchError, match=f"^parallel.compile needs {lacking}"):
        recompute_and_compile(Llama(SPEC), plan, torch.device("cuda"))
