"""Attention to packed documents of divided rows, with a dense reference in place of CUDA's kernel."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from document_kernel import DENSE
from hypothesis import given
from hypothesis import strategies as st
from operations import Operations
from tiers import nightly
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.config.models import model_spec
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Batch, Documents
from llama_core.models.block_attention import VARLEN
from llama_core.models.llama import Llama, build_llama
from llama_core.parallel import document_chunks
from llama_core.parallel import gathered_attention as gathered
from llama_core.parallel.context import apply_context_parallel, shard_batch, shard_sequence
from llama_core.parallel.document_chunks import DocumentChunks
from llama_core.parallel.recompute import apply_recompute
from llama_core.rehearsal.byte_counter import replaced

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=3, head_dim=16, ffn_size=96, vocab_size=128)
SEQ_LEN = 32
ROWS = {  # documents across the borders of chunks, at every 8th token with cp=2 and every 4th with cp=4
    "long": [[5, 14, 13], [29, 3]],
    "short": [[1] * SEQ_LEN, [1, 15, 1, 14, 1]],
    "whole": [[SEQ_LEN], [16, 16]],
}


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@st.composite
def divided_positions(draw):
    """Draw positions of rows cut into documents anywhere, and a rank among those that divide them."""
    cp_size = draw(st.sampled_from([2, 4]))
    row_length = 2 * cp_size * draw(st.integers(1, 3))
    starts = st.lists(st.booleans(), min_size=row_length, max_size=row_length)
    rows = draw(st.lists(starts, min_size=1, max_size=3))
    index = torch.arange(row_length)
    positions_BS = index - (torch.tensor(rows).long() * index).cummax(1).values
    return positions_BS, draw(st.integers(0, cp_size - 1)), cp_size


def places_held(positions_BS, cp_rank, cp_size):
    """Return the places of a rank's tokens in each row, [B, S]."""
    chunks = DocumentChunks(Documents.of_positions(positions_BS).starts, *positions_BS.shape, 2 * cp_size)
    return shard_sequence(chunks.order, cp_rank, cp_size)


def keys_laid_out(positions_BS, key_places, cp_rank, cp_size):
    """Return row and place of every key in the order in which a rank lays them out."""
    chunks = DocumentChunks(Documents.of_positions(positions_BS).starts, *positions_BS.shape, 2 * cp_size)
    chunks_BnC = chunks.order.unflatten(1, (2 * cp_size, -1))
    seen = [chunk for last in (cp_rank, 2 * cp_size - 1 - cp_rank) for chunk in range(last + 1)]
    laid_out = {}
    for row, number in itertools.product(range(len(positions_BS)), range(len(seen))):
        for place, key in zip(key_places[row, number].tolist(), chunks_BnC[row, seen[number]].tolist(), strict=True):
            laid_out[place] = (row, key)
    return [laid_out[place] for place in range(key_places.numel())]


@given(divided_positions(), st.integers(1, 4))
def test_the_ranges_of_a_rank_agree_with_the_mask(case, shortest_piece):
    with replaced(document_chunks, "SHORTEST_PIECE", shortest_piece):
        check_ranges(*case)


def check_ranges(positions_BS, cp_rank, cp_size):
    place = {"cp_rank": cp_rank, "cp_size": cp_size}
    batch, seq_len = positions_BS.shape
    own_BS = places_held(positions_BS, **place)
    documents = Documents.of_positions(positions_BS)
    queries, keys, key_places, most, _ = gathered.held_documents(documents, *own_BS.shape, **place)
    seen = keys_laid_out(positions_BS, key_places, **place)
    num_own = own_BS.shape[1]
    assert (queries.dtype, keys.dtype, most) == (torch.int32, torch.int32, seq_len)
    assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, own_BS.numel(), 0, len(seen))
    assert keys.diff().max() <= most
    assert queries.diff().max() <= min(most, num_own // 2)
    visible = torch.zeros(batch, num_own, batch, seq_len, dtype=torch.bool)
    for (q, q_end), (k, k_end) in zip(*(itertools.pairwise(x.tolist()) for x in (queries, keys)), strict=True):
        assert 0 <= q_end - q <= k_end - k
        for query in range(q, q_end):  # the last query sees the last key
            for row, key in seen[k : k_end - (q_end - 1 - query)]:
                visible[query // num_own, query % num_own, row, key] = True
    mask_BSS = document_mask(positions_BS, torch.float32)[:, 0] == 0
    for row in range(batch):
        assert torch.equal(visible[row, :, row], mask_BSS[row, own_BS[row]])
        visible[row, :, row] = False
    assert not visible.any()


def heads(num_heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, SEQ_LEN, num_heads, 8), generator=generator, dtype=torch.float64).transpose(1, 2)


def with_gradients(attention, tensors, upstream):
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    out = attention(*leaves)
    out.backward(upstream)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def part_of(x_BNSH, own_BS):
    return x_BNSH.gather(2, own_BS[:, None, :, None].expand(-1, x_BNSH.shape[1], -1, x_BNSH.shape[3]))


def check_against_whole(rows, num_kv_heads, dtype, tolerance, window=0):
    positions_BS, place = positions_of(ROWS[rows]), {"cp_rank": dist.get_rank(), "cp_size": dist.get_world_size()}
    own_BS = places_held(positions_BS, **place)
    *tensors, upstream = (heads(count, seed) for seed, count in enumerate((4, num_kv_heads, num_kv_heads, 4)))
    mask = document_mask(positions_BS, torch.float64, window)
    whole = with_gradients(lambda q, k, v: attend(q, k, v, mask), tensors, upstream)
    documents = Documents.of_positions(positions_BS)._replace(window=window)
    documents = gathered.held_documents(documents, *own_BS.shape, **place)
    saved = []

    def attention(q, k, v):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
            return gathered.gathered_attention(q, k, v, documents, group=dist.group.WORLD)

    part = with_gradients(
        attention, [part_of(x, own_BS).to(dtype) for x in tensors], part_of(upstream, own_BS).to(dtype)
    )
    for name, ours, expected in zip(("output", "q", "k", "v"), part, whole, strict=True):
        assert ours.dtype == dtype, name
        torch.testing.assert_close(ours.double(), part_of(expected, own_BS), rtol=tolerance, atol=tolerance)
    # queries and output, keys and values, log-sum-exp
    numbers = own_BS.numel() * (2 * 4 * 8 + 2 * num_kv_heads * 8 + 4)
    assert sum(saved) == numbers + sum(tensor.numel() for tensor in documents[:3])


TOKENS = torch.randint(0, SPEC.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(SEQ_LEN) % 5 == 0, -100)


def loss_and_gradients(model, *batch):
    loss = model(batch[0], Batch(*batch))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def check_model(recompute, *, compiled):
    positions_BS = positions_of(ROWS["long"])
    torch.set_default_dtype(torch.float64)
    whole, model = (build_llama(SPEC, device="cpu", compute_dtype=torch.float64, seed=0) for _ in range(2))
    expected = loss_and_gradients(whole, TOKENS, TARGETS, positions_BS)
    apply_context_parallel(model, dist.group.WORLD)
    apply_recompute(model, recompute)
    for block in model.layers.values() if compiled else ():
        block.compile(backend="aot_eager")
    own = shard_batch(
        Batch(TOKENS, TARGETS, positions_BS).with_documents(), cp_rank=dist.get_rank(), cp_size=dist.get_world_size()
    )
    shares = loss_and_gradients(model, own.tokens_BS, own.targets_BS, own.positions_BS, own.documents)
    for share in shares:
        dist.all_reduce(share)
    torch.testing.assert_close(shares, expected, rtol=1e-10, atol=1e-12)


def check_ranks(recompute, compiled):
    gathered.VARLEN = DENSE
    for rows, num_kv_heads in itertools.product(ROWS, (4, 2, 1)):
        for document_chunks.SHORTEST_PIECE in (SEQ_LEN, 2, 1):
            check_against_whole(rows, num_kv_heads, torch.float64, 1e-10)
            check_against_whole(rows, num_kv_heads, torch.float64, 1e-10, window=5)
    check_against_whole("long", 2, torch.bfloat16, 2**-5)  # a few units of 2**-8 in sums of order one
    check_model(recompute, compiled=compiled)


@pytest.mark.parametrize(
    ("cp_size", "recompute", "compiled"),
    [
        (2, "none", False),
        nightly(4, "selective", False),
        nightly(2, "full", False),
        nightly(2, "selective", True),
        nightly(2, "full", True),
    ],
)
def test_ranks_together_have_the_outputs_losses_and_gradients_of_one_process(cp_size, recompute, compiled):
    run_ranks(cp_size, check_ranks, recompute, compiled)


@pytest.fixture
def one_of_two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_the_output(one_of_two_ranks, recompute, times):
    with torch.device("meta"):
        model = Llama(SPEC, compute_dtype=torch.bfloat16)
    apply_context_parallel(model, one_of_two_ranks)
    apply_recompute(model, recompute)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        documents = Documents(torch.zeros(5, dtype=torch.int32), 40)
        with Operations() as operations:
            model(tokens, Batch(tokens, tokens, tokens, documents)).backward()
    assert operations.called.count(gathered.GATHERED_ATTENTION) == times * SPEC.num_layers
    assert operations.called.count(gathered.GATHERED_ATTENTION_BACKWARD) == SPEC.num_layers
    assert not any("ring_attention" in str(func) for func in operations.called)


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_the_cuda_kernel_is_called_with_arguments_it_accepts(num_kv_heads, window):
    """The meta device checks signatures and shapes, not numbers."""
    with torch.device("meta"):
        q = torch.empty(24, 4, 64, dtype=torch.bfloat16)
        k, v = torch.empty(2, 40, num_kv_heads, 64, dtype=torch.bfloat16)
        bounds = (*torch.empty(2, 5, dtype=torch.int32), 12, 20, window)
    out, lse = VARLEN.forward(q, k, v, *bounds)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 24), torch.float32)
    grads = VARLEN.backward(torch.empty_like(out), q, k, v, out, lse, *bounds)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
