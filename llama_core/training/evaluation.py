"""The loss of a whole model on rows, outside training."""

from collections.abc import Iterable

import torch

from llama_core.models.batch import Batch
from llama_core.models.llama import Llama, losses_by_row


@torch.no_grad()
def losses_of_rows(model: Llama, batches: Iterable[Batch]) -> list[tuple[float, int]]:
    """Return the loss of each row of ``batches`` and how much counts in it, on the model's device, without dropout."""
    device = next(model.parameters()).device
    model.eval()
    found: list[tuple[float, int]] = []
    with losses_by_row(model):
        for batch in batches:
            on_device = batch.to(device)
            losses = model(on_device.tokens_BS, on_device).tolist()
            counts = [int(model.objective.count(row)) for row in batch.split(1)]
            found += zip(losses, counts, strict=True)
    return found
