import pytest

from benchmarks import data_at_scale
from benchmarks.data_at_scale import as_markdown, computed, make_source, shuffle_in_memory, start_of_a_rank
from llama_core.data.shards import token_cache


def test_a_rank_starts_on_the_shards_that_are_made_and_builds_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = make_source(tmp_path / "made", 100_000, 2)
    monkeypatch.delattr(token_cache, "find_shards")
    start_of_a_rank(data)
    shuffle_in_memory(data)


def cost(of_a_start, of_a_shard, num_shards):
    return dict.fromkeys(("seconds", "bytes"), of_a_start + of_a_shard * num_shards)


def test_many_documents_cost_what_their_shards_do_and_a_shuffle_what_it_does_for_each():
    rows = [
        {
            "documents": num_documents,
            "shards": num_shards,
            "first": cost(3.0, 0.5, num_shards),
            "rank": cost(1.0, 0.25, num_shards) | {"peak_bytes": 1},
            "shuffle": dict.fromkeys(("seconds", "bytes", "peak_bytes"), num_documents * 2.0),
        }
        for num_documents, num_shards in data_at_scale.STARTS
    ]
    num_documents, num_shards = data_at_scale.LARGE
    row = computed(rows)
    assert row["first"] == pytest.approx(cost(3.0, 0.5, num_shards))
    assert row["rank"] == pytest.approx(cost(1.0, 0.25, num_shards))
    assert row["shuffle"]["seconds"] == pytest.approx(num_documents * 2.0)
    table = as_markdown("a machine", rows, {"ours": 2.0, "tokenizers alone": 4.0})
    assert "2e+09 (computed)" in table
    assert "| ours | 2.00 | 0.50 |" in table
