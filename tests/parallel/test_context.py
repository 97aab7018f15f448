import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from tiers import nightly
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.config.models import model_spec
from llama_core.errors import PlanError
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Batch
from llama_core.models.block_attention import CUDA_BIASED, CUDA_FLASH, BlockMask, block_forward
from llama_core.models.llama import Llama, build_llama
from llama_core.parallel.context import (
    apply_context_parallel,
    ring_attention,
    ring_masks,
    sequence_index,
    shard_sequence,
)
from llama_core.parallel.recompute import apply_recompute
from llama_core.rehearsal.byte_counter import ByteCounter

SEQ_LEN = 32
DOCUMENTS = {
    "one text per row": None,
    "documents across the borders of chunks": [[5, 14, 13], [29, 3]],  # at 8, 16, 24 with cp=2; at every 4th with cp=4
    "documents of one token": [[1] * SEQ_LEN, [1, 15, 1, 14, 1]],
}
SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=3, head_dim=16, ffn_size=96, vocab_size=128)


def positions(documents):
    rows = DOCUMENTS[documents]
    return rows and torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def held(x, dim=-1):
    return None if x is None else x.index_select(dim, held_places(x.shape[dim]))


def held_places(seq_len):
    return sequence_index(seq_len, **place())


def place():
    return {"cp_rank": dist.get_rank(), "cp_size": dist.get_world_size()}


def random_heads(num_heads, dtype, seed, seq_len=SEQ_LEN):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, num_heads, seq_len, 8), generator=generator, dtype=torch.float64).to(dtype)


def on_ring(q, k, v, masks):
    return ring_attention(q, k, v, masks, group=dist.group.WORLD)


def attention_and_gradients(attention, mask, tensors, upstream):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attention(*leaves, mask)
    out.backward(upstream)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check_against_whole(documents, num_kv_heads, dtype, exact_dtype, rtol, atol):
    positions_BS = positions(documents)
    q, k, v, upstream = (
        random_heads(heads, dtype, seed) for seed, heads in enumerate((4, num_kv_heads, num_kv_heads, 4))
    )
    mask = None if positions_BS is None else document_mask(positions_BS, exact_dtype)
    exact = [x.to(exact_dtype) for x in (q, k, v)]
    whole = attention_and_gradients(attend, mask, exact, upstream.to(exact_dtype))

    masks = ring_masks(held(positions_BS), held_places(SEQ_LEN), dtype, **place())
    parts = [held(x, 2) for x in (q, k, v)]
    of_ring = attention_and_gradients(on_ring, masks, parts, held(upstream, 2))
    for name, ring, reference in zip(("output", "q", "k", "v"), of_ring, whole, strict=True):
        where = f"{name} with {documents} and {num_kv_heads} key/value heads"
        assert ring.dtype == dtype, where
        expected = held(reference, 2)
        torch.testing.assert_close(
            ring.to(exact_dtype), expected, rtol=rtol, atol=atol, msg=lambda text, where=where: f"{where}: {text}"
        )


def check_all_against_whole(*dtypes_and_tolerances):
    for documents, num_kv_heads in itertools.product(DOCUMENTS, (4, 2, 1)):
        check_against_whole(documents, num_kv_heads, *dtypes_and_tolerances)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_output_and_gradients_match_attention_to_the_whole_sequence(cp_size):
    run_ranks(cp_size, check_all_against_whole, torch.float64, torch.float64, 1e-10, 1e-10)


def test_fp32_differs_from_fp64_by_rounding_alone():
    # sums of about 100 terms of order one, each rounded by 2**-24
    run_ranks(4, check_all_against_whole, torch.float32, torch.float64, 0, 4e-6)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_is_near_fp32(dtype, bits):
    # the kernel rounds its blocks and the products inside them: a few units in the last place
    run_ranks(4, check_all_against_whole, dtype, torch.float32, 4 * 2**-bits, 8 * 2**-bits)


@given(cp_size=st.integers(1, 16), chunk=st.integers(1, 8))
def test_every_token_is_held_once_and_all_ranks_compute_equally_many_pairs(cp_size, chunk):
    seq_len = 2 * cp_size * chunk
    places = torch.stack([sequence_index(seq_len, rank, cp_size) for rank in range(cp_size)])
    assert torch.equal(places.flatten().sort().values, torch.arange(seq_len))
    assert torch.equal(places.sort().values, places)
    keys_seen = (places + 1).sum(1)
    assert (keys_seen == keys_seen[0]).all()


@given(cp_size=st.integers(1, 8), chunk=st.integers(1, 4))
def test_a_shard_holds_the_columns_of_its_sequence_index(cp_size, chunk):
    x = torch.arange(3 * 2 * cp_size * chunk).view(3, -1)
    for rank in range(cp_size):
        assert torch.equal(shard_sequence(x, rank, cp_size), x[:, sequence_index(x.shape[1], rank, cp_size)])


@pytest.mark.parametrize(("seq_len", "legal"), [(30, "24 or 32"), (5, "8")])
def test_a_sequence_that_does_not_divide_is_refused_with_the_nearest_legal_lengths(seq_len, legal):
    with pytest.raises(PlanError, match=rf"{seq_len} tokens .* 8 equal chunks \(cp=4\); use {legal}$"):
        shard_sequence(torch.zeros(2, seq_len), 0, 4)


def computed_pairs():
    """Return for every step of the ring the positions of its queries and keys, and whether it takes only a triangle."""
    rank, size = dist.get_rank(), dist.get_world_size()
    masks = ring_masks(None, held_places(SEQ_LEN), torch.float32, **place())
    sources = [sequence_index(SEQ_LEN, (rank - step) % size, size) for step in range(size)]
    own = sources[0]
    return [
        (own[mask.queries].tolist(), source[mask.keys].tolist(), mask.causal)
        for mask, source in zip(masks, sources, strict=True)
    ]


def test_the_ring_computes_every_visible_pair_once_and_no_other():
    computed = torch.zeros(SEQ_LEN, SEQ_LEN)
    for steps in run_ranks(4, computed_pairs):
        for queries, keys, causal in steps:
            pairs = torch.ones(len(queries), len(keys))
            computed[torch.tensor(queries)[:, None], keys] += [pairs, pairs.tril()][causal]
    assert torch.equal(computed, torch.ones(SEQ_LEN, SEQ_LEN).tril())


def test_every_rank_has_the_same_work_at_every_step_of_the_ring():
    chunk = SEQ_LEN // 8
    work = [
        [len(queries) * len(keys) / (1 + causal) for queries, keys, causal in steps]
        for steps in run_ranks(4, computed_pairs)
    ]
    assert work == [[2 * chunk**2] * 4] * 4


def test_a_query_that_sees_no_key_of_a_block_has_no_output_and_no_weight():
    visible = torch.tensor([[[True, False], [False, False]]])
    mask = BlockMask.of_visible(slice(0, 2), slice(0, 2), visible, torch.float32)
    kv = torch.randn(2, 1, 1, 2, 8)
    out, lse = block_forward(torch.randn(1, 1, 2, 8), kv, mask=mask)
    torch.testing.assert_close(out[0, 0], torch.stack((kv[1, 0, 0, 0], torch.zeros(8))))
    assert lse[0, 0, 0].isfinite()
    assert lse[0, 0, 1] == -math.inf


def check_layouts_of_the_upstream_gradient():
    parts = [held(random_heads(4, torch.float64, seed), 2) for seed in range(3)]
    masks = ring_masks(None, held_places(SEQ_LEN), torch.float64, **place())
    dense = torch.ones_like(parts[0])
    expected = attention_and_gradients(on_ring, masks, parts, dense)
    for upstream in (dense[:1, :1, :1, :1].expand_as(dense), dense.mT.contiguous().mT):
        torch.testing.assert_close(attention_and_gradients(on_ring, masks, parts, upstream), expected, rtol=0, atol=0)


def test_the_upstream_gradient_may_have_any_layout():
    run_ranks(2, check_layouts_of_the_upstream_gradient)


class Sent(TorchDispatchMode):
    """Counts the elements that this rank sends to others, by dtype."""

    def __init__(self):
        super().__init__()
        self.elements = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            self.elements.update({tensor.dtype: tensor.numel() for tensor in args[0]})
        return func(*args, **(kwargs or {}))


def sent_elements(num_kv_heads, dtype):
    masks = ring_masks(None, held_places(SEQ_LEN), dtype, **place())
    q, k, v = (held(random_heads(heads, dtype, 0), 2).requires_grad_() for heads in (4, num_kv_heads, num_kv_heads))
    with Sent() as forward:
        out = on_ring(q, k, v, masks)
    with Sent() as backward:
        out.sum().backward()
    return forward.elements, backward.elements, k.shape[0] * SEQ_LEN * num_kv_heads * k.shape[3]


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_a_rank_sends_the_kv_heads_of_every_block_but_one_and_twice_that_in_the_backward(cp_size, num_kv_heads):
    for forward, backward, whole_keys in run_ranks(cp_size, sent_elements, num_kv_heads, torch.float32):
        assert forward.total() == 2 * whole_keys * (cp_size - 1) / cp_size
        assert backward.total() == 2 * forward.total()


def test_half_precision_gradients_are_summed_in_fp32_around_the_ring():
    for forward, backward, _ in run_ranks(2, sent_elements, 1, torch.bfloat16):
        assert forward.keys() == {torch.bfloat16}
        assert backward == forward + Counter({torch.float32: forward.total()})


def bytes_of_a_rank(num_tokens):
    """Return the bytes that a rank of ``num_tokens`` saves for its backward, then its peaks in forward and backward."""
    group, saved = dist.group.WORLD, {}
    seq_len = num_tokens * dist.get_world_size()
    masks = ring_masks(None, held_places(seq_len), torch.float32, **place())
    q, k, v = (random_heads(heads, torch.float32, 0, num_tokens).requires_grad_() for heads in (4, 2, 2))
    upstream = torch.ones_like(q)

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with ByteCounter() as counter, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = ring_attention(q, k, v, masks, group=group)
        counter.phase = "backward"
        out.backward(upstream)
    return sum(saved.values()), counter.peaks["forward"].num_bytes, counter.peaks["backward"].num_bytes


def test_a_rank_saves_only_its_own_tokens_for_the_backward():
    num_tokens = 64
    per_token = 2 * (2 * 4 * 8 + 2 * 2 * 8 + 4) * 4  # two rows; queries and output, keys and values, log-sum-exp
    for saved, _, _ in run_ranks(4, bytes_of_a_rank, num_tokens):
        assert saved == num_tokens * per_token


def test_the_peak_depends_on_the_tokens_of_a_rank_and_not_on_the_length_of_the_ring():
    most_of_three, most_of_six = (
        [max(column) for column in zip(*run_ranks(cp_size, bytes_of_a_rank, 64), strict=True)] for cp_size in (3, 6)
    )
    assert most_of_six == most_of_three


TOKENS = torch.randint(0, SPEC.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(SEQ_LEN) % 5 == 0, -100)


def build(layers=None):
    torch.set_default_dtype(torch.float64)
    if layers is None:
        return build_llama(SPEC, device="cpu", compute_dtype=torch.float64, seed=0)
    return Llama(SPEC, compute_dtype=torch.float64, layers=layers)


def loss_and_gradients(model, *batch):
    loss = model(batch[0], Batch(*batch))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def check_sums_over_ranks(documents):
    positions_BS = positions(documents)
    whole = loss_and_gradients(build(), TOKENS, TARGETS, positions_BS)
    for recompute in ("none", "selective", "full"):
        model = build()
        apply_context_parallel(model, dist.group.WORLD)
        apply_recompute(model, recompute)
        shares = loss_and_gradients(model, held(TOKENS), held(TARGETS), held(positions_BS))
        for share in shares:
            dist.all_reduce(share)
        torch.testing.assert_close(shares, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cp_size", [2, nightly(4)])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_losses_and_gradients_of_the_ranks_sum_to_one_process_in_every_recompute_mode(cp_size, documents):
    run_ranks(cp_size, check_sums_over_ranks, documents)


def losses_of_parts():
    whole, first, last = build(), build(layers=[0]), build(layers=[1, 2])
    apply_context_parallel(whole, dist.group.WORLD)
    batch = Batch(*(held(x) for x in (TOKENS, TARGETS, positions("documents across the borders of chunks"))))
    expected = whole(batch.tokens_BS, batch)
    for part in (first, last):
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
        apply_context_parallel(part, dist.group.WORLD)
    stream = first(batch.tokens_BS, batch, layers=range(1))
    return [last(stream, batch, layers=range(1, 3)).item(), expected.item()]


def test_the_parts_of_a_model_in_turn_give_the_loss_of_the_whole():
    for parts, whole in run_ranks(2, losses_of_parts):
        assert parts == pytest.approx(whole, rel=1e-12)


def check_compiled():
    plain, compiled = build(), build()
    apply_context_parallel(plain, dist.group.WORLD)
    apply_context_parallel(compiled, dist.group.WORLD)
    for block in compiled.layers.values():
        block.compile(backend="aot_eager")
    batch = (held(TOKENS), held(TARGETS), None)
    expected = loss_and_gradients(plain, *batch)
    torch.testing.assert_close(loss_and_gradients(compiled, *batch), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.nightly
def test_compiled_blocks_have_the_same_loss_and_gradients():
    run_ranks(2, check_compiled)


def shapes_on_fake_tensors(documents):
    group = dist.new_group(backend="fake")
    model = Llama(SPEC, compute_dtype=torch.bfloat16)
    apply_context_parallel(model, group)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = Batch(held(TOKENS), held(TARGETS), held(positions(documents)))
        model(batch.tokens_BS, batch).backward()
    return [parameter.grad.shape == parameter.shape for parameter in model.parameters()]


@pytest.mark.parametrize("documents", ["one text per row", "documents of one token"])
def test_a_step_runs_on_fake_tensors_without_other_ranks(documents):
    for fits in run_ranks(2, shapes_on_fake_tensors, documents):
        assert all(fits)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CUDA_FLASH, torch.bfloat16), (CUDA_BIASED, torch.bfloat16), (CUDA_BIASED, torch.float32)]
)
def test_cuda_kernels_are_called_with_shapes_they_accept(kernel, dtype, num_kv_heads):
    """The meta device checks signatures and shapes, not numbers."""
    with torch.device("meta"):
        q, k = torch.empty(2, 4, 40, 64, dtype=dtype), torch.empty(2, num_kv_heads, 24, 64, dtype=dtype)
        mask = BlockMask.of_visible(slice(0, 40), slice(0, 24), torch.empty(2, 40, 24, dtype=torch.bool), dtype)
        out, lse = kernel.forward(q, k, k, mask)
        grads = kernel.backward(out, q, k, k, out, lse, mask)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
