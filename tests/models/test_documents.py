"""Document boundaries for the kernel agree with the document mask."""

from dataclasses import replace

import pytest
import torch
from document_kernel import attention_per_document
from hypothesis import given
from hypothesis import strategies as st
from operations import Operations
from torch._subclasses.fake_tensor import FakeTensorMode

from llama_core import attention
from llama_core.config.models import model_spec
from llama_core.evaluation.inference.row_losses import losses_of_rows
from llama_core.models import attention as block_attention
from llama_core.models import llama
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Batch, Documents
from llama_core.models.llama import Llama, initialize_weights
from llama_core.parallel.recompute import apply_recompute
from llama_core.rehearsal.byte_counter import ByteCounter

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=4, head_dim=16, ffn_size=96, vocab_size=128)


@st.composite
def packed_positions(draw):
    """Draw positions of rows of equal length, cut into documents anywhere; a row may begin inside one."""
    num_rows, row_length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = []
    for _ in range(num_rows):
        starts = draw(st.lists(st.booleans(), min_size=row_length, max_size=row_length))
        position, row = draw(st.sampled_from([0, 0, 5])), []
        for is_start in starts:
            position = 0 if is_start else position
            row.append(position)
            position += 1
        rows.append(row)
    return torch.tensor(rows)


@given(packed_positions())
def test_document_boundaries_agree_with_the_mask(positions_BS):
    documents = Documents.of_positions(positions_BS)
    lengths = documents.starts.diff().tolist()
    assert documents.starts.dtype == torch.int32
    assert documents.row_length == positions_BS.shape[1]
    assert (min(lengths) > 0, sum(lengths)) == (True, positions_BS.numel())
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row_T = torch.arange(positions_BS.numel()) // positions_BS.shape[1]
    visible_TT = (document_T[:, None] == document_T) & torch.ones(len(document_T), len(document_T)).tril().bool()
    assert not (visible_TT & (row_T[:, None] != row_T)).any()
    mask_BSS = document_mask(positions_BS, torch.float32)[:, 0]
    assert torch.equal(mask_BSS == 0, torch.stack([*_blocks(visible_TT, positions_BS.shape[1])]))


def _blocks(visible_TT, size):
    return (visible_TT[at : at + size, at : at + size] for at in range(0, len(visible_TT), size))


@given(packed_positions())
def test_attention_to_documents_matches_attention_under_the_mask(positions_BS):
    """A stand-in follows the kernel's documentation."""
    num_rows, row_length = positions_BS.shape
    q, k, v = (torch.randn(num_rows, row_length, heads, 8, dtype=torch.float64).transpose(1, 2) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "varlen_attn", attention_per_document)
        out = attend(q, k, v, Documents.of_positions(positions_BS))
    torch.testing.assert_close(out, attend(q, k, v, document_mask(positions_BS, torch.float64)))


def test_a_batch_carries_the_documents_of_its_own_rows():
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]])
    whole = Batch(positions, positions, positions)
    first, last = (piece.with_documents() for piece in whole.split(2))
    assert first.documents.starts.tolist() == [0, 3, 4, 5, 8]
    assert last.documents.starts.tolist() == [0, 2, 4]
    assert first.documents.row_length == last.documents.row_length == 4
    assert first.to("meta").documents.starts.device.type == "meta"
    assert Batch(positions, positions, None).with_documents().documents is None


def test_a_batch_carries_the_numbers_of_its_own_tokens():
    tokens, weights = torch.arange(12).view(3, 4), torch.rand(3, 4)
    whole = Batch(tokens, tokens, None, per_token={"weight": weights})
    first, last = whole.split(2)
    assert torch.equal(torch.cat((first.per_token["weight"], last.per_token["weight"])), weights)
    assert whole.with_documents().to("meta").per_token["weight"].device.type == "meta"
    assert any(tensor is weights for tensor in whole.tensors())


def test_rows_that_are_one_document_each_can_do_without_positions():
    """Attention is then causal over whole rows, for which CUDA has faster kernels."""
    whole = torch.arange(4).expand(2, -1)
    broken, begun = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), whole + 5
    taken = [Batch(p, p, p).with_documents(whole_rows_apart=True) for p in (whole, broken, begun)]
    assert [batch.positions_BS is None for batch in taken] == [True, False, False]
    assert [batch.documents is None for batch in taken] == [True, False, False]
    assert Batch(whole, whole, whole).with_documents().documents.starts.tolist() == [0, 4, 8]


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (3, 0), (0, 4), (2, 3)])
def test_losses_outside_training_hold_no_mask_where_a_kernel_takes_documents(window, chunk, monkeypatch):
    spec = replace(SPEC, sliding_window=window, attention_chunk=chunk)
    model = Llama(spec, compute_dtype=torch.float64).double()
    initialize_weights(model, 0)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 0, 0, 1, 2, 3, 4]])
    tokens = torch.randint(0, spec.vocab_size, positions.shape)
    batches = [
        Batch(tokens, tokens, positions),
        *Batch(tokens, tokens, positions).split(1),
        Batch(tokens, tokens, None),
    ]
    masked = losses_of_rows(model, batches)
    everywhere = replace(attention.VARLEN, device="", dtypes=frozenset())
    kernels = tuple(everywhere if kernel is attention.VARLEN else kernel for kernel in attention.KERNELS)
    monkeypatch.setattr(attention, "KERNELS", kernels)
    monkeypatch.setattr(block_attention, "varlen_attn", attention_per_document)
    monkeypatch.setattr(llama, "document_mask", None)
    losses = losses_of_rows(model, batches)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(masked))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_the_kernels_output(recompute, times):
    with torch.device("meta"):
        model = Llama(SPEC, compute_dtype=torch.bfloat16)
    apply_recompute(model, recompute)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        documents = Documents(torch.zeros(5, dtype=torch.int32), 40)
        with Operations() as operations:
            model(tokens, Batch(tokens, tokens, tokens, documents)).backward()
    assert operations.called.count(torch.ops.torch_attn._varlen_attn.default) == times * SPEC.num_layers
    assert operations.called.count(torch.ops.torch_attn._varlen_attn_backward.default) == SPEC.num_layers
    assert not any("repeat_interleave" in str(func) for func in operations.called)


def flops_counted(documents):
    model = Llama(SPEC, compute_dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), ByteCounter() as counter:
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        model(tokens, Batch(tokens, tokens, tokens, documents)).backward()
    return counter.flops


@pytest.mark.parametrize("number", [2, 7])
def test_flops_depend_on_the_length_of_a_row_and_not_on_the_number_of_documents(number):
    """Count each token against a whole row, not each document at full length."""
    masked, kernel = flops_counted(None), flops_counted(Documents(torch.zeros(number + 1, dtype=torch.int32), 64))
    shorter = flops_counted(Documents(torch.zeros(number + 1, dtype=torch.int32), 32))
    assert kernel == masked
    assert kernel - shorter == SPEC.num_layers * (4 + 10) * 2 * 64 * SPEC.q_size * 32


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("begin", [0, 5, 6])
@pytest.mark.parametrize("lengths", [[(9,)], [(4, 5), (1, 8)], [(3, 3, 3), (9,), (8, 1)]])
def test_chunks_of_documents_are_documents_where_positions_restart(lengths, begin, size):
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    for row, (first, *_) in zip(positions, lengths, strict=True):
        row[:first] += begin  # of a document that began in an earlier row
    found = Documents.of_positions(positions).in_chunks(size, positions)
    expected = Documents.of_positions(positions % size)
    assert found.starts.unique().tolist() == expected.starts.tolist()
    assert found.starts.diff().ge(0).all()
    assert (found.starts.dtype, found.row_length) == (torch.int32, min(size, 9))
