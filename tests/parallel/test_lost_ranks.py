"""Which errors of a rank say that another one is gone."""

import pytest
import torch.distributed as dist

from llama_core.parallel.ranks import has_lost_the_others


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistNetworkError("Connection reset by peer"), True),
        (dist.DistNetworkError("The client socket has timed out after 60000ms while trying to connect"), False),
        (dist.DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 clients joined."), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
    ids=repr,
)
def test_a_rank_that_joins_the_others_loses_them_only_if_one_is_gone_in_the_middle(monkeypatch, error, lost):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert has_lost_the_others(error) == lost


@pytest.mark.parametrize(
    "words", ["Timed out waiting 20000ms for recv", "timed out connecting: x", "Connect timeout [x]"]
)
def test_a_rank_that_gloo_cannot_reach_is_lost(monkeypatch, words):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert has_lost_the_others(RuntimeError(f"[gloo/transport/tcp/pair.cc:152] {words}"))
    assert not has_lost_the_others(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
