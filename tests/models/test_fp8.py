import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from distributed import run_ranks
from tiers import nightly
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.config.models import model_spec
from llama_core.config.strategy import TARGETS, LoRA, MoE
from llama_core.models.batch import Batch
from llama_core.models.fp8 import multiply, rounded, scaled_product, use_fp8
from llama_core.models.layers import BLOCK_MATRICES, Linear
from llama_core.models.llama import Llama, with_adapters
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=2, head_dim=16, ffn_size=96, vocab_size=128)


LATENT = replace(SPEC, num_kv_heads=SPEC.num_heads, kv_rank=32, query_rank=48, rope_dim=8)


def operands(*, outliers):
    """An input, a weight and the gradient of their product; with outliers, some numbers 100 times as large."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((64, 256), (512, 256), (64, 512)))
    if outliers:  # a column, as in the residual stream of a trained model, and single numbers; a row of zeros
        x[:, 5] *= 100
        weight[3, 7] *= 100
        grad[1, 2] *= 100
        x[9] = 0
    return x.bfloat16(), 0.02 * weight, grad.bfloat16()


def product_and_gradients(product, x, weight, grad):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = product(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))]


def relative_error(ours, exact):
    return float((ours.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("outliers", [False, True])
def test_a_product_and_both_gradients_are_within_four_percent_of_fp32(outliers):
    x, weight, grad = operands(outliers=outliers)
    ours = product_and_gradients(partial(multiply, cast_OI=None), x, weight, grad)
    exact = product_and_gradients(lambda x, weight: x @ weight.t(), x.float(), weight, grad)
    assert [one.dtype for one in ours] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for one, expected in zip(ours, exact, strict=True):
        assert relative_error(one, expected) < 0.04  # two operands, each with half a unit in 16 at most


def test_a_product_is_that_of_the_rounded_operands():
    x, weight, _ = operands(outliers=True)
    (x8, x_scale), (weight8, weight_scale) = rounded(x), rounded(weight.bfloat16())
    expected = (x8.float() * x_scale) @ (weight8.float() * weight_scale).t()
    assert relative_error(scaled_product(x, weight.bfloat16()), expected) < 2**-8  # its own rounding to bf16


def test_a_scale_is_the_largest_power_of_two_that_keeps_a_row_in_range():
    x = operands(outliers=True)[0]
    digits, scale = rounded(x)
    largest = digits.float().abs().amax(1)[x.any(1)]
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (largest <= 448).all()
    assert (largest >= 448 / 2).all()
    assert torch.equal(rounded(x * 2**-90)[0].view(torch.uint8), digits.view(torch.uint8))


def test_zeros_stay_zero_and_what_is_not_finite_becomes_nan():
    digits, scale = rounded(torch.tensor([[0.0] * 4, [math.nan, 1, 1, 1], [math.inf, 1, 1, 1]], dtype=torch.bfloat16))
    values = digits.float() * scale
    assert torch.equal(values[0], torch.zeros(4))
    assert values[1:, 0].isnan().all()


@pytest.mark.parametrize(("trained", "kept"), [(True, [(64, 256), (512, 256)]), (False, [(512, 256)])])
def test_a_frozen_matrix_keeps_no_input_for_its_backward(trained, kept):
    x, weight, _ = operands(outliers=False)
    saved = []

    def note(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        multiply(x.requires_grad_(), weight.bfloat16().requires_grad_(trained), None)
    assert saved == kept


class Products(TorchDispatchMode):
    """Counts the products in fp8."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))


def step(plan=None, *, spec=SPEC, fp8=True, compute_dtype=torch.bfloat16):
    """Return the loss and the gradients of a step, whole, as arrays, and the number of products in fp8."""
    plan = plan or ParallelPlan()
    model = ParallelModel(spec, plan, device=torch.device("cpu"), compute_dtype=compute_dtype, fp8=fp8).materialize()
    model.initialize_weights(0)
    tokens = torch.randint(0, SPEC.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    with Products() as products:
        loss = model.forward_backward(
            [Batch(tokens, tokens.roll(-1, 1), None)], loss_scale=1.0, on_phase=lambda phase: None
        )
    gradients = {
        name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).numpy()
        for name, parameter in model.model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss), gradients, products.number


def test_a_step_has_three_products_in_fp8_for_every_matrix_and_about_the_loss_of_bf16():
    loss, gradients, number = step()
    reference, exact, none = step(fp8=False, compute_dtype=torch.float32)
    assert (number, none) == (3 * 7 * SPEC.num_layers, 0)
    assert loss == pytest.approx(reference, rel=1e-3)
    assert gradients.keys() == exact.keys()


@pytest.mark.parametrize(("recompute", "again"), [("full", 7), ("selective", 3)])
def test_recomputation_changes_no_number_and_selective_keeps_products_in_fp8(recompute, again):
    loss, gradients, number = step()
    other_loss, other_gradients, other_number = step(ParallelPlan(recompute=recompute))
    assert (other_loss, other_number) == (loss, number + again * SPEC.num_layers)
    for name, gradient in gradients.items():
        assert (other_gradients[name] == gradient).all(), name


def _ranks_step(plan, spec):
    return step(plan, spec=spec)


@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (ParallelPlan(tp=2), SPEC),
        nightly(ParallelPlan(tp=2, sequence_parallel=False), SPEC),
        nightly(ParallelPlan(tp=2), LATENT),
        nightly(ParallelPlan(tp=2, sequence_parallel=False), LATENT),
        pytest.param(
            ParallelPlan(tp=2),
            replace(SPEC, lora=LoRA(lora_rank=16, target_modules=TARGETS)),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_tensor_parallel_ranks_round_their_own_parts(plan, spec):
    loss, gradients, number = step(spec=spec)
    for other_loss, other_gradients, other_number in run_ranks(2, _ranks_step, plan, spec):
        assert other_number == number
        assert other_loss == pytest.approx(loss, rel=1e-3)
        for name, gradient in gradients.items():
            if gradient.any():
                distance = relative_error(*map(torch.from_numpy, (other_gradients[name], gradient)))
                assert distance < 0.1, name  # each of them is some 4 % off


def test_only_the_matrices_of_the_blocks_are_in_fp8():
    settings = {"lora": LoRA(lora_rank=4, target_modules=TARGETS), "moe": MoE(num_experts=2, moe_layers=(1,))}
    found = set()
    for spec in (SPEC, LATENT):
        with torch.device("meta"):
            model = with_adapters(Llama(replace(spec, **settings)))
        use_fp8(model.layers)
        matrices = [(name, one) for name, one in model.named_modules() if isinstance(one, Linear)]
        found |= {name for name, one in matrices if one.multiply is multiply}
    assert {name.rpartition(".")[2] for name in found} == BLOCK_MATRICES
    assert not [name for name in found if "experts" in name or "lora" in name or name == "output"]
