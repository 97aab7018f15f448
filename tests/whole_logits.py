"""The logits of rows with several documents, which the model itself returns only of rows without."""

from types import SimpleNamespace

from llama_core.models.batch import Batch
from llama_core.models.head import logits

LOGITS = SimpleNamespace(loss=lambda head, batch: logits(head).unflatten(0, batch.tokens_BS.shape))


def logits_of_documents(model, tokens_BS, positions_BS):
    """Return the logits of rows whose positions restart at 0 with each document; the model gets another objective."""
    model.objective = LOGITS
    return model(tokens_BS, Batch(tokens_BS, tokens_BS, positions_BS))
