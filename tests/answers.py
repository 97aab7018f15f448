"""Rows of answers, with what a head gets of them."""

import torch
from parity import make_batch


def problem(seed=0, num_rows=3):
    """Return a batch of pairs, and random hidden states and a head for it."""
    batch = make_batch(seed, num_rows, documents=True)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch.tokens_BS.numel(), 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(64, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    return batch, hidden, weight
