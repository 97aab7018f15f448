"""The loss of a whole model on rows, outside training."""

from collections.abc import Iterable

import torch

from llama_core.attention import chosen_kernel
from llama_core.models.batch import Batch
from llama_core.models.cpu_attention import ACTIVATION_DTYPES
from llama_core.models.llama import Llama, losses_by_row


@torch.no_grad()
def losses_of_rows(model: Llama, batches: Iterable[Batch]) -> list[tuple[float, int]]:
    """Return the loss of each row of ``batches`` and how much counts in it, on the model's device, without dropout."""
    device = next(model.parameters()).device
    model.eval()
    found: list[tuple[float, int]] = []
    with losses_by_row(model):
        for batch in batches:
            on_device = _for_kernel(batch, model, device).to(device)
            losses = model(on_device.tokens_BS, on_device).tolist()
            counts = [int(model.objective.count(row)) for row in batch.split(1)]
            found += zip(losses, counts, strict=True)
    return found


def _for_kernel(batch: Batch, model: Llama, device: torch.device) -> Batch:
    """Return a batch in host memory with its documents, if the device has a kernel for them."""
    needs = [needs._replace(documents=True) for needs in model.spec.attentions]
    kernel = chosen_kernel(needs, device=device.type, dtype=ACTIVATION_DTYPES[model.compute_dtype], trains=False)
    if kernel.told != "varlen":
        return batch
    if any(
        layer.hides_in_document for layer in needs
    ):  # each row is a document at least: the kernel has the window too
        return batch.with_positions().with_documents()
    return batch.with_documents(whole_rows_apart=True)
