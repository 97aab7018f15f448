import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import Operations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from llama_core.models.layers import LowRank
from llama_core.models.loss import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    default_chunk_tokens,
    linear_cross_entropies,
    linear_cross_entropy,
)
from llama_core.units import GIB, MIB


def plain_loss(hidden, weight, targets):
    """The definition: all logits at once, in the dtype of the hidden states, then a softmax in at least fp32."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


def problem(shape, dtype=torch.float64, weight_dtype=None, ignored=0.25, seed=0):
    """Random hidden states, head and targets; ``shape`` is tokens, hidden size, vocabulary."""
    num_tokens, hidden_size, vocab_size = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[torch.rand(num_tokens, generator=generator) < ignored] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(weight_dtype or dtype).requires_grad_(), targets


def loss_and_gradients(loss_function, hidden, weight, targets):
    loss = loss_function(hidden, weight, targets)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(2, 50)),
    chunk_tokens=st.integers(1, 50),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_equal_the_plain_ones_for_any_shape_and_chunk(shape, chunk_tokens, ignored, seed):
    inputs = problem(shape, ignored=ignored, seed=seed)
    ours = loss_and_gradients(lambda *x: linear_cross_entropy(*x, chunk_tokens=chunk_tokens), *inputs)
    for value, expected in zip(ours, loss_and_gradients(plain_loss, *inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_the_gradients_have_those_of_the_squares_of_log_z_and_the_loss_stays_the_cross_entropy():
    hidden, weight, targets = problem((40, 12, 50), ignored=0.3)
    loss, *gradients = loss_and_gradients(
        lambda *x: linear_cross_entropy(*x, chunk_tokens=7, z_loss=0.1), hidden, weight, targets
    )
    log_z = (hidden @ weight.T).logsumexp(-1)[targets != -100]
    with_z = plain_loss(hidden, weight, targets) + 0.1 * log_z.square().sum()
    torch.testing.assert_close(loss, plain_loss(hidden, weight, targets), rtol=1e-10, atol=0)
    for gradient, expected in zip(gradients, torch.autograd.grad(with_z, (hidden, weight)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


# fp32 differs in the order of its sums. In bf16 both round the logits alike, then round the gradient of the logits and
# the results again, to 8 bits each; in fp16 to 11.
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "loss_rtol", "grad_tolerance"),
    [
        (torch.float32, torch.float32, 1e-6, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1e-6, 2e-2),
        (torch.bfloat16, torch.float32, 1e-6, 2e-2),
        (torch.float16, torch.float32, 1e-6, 2e-3),
    ],
)
def test_loss_and_gradients_equal_the_plain_ones_in_training_precisions(dtype, weight_dtype, loss_rtol, grad_tolerance):
    inputs = problem((300, 64, 1000), dtype, weight_dtype)
    loss, *gradients = loss_and_gradients(lambda *x: linear_cross_entropy(*x, chunk_tokens=64), *inputs)
    expected_loss, *expected_gradients = loss_and_gradients(plain_loss, *inputs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=loss_rtol, atol=0)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == expected.dtype
        error = (gradient.double() - expected.double()).norm() / expected.double().norm()
        assert error < grad_tolerance


def test_the_weight_gradient_is_summed_in_fp32_over_chunks():
    hidden, weight, targets = problem((512, 8, 64), torch.bfloat16, torch.float32, ignored=0.0)
    exact = loss_and_gradients(plain_loss, hidden.double(), weight.bfloat16().double(), targets)[2]
    errors = [
        (
            loss_and_gradients(lambda *x, c=c: linear_cross_entropy(*x, chunk_tokens=c), hidden, weight, targets)[2]
            - exact
        )
        .norm()
        .item()
        for c in (512, 4)
    ]
    assert errors[1] < 1.5 * errors[0]  # 128 sums in bf16 would cost another order of magnitude


def test_gradients_pass_gradcheck():
    hidden, weight, targets = problem((7, 3, 5))
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, targets, chunk_tokens=3), (hidden, weight)
    )


def test_the_upstream_gradient_scales_both_gradients():
    hidden, weight, targets = problem((9, 4, 11))
    once = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    scaled = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets) * -2.5, (hidden, weight))
    for gradient, reference in zip(scaled, once, strict=True):
        torch.testing.assert_close(gradient, -2.5 * reference)


def test_a_tied_embedding_receives_the_gradients_of_both_its_uses():
    _, table, targets = problem((12, 4, 20), ignored=0.0)
    tokens = targets.roll(1)
    (ours,) = torch.autograd.grad(linear_cross_entropy(F.embedding(tokens, table), table, targets), table)
    (plain,) = torch.autograd.grad(plain_loss(F.embedding(tokens, table), table, targets), table)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_extreme_logits_give_a_finite_loss():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_tokens_give_no_loss():
    hidden, weight, targets = problem((0, 4, 11))
    loss, _, weight_gradient = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    assert loss.item() == 0
    assert not weight_gradient.any()


def peaked_problem(spread):
    """Hidden states and head, exact in fp16, whose logits have a standard deviation of ``spread``; and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator)
    weight = torch.randn(16_384, 32, generator=generator) * spread / 32**0.5
    targets = torch.randint(0, 16_384, (64,), generator=generator)
    return hidden.half().requires_grad_(), weight.half().float().requires_grad_(), targets


def median_relative_error(values, exact):
    return ((values - exact).norm(dim=-1) / exact.norm(dim=-1)).median()


# Logits of up to 4 * spread are rounded by half a unit in 2**11, which changes a probability by as much.
@pytest.mark.parametrize(("spread", "tolerance"), [(0.02, 5e-4), (1.0, 1e-3), (8.0, 1e-2)])
def test_in_fp16_no_target_is_too_improbable_to_have_a_gradient(spread, tolerance):
    hidden, weight, targets = peaked_problem(spread)
    gradients = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)[1:]
    exact = loss_and_gradients(plain_loss, hidden.double(), weight.double(), targets)[1:]
    for gradient, expected in zip(gradients, exact, strict=True):
        assert median_relative_error(gradient.double(), expected) < tolerance
        assert gradient.any(dim=-1).all()  # a softmax rounded to fp16 would lose a fifth of the targets


def test_many_tokens_with_one_target_stay_within_fp16():
    hidden = torch.full((512, 4), 200.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.long)), weight)
    torch.testing.assert_close(gradient[0], torch.full((4,), -7 / 8 * 512 * 200.0))  # more than 65504


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_upstream_gradient_is_not_rounded_to_half_precision(dtype):
    hidden, weight, targets = problem((300, 64, 100), dtype, torch.float32, ignored=0.0)
    loss = linear_cross_entropy(hidden, weight, targets)
    upstream = 1.3004  # 1.2969 in bf16, 1.3008 in fp16
    once, scaled = (torch.autograd.grad(loss * u, hidden, retain_graph=True)[0].double() for u in (1.0, upstream))
    assert (scaled.norm() / once.norm()).item() == pytest.approx(upstream, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_one_chunk_of_logits_or_the_weight(dtype):
    hidden, weight, targets = problem((256, 8, 500), dtype, torch.float32)
    with Operations() as ours:
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=32).backward()
    with Operations() as plain:
        plain_loss(hidden, weight, targets).backward()
    assert ours.largest == 32 * 500
    assert plain.largest == 256 * 500


def test_evaluation_and_frozen_heads_skip_the_gradients_nobody_asked_for():
    hidden, weight, targets = problem((8, 4, 11))

    def products(hidden, weight):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(hidden, weight, targets)
        return counter.get_total_flops() / (2 * 8 * 4 * 11)

    with torch.no_grad():
        assert products(hidden, weight) == 1
    assert products(hidden.detach(), weight.detach()) == 1
    assert products(hidden, weight.detach()) == 2
    assert products(hidden, weight) == 3


def test_a_frozen_head_passes_the_full_gradient_on():
    hidden, weight, targets = problem((8, 4, 11))
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), hidden)
    (expected,) = torch.autograd.grad(plain_loss(hidden, weight, targets), hidden)
    torch.testing.assert_close(gradient, expected)


def test_the_loss_and_its_backward_run_on_fake_tensors():
    with FakeTensorMode():
        hidden = torch.empty((8192, 4096), dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty((128_256, 4096), requires_grad=True)
        linear_cross_entropy(hidden, weight, torch.zeros(8192, dtype=torch.long)).backward()
        assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size", "dtype", "chunk_bytes"),
    [
        (128_256, 256, torch.float32, MIN_CHUNK_BYTES),
        (32_000, 4096, torch.bfloat16, 250 * MIB),  # the weight's own size
        (128_256, 16_384, torch.bfloat16, MAX_CHUNK_BYTES),
    ],
)
def test_the_default_chunk_is_as_large_as_the_weight_within_bounds(vocab_size, hidden_size, dtype, chunk_bytes):
    tokens = default_chunk_tokens(vocab_size, hidden_size, dtype)
    assert tokens * vocab_size * dtype.itemsize <= chunk_bytes < (tokens + 1) * vocab_size * dtype.itemsize
    assert MIN_CHUNK_BYTES < MAX_CHUNK_BYTES <= GIB


def weighted(losses_T):
    """A sum in which every token counts differently, so that its gradient is known only in the backward."""
    return losses_T @ torch.linspace(-1, 2, len(losses_T), dtype=losses_T.dtype)


def plain_losses(hidden, weight, targets):
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(2, 50)),
    chunk_tokens=st.integers(1, 50),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_losses_of_tokens_and_gradients_equal_the_plain_ones_for_any_shape_and_chunk(
    shape, chunk_tokens, ignored, seed
):
    inputs = problem(shape, ignored=ignored, seed=seed)
    torch.testing.assert_close(linear_cross_entropies(*inputs, chunk_tokens=chunk_tokens), plain_losses(*inputs))
    ours = loss_and_gradients(lambda *x: weighted(linear_cross_entropies(*x, chunk_tokens=chunk_tokens)), *inputs)
    theirs = loss_and_gradients(lambda *x: weighted(plain_losses(*x)), *inputs)
    for value, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "grad_tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_losses_of_tokens_equal_the_plain_ones_in_training_precisions(dtype, grad_tolerance):
    inputs = problem((300, 64, 1000), dtype, torch.float32)
    ours = loss_and_gradients(lambda *x: weighted(linear_cross_entropies(*x, chunk_tokens=64)), *inputs)
    loss, *gradients = loss_and_gradients(lambda *x: weighted(plain_losses(*x)), *inputs)
    torch.testing.assert_close(ours[0], loss, rtol=1e-5, atol=1e-3)
    for gradient, expected in zip(ours[1:], gradients, strict=True):
        assert gradient.dtype == expected.dtype
        assert float((gradient - expected).abs().max() / expected.abs().max()) < grad_tolerance


def test_an_adapter_of_the_head_has_the_gradients_of_its_losses_of_tokens():
    hidden, weight, targets = problem((20, 6, 30))
    generator = torch.Generator().manual_seed(5)
    narrow, rows = (
        torch.randn(size, 2, generator=generator, dtype=torch.float64).requires_grad_() for size in (20, 30)
    )
    adapter = LowRank(narrow, rows)
    ours = weighted(linear_cross_entropies(hidden, weight.detach(), targets, adapter=adapter, chunk_tokens=7))
    logits = hidden @ weight.detach().T + narrow @ rows.T
    theirs = weighted(F.cross_entropy(logits, targets, reduction="none"))
    factors = (hidden, narrow, rows)
    torch.testing.assert_close(torch.autograd.grad(ours, factors), torch.autograd.grad(theirs, factors))
