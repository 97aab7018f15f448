"""How evenly context-parallel ranks share attention: counts of pairs and tiles, and the table."""

import itertools

import pytest
import torch

from benchmarks import context_balance


def tiles_one_by_one(num_queries, num_keys):
    size = context_balance.TILE
    return sum(
        first_key <= num_keys - num_queries + min(first_query + size, num_queries) - 1
        for first_query, first_key in itertools.product(range(0, num_queries, size), range(0, num_keys, size))
    )


def test_the_tiles_of_a_document_are_those_with_a_key_that_a_query_sees():
    cases = [(1, 1), (1, 500), (128, 128), (129, 129), (130, 700), (512, 512), (300, 301)]
    counted = context_balance.tiles_of(*torch.tensor(cases).unbind(1))
    assert counted.tolist() == [tiles_one_by_one(*case) for case in cases]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_together_compute_every_pair_once_and_uncut_documents_are_uneven(cp_size):
    lengths = [256] * 8 + [2048]
    starts = context_balance.packed(torch.tensor(lengths).numpy(), 4096)
    even = context_balance.balance(starts, 4096, cp_size)
    assert (even.pairs, even.tiles) == pytest.approx((1, 1), abs=0.02)
    with context_balance.replaced(context_balance.document_chunks, "SHORTEST_PIECE", 4096):
        uneven = context_balance.balance(starts, 4096, cp_size)
    assert uneven.pairs > 1.1
    assert uneven.most_tiles > even.most_tiles


def test_the_table_is_put_on_a_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- context balance -->\nold\n<!-- end of context balance -->\nafter\n")
    monkeypatch.setattr(context_balance, "MAX_TOKENS", 2**14)
    monkeypatch.setattr(context_balance, "sample_lengths", context_balance.log_normal_lengths)
    assert context_balance.main(["--seq-len", "4096", "--cp", "2", "--page", str(page)]) == 0
    header, _, *rows = page.read_text().splitlines()[2:-2]
    assert header.startswith("| documents | sequence | cp | pairs, uncut | pairs, cut |")
    assert [row.split(" | ")[1:3] for row in rows] == [["4,096", "2"]] * 2
