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
