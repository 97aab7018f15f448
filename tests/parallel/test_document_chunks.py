"""Rows of packed documents, cut so that every rank has as many tokens and about as much attention."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama_core.models.batch import Documents
from llama_core.parallel import document_chunks
from llama_core.parallel.context import sequence_index, shard_sequence
from llama_core.parallel.document_chunks import DocumentChunks
from llama_core.parallel.gathered_attention import held_documents
from llama_core.rehearsal.byte_counter import replaced

cp_sizes = st.sampled_from([2, 3, 4, 8])


def starts_of(rows):
    lengths = torch.tensor([0, *itertools.chain.from_iterable(rows)])
    return lengths.cumsum(0).int()


@st.composite
def divided_rows(draw):
    """Draw the lengths of the documents of some rows of one length, and the number of ranks that divide it."""
    cp_size = draw(cp_sizes)
    row_length = 2 * cp_size * draw(st.integers(1, 6))
    borders = st.sets(st.integers(1, row_length - 1), max_size=row_length - 1)
    rows = [
        [end - begin for begin, end in itertools.pairwise([0, *sorted(row), row_length])]
        for row in draw(st.lists(borders, min_size=1, max_size=3))
    ]
    return rows, row_length, cp_size


def sections_of(lengths, shortest):
    """Return begin and end of each section of a row: a long document, or those between two long ones."""
    sections = []
    begin = 0
    was_long = True
    for length in lengths:
        is_long = length >= shortest
        if is_long or was_long:
            sections.append((begin, begin + length))
        else:
            sections[-1] = (sections[-1][0], begin + length)
        was_long = is_long
        begin += length
    return sections


def chunks_of(lengths, num_chunks, shortest):
    """Return the places of the tokens of each chunk of a row, counted one by one."""
    chunks = [[] for _ in range(num_chunks)]
    for begin, end in sections_of(lengths, shortest):
        tokens = iter(range(begin, end))
        for number in range(num_chunks):
            length = sum(place % num_chunks == number for place in range(begin, end))
            chunks[number] += itertools.islice(tokens, length)
    return chunks


@given(divided_rows(), st.integers(1, 4))
def test_a_chunk_has_a_piece_of_every_section_and_every_chunk_as_many_tokens(case, shortest_piece):
    rows, row_length, cp_size = case
    with replaced(document_chunks, "SHORTEST_PIECE", shortest_piece):
        chunks = DocumentChunks(starts_of(rows), len(rows), row_length, 2 * cp_size)
    expected = [chunks_of(row, 2 * cp_size, 2 * cp_size * shortest_piece) for row in rows]
    assert {len(chunk) for row in expected for chunk in row} == {row_length // (2 * cp_size)}
    assert chunks.order.unflatten(1, (2 * cp_size, -1)).tolist() == expected


def pairs_by_rank(rows, row_length, cp_size):
    """Return how many pairs of query and key each rank computes."""
    documents = Documents(starts_of(rows), row_length)
    pairs = []
    for cp_rank in range(cp_size):
        held = held_documents(documents, len(rows), row_length // cp_size, cp_rank=cp_rank, cp_size=cp_size)
        queries = held.query_starts.diff()
        keys = held.key_starts.diff()
        pairs.append(int((queries * keys - queries * (queries - 1) // 2).sum()))
    return pairs


@given(cp_sizes, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 5))
def test_documents_that_the_chunks_divide_are_the_same_work_on_every_rank(cp_size, pieces, last):
    rows = [[2 * cp_size * piece for piece in order] for order in (pieces, pieces[last:] + pieces[:last])]
    with replaced(document_chunks, "SHORTEST_PIECE", 1):
        pairs = pairs_by_rank(rows, sum(rows[0]), cp_size)
    assert set(pairs) == {sum(length * (length + 1) // 2 for row in rows for length in row) // cp_size}


def test_a_long_document_at_the_end_of_a_row_is_no_longer_most_of_one_ranks_work():
    rows = [[64] * 32 + [2048]]
    with replaced(document_chunks, "SHORTEST_PIECE", 4096):
        uncut = pairs_by_rank(rows, 4096, 4)
    cut = pairs_by_rank(rows, 4096, 4)
    assert sum(cut) == sum(uncut)
    assert max(uncut) / min(uncut) > 5
    assert max(cut) == min(cut)


@pytest.mark.parametrize("lengths", [[4096], [1] * 4096, [500] * 8 + [96]])
def test_rows_without_a_long_document_among_others_are_cut_as_without_documents(lengths):
    chunks = DocumentChunks(starts_of([lengths]), 1, 4096, 8)
    for cp_rank in range(4):
        assert torch.equal(shard_sequence(chunks.order, cp_rank, 4)[0], sequence_index(4096, cp_rank, 4))
