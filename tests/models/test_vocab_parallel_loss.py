import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from operations import Operations
from tiers import nightly
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.models.loss import IGNORE_INDEX, linear_cross_entropy

TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 61, 6, 96
PLACES = {  # where the targets lie in the vocabulary, as fractions of it
    "anywhere": (0.0, 1.0),
    "in the first rank's part": (0.0, 0.25),
    "in the last rank's part": (0.75, 1.0),
}


Z_LOSS = 0.05


def problem(dtype, place="anywhere"):
    """Hidden states, the whole head in fp32 or wider, and targets, every fifth of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    low, high = (int(bound * VOCAB_SIZE) for bound in PLACES[place])
    targets = torch.randint(low, high, (TOKENS,), generator=generator)
    targets[::5] = IGNORE_INDEX
    weight_dtype = torch.promote_types(dtype, torch.float32)
    # rounded to the narrower dtype, so that no cast inside the loss changes the problem
    return hidden.to(dtype), weight.to(dtype).to(weight_dtype), targets


def loss_and_gradients(hidden, weight, targets, **options):
    """Return the loss and both gradients as fp64 arrays, which pass between processes."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    (loss / TOKENS).backward()
    return [tensor.detach().double().numpy() for tensor in (loss, hidden.grad, weight.grad)]


def part_of(weight, group):
    return weight.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def on_this_rank(hidden, weight, targets, group=None, **options):
    group = group or dist.group.WORLD
    return loss_and_gradients(hidden, part_of(weight, group), targets, vocab_group=group, **options)


def solve(*problem_args):
    return on_this_rank(*problem(*problem_args), chunk_tokens=17, z_loss=Z_LOSS)


def combine(results):
    """Return every rank's loss, the summed gradient of the hidden states and the joined gradient of the head."""
    losses, hidden_gradients, weight_gradients = zip(*results, strict=True)
    return np.array(losses), np.sum(hidden_gradients, 0), np.concatenate(weight_gradients)


def assert_same(results, expected, tolerance):
    for value, reference in zip(combine(results), expected, strict=True):
        assert np.linalg.norm(value - reference) <= tolerance * np.linalg.norm(reference)


# The order of sums differs; in half precision each rank also rounds its gradients, to 8 or 11 bits.
PRECISIONS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("world_size", [2, nightly(4)])
def test_ranks_that_divide_the_vocabulary_match_one_rank(world_size, dtype):
    alone = loss_and_gradients(*problem(dtype), chunk_tokens=17, z_loss=Z_LOSS)
    assert_same(run_ranks(world_size, solve, dtype), alone, PRECISIONS[dtype])


@pytest.mark.parametrize("place", PLACES)
def test_it_does_not_matter_which_ranks_hold_the_targets(place):
    alone = loss_and_gradients(*problem(torch.float64, place), z_loss=Z_LOSS)
    assert_same(run_ranks(4, solve, torch.float64, place), alone, 1e-12)


def test_all_ranks_get_the_same_loss_bit_for_bit():
    losses = combine(run_ranks(4, solve, torch.float32))[0]
    assert np.unique(losses).size == 1


def with_every_target_ignored():
    hidden, weight, targets = problem(torch.float64)
    return on_this_rank(hidden, weight, torch.full_like(targets, IGNORE_INDEX), chunk_tokens=17)


def test_only_ignored_targets_give_zeros_on_every_rank():
    for result in run_ranks(2, with_every_target_ignored):
        assert not any(value.any() for value in result)


def with_extreme_logits():
    hidden = torch.tensor([[1e4], [-1e4]])  # each rank has the largest logit of one token
    return on_this_rank(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0]))


def test_an_extreme_logit_on_another_rank_gives_a_finite_loss():
    losses, *gradients = combine(run_ranks(2, with_extreme_logits))
    assert losses == pytest.approx(4e4)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def with_a_target_beyond_the_vocabulary():
    hidden, weight, targets = problem(torch.float32)
    targets[7] = VOCAB_SIZE
    return on_this_rank(hidden, weight, targets)


def test_a_target_beyond_the_vocabulary_gives_an_infinite_loss():
    assert (combine(run_ranks(2, with_a_target_beyond_the_vocabulary))[0] == math.inf).all()


def in_groups_of_every_second_rank():
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    return on_this_rank(*problem(torch.float64), group=groups[dist.get_rank() % 2])


def test_parts_follow_the_rank_in_the_group():
    alone = loss_and_gradients(*problem(torch.float64))
    results = run_ranks(4, in_groups_of_every_second_rank)
    assert_same(results[0::2], alone, 1e-12)
    assert_same(results[1::2], alone, 1e-12)


def without_gradients():
    hidden, weight, targets = problem(torch.float64)
    weight = part_of(weight, dist.group.WORLD)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden.requires_grad_(), weight, targets, vocab_group=dist.group.WORLD)
    frozen = linear_cross_entropy(hidden, weight, targets, vocab_group=dist.group.WORLD)
    frozen.backward()
    return evaluated.item(), frozen.item(), hidden.grad.numpy()


def test_evaluation_and_frozen_heads_work_on_a_part_too():
    loss, hidden_gradient, _ = loss_and_gradients(*problem(torch.float64))
    evaluated, frozen, gradients = zip(*run_ranks(2, without_gradients), strict=True)
    assert [*evaluated, *frozen] == pytest.approx([float(loss)] * 4, rel=1e-12)
    np.testing.assert_allclose(np.sum(gradients, 0), hidden_gradient * TOKENS, rtol=1e-10)


def operations_on_this_rank():
    inputs = problem(torch.float32)
    with Operations() as noted:
        on_this_rank(*inputs, chunk_tokens=20)
    return noted.largest, noted.received


def test_a_rank_holds_one_chunk_of_logits_and_receives_three_numbers_per_token():
    for largest, received in run_ranks(4, operations_on_this_rank):
        assert largest == 16 * VOCAB_SIZE // 4  # 61 tokens in chunks of at most 20 are four of at most 16
        assert received == [3 * 4 * num_tokens for num_tokens in (16, 16, 16, 13)]


def test_a_group_of_one_rank_sends_nothing():
    ((_, received),) = run_ranks(1, operations_on_this_rank)
    assert not received


def on_fake_tensors():
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    with FakeTensorMode():
        hidden = torch.empty((8192, 4096), dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty((128_256 // 8, 4096), requires_grad=True)
        targets = torch.zeros(8192, dtype=torch.long)
        linear_cross_entropy(hidden, weight, targets, vocab_group=dist.group.WORLD).backward()
        return tuple(hidden.grad.shape), tuple(weight.grad.shape)


def test_one_rank_of_many_runs_on_fake_tensors():
    assert run_ranks(1, on_fake_tensors) == [((8192, 4096), (16_032, 4096))]
