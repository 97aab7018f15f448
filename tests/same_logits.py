"""Compares the logits of two models on the same tokens."""

import torch

TOKENS = torch.randint(0, 66, (2, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return model(TOKENS)


def assert_same_logits(ours, theirs):
    assert ours.std() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
