"""Where a rank holds whole fp32 weights, its matrices have a copy in half precision that is as new as they are."""

from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest
import torch
from distributed import run_ranks
from operations import Operations
from parity import HYBRID, SPARSE, TRAINING, UNTIED, native_engine, own_microbatches
from tiers import nightly

from llama_core.models import cast_weights
from llama_core.models.layers import BLOCK_MATRICES, local_part
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import train_step

PLAN = ParallelPlan(num_microbatches=2)
NARROW = torch.bfloat16


def step(engine, number=0):
    plan = engine.parallel.plan
    return train_step(
        engine,
        own_microbatches(number, plan, documents=True),
        learning_rate=TRAINING.learning_rate,
        max_grad_norm=TRAINING.max_grad_norm,
    )


def matrices(engine):
    """Yield every matrix of a block with its weight and its copy."""
    for path, module in engine.model.layers.named_modules():
        if path.rpartition(".")[2] in BLOCK_MATRICES:
            yield path, local_part(module.weight), module.cast_weight


def assert_up_to_date(engine):
    for path, weight, copy in matrices(engine):
        assert torch.equal(copy, weight.to(NARROW)), path


def test_copies_are_as_new_as_the_weights(tmp_path):
    engine = native_engine(PLAN, SPARSE, NARROW)
    assert_up_to_date(engine)
    engine.set_weights(lambda model: [parameter.data.mul_(2) for parameter in model.parameters()])
    assert_up_to_date(engine)
    step(engine)
    assert_up_to_date(engine)
    engine.save(tmp_path / "checkpoint").result()
    engine.end_saving()
    other = native_engine(PLAN, SPARSE, NARROW, seed=2)
    other.load(tmp_path / "checkpoint")
    assert_up_to_date(other)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),  # one microbatch casts each weight once, as an update would
        replace(PLAN, recompute="full"),  # nothing is kept for the backward, and copies would cost memory
    ],
)
def test_nothing_is_kept_where_it_would_not_pay(plan):
    assert [copy for _, _, copy in matrices(native_engine(plan, UNTIED, NARROW)) if copy is not None] == []


def test_a_step_casts_no_matrix_of_a_block():
    engine = native_engine(PLAN, UNTIED, NARROW)
    shapes = {weight.shape for _, weight, _ in matrices(engine)}
    with Operations() as operations:
        engine.forward_backward(own_microbatches(0, PLAN, documents=True), loss_scale=1.0, on_phase=lambda phase: None)
    assert shapes.isdisjoint(operations.narrowed)


def trained(plan, spec):
    """Return losses and norms of three steps with copies and without, on this rank."""
    found = []
    for keeps in (True, False):
        with patch.object(ParallelPlan, "keeps_cast_weights", PropertyMock(return_value=keeps)):
            engine = native_engine(plan, spec, NARROW)
            steps = [step(engine, number) for number in range(3)]
        copies = [copy for _, _, copy in matrices(engine) if copy is not None]
        assert bool(copies) == keeps
        found.append([float(value) for one in steps for value in (one.loss, one.grad_norm)])
    return found


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        (UNTIED, {}),
        nightly(HYBRID, {}),
        nightly(UNTIED, {"tp": 2}),
        nightly(UNTIED, {"pp": 2}),
        (SPARSE, {"pp": 2, "schedule": "zb_h1"}),
        nightly(UNTIED, {"dp_replicate": 2}),
        nightly(SPARSE, {"tp": 2, "pp": 2}),
    ],
)
def test_training_with_copies_has_the_numbers_of_training_without(spec, plan):
    """Rounded once an update or once a use, a weight is the same; so are products of the same two operands."""
    plan = ParallelPlan(**plan, num_microbatches=4)
    for with_copies, without in run_ranks(plan.world_size, trained, plan, replace(spec, num_layers=4)):
        assert with_copies == without


def test_on_cuda_the_gradient_of_a_weight_is_made_in_fp32(monkeypatch):
    """The meta device checks the operator's arguments and shapes, not its numbers."""
    monkeypatch.setattr(cast_weights, "multiplies_into_fp32", lambda x: True)
    with torch.device("meta"):
        x, weight = torch.empty(2, 8, 16, dtype=NARROW), torch.empty(4, 16, requires_grad=True)
        out = cast_weights.cast_linear(x, weight, weight.detach().to(NARROW))
        with Operations() as operations:
            out.backward(torch.empty_like(out))
    assert weight.grad.dtype == torch.float32
    assert torch.ops.aten.mm.dtype in operations.called
    assert torch.ops.aten._to_copy.default not in operations.called


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_weight_without_a_copy_gets_its_gradient_in_fp32_with_any_recomputation(recompute, monkeypatch):
    """A product with an fp32 result, which a CPU lacks, is made of wider factors here."""
    made = []

    def wide_product(left, right, dtype):
        made.append(torch.Size((left.shape[0], right.shape[1])))
        return left.to(dtype) @ right.to(dtype)

    monkeypatch.setattr(cast_weights, "_wide_product", wide_product)
    plan = ParallelPlan(recompute=recompute)
    engine = native_engine(plan, UNTIED, NARROW)
    engine.forward_backward(own_microbatches(0, plan, documents=True), loss_scale=1.0, on_phase=lambda phase: None)
    weights = [weight for _, weight, _ in matrices(engine)]
    assert sorted(made) == sorted(weight.shape for weight in weights)
    for module in engine.model.layers.modules():
        gradient = getattr(getattr(module, "weight", None), "grad", None)
        if gradient is not None and gradient.ndim == 2:
            assert not torch.equal(gradient, gradient.to(NARROW).to(gradient.dtype))
