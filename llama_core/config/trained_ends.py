"""Which weights outside the layers a run trains: embedding, final norm and head."""

from llama_core.config.model_spec import ModelSpec
from llama_core.config.model_weights import EMBEDDING_WEIGHT, FINAL_NORM_WEIGHT, HEAD_WEIGHT
from llama_core.config.strategy import EMBEDDING, HEAD


def trains_embedding(spec: ModelSpec) -> bool:
    """Return whether the embedding, or an adapter on it, gets gradients."""
    return trains_table(spec) or EMBEDDING_WEIGHT.name in spec.adapted


def trains_table(spec: ModelSpec) -> bool:
    """Return whether the embedding is trained in full."""
    return EMBEDDING_WEIGHT.name in spec.trained_in_full


def trains_final_norm(spec: ModelSpec) -> bool:
    """Return whether the norm before the head is trained."""
    return FINAL_NORM_WEIGHT.name in spec.trained_in_full


def trains_head(spec: ModelSpec) -> bool:
    """Return whether the head, or an embedding in its place, is trained in full."""
    head = EMBEDDING_WEIGHT if spec.tied_embeddings else HEAD_WEIGHT
    return head.name in spec.trained_in_full


def adapted_tables(spec: ModelSpec) -> frozenset[str]:
    """Return which matrices have an adapter: ``embed_tokens``, ``lm_head``, both or none."""
    names = {EMBEDDING_WEIGHT.name: EMBEDDING, HEAD_WEIGHT.name: HEAD}
    return frozenset(names[name] for name in spec.adapted.intersection(names))
