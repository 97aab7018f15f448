import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_ranks
from operations import Operations

from llama_core.parallel.vocabulary import vocab_parallel_embedding

VOCAB_SIZE, HIDDEN_SIZE, SHAPE = 96, 8, (3, 11)


def problem():
    """Return the whole table, tokens with many repeats, and an upstream gradient."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    tokens = torch.randint(0, VOCAB_SIZE, SHAPE, generator=generator)
    tokens[:, ::2] = VOCAB_SIZE - 1
    return table, tokens, torch.randn(*SHAPE, HIDDEN_SIZE, generator=generator)


def embeddings_and_gradient(embedding, weight, tokens, upstream):
    weight = weight.clone().requires_grad_()
    x = embedding(tokens, weight)
    x.backward(upstream)
    return x.detach().numpy(), weight.grad.numpy()


def part_of_the_problem():
    group = dist.group.WORLD
    table, tokens, upstream = problem()
    part = table.chunk(dist.get_world_size())[dist.get_rank()]
    return (lambda tokens, weight: vocab_parallel_embedding(tokens, weight, group)), part, tokens, upstream


def on_this_rank():
    return embeddings_and_gradient(*part_of_the_problem())


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_sum_over_ranks_is_exactly_the_lookup_in_the_whole_table(world_size):
    table, tokens, _ = problem()
    parts = [x for x, _ in run_ranks(world_size, on_this_rank)]
    np.testing.assert_array_equal(np.sum(parts, 0), F.embedding(tokens, table).numpy())


def test_every_token_is_looked_up_by_one_rank():
    parts = np.array([x for x, _ in run_ranks(4, on_this_rank)])
    assert (parts.any(-1).sum(0) == 1).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_ranks_gradient_is_its_rows_of_the_whole_tables_gradient_bit_for_bit(world_size):
    whole = embeddings_and_gradient(F.embedding, *problem())[1]
    gradients = [gradient for _, gradient in run_ranks(world_size, on_this_rank)]
    np.testing.assert_array_equal(np.concatenate(gradients), whole)


def on_several_threads():
    torch.set_num_threads(4)
    return [on_this_rank()[1] for _ in range(5)]


def test_the_gradient_does_not_depend_on_threads():
    for rank, gradients in enumerate(run_ranks(2, on_several_threads)):
        whole = embeddings_and_gradient(F.embedding, *problem())[1]
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, np.split(whole, 2)[rank])


def largest_tensor_on_this_rank():
    embedding, part, tokens, upstream = part_of_the_problem()
    with Operations() as noted:
        embeddings_and_gradient(embedding, part, tokens, upstream)
    return noted.largest


def test_no_rank_makes_a_tensor_as_large_as_the_whole_table():
    embeddings, part = np.prod(SHAPE) * HIDDEN_SIZE, VOCAB_SIZE // 2 * HIDDEN_SIZE
    assert embeddings < part
    assert run_ranks(2, largest_tensor_on_this_rank) == [part, part]
